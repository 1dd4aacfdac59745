"""Clocks, the speed of memory, and what a decode step has to read at least."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel


COPY_CONVENTION = "bytes copied per second, each counted once, not once for the read and once for the write"


def timed(device: torch.device, run: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Wall-clock seconds of `run(*args)`, the work it left on the device included, and its result."""
    synchronize(device)
    started = time.perf_counter()
    result = run(*args)
    synchronize(device)
    return time.perf_counter() - started, result


def synchronize(device: torch.device) -> None:
    """Wait for the work that was given to a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spread(seconds: list[float]) -> dict[str, Any]:
    """Median, fastest and slowest of the measured times, and the times themselves."""
    return {"median": median(seconds), "fastest": min(seconds), "slowest": max(seconds), "seconds": seconds}


@dataclass
class Bandwidth:
    """
    The speed of the device's memory: a large copy, and a large sum, which only reads. It is measured between the steps
    it is compared with, so that a busy machine slows both.
    """

    device: torch.device
    num_bytes: int = 256 << 20
    copies: list[float] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._source = torch.ones(self.num_bytes // 4, device=self.device)
        self._target = torch.zeros_like(self._source)
        self._unread = torch.ones_like(self._source)  # what was copied would come from the cache

    def measure(self) -> None:
        """Time one copy and one read."""
        self.copies.append(timed(self.device, self._target.copy_, self._source)[0])
        self.reads.append(timed(self.device, self._unread.sum)[0])

    def summary(self) -> dict[str, Any]:
        """Bytes per second (median, and from slowest to fastest), and how they are counted."""
        return {
            "copy": self.num_bytes / median(self.copies),
            "copy_range": [self.num_bytes / max(self.copies), self.num_bytes / min(self.copies)],
            "read": self.num_bytes / median(self.reads),
            "read_range": [self.num_bytes / max(self.reads), self.num_bytes / min(self.reads)],
            "bytes": self.num_bytes,
            "measurements": len(self.copies),
            "convention": COPY_CONVENTION,
        }


def weight_bytes(model: PreTrainedModel, batch: int) -> int | None:
    """
    Bytes of weights that a decode step of `batch` sequences reads: all of them, except an embedding matrix that is not
    the output matrix too, of which it reads a row a sequence. `None` for mixtures of experts, which read what their
    router picks.
    """
    config = model.config.get_text_config()
    if any(
        (getattr(config, name, None) or 0) > 1 for name in ("num_experts", "num_local_experts", "n_routed_experts")
    ):
        return None
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    if output is None or output.weight is not embedding:
        total -= (embedding.shape[0] - batch) * embedding.shape[1] * embedding.element_size()
    return total
