"""
How far online distillation lifts the tail: a frozen policy, a fixed budget that is too small, and the co-resident LoRA.

    python examples/distill_frozen_policy.py --output_dir distill-frozen

SmolLM2-135M continues passages of the Python manual with sparse attention and its LoRA on; the LoRA is updated on what
was sampled, and so on, as in training, but for the policy. The acceptance rate is measured on prompts that the LoRA
never sees: completions are sampled from the actor at that moment, and both sides score them over the full vocabulary.
Written to the output folder: `distill.json` (every measurement, with the options and the machine), `distill.png` (the
curve) and `adapter/` (the LoRA).
"""

import json
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, HfArgumentParser, PreTrainedModel

from sparrow_trl import RolloutEngine, SparsitySchedule
from sparrow_trl.attention import TeacherForced
from sparrow_trl.benchmark.text import cut, token_stream
from sparrow_trl.distill import DistillLoss, DistillUpdate, Sample, SparrowAdapter
from sparrow_trl.split_forward import SplitForward
from sparrow_trl.embedded import MODEL_NAME, load_smollm2
from sparrow_trl.environment import hardware, versions
from sparrow_trl.monitor import AcceptanceHistogram, LazyLogits, acceptance_rate
from sparrow_trl.rollout.isolation import teacher_forced_mode


@dataclass
class Arguments:
    output_dir: str = field(default="distill-frozen", metadata={"help": "Where the results go."})
    minutes: float = field(default=24.0, metadata={"help": "Minutes of sampling and updates, measurements left out."})
    budget: int = field(default=7, metadata={"help": "Scored pages of 16 tokens that a query keeps, beside 3 others."})
    prompt_tokens: int = field(default=192, metadata={"help": "Tokens of a prompt."})
    completion_tokens: int = field(default=512, metadata={"help": "Tokens of a completion, at most."})
    held_out: int = field(default=32, metadata={"help": "Prompts on which the tail is measured."})
    measurements: int = field(default=2, metadata={"help": "Measurements on the way."})
    other_budgets: str = field(
        default="9,11,13", metadata={"help": "Budgets measured without the LoRA at the end, separated by commas."}
    )
    batch: int = field(default=16, metadata={"help": "Completions that are sampled at a time."})
    steps: int = field(default=4, metadata={"help": "Optimizer steps on each such batch."})
    rank: int = field(default=16, metadata={"help": "Rank of the LoRA."})
    target_modules: str = field(
        default="q_proj,k_proj,v_proj,o_proj", metadata={"help": "Layers it adapts, separated by commas."}
    )
    learning_rate: float = field(
        default=5e-4, metadata={"help": "Learning rate of the LoRA; it falls to a tenth towards the end."}
    )
    kl: str = field(default="full", metadata={"help": "See the option distill_kl."})
    bf16: bool = field(default=True, metadata={"help": "Sample and update in bfloat16; measurements are in float32."})
    seed: int = field(default=0, metadata={"help": "Of the samples, the LoRA and the choice of passages."})


def passages(stream: list[int], length: int, seed: int) -> list[list[int]]:
    """All neighbouring pieces of the text, in random order."""
    pieces = cut(stream, len(stream) // length, length)
    return [pieces[index] for index in torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed))]


def score(
    split: SplitForward, adapter: SparrowAdapter | None, schedule: SparsitySchedule, prompt: list[int], new: list[int]
) -> torch.Tensor:
    """Exact acceptance rate of each token of a completion, `(len(new),)`."""
    ids = torch.tensor([prompt + new])
    inputs = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None]}
    hidden = []
    with teacher_forced_mode(split.model, gradients=False):
        for attention, lora in ((SparsitySchedule.dense(), None), (schedule, adapter)):
            with lora.active() if lora else nullcontext():
                state = TeacherForced(attention, [ids.shape[1]], [len(prompt)])
                hidden.append(split.hidden(**inputs, sparrow=state)[0, len(prompt) - 1 : -1])
        return acceptance_rate(*(LazyLogits(rows, split.logits) for rows in hidden))


def measure(
    engine: RolloutEngine,
    adapter: SparrowAdapter | None,
    prompts: list[list[int]],
    config: GenerationConfig,
    seed: int,
) -> list[torch.Tensor]:
    """Acceptance rates of the completions that the actor of this moment samples, one tensor a prompt."""
    with adapter.active() if adapter else nullcontext():
        output = engine.generate(prompts, config, seed=seed)
    split = SplitForward(engine.model)
    return [
        score(split, adapter, engine.schedule, prompt, new)
        for prompt, new in zip(prompts, output.completion_ids, strict=True)
    ]


def interval(values: list[torch.Tensor], statistic, seed: int = 0, draws: int = 2000) -> list[float]:
    """95 % confidence interval by drawing whole completions anew, for the tokens of one are not independent."""
    rows = [row.numpy() for row in values]
    generator = np.random.default_rng(seed)
    drawn = [
        statistic(np.concatenate([rows[index] for index in generator.integers(len(rows), size=len(rows))]))
        for _ in range(draws)
    ]
    return [float(value) for value in np.percentile(drawn, [2.5, 97.5])]


def tail_of(values: np.ndarray) -> float:
    return float(np.quantile(values, 0.05))


def summary(values: list[torch.Tensor], positions_from: int, bin_tokens: int = 128) -> dict:
    """Tail and mean with their intervals, and the tail by bins of positions."""
    pooled = torch.cat(values).numpy()
    histogram = AcceptanceHistogram(bin_tokens=bin_tokens)
    for row in values:
        histogram.add(torch.arange(len(row)) + positions_from - 1, row)
    return {
        "tokens": len(pooled),
        "completions": len(values),
        "tail": tail_of(pooled),
        "tail_interval": interval(values, tail_of),
        "mean": float(pooled.mean()),
        "mean_interval": interval(values, lambda drawn: float(drawn.mean())),
        "bins": [
            {"first_position": index * bin_tokens, **histogram.tail(index)._asdict(), "mean": histogram.mean(index)}
            for index in range(len(histogram))
            if histogram.tokens(index) >= 200
        ],
    }


def without_the_lora(
    engine: RolloutEngine, before: dict, prompts: list[list[int]], config: GenerationConfig, options: Arguments
) -> list[dict]:
    """Budgets and what was measured with them without the LoRA, that of the experiment first."""
    found = [
        {"budget": options.budget, **{name: before[name] for name in ("tail", "tail_interval", "mean", "tokens")}}
    ]
    schedule = engine.schedule
    for budget in map(int, filter(None, options.other_budgets.split(","))):
        engine.schedule = SparsitySchedule.fixed(budget)
        values = summary(measure(engine, None, prompts, config, 1), options.prompt_tokens)
        found.append({"budget": budget, **{name: values[name] for name in found[0] if name != "budget"}})
    engine.schedule = schedule
    return found


def equal_budget(without: list[dict], tail: float) -> float | None:
    """The budget that has this tail without the LoRA, linear in the logarithm of the kept pages; `None` if all have less."""
    points = sorted((point["tail"], point["budget"]) for point in without)
    if tail > points[-1][0]:
        return None
    tails, budgets = zip(*points, strict=True)
    always = SparsitySchedule.fixed(1).sink_pages + SparsitySchedule.fixed(1).recent_pages
    return float(np.exp2(np.interp(tail, tails, np.log2(np.array(budgets) + always))) - always)


def plot(record: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    points = record["measurements"]
    minutes = [point["minutes"] for point in points]
    for name, colour in (("mean", "tab:grey"), ("tail", "tab:blue")):
        values = np.array([point[name] for point in points])
        low, high = np.array([point[f"{name}_interval"] for point in points]).T
        axes.errorbar(
            minutes, values, yerr=[values - low, high - values], marker="o", capsize=3, color=colour, label=name
        )
    axes.set(xlabel="minutes of online distillation", ylabel="acceptance rate on held-out prompts")
    axes.set_title(f"{record['model']}, {record['options']['budget']} scored pages, frozen policy")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


def run(model: PreTrainedModel, stream: list[int], options: Arguments, name: str, console: Console) -> dict:
    """Distil for so many minutes, measure before, on the way and after, and write the record as it grows."""
    folder = Path(options.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    pieces = passages(stream, options.prompt_tokens, options.seed)
    if len(pieces) < options.held_out + options.batch:
        raise ValueError(
            f"The text has {len(pieces)} passages of {options.prompt_tokens} tokens, too few for {options.held_out} "
            f"held out and {options.batch} a batch; lower --prompt_tokens or --held_out."
        )
    held_out, training = pieces[: options.held_out], pieces[options.held_out :]
    engine = RolloutEngine(model, SparsitySchedule.fixed(options.budget), progress_bar=False)
    config = GenerationConfig(do_sample=True, temperature=1.0, max_new_tokens=options.completion_tokens)
    adapter = SparrowAdapter(
        model,
        options.rank,
        target_modules=options.target_modules.split(","),
        seed=options.seed,
    )
    autocast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=options.bf16)
    update = DistillUpdate(
        model,
        adapter,
        DistillLoss(kl=options.kl, ppo_coef=0.0),  # no rewards: the policy is frozen
        learning_rate=options.learning_rate,
        num_steps=options.steps,
        micro_tokens=2 * (options.prompt_tokens + options.completion_tokens),
        autocast=autocast,
        seed=options.seed,
    )
    record: dict = {
        "model": name,
        "hardware": hardware(),
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "options": asdict(options),
        "measurements": [],
        "updates": [],
    }
    spent = sampling = updating = 0.0

    def note(lora: SparrowAdapter | None) -> None:
        point = {
            "minutes": spent / 60,
            "lora": lora is not None,
            "optimizer_steps": sum(u["steps"] for u in record["updates"]),
        }
        record["measurements"].append(
            {**point, **summary(measure(engine, lora, held_out, config, 1), options.prompt_tokens)}
        )
        (folder / "distill.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        shown = record["measurements"][-1]
        console.print(
            f"{spent / 60:5.1f} min  tail {shown['tail']:.4f} [{shown['tail_interval'][0]:.4f}, "
            f"{shown['tail_interval'][1]:.4f}]  mean {shown['mean']:.4f}  ({shown['tokens']} tokens)"
        )

    note(None)
    limit, done, place = 60 * options.minutes, 0, 0
    while spent < limit:
        started = time.perf_counter()
        prompts = [training[(place + index) % len(training)] for index in range(options.batch)]
        place += options.batch
        with adapter.active(), autocast():
            output = engine.generate(prompts, config, seed=1000 + place)
        sampled = time.perf_counter()
        samples = [
            Sample(prompt, new, torch.tensor(logprobs))
            for prompt, new, logprobs in zip(prompts, output.completion_ids, output.logprobs, strict=True)
        ]
        update.scheduler.base_lrs = [options.learning_rate * (1 - 0.9 * min(spent / limit, 1.0))]
        stats = update.update(samples, engine.schedule)
        ended = time.perf_counter()
        sampling += sampled - started
        updating += ended - sampled
        spent = sampling + updating
        record["updates"].append({**asdict(stats), "minutes": spent / 60, "sampling_seconds": sampled - started})
        console.print(
            f"{spent / 60:5.1f} min  KL {stats.kl:.4f}  acceptance {stats.acceptance or float('nan'):.4f}  gradient "
            f"{stats.grad_norm:.3f}  sampled in {sampled - started:.0f} s, updated in {ended - sampled:.0f} s"
        )
        if done < options.measurements and spent >= limit * (done + 1) / (options.measurements + 1):
            done += 1
            note(adapter)
    note(adapter)
    record["sampling_minutes"], record["updating_minutes"] = sampling / 60, updating / 60
    before, after = record["measurements"][0], record["measurements"][-1]
    record["tail_lift"], record["mean_lift"] = after["tail"] - before["tail"], after["mean"] - before["mean"]
    record["intervals_apart"] = after["tail_interval"][0] > before["tail_interval"][1]
    adapter.save_pretrained(folder / "adapter")
    record["without"] = without_the_lora(engine, before, held_out, config, options)
    record["equal_budget"] = equal_budget(record["without"], after["tail"])
    (folder / "distill.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    plot(record, folder / "distill.png")
    return record


def main() -> None:
    (options,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    console = Console()
    model, tokenizer = load_smollm2()
    record = run(model, token_stream(tokenizer), options, MODEL_NAME, console)
    table = Table("", "tail (95 % interval)", "mean (95 % interval)", "tokens")
    for label, point in (("without the LoRA", record["measurements"][0]), ("with it", record["measurements"][-1])):
        cells = (
            f"{point[name]:.4f} [{point[f'{name}_interval'][0]:.4f}, {point[f'{name}_interval'][1]:.4f}]"
            for name in ("tail", "mean")
        )
        table.add_row(label, *cells, str(point["tokens"]))
    console.print(table)
    console.print(
        f"Tail lifted by {record['tail_lift']:.4f}, mean by {record['mean_lift']:.4f}, in {record['measurements'][-1]['minutes']:.1f} "
        f"minutes; the intervals of the tail are {'apart' if record['intervals_apart'] else 'not apart'}."
    )
    for point in record["without"][1:]:
        console.print(f"Without the LoRA, {point['budget']} scored pages have a tail of {point['tail']:.4f}.")
    if record["equal_budget"]:
        console.print(f"With it, {options.budget} are worth {record['equal_budget']:.1f}.")


if __name__ == "__main__":
    main()
