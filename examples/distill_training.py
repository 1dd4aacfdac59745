"""
The tail with and without the co-resident LoRA after a training of the policy, bin by bin.

    python examples/distill_training.py --output_dir distill-training

SmolLM2-135M is trained with GRPO to continue passages of the Python manual with words that do not repeat, its rollouts
sparse and with `distill_sparse=True`. Then the acceptance rate of the trained policy's sparse actor is measured on
prompts that were not in the training, once with the LoRA on and once without; each actor samples its own completions.
Written to the output folder, beside the trained policy and `sparrow/adapter`: `tails.json` and `tails.png`.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from datasets import Dataset
from distill_frozen_policy import measure, passages, summary
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase

from sparrow_trl import SparrowGRPOConfig, SparrowGRPOTrainer
from sparrow_trl.benchmark.text import token_stream
from sparrow_trl.embedded import MODEL_NAME, load_smollm2
from sparrow_trl.environment import hardware, versions


@dataclass
class Arguments:
    output_dir: str = field(default="distill-training", metadata={"help": "Where the policy and the results go."})
    steps: int = field(default=12, metadata={"help": "Training steps."})
    budget: int = field(default=8, metadata={"help": "Scored pages of 16 tokens that a query keeps, beside 3 others."})
    prompt_tokens: int = field(default=192, metadata={"help": "Tokens of a prompt."})
    completion_tokens: int = field(default=320, metadata={"help": "Tokens of a completion, at most."})
    held_out: int = field(default=24, metadata={"help": "Prompts on which the tail is measured."})
    batch: int = field(default=16, metadata={"help": "Completions of a step, in groups of four."})
    distill_steps: int = field(default=4, metadata={"help": "Steps of the LoRA's optimizer on each batch."})
    learning_rate: float = field(default=1e-6, metadata={"help": "Of the policy."})
    distill_learning_rate: float = field(default=5e-4, metadata={"help": "Of the LoRA."})
    distill_kl_coef: float = field(default=1.0, metadata={"help": "Weight of the divergence in the LoRA's loss."})
    distill_ppo_coef: float = field(default=0.1, metadata={"help": "Weight of its policy-gradient term."})
    bin_tokens: int = field(default=128, metadata={"help": "Width of a bin of positions."})
    bf16: bool = field(default=True, metadata={"help": "Train in bfloat16; the tails are measured in float32."})
    seed: int = field(default=0, metadata={"help": "Of the samples, the LoRA and the choice of passages."})


def different_words_reward(completions: list[str], **kwargs) -> list[float]:
    """How many of the words of a completion are different ones."""
    words = [completion.lower().split() for completion in completions]
    return [len(set(found)) / len(found) if found else 0.0 for found in words]


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    stream: list[int],
    options: Arguments,
    name: str,
    **settings,
) -> dict:
    """Train, measure both actors, write the record. `settings` are further options of the trainer's configuration."""
    folder = Path(options.output_dir)
    pieces = passages(stream, options.prompt_tokens, options.seed)
    held_out = pieces[: options.held_out]
    dataset = Dataset.from_dict({"prompt": [tokenizer.decode(piece) for piece in pieces[options.held_out :]]})
    args = SparrowGRPOConfig(
        output_dir=options.output_dir,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch // 4,
        gradient_accumulation_steps=4,
        num_generations=4,
        max_completion_length=options.completion_tokens,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        seed=options.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=options.bf16,
        gradient_checkpointing=False,
        distill_sparse=True,
        distill_steps=options.distill_steps,
        distill_learning_rate=options.distill_learning_rate,
        distill_kl_coef=options.distill_kl_coef,
        distill_ppo_coef=options.distill_ppo_coef,
        distill_micro_tokens=2 * (options.prompt_tokens + options.completion_tokens),
        **{
            "sparse_schedule": f"fixed:{options.budget}",
            "distill_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
            **settings,
        },
    )
    trainer = SparrowGRPOTrainer(
        model=model, args=args, reward_funcs=different_words_reward, train_dataset=dataset, processing_class=tokenizer
    )
    trainer.train()
    trainer.save_model()
    config = GenerationConfig(do_sample=True, temperature=1.0, max_new_tokens=options.completion_tokens)
    tails = {}
    for label, adapter in (("without the LoRA", None), ("with the LoRA", trainer.distill.adapter)):
        values = measure(trainer.rollout_engine, adapter, held_out, config, seed=1)
        tails[label] = summary(values, options.prompt_tokens, options.bin_tokens)
    record = {
        "model": name,
        "hardware": hardware(),
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "options": asdict(options),
        "tails": tails,
        "log": trainer.state.log_history,
    }
    (folder / "tails.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    plot(record, folder / "tails.png")
    return record


def rows_of(record: dict) -> list[tuple[int, dict, dict]]:
    """Bins that both actors have enough tokens in: first position, without the LoRA, with it."""
    without, with_it = (
        {entry["first_position"]: entry for entry in record["tails"][label]["bins"]}
        for label in ("without the LoRA", "with the LoRA")
    )
    return [(first, without[first], with_it[first]) for first in sorted(without.keys() & with_it.keys())]


def plot(record: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    rows = rows_of(record)
    width = record["options"]["bin_tokens"]
    for index, (label, colour) in enumerate((("without the LoRA", "tab:grey"), ("with the LoRA", "tab:blue"))):
        entries = [row[1 + index] for row in rows]
        values = [entry["value"] for entry in entries]
        errors = [
            [entry["value"] - entry["low"] for entry in entries],
            [entry["high"] - entry["value"] for entry in entries],
        ]
        axes.errorbar(
            [row[0] + width / 2 for row in rows], values, yerr=errors, marker="o", capsize=3, color=colour, label=label
        )
    axes.set(xlabel="position", ylabel="tail of the acceptance rate")
    axes.set_title(
        f"{record['model']}, {record['options']['budget']} scored pages, {record['options']['steps']} steps"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    (options,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    model, tokenizer = load_smollm2()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    record = run(model, tokenizer, token_stream(tokenizer), options, MODEL_NAME)
    table = Table("positions", "tail without the LoRA", "tail with it", "mean without", "mean with", "tokens")
    width = options.bin_tokens
    for first, without, with_it in rows_of(record):
        table.add_row(
            f"{first} to {first + width - 1}",
            *(f"{e['value']:.4f} [{e['low']:.4f}, {e['high']:.4f}]" for e in (without, with_it)),
            *(f"{e['mean']:.4f}" for e in (without, with_it)),
            f"{without['tokens']:.0f}, {with_it['tokens']:.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
