"""
What the tail monitor costs: a short training of SmolLM2-135M, half of whose steps are monitored.

    python examples/monitor_overhead.py

Monitored and other steps take turns (`tail_every=2`), with the same prompts and completions of fixed length, so that the
two are compared in one run. Processor time is compared, which other programs on the machine disturb less than the clock.
"""

import tempfile
import time
import warnings
from dataclasses import dataclass, field
from statistics import median

from transformers import HfArgumentParser

from demo import make_dataset
from sparrow_trl import SparrowGRPOConfig, SparrowGRPOTrainer
from sparrow_trl.embedded import MODEL_NAME, load_smollm2
from sparrow_trl.monitor import TailMonitor


@dataclass
class OverheadArguments:
    steps: int = field(default=12, metadata={"help": "Training steps; the first two are not counted."})
    batch_size: int = field(default=16, metadata={"help": "Completions in a step."})
    prompt_tokens: int = field(default=450, metadata={"help": "Tokens of a prompt, about."})
    completion_tokens: int = field(default=64, metadata={"help": "Tokens of a completion."})
    budget: int = field(default=12, metadata={"help": "Scored pages of 16 tokens."})
    statistic: str = field(default="auto", metadata={"help": "See `tail_statistic`."})


class TimedTrainer(SparrowGRPOTrainer):
    """Notes the processor time of each step."""

    def training_step(self, *args, **kwargs):
        started = time.process_time()
        loss = super().training_step(*args, **kwargs)
        self.seconds.append(time.process_time() - started)
        return loss


def timed(method, seconds: list[float]):
    def call(*args, **kwargs):
        started = time.process_time()
        result = method(*args, **kwargs)
        seconds.append(time.process_time() - started)
        return result

    return call


def main() -> None:
    (arguments,) = HfArgumentParser(OverheadArguments).parse_args_into_dataclasses()
    model, tokenizer = load_smollm2()
    updates: list[float] = []
    TailMonitor.update = timed(TailMonitor.update, updates)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=lambda completions, **kwargs: [float(i) for i in range(len(completions))],
            train_dataset=make_dataset(tokenizer, arguments.prompt_tokens, 64),
            args=SparrowGRPOConfig(
                output_dir=folder,
                sparse_schedule=f"fixed:{arguments.budget}",
                tail_every=2,
                tail_statistic=arguments.statistic,
                tail_threshold=0.5,
                per_device_train_batch_size=arguments.batch_size,
                num_generations=arguments.batch_size,
                max_completion_length=arguments.completion_tokens,
                generation_kwargs={"min_new_tokens": arguments.completion_tokens},
                max_steps=arguments.steps,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
        )
        trainer.seconds = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.train()
    monitored, others = trainer.seconds[2::2], trainer.seconds[3::2]
    update = median(updates[2::2])
    print(f"{MODEL_NAME}, {arguments}, statistic {trainer.tail_monitor.statistic!r}, share {trainer.args.tail_share}")
    print(f"step with the monitor    {median(monitored):8.2f} s of processor time, median of {len(monitored)}")
    print(f"step without             {median(others):8.2f} s")
    print(f"  difference             {median(monitored) / median(others) - 1:8.2%}")
    print(f"update of the monitor    {update:8.2f} s, {update / median(others):.2%} of a step without")


if __name__ == "__main__":
    main()
