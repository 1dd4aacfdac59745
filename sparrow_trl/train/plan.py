"""The dry run of `sparrow train`: what would be done, the memory it takes, and the speed-up to expect."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from trl import ModelConfig

from ..config import SparrowGRPOConfig
from ..rollout.support import check_model_config
from ..sparsity import SparsitySchedule
from ..sparsity.cost import CHIPS, Chip, ModelShape, measure_chip, rollout_cost, speedup
from ..sparsity.presets import preset_name


ADAM_MOMENTS = 2  # of a trained parameter, in its dtype


def make_plan(
    args: SparrowGRPOConfig,
    model: ModelConfig,
    chip_name: str | None = None,
    prompt_length: int | None = None,
    dataset_rows: int | None = None,
) -> dict[str, Any]:
    """
    Plan a run from its arguments and the model's configuration alone: no weights are loaded.

    Args:
        chip_name (`str`, *optional*): one of `CHIPS`; by default this machine is measured.
        prompt_length (`int`, *optional*): tokens of a typical prompt; by default 512.
        dataset_rows (`int`, *optional*): prompts in the dataset.

    Returns:
        `dict`: sections of named values, sizes in bytes.

    Raises:
        UnsupportedModelError: sparse rollouts do not support the model.
        ValueError: the chip is unknown, or the schedule cannot be resolved.
    """
    config = AutoConfig.from_pretrained(model.model_name_or_path, revision=model.model_revision)
    if args.sparse_schedule is not None:
        check_model_config(config)
    shape = ModelShape.from_config(config, str(model.model_name_or_path))
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    schedule, note = _schedule(args, str(model.model_name_or_path))
    prompt = prompt_length or 512
    context = prompt + args.max_completion_length
    if shape.longest is not None:
        context = min(context, shape.longest)
    generations = args.generation_batch_size or 1
    world = max(1, args.world_size)
    per_process = generations // world
    dtype_bytes = 2 if args.bf16 or args.fp16 else 4
    chip = _chip(chip_name, torch.bfloat16 if args.bf16 else torch.float32)
    sections = {
        "run": {
            "model": str(model.model_name_or_path),
            "parameters": parameters,
            "processes": world,
            "completions per generation batch": generations,
            "prompts per generation batch": generations // args.num_generations,
            "optimizer steps per generation batch": _steps_per_batch(args),
            "optimizer steps": _total_steps(args, dataset_rows),
            "longest sequence, tokens": context,
        },
        "memory of a process": _memory(
            shape, parameters, _weight_bytes(config, model), args, model, context, per_process, dtype_bytes
        ),
        "rollout": _rollout(shape, schedule, note, prompt, context, min(per_process, args.rollout_max_num_seqs), chip),
    }
    return sections


def _schedule(args: SparrowGRPOConfig, name: str) -> tuple[SparsitySchedule | None, str]:
    if args.sparse_schedule is None:
        return None, "sparsity off: TRL's own generation"
    if args.sparse_schedule == "auto" and preset_name(name) not in SparsitySchedule.presets():
        return None, "calibrated on the first training prompts when training starts (auto)"
    schedule = SparsitySchedule.resolve(args.sparse_schedule, name, args.sparse_target)
    if schedule.is_dense:
        return schedule, "dense"
    return schedule, f"{', '.join(map(str, schedule.budgets))} scored pages by bin of {schedule.bin_tokens:,} tokens"


def _chip(name: str | None, dtype: torch.dtype) -> Chip:
    if name is None:
        return measure_chip(dtype, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if name.lower() not in CHIPS:
        raise ValueError(f"chip={name!r} is unknown; choose one of {', '.join(CHIPS)}, or leave it out to measure.")
    return CHIPS[name.lower()]


def _steps_per_batch(args: SparrowGRPOConfig) -> int:
    per_step = args.per_device_train_batch_size * max(1, args.world_size) * args.gradient_accumulation_steps
    return max(1, (args.generation_batch_size or per_step) // per_step) * args.num_iterations


def _total_steps(args: SparrowGRPOConfig, rows: int | None) -> int | None:
    if args.max_steps > 0:
        return args.max_steps
    if rows is None:
        return None
    batches = rows * args.num_generations // (args.generation_batch_size or 1)
    return int(args.num_train_epochs * batches * _steps_per_batch(args))


def _weight_bytes(config: PretrainedConfig, model: ModelConfig) -> int:
    name = str(config.dtype or "float32") if model.dtype == "auto" else model.dtype or "float32"
    return getattr(torch, name.removeprefix("torch.")).itemsize


def _memory(
    shape: ModelShape,
    parameters: int,
    weight_bytes: int,
    args: SparrowGRPOConfig,
    model: ModelConfig,
    context: int,
    sequences: int,
    dtype_bytes: int,
) -> dict[str, Any]:
    """Sizes in bytes. What the activations of the backward take is not known without running it."""
    trained = 0 if model.use_peft else parameters
    kv_heads_bytes = 2 * shape.kv_heads * shape.head_dim * dtype_bytes
    window_tokens = sum(context if window is None else min(window, context) for window in shape.windows)
    cache = kv_heads_bytes * context * len(shape.windows) * sequences
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else psutil.virtual_memory().available
    bound = int(args.rollout_memory_fraction * max(0, free - parameters * weight_bytes))
    return {
        "weights": parameters * weight_bytes,
        "gradients and optimizer (AdamW)": trained * (1 + ADAM_MOMENTS) * weight_bytes,
        "KV cache of a whole generation batch, at full length": cache,
        "KV read by a dense step of one sequence, at full length": kv_heads_bytes * window_tokens,
        "KV cache allowed (rollout_memory_fraction of what is free here, less the weights)": bound,
        "sequences at full length that fit at once": max(0, bound * sequences // max(1, cache)),
    }


def _rollout(
    shape: ModelShape,
    schedule: SparsitySchedule | None,
    note: str,
    prompt: int,
    context: int,
    batch: int,
    chip: Chip,
) -> dict[str, Any]:
    values: dict[str, Any] = {"schedule": note, "chip": chip.name}
    if schedule is None or schedule.is_dense or not prompt < context:
        return values
    dense = rollout_cost(shape, SparsitySchedule.dense(page_size=schedule.page_size), prompt, context, max(1, batch))
    sparse = rollout_cost(shape, schedule, prompt, context, max(1, batch))
    values["KV bytes read, of dense"] = sparse.kv_bytes / dense.kv_bytes
    values["expected speed-up of decoding, at full length"] = speedup(dense, sparse, chip)
    return values


def print_plan(plan: dict[str, Any], console: Console) -> None:
    """One table a section."""
    for title, values in plan.items():
        table = Table(title=title, title_justify="left", show_header=False)
        for name, value in values.items():
            table.add_row(name, _text(name, title, value))
        console.print(table)


def _text(name: str, section: str, value: Any) -> str:
    if value is None:
        return "depends on the dataset"
    if isinstance(value, float):
        return f"{value:.0%}" if name.startswith("KV bytes") else f"{value:.2f}x"
    if section.startswith("memory") and not name.startswith("sequences"):
        return f"{value / 2**30:,.2f} GiB"
    return f"{value:,}" if isinstance(value, int) else str(value)
