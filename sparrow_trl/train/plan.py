"""The dry run of `sparrow train`: what would be done, the memory it takes, and the speed-up to expect."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, PretrainedConfig
from trl import ModelConfig

from ..config import SparrowGRPOConfig
from ..memory import free_memory
from ..rollout.support import check_model_config
from ..sparsity import SparsitySchedule
from ..sparsity.cost import CHIPS, Chip, ModelShape, measure_chip, rollout_cost, speedup
from ..sparsity.presets import preset_name


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
        chip_name (`str`, *optional*): one of `CHIPS`, whose memory and speed are planned with; by default this machine is
            measured.
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
    schedule, note = _schedule(args, str(model.model_name_or_path))
    prompt = prompt_length or 512
    context = prompt + args.max_completion_length
    if shape.longest is not None:
        context = min(context, shape.longest)
    generations = args.generation_batch_size or 1
    world = max(1, args.world_size)
    per_process = generations // world
    chip = _chip(chip_name, torch.bfloat16 if args.bf16 else torch.float32)
    sections = {
        "run": {
            "model": str(model.model_name_or_path),
            "parameters": shape.parameters,
            "processes": world,
            "completions per generation batch": generations,
            "prompts per generation batch": generations // args.num_generations,
            "optimizer steps per generation batch": _steps_per_batch(args),
            "optimizer steps": _total_steps(args, dataset_rows),
            "longest sequence, tokens": context,
        },
        "memory of a process": _memory(
            shape,
            args,
            model,
            config,
            page_size=16 if schedule is None else schedule.page_size,
            prompt=min(prompt, context - 1),
            context=context,
            sequences=per_process,
            chip=None if chip_name is None else chip,
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


def _memory(
    shape: ModelShape,
    args: SparrowGRPOConfig,
    model: ModelConfig,
    config: PretrainedConfig,
    *,
    page_size: int,
    prompt: int,
    context: int,
    sequences: int,
    chip: Chip | None,
) -> dict[str, Any]:
    """
    Sizes in bytes. What the activations of the backward take is not known without running it, but for what gradient
    checkpointing keeps.

    Args:
        prompt, context (`int`): tokens of a prompt, and of a sequence at full length.
        sequences (`int`): in a rollout of one process.
        chip (`Chip`, *optional*): whose memory is planned with; by default what is free on this machine.
    """
    on_gpu = chip is not None or torch.cuda.is_available()
    stored = _bytes_of_weights(model, config)
    computed = 2 if args.bf16 or args.fp16 else stored
    trained = 0 if model.use_peft else shape.parameters
    weights, moments = stored * shape.parameters, 2 * stored * trained
    # Made when a rollout starts: packed ones on a CPU, on a GPU those that autocast would cast at every step
    copies = computed * shape.weights if not on_gpu or computed < stored else 0
    free: float
    if chip is None or chip.memory is None:
        free = free_memory(torch.device("cuda" if on_gpu else "cpu"))
    else:
        free = chip.memory
    allowed = int(args.rollout_memory_fraction * max(0, free - weights - moments - (copies if on_gpu else 0)))

    page = (2 * page_size + 1) * shape.kv_heads * shape.head_dim * len(shape.windows) * computed
    own_pages = -(-context // page_size) - prompt // page_size

    def pages(count: int) -> int:
        """Of so many sequences at full length, those of a prompt sharing its pages."""
        return -(-count // args.num_generations) * -(-prompt // page_size) + count * own_pages

    running = min(sequences, args.rollout_max_num_seqs)
    sizes = {
        "weights": weights,
        "gradients": stored * trained,
        "moments of the optimizer (AdamW)": moments,
        "copies of weights in a rollout": copies,
        f"KV page of {page_size} tokens": page,
        "KV of one sequence, at full length": page * pages(1),
        "KV cache that a rollout wants: its sequences at full length": page * pages(running),
        "KV cache that it may take (rollout_memory_fraction)": allowed,
        "sequences at full length that fit at once": next(
            (count for count in range(running, 0, -1) if page * pages(count) <= allowed), 0
        ),
    }
    if args.gradient_checkpointing:
        tokens = args.per_device_train_batch_size * context
        hidden_size = config.get_text_config().hidden_size
        sizes["hidden states that gradient checkpointing keeps"] = stored * tokens * hidden_size * len(shape.windows)
    return sizes


def _bytes_of_weights(model: ModelConfig, config: PretrainedConfig) -> int:
    """Of one weight as it is loaded."""
    dtype = (config.dtype or torch.float32) if model.dtype in (None, "auto") else getattr(torch, model.dtype)
    return dtype.itemsize


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
        for name, text in plan_rows(title, values):
            table.add_row(name, text)
        console.print(table)


def plan_rows(section: str, values: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values of a section of a plan, as they are shown."""
    return [(name, _text(name, section, value)) for name, value in values.items()]


def _text(name: str, section: str, value: Any) -> str:
    if value is None:
        return "depends on the dataset"
    if isinstance(value, float):
        return f"{value:.0%}" if name.startswith("KV bytes") else f"{value:.2f}x"
    if section.startswith("memory") and not name.startswith("sequences"):
        return f"{value / 2**30:,.2f} GiB" if value >= 2**30 else f"{value / 2**20:,.2f} MiB"
    return f"{value:,}" if isinstance(value, int) else str(value)
