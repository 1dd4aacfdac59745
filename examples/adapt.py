"""
Watch the controller: SmolLM2-135M starts with budgets that are too small, and `tail_action="adapt"` raises them.

    python examples/adapt.py

Prompts have two lengths, so that two bins of positions are seen, which are 256 tokens wide here. Printed for each step:
tail, budget and tokens of each bin; and at the end what the controller decided. Pictures are in `OUTPUT_DIR/sparrow`.
"""

import warnings
from dataclasses import dataclass, field

from datasets import concatenate_datasets
from rich.console import Console
from rich.table import Table
from transformers import HfArgumentParser

from demo import make_dataset, short_sentence_reward
from sparrow_trl import SparrowGRPOConfig, SparrowGRPOTrainer, SparsitySchedule
from sparrow_trl.embedded import load_smollm2


@dataclass
class AdaptArguments:
    output_dir: str = field(default="adapt-output", metadata={"help": "Where the pictures go."})
    steps: int = field(default=6, metadata={"help": "Training steps."})
    batch_size: int = field(default=4, metadata={"help": "Completions in a step."})
    completion_tokens: int = field(default=64, metadata={"help": "Tokens of a completion."})
    budget: int = field(default=4, metadata={"help": "Scored pages of 16 tokens at the start."})
    threshold: float = field(default=0.86, metadata={"help": "What the tail should be at or above."})


def main() -> None:
    (arguments,) = HfArgumentParser(AdaptArguments).parse_args_into_dataclasses()
    model, tokenizer = load_smollm2()
    dataset = concatenate_datasets([make_dataset(tokenizer, length, 32) for length in (350, 600)])
    trainer = SparrowGRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=short_sentence_reward,
        train_dataset=dataset,
        args=SparrowGRPOConfig(
            output_dir=arguments.output_dir,
            sparse_schedule=SparsitySchedule.fixed(arguments.budget, bin_tokens=256),
            tail_action="adapt",
            tail_threshold=arguments.threshold,
            tail_share=1.0,
            tail_min_tokens=100,
            tail_min_budget=2,
            per_device_train_batch_size=arguments.batch_size,
            num_generations=2,
            max_completion_length=arguments.completion_tokens,
            generation_kwargs={"min_new_tokens": arguments.completion_tokens},
            max_steps=arguments.steps,
            logging_steps=1,
            learning_rate=1e-6,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    console = Console()
    table = Table("step", "bin", "tail", "KV share", "budget after the step")
    for entry in trainer.state.log_history:
        for index in range(20):
            if f"sparrow/tail/bin_{index}" in entry:
                budget = entry.get(f"sparrow/budget/bin_{index}", trainer.tail_monitor.schedule.budgets[-1])
                tail = f"{entry[f'sparrow/tail/bin_{index}']:.3f}"
                table.add_row(
                    str(entry["step"]), str(index), tail, f"{entry['sparrow/kv_share']:.2f}", f"{budget:.0f}"
                )
    console.print(table)
    for decision in trainer.tail_monitor.controller.decisions:
        console.print(
            f"step {decision.step}: bin {decision.index} from {decision.old} to {decision.new} pages "
            f"({decision.reason}, tail {decision.tail:.3f})"
        )


if __name__ == "__main__":
    main()
