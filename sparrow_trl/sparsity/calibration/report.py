"""`sparrow calibrate` and `sparrow tail`: load, run, print, write."""

from __future__ import annotations

import json
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ...distill import SparrowAdapter
from ...embedded import MODEL_NAME, load_smollm2
from ...environment import find_device
from ...rollout import UnsupportedModelError
from ..schedule import SparsitySchedule
from .options import CalibrationOptions, MeasureOptions
from .plot import plot_calibration, plot_tails
from .run import Calibration, TailReport, calibrate_schedule, measure_tail


PLOT_FILE, TAIL_PLOT_FILE, TAIL_FILE = "sparrow_calibration.png", "sparrow_tail.png", "sparrow_tail.json"


def calibrate_main(options: CalibrationOptions, args: Namespace, command: list[str]) -> int:
    """
    Calibrate, write `sparrow_schedule.json` and a plot into `args.out`, and print what was found.

    Returns:
        `int`: 0; 1 where the model is refused; 2 where options, data and model do not fit.
    """

    def run(console: Console) -> int:
        started = time.perf_counter()
        model, tokenizer = _load(args)
        calibration = calibrate_schedule(
            model,
            tokenizer,
            args.dataset,
            out=args.out,
            name=args.model or MODEL_NAME,
            revision=args.revision,
            split=args.split,
            options=options,
        )
        provenance = {**calibration.schedule.provenance, "command": shlex.join(command)}
        schedule = replace(calibration.schedule, provenance=provenance)
        path = schedule.save_pretrained(args.out)
        print_calibration(replace(calibration, schedule=schedule), console)
        _draw(lambda: plot_calibration(schedule, Path(args.out) / PLOT_FILE), console)
        console.print(f"{time.perf_counter() - started:,.0f} s. The schedule is in {path}.", highlight=False)
        return 0

    return _guarded(run)


def tail_main(options: MeasureOptions, args: Namespace, command: list[str]) -> int:
    """
    Measure the tail of `args.schedule`, print it, and write a plot and the figures into `args.out`.

    Returns:
        `int`: 0; 1 where the model is refused; 2 where options, data and model do not fit.
    """

    def run(console: Console) -> int:
        schedule = SparsitySchedule.resolve(args.schedule, args.model)
        model, tokenizer = _load(args)
        name = Path(args.schedule).name
        actors: dict[str, SparrowAdapter | None] = {name: None}
        if args.adapter is not None:
            adapter = SparrowAdapter.from_pretrained(model, args.adapter).to(model.device)
            actors = {f"{name}, without the LoRA": None, f"{name}, with the LoRA": adapter}
        reports = {
            label: measure_tail(
                model,
                tokenizer,
                schedule,
                args.dataset,
                out=args.out,
                split=args.split,
                actor=None if adapter is None else adapter.active,
                actor_name=None if adapter is None else adapter.fingerprint(),
                options=options,
            )
            for label, adapter in actors.items()
        }
        for label, measured in reports.items():
            print_tails(label, measured, console)
        if args.out is not None:
            folder = Path(args.out)
            results = {
                "command": shlex.join(command),
                "reports": {label: measured.to_dict() for label, measured in reports.items()},
            }
            (folder / TAIL_FILE).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            _draw(lambda: plot_tails(reports, schedule.target, folder / TAIL_PLOT_FILE), console)
        return 0

    return _guarded(run)


def print_calibration(calibration: Calibration, console: Console) -> None:
    """The budget of each bin, and what is known of it."""
    schedule = calibration.schedule
    provenance = schedule.provenance
    console.print(
        f"[bold]{provenance['model']['name']}[/]: a tail of {schedule.target} on {provenance['data']['name']} "
        f"({provenance['data']['kind']}); {provenance['way']}; seed {provenance['seed']}.",
        highlight=False,
    )
    table = Table(title="Budgets in scored pages", title_justify="left")
    for heading in ("bin", "positions", "budget", "", "measured budgets: tail", "check: tail", "interval", "mean", ""):
        table.add_column(heading, justify="left" if not heading else "right")
    last = calibration.checks[-1] if calibration.checks else None
    for entry in provenance["bins"]:
        index = entry["index"]
        tail = last.tails.get(index) if last else None
        curve = " ".join(
            f"{budget}: {value:.3f}"
            for budget, value in zip(entry.get("budgets", ()), entry.get("tails", ()))  # noqa: B905
        )
        table.add_row(
            str(index),
            _positions(index, schedule.bin_tokens),
            str(entry["budget"]),
            entry["status"],
            curve,
            f"{tail.value:.3f}" if tail else "-",
            f"{tail.low:.3f} - {tail.high:.3f}" if tail else "-",
            f"{tail.mean:.3f}" if tail else "-",
            entry.get("check", ""),
        )
    console.print(table)
    console.print(
        f"Tokens count as {1 / calibration.effect:.2f} of an independent one in the search (design effect "
        f"{calibration.effect:.2f}). {provenance['growth_rule']}",
        highlight=False,
    )


def print_tails(label: str, report: TailReport, console: Console) -> None:
    """The tail of each bin."""
    schedule = report.schedule
    target = schedule.target
    console.print(
        f"[bold]{label}[/] on {report.source['name']} ({report.source['kind']}): {report.way}, the past read with the "
        "schedule itself.",
        highlight=False,
    )
    table = Table(title=f"Tail of the acceptance rate{f', target {target}' if target else ''}", title_justify="left")
    for heading in ("bin", "positions", "budget", "tail", "interval", "mean", "tokens", "independent", ""):
        table.add_column(heading, justify="left" if not heading else "right")
    for index, tail in report.tails.items():
        verdict = "too few tokens"
        if report.is_known(index):
            verdict = "" if target is None else f"{tail.value - target:+.3f}"
        table.add_row(
            str(index),
            _positions(index, schedule.bin_tokens),
            str(schedule.budget_at(index * schedule.bin_tokens)),
            f"{tail.value:.3f}",
            f"{tail.low:.3f} - {tail.high:.3f}",
            f"{tail.mean:.3f}",
            f"{tail.tokens:,}",
            f"{tail.effective_tokens:,.0f}",
            verdict,
        )
    console.print(table)


def _positions(index: int, bin_tokens: int) -> str:
    return f"{index * bin_tokens:,} - {(index + 1) * bin_tokens - 1:,}"


def _load(args: Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    device = find_device(args.device)
    dtype: Any = getattr(torch, args.dtype) if args.dtype else torch.float32 if device.type == "cpu" else "auto"
    if args.model is None:
        model, tokenizer = load_smollm2(dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, revision=args.revision, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(args.model, revision=args.revision)
    return model.to(device).eval(), tokenizer


def _draw(draw: Callable[[], Any], console: Console) -> None:
    """A plot, where matplotlib is there; the results do not depend on it."""
    try:
        draw()
    except ImportError as error:
        console.print(str(error), highlight=False)


def _guarded(run: Callable[[Console], int]) -> int:
    """Errors of the user's making as one line."""
    errors = Console(stderr=True)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return run(Console(width=None if sys.stdout.isatty() else 160))
    except UnsupportedModelError as error:
        errors.print(str(error), style="bold red", highlight=False, markup=False)
        return 1
    except (ValueError, TypeError, ImportError, OSError) as error:
        errors.print(f"{type(error).__name__}: {error}", style="bold red", highlight=False, markup=False)
        return 2
    finally:
        logging.set_verbosity(verbosity)
