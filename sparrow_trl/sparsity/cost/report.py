"""`sparrow cost`: predicted speed-up, as tables, JSON and a plot."""

from __future__ import annotations

import json
import sys
from bisect import bisect_right
from dataclasses import asdict, replace
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ...rollout import UnsupportedModelError
from ..presets import preset_name
from ..schedule import SparsitySchedule
from .chips import CHIPS, Chip, measure_chip
from .compare import compare_with_bench
from .decode import Cost, crossover, rollout_cost, speedup, step_cost
from .frontier import TailCurve, cheapest_schedule
from .options import BYTES_PER_VALUE, CONTEXTS, MEASURED, CostOptions
from .plot import plot_speedup
from .shape import ModelShape


def main(options: CostOptions, json_path: str | None = None) -> int:
    """
    Compute, print, write and draw.

    Args:
        json_path (`str`, *optional*): where to write the results as JSON; `"-"` prints that alone.

    Returns:
        `int`: 0; 1 where the model is refused; 2 where the options do not fit.
    """
    errors = Console(stderr=True)
    try:
        results = compute(options)
        if options.plot is not None:
            plot_speedup(results, options.plot)
    except UnsupportedModelError as error:
        errors.print(str(error), style="bold red", highlight=False, markup=False)
        return 1
    except (ValueError, KeyError, ImportError, OSError) as error:
        errors.print(f"{type(error).__name__}: {error}", style="bold red", highlight=False, markup=False)
        return 2
    text = json.dumps(results, indent=1) + "\n"
    if json_path == "-":
        sys.stdout.write(text)
        return 0
    console = Console(width=None if sys.stdout.isatty() else 120)
    print_results(results, console)
    if json_path is not None:
        with open(json_path, "w", encoding="utf-8") as file:
            file.write(text)
    return 0


def compute(options: CostOptions) -> dict[str, Any]:
    """
    All figures that the options ask for, as plain values.

    Raises:
        UnsupportedModelError: where sparse rollouts do not support the model.
        ValueError: where the options do not fit the model or the files.
    """
    shape = _shape(options.model)
    size = BYTES_PER_VALUE[options.dtype]
    chip = _chip(options.chip, options.dtype)
    known = preset_name(shape.name) in SparsitySchedule.presets()
    schedule = SparsitySchedule.resolve(
        "fixed:64" if options.schedule == "auto" and not known else options.schedule, shape.name
    )
    dense = SparsitySchedule.dense(page_size=schedule.page_size)
    longest = shape.longest or max(CONTEXTS)
    contexts = options.contexts or [c for c in CONTEXTS if options.prompt_length < c <= longest] or [longest]
    if shape.longest is not None and max(contexts) > shape.longest:
        raise ValueError(
            f"--context {max(contexts)} is beyond the {shape.longest:,} positions of {shape.name}; give shorter ones."
        )

    def row(context: int) -> dict[str, Any]:
        costs = {
            name: step_cost(shape, s, context, options.batch, size)
            for name, s in (("dense", dense), ("sparse", schedule))
        }
        whole = [
            rollout_cost(shape, s, options.prompt_length, context, options.batch, size) for s in (dense, schedule)
        ]
        return {
            "context": context,
            "budget": None if schedule.is_dense else schedule.budget_at(context - 1),
            **{name: _described(cost, chip) for name, cost in costs.items()},
            "speedup": speedup(costs["dense"], costs["sparse"], chip),
            "rollout_speedup": speedup(whole[0], whole[1], chip),
            "fits": _fits(shape, chip, context, options.batch, size),
        }

    results: dict[str, Any] = {
        "options": {name: _plain(value) for name, value in asdict(options).items()},
        "model": {**asdict(shape), "windows": list(shape.windows)},
        "chip": {**asdict(chip), "intensity": chip.intensity},
        "schedule": {key: value for key, value in schedule.to_dict().items() if key != "provenance"},
        "contexts": [row(context) for context in contexts],
        "curve": _curve(shape, schedule, dense, chip, max(contexts), options, size),
        "crossover": crossover(shape, schedule, chip, options.batch, size),
        "page_sizes": [
            _page_size_row(shape, schedule, page_size, chip, max(contexts), options.batch, size)
            for page_size in options.page_sizes
        ],
    }
    if options.curves:
        results["cheapest"] = _cheapest(shape, chip, options, size)
    if options.bench is not None:
        text = options.bench.read_text(encoding="utf-8")
        try:
            measured = json.loads(text)
            chips = {run["dtype"]: _chip(options.chip, run["dtype"]) for run in measured["runs"]}
            results["bench"] = compare_with_bench(measured, shape, chips)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"--bench {options.bench} is not what `sparrow bench rollout --json` writes ({type(error).__name__}: {error})."
            ) from error
    return results


def _shape(model: str | None) -> ModelShape:
    if model is not None:
        return ModelShape.from_pretrained(model)
    from ...embedded import MODEL_NAME, smollm2_config

    return ModelShape.from_config(smollm2_config(), MODEL_NAME)


def _chip(name: str, dtype: str) -> Chip:
    if name != MEASURED:
        return CHIPS[name]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return measure_chip(getattr(torch, dtype), device)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, list, type(None))) else str(value)


def _described(cost: Cost, chip: Chip) -> dict[str, float]:
    return {
        **asdict(cost),
        "equivalent_flops": cost.equivalent_flops(chip),
        "seconds": cost.seconds(chip),
        "floor_seconds": cost.floor_seconds(chip),
    }


def _fits(shape: ModelShape, chip: Chip, context: int, batch: int, size: int) -> bool | None:
    """Whether weights and the whole cache, landmarks left aside, fit into the chip's memory."""
    if chip.memory is None:
        return None
    cache = 2 * len(shape.windows) * shape.kv_heads * shape.head_dim * context * batch
    return size * (shape.parameters + cache) <= chip.memory


def _curve(shape, schedule, dense, chip, high: int, options: CostOptions, size: int) -> dict[str, list]:
    """The speed-up at many contexts up to `high`, for the plot."""
    low = max(options.prompt_length + 1, 256)
    contexts = sorted({int(c) for c in np.geomspace(min(low, high), high, 60)})
    steps, rollouts = [], []
    for context in contexts:
        pair = [step_cost(shape, s, context, options.batch, size) for s in (dense, schedule)]
        steps.append(speedup(pair[0], pair[1], chip))
        whole = [
            rollout_cost(shape, s, options.prompt_length, context, options.batch, size) for s in (dense, schedule)
        ]
        rollouts.append(speedup(whole[0], whole[1], chip))
    return {"context": contexts, "step": steps, "rollout": rollouts}


def keeping_tokens(schedule: SparsitySchedule, page_size: int) -> SparsitySchedule:
    """The schedule with pages of another size that keeps at least as many tokens, of every kind."""

    def pages(count: int) -> int:
        return -(-count * schedule.page_size // page_size)

    return replace(
        schedule,
        page_size=page_size,
        budgets=tuple(pages(budget) for budget in schedule.budgets),
        sink_pages=pages(schedule.sink_pages),
        recent_pages=pages(schedule.recent_pages),
    )


def _page_size_row(shape, schedule, page_size: int, chip, context: int, batch: int, size: int) -> dict[str, Any]:
    sized = keeping_tokens(schedule, page_size)
    dense = step_cost(shape, SparsitySchedule.dense(page_size=page_size), context, batch, size)
    sparse = step_cost(shape, sized, context, batch, size)
    return {
        "page_size": page_size,
        "context": context,
        "budget": None if sized.is_dense else sized.budget_at(context - 1),
        "kv_bytes": sparse.kv_bytes,
        "speedup": speedup(dense, sparse, chip),
        "as_cheap_budget": _as_cheap(shape, schedule, sized, context, chip, batch, size),
    }


def _as_cheap(shape, schedule, sized, context: int, chip: Chip, batch: int, size: int) -> int | None:
    """The largest budget of the other page size with which a step costs no more than with the schedule itself."""
    if schedule.is_dense:
        return None
    limit = step_cost(shape, schedule, context, batch, size).seconds(chip)
    budgets = range(-(-context // sized.page_size) + 1)
    return (
        bisect_right(
            budgets,
            limit,
            key=lambda b: step_cost(shape, replace(sized, budgets=(b,)), context, batch, size).seconds(chip),
        )
        - 1
    )


def _cheapest(shape: ModelShape, chip: Chip, options: CostOptions, size: int) -> list[dict[str, Any]]:
    """The cheapest schedule of each page size among calibrated ones, cheapest first."""
    curves: dict[int, list[TailCurve]] = {}
    layout = SparsitySchedule.fixed(0)
    for name in options.curves:
        calibrated = SparsitySchedule.from_pretrained(name)
        # Only from bin 0 on, for a curve's place says where its bin is
        bins = list(takewhile(lambda known: known.get("budgets"), calibrated.provenance.get("bins", ())))
        if not bins:
            raise ValueError(
                f"--curves {name} has no measured tails in bin 0; give schedules that `sparrow calibrate` wrote, with "
                "prompts shorter than a bin."
            )
        if curves and calibrated.bin_tokens != layout.bin_tokens:
            raise ValueError(
                f"--curves {name} has bins of {calibrated.bin_tokens} tokens, and another one of {layout.bin_tokens}: "
                "tails of different bins cannot be compared. Calibrate with the same --bin-tokens."
            )
        _check_model(name, calibrated, shape)
        curves[calibrated.page_size] = [TailCurve(tuple(known["budgets"]), tuple(known["low"])) for known in bins]
        layout = calibrated
    shortest = min(len(bins) for bins in curves.values())
    curves = {page_size: bins[:shortest] for page_size, bins in curves.items()}
    layout = replace(layout, provenance={})
    found = cheapest_schedule(curves, options.target, shape, layout, chip, options.batch, size)
    return [
        {
            "page_size": candidate.schedule.page_size,
            "budgets": list(candidate.schedule.budgets),
            "kept_tokens": [budget * candidate.schedule.page_size for budget in candidate.schedule.budgets],
            **_described(candidate.cost, chip),
        }
        for candidate in found
    ]


def _check_model(name: str, schedule: SparsitySchedule, shape: ModelShape) -> None:
    """Refuse a schedule that was calibrated for a model of another shape."""
    known = (schedule.provenance.get("model") or {}).get("architecture") or {}
    here = {"layers": len(shape.windows), "heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    differing = [f"{key} {known[key]} against {here[key]}" for key in here if known.get(key, here[key]) != here[key]]
    if differing:
        raise ValueError(
            f"--curves {name} was calibrated for another model than {shape.name}: {', '.join(differing)}."
        )


def print_results(results: dict[str, Any], console: Console) -> None:
    """Print what [`compute`] returned."""
    model, chip, options = results["model"], results["chip"], results["options"]
    parameters = model["weights"] + model["expert_weights"]
    console.print(
        f"[bold]{model['name']}[/]: {len(model['windows'])} layers, {model['heads']} query and {model['kv_heads']} KV heads "
        f"of {model['head_dim']}, {parameters / 1e6:,.0f}M parameters read a step; {options['dtype']}",
        highlight=False,
    )
    console.print(
        f"[bold]{chip['name']}[/]: {chip['flops'] / 1e12:,.3g} TFLOP/s, {chip['bandwidth'] / 1e9:,.4g} GB/s, so a byte "
        f"costs I = {chip['intensity']:,.0f} FLOPs. Time is equivalent FLOPs (flops + I * bytes) over the peak.",
        highlight=False,
    )
    table = Table(
        title=f"One decode step of {options['batch']} sequences; rollouts from {options['prompt_length']} tokens on",
        title_justify="left",
    )
    for heading in (
        "context",
        "budget",
        "bytes",
        "sparse",
        "GFLOP",
        "sparse",
        "eq. TFLOP",
        "sparse",
        "step",
        "rollout",
        "",
    ):
        table.add_column(heading, justify="right")
    for row in results["contexts"]:
        dense, sparse = row["dense"], row["sparse"]
        table.add_row(
            f"{row['context']:,}",
            "all" if row["budget"] is None else str(row["budget"]),
            *(_gigabytes(cost["weight_bytes"] + cost["kv_bytes"]) for cost in (dense, sparse)),
            *(f"{cost['flops'] / 1e9:,.0f}" for cost in (dense, sparse)),
            *(f"{cost['equivalent_flops'] / 1e12:,.2f}" for cost in (dense, sparse)),
            f"{row['speedup']:.2f}x",
            f"{row['rollout_speedup']:.2f}x",
            "does not fit" if row["fits"] is False else "",
        )
    console.print(table)
    crossover_at = results["crossover"]
    console.print(
        "A sparse step is never faster."
        if crossover_at is None
        else f"A sparse step is faster from {crossover_at:,} tokens of context on."
    )
    if results["page_sizes"]:
        _print_page_sizes(results["page_sizes"], console)
    if "cheapest" in results:
        _print_cheapest(results["cheapest"], options["target"], console)
    if "bench" in results:
        _print_bench(results["bench"], console)


def _print_page_sizes(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title=f"Page sizes at {rows[0]['context']:,} tokens, keeping as many tokens", title_justify="left")
    for heading in ("page size", "budget", "tokens", "KV read", "step", "as cheap with tokens"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row["page_size"]),
            "all" if row["budget"] is None else str(row["budget"]),
            "all" if row["budget"] is None else f"{row['budget'] * row['page_size']:,}",
            _gigabytes(row["kv_bytes"]),
            f"{row['speedup']:.2f}x",
            "-" if row["as_cheap_budget"] is None else f"{row['as_cheap_budget'] * row['page_size']:,}",
        )
    console.print(table)
    console.print(
        "Larger pages choose more coarsely, so as many tokens give a lower tail. A page size pays only if its tail with the "
        "tokens of the last column is higher."
    )


def _print_cheapest(rows: list[dict[str, Any]], target: float, console: Console) -> None:
    table = Table(title=f"Cheapest measured budgets with a tail of {target} in every bin", title_justify="left")
    for heading in ("page size", "budgets", "kept tokens", "KV read", "eq. TFLOP"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row["page_size"]),
            " ".join(map(str, row["budgets"])),
            " ".join(map(str, row["kept_tokens"])),
            _gigabytes(row["kv_bytes"]),
            f"{row['equivalent_flops'] / 1e12:,.3f}",
        )
    console.print(table)


def _print_bench(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="Against measured decode steps", title_justify="left")
    for heading in (
        "dtype",
        "schedule",
        "context",
        "KV bytes",
        "predicted",
        "step",
        "predicted",
        "speed-up",
        "predicted",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["dtype"],
            row["schedule"],
            f"{row['context']:,}",
            *(f"{row[f'kv_bytes_{kind}'] / 1e6:,.1f} MB" for kind in ("measured", "predicted")),
            *(f"{1e3 * row[f'seconds_{kind}']:,.1f} ms" for kind in ("measured", "predicted")),
            *(f"{row[f'speedup_{kind}']:.2f}x" for kind in ("measured", "predicted")),
        )
    console.print(table)


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.2f} GB"
