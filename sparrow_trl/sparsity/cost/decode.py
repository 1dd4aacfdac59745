"""
Bytes and FLOPs of decode steps.

Per layer and KV head, with head dimension d, context s, B kept tokens, G query heads and b bytes a value, dense attention
reads `2*s*d*b` and computes `4*s*d*G`; sparse attention reads `2*B*d*b` and a landmark of `d*b` a page, and computes
`4*B*d*G` and `2*d` a landmark (arXiv 2606.08446). Weights are read once a step, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..schedule import SparsitySchedule
from .chips import Chip
from .shape import ModelShape


@dataclass(frozen=True)
class Cost:
    """
    What steps take.

    Attributes:
        weight_bytes, kv_bytes (`float`): bytes read; landmarks are among `kv_bytes`.
        flops (`float`): floating-point operations, a multiply-add counted as two.
    """

    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    flops: float = 0.0

    @property
    def bytes(self) -> float:
        """All bytes read."""
        return self.weight_bytes + self.kv_bytes

    def equivalent_flops(self, chip: Chip) -> float:
        """`flops + I * bytes`, with `I` the FLOPs that the chip could do while it moves a byte."""
        return self.flops + chip.intensity * self.bytes

    def seconds(self, chip: Chip) -> float:
        """Time at the chip's peaks, where moving bytes and computing do not overlap: equivalent FLOPs over its peak."""
        return self.equivalent_flops(chip) / chip.flops

    def floor_seconds(self, chip: Chip) -> float:
        """Time to move the bytes alone."""
        return self.bytes / chip.bandwidth

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.weight_bytes + other.weight_bytes, self.kv_bytes + other.kv_bytes, self.flops + other.flops)


def step_cost(
    shape: ModelShape, schedule: SparsitySchedule, context: int, batch: int, bytes_per_value: int = 2
) -> Cost:
    """
    Cost of one decode step.

    Args:
        shape (`ModelShape`): the model.
        schedule (`SparsitySchedule`): what is read; `SparsitySchedule.dense()` for all.
        context (`int`): tokens that each query sees, its own included.
        batch (`int`): sequences, all of that context.
        bytes_per_value (`int`, *optional*, defaults to `2`): of weights and cache.

    Raises:
        ValueError: for a context, batch or size below 1.
    """
    for name, value in (("context", context), ("batch", batch), ("bytes_per_value", bytes_per_value)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    kv_bytes, flops = _attention(shape, schedule, np.array([context]), bytes_per_value)
    return Cost(
        weight_bytes=bytes_per_value * shape.read_parameters(batch),
        kv_bytes=batch * float(kv_bytes[0]),
        flops=batch * (2 * shape.active_parameters + float(flops[0])),
    )


def rollout_cost(
    shape: ModelShape,
    schedule: SparsitySchedule,
    prompt_length: int,
    context: int,
    batch: int,
    bytes_per_value: int = 2,
) -> Cost:
    """
    Cost of all decode steps of a batch that grows together from a prompt of `prompt_length` tokens to `context` tokens.

    Raises:
        ValueError: where that leaves no step.
    """
    if not 0 < prompt_length < context:
        raise ValueError(f"prompt_length={prompt_length} must be at least 1 and below context={context}.")
    if batch < 1:
        raise ValueError(f"batch={batch} must be at least 1.")
    contexts = np.arange(prompt_length + 1, context + 1)
    kv_bytes, flops = _attention(shape, schedule, contexts, bytes_per_value)
    return Cost(
        weight_bytes=len(contexts) * bytes_per_value * shape.read_parameters(batch),
        kv_bytes=batch * float(kv_bytes.sum()),
        flops=batch * (len(contexts) * 2 * shape.active_parameters + float(flops.sum())),
    )


def speedup(dense: Cost, sparse: Cost, chip: Chip) -> float:
    """How many times faster the sparse steps are."""
    return dense.seconds(chip) / sparse.seconds(chip)


def crossover(
    shape: ModelShape,
    schedule: SparsitySchedule,
    chip: Chip,
    batch: int,
    bytes_per_value: int = 2,
    longest: int = 131072,
    margin: float = 1.0,
) -> int | None:
    """
    The shortest context, to a page, from which on a sparse step is more than `margin` times as fast as a dense one;
    `None` if there is none up to `longest`.
    """
    dense_schedule = SparsitySchedule.dense(page_size=schedule.page_size)
    contexts = np.arange(schedule.page_size, longest + 1, schedule.page_size)
    seconds = []
    for chosen in (dense_schedule, schedule):
        kv_bytes, flops = _attention(shape, chosen, contexts, bytes_per_value)
        weights = bytes_per_value * shape.read_parameters(batch)
        total_flops = batch * (2 * shape.active_parameters + flops)
        seconds.append((total_flops + chip.intensity * (weights + batch * kv_bytes)) / chip.flops)
    slower = np.flatnonzero(seconds[0] <= margin * seconds[1])
    first = int(slower[-1]) + 1 if len(slower) else 0
    return int(contexts[first]) if first < len(contexts) else None


def _attention(
    shape: ModelShape, schedule: SparsitySchedule, contexts: np.ndarray, bytes_per_value: int
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and FLOPs of the attention of one sequence over all layers, `(len(contexts),)` float64 each."""
    group = shape.heads // shape.kv_heads
    kept, landmarks = _kept(schedule, contexts)
    tokens_read = np.zeros(len(contexts))
    landmarks_read = np.zeros(len(contexts))
    for layer, window in enumerate(shape.windows):
        if window is not None:
            tokens_read += np.minimum(contexts, window)
        elif schedule.is_dense or layer in schedule.dense_layers:
            tokens_read += contexts
        else:
            tokens_read += kept
            landmarks_read += landmarks
    values = shape.kv_heads * shape.head_dim
    kv_bytes = bytes_per_value * values * (2 * tokens_read + landmarks_read)
    flops = values * (4 * group * tokens_read + 2 * landmarks_read)
    return kv_bytes, flops


def _kept(schedule: SparsitySchedule, contexts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that a query of a sparse layer reads, and landmarks it scores (none where it keeps every page)."""
    last_page = (contexts - 1) // schedule.page_size
    candidates = np.maximum(last_page + 1 - schedule.sink_pages - schedule.recent_pages, 0)
    left_out = np.maximum(candidates - _budgets(schedule, contexts - 1), 0)
    return contexts - left_out * schedule.page_size, np.where(left_out > 0, candidates, 0)


def _budgets(schedule: SparsitySchedule, positions: np.ndarray) -> np.ndarray | Sequence[int]:
    if schedule.is_dense:
        return np.full(len(positions), schedule.budget_at(0))
    table = np.array(schedule.budgets)
    return table[np.minimum(positions // schedule.bin_tokens, len(table) - 1)]
