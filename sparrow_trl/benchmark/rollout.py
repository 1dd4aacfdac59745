"""`sparrow bench rollout`: sparse against dense rollouts, in one run."""

from __future__ import annotations

import copy
import gc
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..embedded import MODEL_NAME, load_smollm2
from ..environment import find_device, hardware, versions
from ..memory import free_memory
from ..rollout import RolloutEngine, UnsupportedModelError
from ..sparsity import SparsitySchedule
from .checks import CheckFailedError, Gate
from .decode import check_sparse, measure_steps, prefill
from .options import RolloutOptions
from .ragged import draw_lengths, measure_rollouts
from .report import print_results
from .text import cut, token_stream


SHORTEST_PAST = 512  # tokens that the check of sparse attention wants at least


def main(options: RolloutOptions, json_path: str | None, command: list[str]) -> int:
    """
    Run the benchmark and print the results.

    Args:
        json_path (`str`, *optional*): where to write them as JSON; `"-"` prints that, and the tables to the error stream.
        command (`list[str]`): the command line, to be shown with the results.

    Returns:
        `int`: 0; 1 where a check failed or the model is refused, 2 where the options do not fit. Then no result is
        printed or written; what the error stream showed until then had passed its checks.
    """
    errors = Console(stderr=True)
    try:
        with _quiet_transformers():
            results = run(options, report=lambda text: errors.print(text, style="dim", highlight=False))
    except CheckFailedError as error:
        errors.print(f"Check failed, so no results are shown. {error}", style="bold red", highlight=False)
        return 1
    except UnsupportedModelError as error:
        errors.print(str(error), style="bold red", highlight=False)
        return 1
    except (ValueError, ImportError, OSError) as error:
        errors.print(f"{type(error).__name__}: {error}", style="bold red", highlight=False)
        return 2
    results = {"command": shlex.join(command), **results}
    text = json.dumps(results, indent=1) + "\n"
    to_stdout = json_path == "-"
    print_results(results, _console(sys.stderr if to_stdout else sys.stdout))
    if to_stdout:
        sys.stdout.write(text)
    elif json_path is not None:
        Path(json_path).write_text(text, encoding="utf-8")
    return 0


def run(options: RolloutOptions, report: Callable[[str], None]) -> dict[str, Any]:
    """
    Measure everything that the options ask for, in all dtypes.

    Raises:
        CheckFailedError: where a result is wrong.
        UnsupportedModelError: where the engine refuses the model.
        ValueError: where the options do not fit the model, the text or the memory.
    """
    started = time.perf_counter()
    device = find_device(options.device)
    named = {name: SparsitySchedule.resolve(name, options.model) for name in options.schedules}
    page_sizes = {schedule.page_size for schedule in named.values()}
    if len(page_sizes) > 1:
        raise ValueError(f"The schedules have pages of {sorted(page_sizes)} tokens; give those of one size at a time.")
    page_size = page_sizes.pop()
    schedules = {"dense": SparsitySchedule.dense(page_size=page_size)}
    schedules |= {name: schedule for name, schedule in named.items() if not schedule.is_dense}

    runs: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    for dtype in options.dtypes:
        report(f"{dtype}: loading the model")
        model, tokenizer = _load(options.model, getattr(torch, dtype), device)
        _check_size(model, options, device)
        facts = _facts(model, options.model)
        stream = token_stream(tokenizer, options.text)
        prefixed = partial(_prefixed, report, dtype)
        runs.append({"dtype": dtype, **_run_dtype(model, stream, schedules, options, prefixed)})
        del model
        gc.collect()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": time.perf_counter() - started,
        "hardware": hardware(),
        "versions": versions(),
        "model": facts,
        "options": {**asdict(options), "text": str(options.text) if options.text else None},
        "schedules": {name: schedule.to_dict() for name, schedule in schedules.items()},
        "runs": runs,
    }


def _prefixed(report: Callable[[str], None], prefix: str, text: str) -> None:
    report(f"{prefix}: {text}")


def _run_dtype(
    model: PreTrainedModel,
    stream: list[int],
    schedules: dict[str, SparsitySchedule],
    options: RolloutOptions,
    report: Callable[[str], None],
) -> dict[str, Any]:
    gate = Gate()
    result: dict[str, Any] = {}
    exact_model = None if model.dtype == torch.float32 else copy.deepcopy(model).float()
    report("trying the engine")
    RolloutEngine(model, schedules["dense"])  # refuses models that it would run wrongly

    length = max([*options.contexts, SHORTEST_PAST])
    length = min(length, _longest(model) or length)
    report(f"prefilling {length:,} tokens")
    [token_ids] = cut(stream, 1, length)
    past = prefill(model, token_ids, schedules["dense"].page_size)
    for name, schedule in schedules.items():
        if name != "dense":
            report(f"checking {name}")
            check_sparse(model, exact_model, past, name, schedule, gate)
    if options.contexts:
        contexts = sorted(set(options.contexts), reverse=True)
        result["decode"] = measure_steps(
            model, exact_model, past, schedules, contexts, options.batch, options.steps, options.warmup, gate, report
        )
    del past
    gc.collect()

    if options.ragged:
        groups = options.completions // options.group
        distinct = cut(stream, groups, options.prompt_length)
        prompts = [prompt for prompt in distinct for _ in range(options.group)]
        lengths = draw_lengths(options.completions, options.median_length, options.longest_length, options.seed)
        rows = measure_rollouts(
            model,
            exact_model,
            prompts,
            lengths,
            schedules,
            options.repeats,
            options.continuous_batching,
            options.time_limit,
            options.seed,
            gate,
            report,
        )
        result["rollouts"] = {"lengths": lengths, "contenders": rows}
    result["checks"] = [check.to_dict() for check in gate.checks]
    return result


def _load(
    name: str | None, dtype: torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if name is None:
        model, tokenizer = load_smollm2(dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(name)
    return model.to(device).eval(), tokenizer


def _longest(model: PreTrainedModel) -> int | None:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _check_size(model: PreTrainedModel, options: RolloutOptions, device: torch.device) -> None:
    """Refuse what does not fit into the model's context or into memory, before any time is spent."""
    longest = _longest(model)
    if longest is not None and options.longest_sequence > longest:
        raise ValueError(
            f"Sequences of {options.longest_sequence:,} tokens exceed the model's {longest:,} positions; lower "
            "--context, or --prompt-length and --longest-length."
        )
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * head_dim * model.dtype.itemsize
    # Our pages, the cache of `generate`, and a layer or two of that once more while it grows.
    steps = int(2.2 * per_token * options.batch * sum(options.contexts))
    rollouts = int(1.2 * per_token * options.completions * (options.prompt_length + options.longest_length))
    needed = max(steps, rollouts if options.ragged else 0)
    available = free_memory(device)
    if needed > 0.9 * available:
        raise ValueError(
            f"Keys and values of all contenders take about {needed / 2**30:.1f} GiB, and {available / 2**30:.1f} GiB of "
            "memory are free; lower --batch and --context, or --completions."
        )


def _facts(model: PreTrainedModel, name: str | None) -> dict[str, Any]:
    config = model.config.get_text_config()
    return {
        "name": name or MODEL_NAME,
        "type": config.model_type,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "attention": model.config._attn_implementation,
        "device": str(model.device),
    }


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No warnings of transformers between our own lines."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _console(stream: Any) -> Console:
    """A console that does not wrap tables where there is no terminal."""
    return Console(file=stream, width=None if stream.isatty() else 120)
