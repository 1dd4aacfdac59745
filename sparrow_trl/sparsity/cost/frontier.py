"""The cheapest schedule that meets a target, given the tails of budgets and page sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..schedule import SparsitySchedule
from .chips import Chip
from .decode import Cost, step_cost
from .shape import ModelShape


@dataclass(frozen=True)
class TailCurve:
    """
    Tails of one length bin, as calibration measures them.

    Attributes:
        budgets (`tuple[int, ...]`): scored pages, rising.
        tails (`tuple[float, ...]`): of each budget, the tail, or the lower end of its confidence interval.
    """

    budgets: tuple[int, ...]
    tails: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.budgets) != len(self.tails) or not self.budgets:
            raise ValueError(f"{len(self.budgets)} budgets and {len(self.tails)} tails: one tail a budget is needed.")
        if list(self.budgets) != sorted(set(self.budgets)):
            raise ValueError(f"budgets={self.budgets} are not rising.")


@dataclass(frozen=True)
class Candidate:
    """A schedule that meets the target, and the cost of a step in the middle of each of its bins, summed."""

    schedule: SparsitySchedule
    cost: Cost


def cheapest_budgets(
    curves: Sequence[TailCurve],
    target: float,
    shape: ModelShape,
    layout: SparsitySchedule,
    chip: Chip,
    batch: int,
    bytes_per_value: int = 2,
) -> list[int] | None:
    """
    Per bin, the measured budget of least cost whose tail meets the target; `None` if a bin has none.

    Args:
        curves (`list[TailCurve]`): one a bin.
        layout (`SparsitySchedule`): page size, forced pages, bins and dense layers.
    """
    chosen = []
    for index, curve in enumerate(curves):
        context = index * layout.bin_tokens + layout.bin_tokens // 2
        priced = [
            (step_cost(shape, replace(layout, budgets=(b,)), context, batch, bytes_per_value).seconds(chip), b)
            for b, tail in zip(curve.budgets, curve.tails, strict=True)
            if tail >= target
        ]
        if not priced:
            return None
        chosen.append(min(priced)[1])
    return chosen


def cheapest_schedule(
    curves: Mapping[int, Sequence[TailCurve]],
    target: float,
    shape: ModelShape,
    layout: SparsitySchedule,
    chip: Chip,
    batch: int,
    bytes_per_value: int = 2,
) -> list[Candidate]:
    """
    The cheapest schedule of each page size that can meet the target, cheapest first.

    Args:
        curves (`dict[int, list[TailCurve]]`): of each page size, one curve a bin. Budgets count pages of that size.

    Raises:
        ValueError: no page size meets the target in every bin.
    """
    candidates = []
    for page_size, bins in curves.items():
        sized = replace(layout, page_size=page_size, target=target)
        budgets = cheapest_budgets(bins, target, shape, sized, chip, batch, bytes_per_value)
        if budgets is None:
            continue
        schedule = replace(sized, budgets=tuple(budgets))
        cost = Cost()
        for index in range(len(budgets)):
            context = index * layout.bin_tokens + layout.bin_tokens // 2
            cost += step_cost(shape, schedule, context, batch, bytes_per_value)
        candidates.append(Candidate(schedule, cost))
    if not candidates:
        best = {size: min(max(curve.tails) for curve in bins) for size, bins in curves.items()}
        raise ValueError(
            f"No budget meets target={target} in every bin; the worst bin reaches "
            + ", ".join(f"{tail:.3f} (page size {size})" for size, tail in sorted(best.items()))
            + ". Measure larger budgets, or lower the target."
        )
    return sorted(candidates, key=lambda candidate: candidate.cost.seconds(chip))
