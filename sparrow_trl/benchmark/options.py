"""The options of `sparrow bench rollout`. Nothing heavy is imported here: `sparrow --help` needs them too."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class RolloutOptions:
    """
    What to measure. Lengths are tokens.

    Attributes:
        model (`str`, *optional*): name or path; by default the embedded SmolLM2-135M-Instruct.
        dtypes (`list[str]`): dtypes of the weights, one after the other.
        device (`str`, *optional*): by default the GPU if there is one.
        schedules (`list[str]`): what [`SparsitySchedule.resolve`] understands; dense is measured anyway.
        batch (`int`): sequences in a decode step.
        contexts (`list[int]`): tokens in the cache at a decode step; empty leaves decode steps out.
        steps, warmup (`int`): decode steps of each contender, timed and before that.
        ragged (`bool`): whether to measure whole rollouts of unequal length.
        completions, group, prompt_length (`int`): completions, how many of them share a prompt, and its length.
        median_length, longest_length (`int`): of the completions.
        repeats (`int`): timed rollouts of each contender; `generate` has one.
        continuous_batching (`bool`): whether transformers' continuous batching takes part in whole rollouts.
        time_limit (`float`, *optional*): seconds after which continuous batching is stopped; by default the time of
            `generate`.
        text (`Path`, *optional*): the text that prompts are cut from; by default the topics of Python's `help()`.
        seed (`int`): seed of lengths and sampling.
    """

    model: str | None = None
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"])
    device: str | None = None
    schedules: list[str] = field(default_factory=lambda: ["fixed:64"])
    batch: int = 8
    contexts: list[int] = field(default_factory=lambda: [8000, 2000])
    steps: int = 9
    warmup: int = 2
    ragged: bool = True
    completions: int = 32
    group: int = 8
    prompt_length: int = 512
    median_length: int = 100
    longest_length: int = 600
    repeats: int = 1
    continuous_batching: bool = True
    time_limit: float | None = None
    text: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        at_least = {
            "batch": 1,
            "steps": 1,
            "warmup": 1,
            "completions": 1,
            "group": 1,
            "prompt_length": 1,
            "repeats": 1,
        }
        at_least |= {"median_length": 1, "longest_length": self.median_length}
        for name, low in at_least.items():
            if getattr(self, name) < low:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least {low}.")
        for context in self.contexts:
            if context < 1:
                raise ValueError(f"--context {context} must be at least 1.")
        if self.completions % self.group:
            raise ValueError(f"--completions {self.completions} is not a multiple of --group {self.group}.")
        if self.time_limit is not None and self.time_limit <= 0:
            raise ValueError(f"--time-limit {self.time_limit} must be above 0.")
        if not self.contexts and not self.ragged:
            raise ValueError("An empty --context together with --no-ragged leaves nothing to measure.")

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that any part builds."""
        ragged = self.prompt_length + self.longest_length if self.ragged else 0
        return max([context + 1 for context in self.contexts] + [ragged])

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> RolloutOptions:
        """The options that [`add_arguments`] has parsed."""
        values: dict[str, Any] = {
            name: getattr(args, name) for name in cls.__dataclass_fields__ if name != "schedules"
        }
        asked = list(args.schedules or ()) + [f"fixed:{budget}" for budget in args.budgets or ()]
        if asked:
            values["schedules"] = list(dict.fromkeys(asked))
        return cls(**values)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of [`RolloutOptions`]."""
    default = RolloutOptions()
    common = parser.add_argument_group("what is measured")
    common.add_argument("--model", metavar="NAME", help="model name or path (default: the embedded SmolLM2-135M)")
    common.add_argument("--dtype", dest="dtypes", nargs="+", choices=DTYPES, default=default.dtypes)
    common.add_argument("--device", help="default: the GPU if there is one, else the CPU")
    common.add_argument(
        "--schedule",
        dest="schedules",
        nargs="+",
        metavar="SCHEDULE",
        help="sparsity schedules: fixed:64, a preset, a file, a Hub repository (default: fixed:64)",
    )
    common.add_argument(
        "--budget", dest="budgets", nargs="+", type=int, metavar="PAGES", help="short for --schedule fixed:PAGES"
    )
    common.add_argument("--text", type=Path, metavar="FILE", help="text for prompts (default: the topics of help())")
    common.add_argument("--seed", type=int, default=default.seed)
    common.add_argument("--json", metavar="PATH", help="also write the results as JSON; - is standard output")

    steps = parser.add_argument_group("decode steps")
    steps.add_argument("--batch", type=int, default=default.batch, help="sequences (default: %(default)s)")
    steps.add_argument(
        "--context",
        dest="contexts",
        nargs="*",
        type=int,
        metavar="TOKENS",
        default=default.contexts,
        help="tokens in the cache; nothing leaves this part out (default: 8000 2000)",
    )
    steps.add_argument("--steps", type=int, default=default.steps, help="timed steps each (default: %(default)s)")
    steps.add_argument("--warmup", type=int, default=default.warmup, help="steps before that (default: %(default)s)")

    ragged = parser.add_argument_group("whole rollouts of unequal length")
    ragged.add_argument("--ragged", action=argparse.BooleanOptionalAction, default=default.ragged)
    for name, text in (
        ("completions", "sampled together"),
        ("group", "completions of a prompt"),
        ("prompt_length", "tokens of a prompt"),
        ("median_length", "tokens of the median completion"),
        ("longest_length", "tokens of the longest completion"),
        ("repeats", "timed rollouts each"),
    ):
        flag, value = f"--{name.replace('_', '-')}", getattr(default, name)
        ragged.add_argument(flag, type=int, default=value, help=f"{text} (default: %(default)s)")
    ragged.add_argument(
        "--continuous-batching",
        action=argparse.BooleanOptionalAction,
        default=default.continuous_batching,
        help="let transformers' continuous batching take part, where it runs",
    )
    ragged.add_argument(
        "--time-limit",
        type=float,
        default=default.time_limit,
        metavar="SECONDS",
        help="stop continuous batching after so long, and count what it has finished until then (default: the time of "
        "generate)",
    )
