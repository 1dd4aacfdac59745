"""The options of `sparrow calibrate` and `sparrow tail`. Nothing heavy is imported here: `sparrow --help` needs them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace
from typing import Any


DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class MeasureOptions:
    """
    How tails are measured.

    Attributes:
        max_context (`int`, *optional*): positions to look at; by default, and at most, the model's.
        texts (`int`): windows of text, or prompts, to start from.
        check_places (`int`): places in each bin where tokens are generated to judge a schedule. Many short stretches say more
            than a few long ones, for the tokens of one resemble each other.
        check_tokens (`int`): tokens generated at each of them.
        prompt_length (`int`): tokens of a window of text that count as its prompt, which is read densely.
        min_tokens (`int`): tokens that a bin needs, counted as independent ones.
        confidence (`float`): of the intervals, two-sided.
        temperature (`float`): of the sampling.
        seed (`int`): of places, prompts and sampling.
        memory_fraction (`float`): share of the free memory that the KV cache may take.
    """

    max_context: int | None = None
    texts: int = 6
    check_places: int = 48
    check_tokens: int = 48
    prompt_length: int = 256
    min_tokens: int = 100
    confidence: float = 0.90
    temperature: float = 1.0
    seed: int = 0
    memory_fraction: float = 0.5

    def __post_init__(self) -> None:
        for name in ("texts", "check_places", "check_tokens", "prompt_length", "min_tokens"):
            _at_least(name, getattr(self, name), 1)
        if self.max_context is not None:
            _at_least("max_context", self.max_context, 2)
        _at_least("seed", self.seed, 0)
        for name, closed in (("confidence", False), ("memory_fraction", True)):
            value = getattr(self, name)
            if not (0 < value < 1 or (closed and value == 1)):
                raise ValueError(f"{_flag(name)} {value} is not between 0 and 1.")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"--temperature {self.temperature} must be above 0, and finite.")


@dataclass(frozen=True)
class CalibrationOptions(MeasureOptions):
    """
    How a schedule is looked for, beside how tails are measured.

    Attributes:
        target (`float`): the tail that every bin must keep.
        budgets (`tuple[int, ...]`): budgets to measure in every bin; by default they are searched for, bin by bin.
        probe_places, probe_tokens (`int`): places in each bin for each budget, and tokens generated at each.
        checks (`int`): times that the schedule found is checked on its own trajectories, and mended; 0 leaves that out.
        page_size, bin_tokens, sink_pages, recent_pages (`int`), dense_layers (`tuple[int, ...]`): as in the schedule.
    """

    target: float = 0.86
    budgets: tuple[int, ...] = ()
    probe_places: int = 32
    probe_tokens: int = 32
    checks: int = 2
    page_size: int = 16
    bin_tokens: int = 2000
    sink_pages: int = 1
    recent_pages: int = 2
    dense_layers: tuple[int, ...] = (0, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.target < 1:
            raise ValueError(f"--target {self.target} is not between 0 and 1; it is a tail of the acceptance rate.")
        for budget in self.budgets:
            _at_least("budgets", budget, 0)
        object.__setattr__(self, "budgets", tuple(sorted(set(self.budgets))))
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        _at_least("probe_places", self.probe_places, 1)
        _at_least("probe_tokens", self.probe_tokens, 1)
        _at_least("checks", self.checks, 0)
        _at_least("bin_tokens", self.bin_tokens, 1)
        for name in ("probe_tokens", "check_tokens"):
            if getattr(self, name) > self.bin_tokens:
                raise ValueError(
                    f"{_flag(name)} {getattr(self, name)} is longer than a bin of {self.bin_tokens} tokens."
                )


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ValueError(f"{_flag(name)} {value} must be at least {low}.")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def options_from_args(kind: type[MeasureOptions], args: argparse.Namespace) -> Any:
    """The options that the parser has read; those not given keep their defaults."""
    given = {field.name: getattr(args, field.name, None) for field in fields(kind)}
    return replace(kind(), **{name: value for name, value in given.items() if value is not None})


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `sparrow calibrate`."""
    _add_common(parser)
    default = CalibrationOptions()
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the schedule and of partial results")
    search = parser.add_argument_group("the schedule")
    search.add_argument("--target", type=float, help=f"tail that every bin must keep (default: {default.target})")
    search.add_argument(
        "--budgets", nargs="+", type=int, metavar="PAGES", help="measure these budgets (default: search, bin by bin)"
    )
    search.add_argument("--page-size", type=int, help=f"tokens in a page (default: {default.page_size})")
    search.add_argument("--bin-tokens", type=int, help=f"tokens in a bin (default: {default.bin_tokens})")
    search.add_argument(
        "--probe-places", type=int, help=f"places in each bin for each budget (default: {default.probe_places})"
    )
    search.add_argument(
        "--probe-tokens", type=int, help=f"generated at each of them (default: {default.probe_tokens})"
    )
    search.add_argument("--checks", type=int, help=f"checks of the schedule found (default: {default.checks})")
    _add_measure(parser)


def add_tail_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `sparrow tail`."""
    _add_common(parser)
    parser.add_argument("--schedule", required=True, help="a schedule file or folder, a preset, fixed:64, ...")
    parser.add_argument(
        "--adapter", metavar="DIR", help="a LoRA of DistillSparse: the tail is measured with it as well as without"
    )
    parser.add_argument("--out", metavar="DIR", help="folder of the plot, the figures as JSON, and partial results")
    _add_measure(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="name or path (default: the embedded SmolLM2-135M)")
    parser.add_argument("--revision", help="of the model, on the Hub")
    parser.add_argument(
        "--dataset",
        metavar="DATA",
        help="a file of text, a file of rows (jsonl, parquet, csv), a datasets folder or a Hub name, with a column "
        "'prompt' or 'text' (default: the topics of Python's help())",
    )
    parser.add_argument("--split", default="train", help="of a dataset (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32 on a CPU, else the model's own")
    parser.add_argument("--device", help="default: the GPU if there is one, else the CPU")


def _add_measure(parser: argparse.ArgumentParser) -> None:
    default = MeasureOptions()
    measure = parser.add_argument_group("the measurement")
    measure.add_argument("--max-context", type=int, metavar="TOKENS", help="default: the model's positions")
    for name, text in (
        ("texts", "windows of text, or prompts"),
        ("check_places", "places in each bin where tokens are generated to judge a schedule"),
        ("check_tokens", "generated at each of them"),
        ("prompt_length", "tokens of a text that are read densely"),
        ("min_tokens", "independent tokens that a bin needs"),
        ("seed", "of places, prompts and sampling"),
    ):
        measure.add_argument(_flag(name), type=int, help=f"{text} (default: {getattr(default, name)})")
    for name, text in (
        ("confidence", "of the intervals"),
        ("temperature", "of the sampling"),
        ("memory_fraction", "share of the free memory for the KV cache"),
    ):
        measure.add_argument(_flag(name), type=float, help=f"{text} (default: {getattr(default, name)})")
