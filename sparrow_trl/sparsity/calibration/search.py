"""Which budget to measure next in a bin, and which one to take."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from .curves import Curve, Tail, design_effect, tail_of


SMALLEST_BUDGET = 2
FIRST_TOKENS = 512  # scored tokens with which the search starts in bin 0; it grows with the root of the bin
FINE_ENOUGH = 1.5  # ratio of two neighbouring budgets around the target at which the search ends
LEAST_SLOPE, STEEPEST_SLOPE = 0.3, 1.5


@dataclass
class BinSearch:
    """
    The budgets measured in one bin.

    Args:
        index (`int`): the bin.
        largest (`int`): budget at which its last position reads every page.
        first (`int`): budget to begin with.
        always (`int`): pages kept beside the budget.
    """

    index: int
    largest: int
    first: int
    always: int
    measured: dict[int, list[np.ndarray]] = field(default_factory=dict)

    def tails(self, effect: float | None, confidence: float) -> dict[int, Tail]:
        """The tail of each measured budget, budgets rising."""
        return {budget: tail_of(self.measured[budget], effect, confidence) for budget in sorted(self.measured)}

    def curve(self, tails: dict[int, Tail], end: str = "value") -> Curve:
        """The curve through the tails, or through the lower or upper ends of their intervals."""
        values = [getattr(tail, end) for tail in tails.values()]
        return Curve(list(tails), values, [tail.tokens for tail in tails.values()], self.always)

    def next_budget(self, target: float, effect: float, confidence: float) -> int | None:
        """The budget to measure next; `None` once the target lies between two close ones."""
        if not self.measured:
            return min(self.first, self.largest)
        curve = self.curve(self.tails(effect, confidence), "low")
        meeting = [budget for budget, tail in zip(curve.budgets, curve.tails, strict=True) if tail >= target]
        if not meeting:
            wanted = min(2 * curve.budgets[-1] + 1, self.largest)
        elif meeting[0] == curve.budgets[0]:
            wanted = max(meeting[0] // 2, SMALLEST_BUDGET)
        else:
            below = curve.budgets[curve.budgets.index(meeting[0]) - 1]
            if (meeting[0] + self.always) / (below + self.always) <= FINE_ENOUGH or meeting[0] - below <= 1:
                return None
            wanted = round(math.sqrt((meeting[0] + self.always) * (below + self.always))) - self.always
        return None if wanted in self.measured else wanted

    def slope(self, tails: dict[int, Tail]) -> float:
        """
        Of `log(1 - tail)` against the log of the kept pages, with the sign turned: how fast what is missing shrinks.
        Fitted to all budgets, for noise moves neighbours.
        """
        points = [
            (math.log(budget + self.always), math.log(1 - tail.value), tail.tokens)
            for budget, tail in tails.items()
            if 0.3 < tail.value < 0.99
        ]
        if len(points) < 2:
            return 0.5
        x, y, weights = (np.array(column) for column in zip(*points, strict=True))
        x = x - np.average(x, weights=weights)
        spread = (weights * x**2).sum()
        slope = -(weights * x * y).sum() / spread if spread else 0.5
        return float(np.clip(slope, LEAST_SLOPE, STEEPEST_SLOPE))

    def moved(self, budget: int, tail: float, wanted: float, slope: float) -> int:
        """The budget at which a tail that is `tail` at `budget` would be `wanted`."""
        missing, allowed = max(1 - tail, 1e-3), max(1 - wanted, 1e-3)
        pages = (budget + self.always) * (missing / allowed) ** (1 / slope)
        return int(np.clip(math.ceil(pages) - self.always, 0, self.largest))


def shared_effect(groups: list[list[np.ndarray]]) -> float:
    """The mean design effect of several bins or budgets: that of a few stretches alone is mostly noise."""
    effects = [design_effect(group) for group in groups if len(group) > 1]
    return max(1.0, float(np.mean(effects))) if effects else 1.0


def extrapolate(budgets: dict[int, int], num_bins: int, bin_tokens: int) -> list[int]:
    """
    A rising budget for each of `num_bins` bins, where only some are known.

    A bin between known ones gets the budget of the next known one, as does one before the first. Behind the last known
    bin the kept share of the context stays what it was there, so that the budget grows in proportion to the middle of
    the bin; it is never below the last known one.
    """
    if not budgets:
        raise ValueError("No bin has a known budget.")
    last = max(budgets)
    found = []
    for index in range(num_bins):
        if index > last:
            growth = (index + 0.5) / (last + 0.5)
            found.append(max(budgets[last], math.ceil(budgets[last] * growth)))
        else:
            found.append(budgets[min(known for known in budgets if known >= index)])
    return np.maximum.accumulate(found).tolist()
