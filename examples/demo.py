"""
The main job in a few minutes on two cores: train SmolLM2-135M with GRPO, its rollouts reading a part of the KV cache.

    python examples/demo.py

Prompts are passages of the Python manual (it comes with the interpreter) of several hundred tokens; the task, "one short
sentence that uses a given word", can be verified without a judge. Printed at the end: reward by step, tokens per second
of dense and sparse rollouts measured in this run, the share of the KV cache that was read, and where the model lies.
"""

import re
from dataclasses import dataclass, field
from pydoc_data.topics import topics

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, HfArgumentParser, PreTrainedTokenizerBase

from sparrow_trl import RolloutEngine, SparrowGRPOConfig, SparrowGRPOTrainer, SparsitySchedule
from sparrow_trl.embedded import MODEL_NAME, load_smollm2


LONGEST_ANSWER = 20  # words
KEYWORDS = ["class", "function", "value", "object", "name", "statement", "expression", "type", "method", "module"]


@dataclass
class DemoArguments:
    output_dir: str = field(default="demo-output", metadata={"help": "Where the trained model goes."})
    steps: int = field(default=6, metadata={"help": "Training steps."})
    prompt_tokens: int = field(default=450, metadata={"help": "Tokens of the passage in a prompt, about."})
    budget: int = field(
        default=12, metadata={"help": "Scored pages of 16 tokens that a query keeps, beside 3 others."}
    )
    compare_tokens: int = field(
        default=2000, metadata={"help": "Prompt tokens of the rollouts that compare dense and sparse."}
    )


def passages(tokenizer: PreTrainedTokenizerBase, num_tokens: int, count: int) -> list[str]:
    """`count` different passages of about `num_tokens` tokens each, of the Python manual."""
    text = re.sub(r"\n{3,}", "\n\n", "\n\n".join(topics[name] for name in sorted(topics)))
    stride = len(text) // count
    return [
        tokenizer.decode(tokenizer(text[start : start + 6 * num_tokens])["input_ids"][:num_tokens])
        for start in range(0, stride * count, stride)
    ]


def make_dataset(tokenizer: PreTrainedTokenizerBase, num_tokens: int, count: int) -> Dataset:
    rows = []
    for place, passage in enumerate(passages(tokenizer, num_tokens, count)):
        keyword = KEYWORDS[place % len(KEYWORDS)]
        task = (
            f"{passage}\n\nWhat is the text above about? Answer with one sentence of at most {LONGEST_ANSWER} words "
            f'that uses the word "{keyword}".'
        )
        rows.append({"prompt": [{"role": "user", "content": task}], "keyword": keyword})
    return Dataset.from_list(rows)


def short_sentence_reward(completions: list[list[dict[str, str]]], keyword: list[str], **kwargs) -> list[float]:
    """A third each for using the word, for ending with a full stop, and for at most `LONGEST_ANSWER` words."""
    rewards = []
    for completion, word in zip(completions, keyword, strict=True):
        answer = completion[0]["content"].strip()
        checks = [word in answer.lower(), answer.endswith("."), 0 < len(answer.split()) <= LONGEST_ANSWER]
        rewards.append(sum(checks) / len(checks))
    return rewards


def compare_rollouts(
    engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, num_tokens: int, schedules: dict[str, SparsitySchedule]
) -> Table:
    """Decode the same prompts under each schedule, and time it."""
    prompts = [tokenizer(passage)["input_ids"] for passage in passages(tokenizer, num_tokens, 4)]
    config = GenerationConfig(do_sample=True, max_new_tokens=32, min_new_tokens=32)
    table = Table(
        title=f"Rollouts, {len(prompts)} prompts of {num_tokens} tokens, {config.max_new_tokens} new tokens each"
    )
    for column in ("rollout", "decode tokens/s", "against dense", "share of KV read"):
        table.add_column(column, justify="right")
    dense_speed = None
    for name, engine.schedule in schedules.items():
        stats = engine.generate(prompts, config, seed=0).stats
        speed = stats.completion_tokens / (stats.seconds_decode + stats.seconds_sampling)
        dense_speed = dense_speed or speed
        table.add_row(name, f"{speed:.1f}", f"{speed / dense_speed:.2f}x", f"{stats.kv_share:.0%}")
    return table


def main() -> None:
    (arguments,) = HfArgumentParser(DemoArguments).parse_args_into_dataclasses()
    console = Console()
    model, tokenizer = load_smollm2()
    args = SparrowGRPOConfig(
        output_dir=arguments.output_dir,
        sparse_schedule=f"fixed:{arguments.budget}",
        max_steps=arguments.steps,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=40,
        learning_rate=1e-5,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=1,
        epsilon_high=0.28,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = SparrowGRPOTrainer(
        model=model,
        reward_funcs=short_sentence_reward,
        args=args,
        train_dataset=make_dataset(tokenizer, arguments.prompt_tokens, count=32),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()

    steps = Table(title=f"GRPO on {MODEL_NAME}, sparse rollouts ({args.sparse_schedule})")
    columns = {
        "step": "step",
        "reward": "reward",
        "completions/mean_length": "tokens",
        "sparrow/importance_ratio/mean": "mean ratio",
        "sparrow/clipped_fraction": "clipped",
        "sparrow/kv_share": "share of KV read",
        "sparrow/rollout_tokens_per_second": "rollout tokens/s",
    }
    for title in columns.values():
        steps.add_column(title, justify="right")
    for log in trainer.state.log_history:
        if "reward" in log:
            steps.add_row(*(f"{log[name]:.4g}" for name in columns))
    console.print(steps)

    schedules = {
        "dense": SparsitySchedule.dense(),
        f"sparse ({args.sparse_schedule})": trainer.rollout_engine.schedule,
    }
    console.print(compare_rollouts(trainer.rollout_engine, tokenizer, arguments.compare_tokens, schedules))
    console.print(f"Measured on {torch.get_num_threads()} CPU threads in float32, in this run.")
    console.print(f"The trained model, the dense policy, is in {args.output_dir}: load it with from_pretrained.")


if __name__ == "__main__":
    main()
