"""
Write the pages that come from the code into docs/_generated (run by `make docs`):

- configuration.md, from the dataclass `SparrowGRPOConfig` and TRL's `GRPOConfig`;
- presets.md, from the published schedules;
- speedups.md and published.md, from the cost model;
- memory.md and cache.md, from the plan of `sparrow train --dry-run` and the shapes of models.

support_matrix.md, the table of models, is written by tests/test_support_matrix.py and committed. Where it is missing a
note takes its place.
"""

import re
from dataclasses import MISSING, Field, fields
from functools import cache
from pathlib import Path

from transformers import TrainingArguments
from trl import GRPOConfig, ModelConfig

from sparrow_trl import SparrowGRPOConfig, SparsitySchedule
from sparrow_trl.sparsity.cost import CHIPS, ModelShape, crossover, rollout_cost, speedup, step_cost
from sparrow_trl.train.plan import make_plan, plan_rows


FOLDER = Path(__file__).with_name("_generated")
CONFIGS = Path(__file__).resolve().parents[1] / "examples" / "configs"

# What the paper measured on four H200 at a tail of 0.86 (AIME24, 8 completions a problem, 32K tokens): rollout, RL step.
PUBLISHED_SPEEDUPS = {
    "Qwen3-1.7B": (2.21, 1.97),
    "Qwen3-4B": (2.41, 2.11),
    "Qwen3-8B": (2.06, 1.81),
    "Qwen3-14B": (1.49, 1.35),
}
TARGET, BATCH, PROMPT, CONTEXT = 0.86, 16, 512, 32768
PLANNED_CHIPS = ("h200", "h100", "a100", "l4", "t4")


def default_of(field: Field) -> object:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def cell(text: object) -> str:
    """Text as one cell of a Markdown table; what stands between backticks is kept as it is."""
    parts = " ".join(str(text).split()).replace("|", "\\|").split("`")
    parts[::2] = [re.sub(r"([*_<\[])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def option_table(options: list[Field]) -> str:
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for option in options:
        default = "required" if default_of(option) is MISSING else f"`{default_of(option)!r}`".replace("|", "\\|")
        rows.append(f"| `{option.name}` | {default} | {cell(option.metadata.get('help', ''))} |")
    return "\n".join(rows)


def configuration() -> str:
    trl_defaults = {field.name: default_of(field) for field in fields(GRPOConfig)}
    transformers_names = {field.name for field in fields(TrainingArguments)}
    ours = [field for field in fields(SparrowGRPOConfig) if field.name not in trl_defaults]
    changed = [
        field
        for field in fields(SparrowGRPOConfig)
        if field.name in trl_defaults and default_of(field) != trl_defaults[field.name]
    ]
    inherited = [field for field in fields(GRPOConfig) if field.name not in transformers_names]
    return "\n".join(
        [
            "## Options of this package\n",
            option_table(ours),
            "\n## Options of TRL with another default\n",
            option_table(changed),
            "\n## Options of TRL\n",
            "They have the meaning that TRL gives them; the defaults are TRL's.\n",
            option_table(inherited),
        ]
    )


def presets() -> str:
    rows = ["| preset | target | scored pages in bin 0, 1, 2, ... |", "|---|---|---|"]
    for name, targets in SparsitySchedule.presets().items():
        for target in targets:
            budgets = SparsitySchedule.from_preset(name, target).budgets
            rows.append(f"| `{name}` | {target:.2f} | {', '.join(map(str, budgets))} |")
    return "\n".join(rows)


@cache
def shape_of(model: str) -> ModelShape:
    return ModelShape.from_pretrained(CONFIGS / model.lower())


def largest_batch(shape: ModelShape, chip: str) -> int:
    """How many sequences of the full length fit beside the weights, in 16 bits, up to `BATCH`."""
    cache_values = 2 * len(shape.windows) * shape.kv_heads * shape.head_dim * CONTEXT
    return max(0, min(BATCH, int((CHIPS[chip].memory / 2 - shape.parameters) // cache_values)))


def predicted(model: str, chip: str, batch: int) -> tuple[float, float]:
    """Speed-up of a rollout up to the full length, and of a step at it; as `sparrow cost` has them."""
    shape, schedule = shape_of(model), SparsitySchedule.from_preset(model, TARGET)
    dense = SparsitySchedule.dense(page_size=schedule.page_size)
    steps = [step_cost(shape, chosen, CONTEXT, batch) for chosen in (dense, schedule)]
    rollouts = [rollout_cost(shape, chosen, PROMPT, CONTEXT, batch) for chosen in (dense, schedule)]
    return speedup(*rollouts, CHIPS[chip]), speedup(*steps, CHIPS[chip])


def faster_from(model: str, chip: str, batch: int, margin: float) -> str:
    """The context from which on a step is more than `margin` times as fast."""
    schedule = SparsitySchedule.from_preset(model, TARGET)
    start = crossover(shape_of(model), schedule, CHIPS[chip], batch, longest=CONTEXT, margin=margin)
    return "-" if start is None else f"{start:,}"


def speedups() -> str:
    rows = [
        "| model | chip | sequences | rollout | step at the end | 1.1x from | 1.5x from |",
        "|---|---|---|---|---|---|---|",
    ]
    for model in PUBLISHED_SPEEDUPS:
        for chip in PLANNED_CHIPS:
            cells = ["none fits", "", "", "", ""]
            if batch := largest_batch(shape_of(model), chip):
                gains = [f"{gain:.2f}x" for gain in predicted(model, chip, batch)]
                cells = [str(batch), *gains, *(faster_from(model, chip, batch, margin) for margin in (1.1, 1.5))]
            rows.append(f"| {model} | {CHIPS[chip].name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def published() -> str:
    rows = [
        "| model | predicted rollout | paper's rollout | paper's step | rollouts' part of a dense step |",
        "|---|---|---|---|---|",
    ]
    for model, (rollout, step) in PUBLISHED_SPEEDUPS.items():
        part = (1 - 1 / step) / (1 - 1 / rollout)
        rows.append(
            f"| {model} | {predicted(model, 'h200', BATCH)[0]:.2f}x | {rollout:.2f}x | {step:.2f}x | {part:.0%} |"
        )
    return "\n".join(rows)


def memory() -> str:
    """The plan of a run of Qwen3-1.7B on one H200; the page on memory gives the command."""
    args = SparrowGRPOConfig(
        output_dir="out",
        use_cpu=True,  # of the machine that writes the docs
        bf16=True,
        max_completion_length=16384,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=32,
        sparse_schedule="qwen3-1.7b",
    )
    model = ModelConfig(model_name_or_path=str(CONFIGS / "qwen3-1.7b.json"))
    plan = make_plan(args, model, "h200", prompt_length=PROMPT)
    rows = ["| in a process | |", "|---|---|"]
    rows += [f"| {name} | {value} |" for name, value in plan_rows("memory of a process", plan["memory of a process"])]
    return "\n".join(rows)


def kv_cache() -> str:
    rows = [
        "| model | layers x KV heads x head dim | a token | 8,192 tokens | 32,768 tokens |",
        "|---|---|---|---|---|",
    ]
    for model in PUBLISHED_SPEEDUPS:
        shape = shape_of(model)
        layers, page_size = len(shape.windows), SparsitySchedule.from_preset(model, TARGET).page_size
        page = (2 * page_size + 1) * layers * shape.kv_heads * shape.head_dim * 2
        sizes = [
            f"{page / page_size / 2**10:,.0f} KiB",
            *(f"{page * n / page_size / 2**30:.2f} GiB" for n in (8192, CONTEXT)),
        ]
        rows.append(f"| {model} | {layers} x {shape.kv_heads} x {shape.head_dim} | {' | '.join(sizes)} |")
    return "\n".join(rows)


PAGES = {
    "configuration.md": configuration,
    "presets.md": presets,
    "speedups.md": speedups,
    "published.md": published,
    "memory.md": memory,
    "cache.md": kv_cache,
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make() + "\n", encoding="utf-8")
    matrix = FOLDER / "support_matrix.md"
    if not matrix.exists():
        matrix.write_text(
            "The table of models is written by tests/test_support_matrix.py, see there.\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
