"""What the launches of an op depend on: the kind of GPU, and scratch memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


# By the major number of the compute capability. Turing is without matrix units in Triton; consumer Blackwell (12) has the
# units and the 99 KB of shared memory of Ampere and Ada.
FAMILIES = {7: "turing", 8: "ampere", 9: "hopper", 10: "blackwell", 12: "ampere"}

_assumed: list[str] = []


def scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that a kernel fills before another one reads it."""
    return torch.empty(shape, dtype=dtype, device=device)


def gpu_family(device: torch.device) -> str:
    """`"turing"`, `"ampere"`, `"hopper"`, `"blackwell"` or `"cdna"`; `"ampere"` for what is no GPU."""
    return _assumed[-1] if _assumed else _family(device)


@cache
def _family(device: torch.device) -> str:
    if device.type != "cuda":
        return "ampere"
    if torch.version.hip:
        return "cdna"
    return FAMILIES.get(torch.cuda.get_device_capability(device)[0], "ampere")


@contextmanager
def assume_family(family: str) -> Iterator[None]:
    """Inside, launch options are those for a GPU of `family`: to compile for it, or to test them, without one."""
    _assumed.append(family)
    try:
        yield
    finally:
        _assumed.pop()
