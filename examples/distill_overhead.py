"""
What DistillSparse costs: the update of the LoRA against that of the policy, and rollouts with the LoRA on against without.

    python examples/distill_overhead.py

SmolLM2-135M, in one run. Updates: a short training with completions of fixed length, in which both updates see the same
tokens. That of the policy is its forward, backward and optimizer step; that of the LoRA is its whole update, the teacher's
forward included. Rollouts: the same prompts with and without the LoRA, in turns. Processor time is compared, which other
programs on the machine disturb less than the clock.
"""

import tempfile
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, HfArgumentParser, TrainerCallback

from demo import make_dataset
from sparrow_trl import SparrowGRPOConfig, SparrowGRPOTrainer
from sparrow_trl.benchmark.text import cut, token_stream
from sparrow_trl.embedded import MODEL_NAME, load_smollm2


@dataclass
class OverheadArguments:
    steps: int = field(default=5, metadata={"help": "Training steps; the first is not counted."})
    rollouts: int = field(default=5, metadata={"help": "Rollouts with the LoRA, and as many without."})
    batch_size: int = field(default=4, metadata={"help": "Completions in a step."})
    prompt_tokens: int = field(default=250, metadata={"help": "Tokens of a prompt in training, about."})
    completion_tokens: int = field(default=128, metadata={"help": "Tokens of a completion in training."})
    budget: int = field(default=8, metadata={"help": "Scored pages of 16 tokens."})
    rollout_context: int = field(default=1000, metadata={"help": "Tokens of the prompts of the rollouts."})
    rollout_tokens: int = field(default=32, metadata={"help": "New tokens of the rollouts."})
    target_modules: str = field(default="all-linear", metadata={"help": "Layers of the LoRA, separated by commas."})
    rank: int = field(default=16, metadata={"help": "Its rank."})
    bf16: bool = field(default=False, metadata={"help": "Compute in bfloat16."})


class TimedTrainer(SparrowGRPOTrainer):
    """Notes the processor time of each update of the policy: from the batch being ready to the optimizer's step."""

    def _prepare_inputs(self, *args, **kwargs):
        inputs = super()._prepare_inputs(*args, **kwargs)
        self.ready = time.process_time()
        return inputs


class AfterOptimizer(TrainerCallback):
    def __init__(self, trainer, seconds):
        self.trainer, self.seconds = trainer, seconds

    def on_optimizer_step(self, *args, **kwargs):
        self.seconds.append(time.process_time() - self.trainer.ready)


def timed(method, seconds):
    def call(*args, **kwargs):
        started = time.process_time()
        result = method(*args, **kwargs)
        seconds.append(time.process_time() - started)
        return result

    return call


def rollout_steps(trainer, prompts, arguments):
    """Seconds of a decode step with the LoRA on and without, one of each rollout."""
    config = GenerationConfig(do_sample=True, max_new_tokens=arguments.rollout_tokens)
    engine, adapter = trainer.rollout_engine, trainer.distill.adapter
    engine.stop_token_ids = []
    autocast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=arguments.bf16)
    with_lora, without = [], []
    for _ in range(arguments.rollouts):
        for seconds, mode in ((with_lora, adapter.active()), (without, nullcontext())):
            with mode, autocast():
                stats = engine.generate(prompts, config, seed=0).stats
            seconds.append(stats.seconds_decode / stats.decode_steps)
    return with_lora, without


def main() -> None:
    (arguments,) = HfArgumentParser(OverheadArguments).parse_args_into_dataclasses()
    model, tokenizer = load_smollm2()
    targets = arguments.target_modules
    policy, lora = [], []
    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=lambda completions, **kwargs: [float(i) for i in range(len(completions))],
            train_dataset=make_dataset(tokenizer, arguments.prompt_tokens, 64),
            args=SparrowGRPOConfig(
                output_dir=folder,
                sparse_schedule=f"fixed:{arguments.budget}",
                distill_sparse=True,
                distill_rank=arguments.rank,
                distill_target_modules=None if targets == "all-linear" else targets.split(","),
                tail_monitor=False,
                per_device_train_batch_size=arguments.batch_size,
                gradient_accumulation_steps=1,
                num_generations=arguments.batch_size,
                max_completion_length=arguments.completion_tokens,
                generation_kwargs={"min_new_tokens": arguments.completion_tokens},
                max_steps=arguments.steps,
                use_cpu=True,
                bf16=arguments.bf16,
                gradient_checkpointing=False,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
        )
        trainer.add_callback(AfterOptimizer(trainer, policy))
        trainer.distill.update = timed(trainer.distill.update, lora)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.train()
        prompts = cut(token_stream(tokenizer), arguments.batch_size, arguments.rollout_context)
        with_lora, without = rollout_steps(trainer, prompts, arguments)
    console = Console()
    console.print(f"{MODEL_NAME}, {arguments}, {torch.get_num_threads()} threads")
    table = Table("", "with the LoRA / of it", "without / of the policy", "ratio", "medians of")
    for name, ours, theirs in (
        ("update, processor seconds", lora[1:], policy[1:]),
        ("decode step of a rollout, seconds", with_lora, without),
    ):
        values = median(ours), median(theirs)
        cells = [f"{value:.3f}" for value in values] + [f"{values[0] / values[1]:.2f}", str(len(ours))]
        table.add_row(name, *cells)
    console.print(table)


if __name__ == "__main__":
    main()
