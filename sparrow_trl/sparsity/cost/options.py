"""The options of `sparrow cost`. Nothing heavy is imported here: `sparrow --help` needs them too."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path


BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2}
CHIP_NAMES = ("h200", "h100", "a100", "l4", "t4", "rtx4090", "mi300x")
MEASURED = "measured"

CONTEXTS = (2048, 4096, 8192, 16384, 32768)


@dataclass
class CostOptions:
    """
    What to compute.

    Attributes:
        model (`str`, *optional*): configuration file, folder or name; by default the embedded SmolLM2-135M-Instruct.
        chip (`str`): one of the chips known by their data sheets, or `"measured"`: this machine.
        batch (`int`): sequences in a decode step.
        dtype (`str`): of weights and cache.
        schedule (`str`): what [`SparsitySchedule.resolve`] understands.
        contexts (`list[int]`, *optional*): tokens that a query sees; by default `CONTEXTS`, as far as the model reaches.
        prompt_length (`int`): where a rollout starts.
        page_sizes (`list[int]`): page sizes to compare, at equal kept tokens.
        curves (`list[str]`): schedules of `sparrow calibrate`, the cheapest of which is looked for.
        target (`float`): the tail that it has to meet.
        bench (`Path`, *optional*): JSON of `sparrow bench rollout` to compare with.
        plot (`Path`, *optional*): where to draw the speed-up.
    """

    model: str | None = None
    chip: str = "h200"
    batch: int = 32
    dtype: str = "bfloat16"
    schedule: str = "auto"
    contexts: list[int] | None = None
    prompt_length: int = 512
    page_sizes: list[int] = field(default_factory=lambda: [16, 32, 64, 128])
    curves: list[str] = field(default_factory=list)
    target: float = 0.86
    bench: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "prompt_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1.")
        if self.contexts == []:
            raise ValueError("--context needs at least one number of tokens.")
        for context in self.contexts or ():
            if context <= self.prompt_length:
                raise ValueError(
                    f"--context {context} must be above --prompt-length {self.prompt_length}: nothing is decoded."
                )
        for size in self.page_sizes:
            if size < 1 or size & (size - 1):
                raise ValueError(f"--page-size {size} is not a power of two.")
        if not 0 < self.target < 1:
            raise ValueError(f"--target {self.target} is not between 0 and 1.")

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> CostOptions:
        """The options that [`add_arguments`] has parsed."""
        return cls(**{name: getattr(args, name) for name in cls.__dataclass_fields__})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of [`CostOptions`]."""
    default = CostOptions()
    parser.add_argument(
        "--model", metavar="NAME", help="configuration file, folder or Hub name (default: SmolLM2-135M)"
    )
    parser.add_argument(
        "--chip",
        choices=(*CHIP_NAMES, MEASURED),
        default=default.chip,
        help="default: %(default)s; measured: this one",
    )
    parser.add_argument("--batch", type=int, default=default.batch, help="sequences in a step (default: %(default)s)")
    parser.add_argument("--dtype", choices=tuple(BYTES_PER_VALUE), default=default.dtype)
    parser.add_argument(
        "--schedule",
        default=default.schedule,
        help="a preset, fixed:64, a file, ... (default: the model's preset, else fixed:64)",
    )
    parser.add_argument(
        "--context",
        dest="contexts",
        nargs="+",
        type=int,
        metavar="TOKENS",
        help=f"tokens that a query sees (default: {' '.join(map(str, CONTEXTS))}, as far as the model reaches)",
    )
    parser.add_argument(
        "--prompt-length", type=int, default=default.prompt_length, help="start of a rollout (default: %(default)s)"
    )
    parser.add_argument(
        "--page-size",
        dest="page_sizes",
        nargs="*",
        type=int,
        metavar="TOKENS",
        default=default.page_sizes,
        help="page sizes to compare at equal kept tokens (default: 16 32 64 128)",
    )
    parser.add_argument(
        "--curves",
        nargs="+",
        default=default.curves,
        metavar="FILE",
        help="schedules that sparrow calibrate wrote, for several page sizes: find the cheapest one",
    )
    parser.add_argument(
        "--target", type=float, default=default.target, help="tail that it has to meet (default: %(default)s)"
    )
    parser.add_argument("--bench", type=Path, metavar="FILE", help="compare with this JSON of sparrow bench rollout")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the speed-up against the context")
    parser.add_argument("--json", metavar="PATH", help="also write the results as JSON; - is standard output")
