"""
What DistillSparse costs: the update of the LoRA against that of the policy, and decode steps with the LoRA on against without.

    python examples/distill_overhead.py

SmolLM2-135M, in one run. Updates: a short training with completions of fixed length, in which both updates see the same
tokens. That of the policy is its forward, backward and optimizer step; that of the LoRA is its whole update, the teacher's
forward included. Processor time is compared, which other programs on the machine disturb less than the clock. Decode steps:
two copies of the model on the same weights, one with the LoRA on and one without, decode the same tokens in turns. The clock
counts here, so nothing else should run.
"""

import copy
import tempfile
import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from transformers import HfArgumentParser, PreTrainedModel, TrainerCallback

from demo import make_dataset
from sparrow_trl import SparrowGRPOConfig, SparrowGRPOTrainer, SparsitySchedule
from sparrow_trl.benchmark.text import cut, token_stream
from sparrow_trl.distill import SparrowAdapter
from sparrow_trl.embedded import MODEL_NAME, load_smollm2
from sparrow_trl.rollout.cache import PagedKVCache, PageTable
from sparrow_trl.rollout.isolation import rollout_mode
from sparrow_trl.rollout.runner import ModelRunner
from sparrow_trl.rollout.step import Piece


@dataclass
class OverheadArguments:
    steps: int = field(default=5, metadata={"help": "Training steps; the first is not counted."})
    batch_size: int = field(default=4, metadata={"help": "Completions in a step."})
    prompt_tokens: int = field(default=250, metadata={"help": "Tokens of a prompt in training, about."})
    completion_tokens: int = field(default=128, metadata={"help": "Tokens of a completion in training."})
    budget: int = field(default=8, metadata={"help": "Scored pages of 16 tokens."})
    decode_steps: int = field(default=40, metadata={"help": "Decode steps with the LoRA, and as many without."})
    decode_batches: str = field(default="8,32", metadata={"help": "Sequences that decode, separated by commas."})
    decode_context: int = field(default=300, metadata={"help": "Tokens that each of them has."})
    target_modules: str = field(
        default="all-linear", metadata={"help": "Layers of the LoRA in the updates, separated by commas."}
    )
    rank: int = field(default=16, metadata={"help": "Its rank."})
    bf16: bool = field(default=False, metadata={"help": "Updates in bfloat16."})


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


def decoder(model: PreTrainedModel, prompts: list[list[int]], schedule: SparsitySchedule, dtype: torch.dtype):
    """A function that decodes one token after each prompt, always the same one."""
    page_size, length = schedule.page_size, len(prompts[0])
    pages = length // page_size + 1
    cache = PagedKVCache(pages * len(prompts), page_size, dtype)
    runner = ModelRunner(model, schedule, cache)
    pieces = []
    for index, prompt in enumerate(prompts):
        table = PageTable()
        for page in range(pages):
            table.append(index * pages + page)
        runner.run([Piece(table, 0, prompt)], [0], decoding=False)
        pieces.append(Piece(table, length, [prompt[0]]))
    return partial(runner.run, pieces, range(len(pieces)), decoding=True)


def decode_seconds(
    model: PreTrainedModel, prompts: list[list[int]], dtype: torch.dtype, names: str, arguments: OverheadArguments
) -> tuple[list[float], list[float]]:
    """Seconds of decode steps with the LoRA and without, in turns."""
    schedule = SparsitySchedule.fixed(arguments.budget)
    twin = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    adapter = SparrowAdapter(twin, arguments.rank, target_modules=names.split(","))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with ExitStack() as stack:
        stack.enter_context(torch.autocast("cpu", dtype, enabled=dtype is not torch.float32))
        stack.enter_context(adapter.active())
        for candidate in (model, twin):
            stack.enter_context(rollout_mode(candidate, packed=True))
        steps = {True: decoder(twin, prompts, schedule, dtype), False: decoder(model, prompts, schedule, dtype)}
        for repetition in range(-4, arguments.decode_steps):
            for has_lora in (True, False) if repetition % 2 else (False, True):
                started = time.perf_counter()
                steps[has_lora]()
                if repetition >= 0:
                    seconds[has_lora].append(time.perf_counter() - started)
    return seconds[True], seconds[False]


def main() -> None:
    (arguments,) = HfArgumentParser(OverheadArguments).parse_args_into_dataclasses()
    model, tokenizer = load_smollm2()
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
                distill_target_modules=arguments.target_modules.split(","),
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
    rows = [("update, processor seconds", lora[1:], policy[1:])]
    stream = token_stream(tokenizer)
    model, _ = load_smollm2()  # the trainer has wrapped the other's forward, which a copy would share
    for batch in map(int, arguments.decode_batches.split(",")):
        prompts = cut(stream, batch, arguments.decode_context)
        for dtype in (torch.float32, torch.bfloat16):
            for names in ("attention", "all-linear"):
                label = f"decode step of {batch}, {str(dtype).removeprefix('torch.')}, {names}"
                rows.append((label, *decode_seconds(model, prompts, dtype, names, arguments)))
    console = Console()
    console.print(f"{MODEL_NAME}, {arguments}, {torch.get_num_threads()} threads")
    table = Table("", "with the LoRA / of it", "without / of the policy", "ratio", "medians of")
    for name, ours, theirs in rows:
        values = median(ours), median(theirs)
        cells = [f"{value:.3f}" for value in values] + [f"{values[0] / values[1]:.2f}", str(len(ours))]
        table.add_row(name, *cells)
    console.print(table)


if __name__ == "__main__":
    main()
