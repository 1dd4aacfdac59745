"""Tails of measured budgets, with confidence; the curve through them; and the cheapest budget that meets a target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...monitor.histogram import TAIL_QUANTILE, order_statistics


DEFAULT_CONFIDENCE = 0.90


@dataclass(frozen=True)
class Tail:
    """
    The 5th percentile of acceptance rates, with the ends of its confidence interval.

    Attributes:
        value, low, high (`float`): the percentile and its interval.
        mean (`float`): mean of the rates.
        tokens (`int`): how many there are.
        design_effect (`float`): how many times larger the variance is than that of independent tokens. Tokens of a
            stretch resemble each other.
    """

    value: float
    low: float
    high: float
    mean: float
    tokens: int
    design_effect: float

    @property
    def effective_tokens(self) -> float:
        """Independent tokens that would say as much."""
        return self.tokens / self.design_effect

    def has_low_end(self, confidence: float) -> bool:
        """Whether there are enough tokens for the lower end of an interval; without, `low` is 0."""
        return order_statistics(max(1, int(self.effective_tokens)), TAIL_QUANTILE, confidence)[0] is not None


def design_effect(stretches: Sequence[np.ndarray]) -> float:
    """
    Variance of the share of rates below their 5th percentile, stretches taken as clusters, over what it would be if all
    tokens were independent; at least 1 (Kish's design effect).

    The stretches are in the order of their positions, over which they are spread evenly. The variance is that of
    neighbours' differences, the usual estimator for such a systematic sample: the trend within a bin, which the sample
    follows, is no noise.
    """
    filled = [stretch for stretch in stretches if len(stretch)]
    pooled = np.concatenate(filled) if filled else np.empty(0)
    if len(filled) < 2:
        return 1.0
    cut = np.quantile(pooled, TAIL_QUANTILE)
    below = np.array([(stretch < cut).sum() for stretch in filled])
    sizes = np.array([len(stretch) for stretch in filled])
    share = below.sum() / sizes.sum()
    independent = sizes.sum() * share * (1 - share)
    if independent == 0:
        return 1.0
    steps = np.diff(below - share * sizes)
    clustered = len(filled) / (len(filled) - 1) * (steps**2).sum() / 2
    return max(1.0, float(clustered / independent))


def tail_of(
    stretches: Sequence[np.ndarray], effect: float | None = None, confidence: float = DEFAULT_CONFIDENCE
) -> Tail:
    """
    The tail of pooled stretches. Its interval lies between two order statistics, chosen by the binomial distribution for
    as many independent tokens as the pooled ones are worth.

    Args:
        stretches (`list[np.ndarray]`): acceptance rates of each stretch.
        effect (`float`, *optional*): the design effect; by default that of these stretches.
        confidence (`float`, *optional*, defaults to `0.9`): of the two-sided interval.
    """
    pooled = np.sort(np.concatenate([np.empty(0), *stretches]))
    tokens = len(pooled)
    if effect is None:
        effect = design_effect(stretches)
    if tokens == 0:
        return Tail(math.nan, 0.0, 1.0, math.nan, 0, effect)
    effective = max(1, int(tokens / effect))
    below, above = order_statistics(effective, TAIL_QUANTILE, confidence)

    def statistic(rank: int | None, missing: float) -> float:
        return missing if rank is None else float(np.quantile(pooled, min(1.0, (rank + 0.5) / effective)))

    value = float(np.quantile(pooled, TAIL_QUANTILE))
    low, high = statistic(below, 0.0), statistic(above, 1.0)
    return Tail(value, min(low, value), max(high, value), float(pooled.mean()), tokens, effect)


def rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The closest rising sequence in weighted least squares (isotonic regression, pool adjacent violators)."""
    blocks: list[list[float]] = []  # [mean, weight, count]
    for value, weight in zip(values, weights, strict=True):
        blocks.append([value, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, total, count = blocks.pop()
            before = blocks[-1]
            before[0] = (before[0] * before[1] + mean * total) / (before[1] + total)
            before[1] += total
            before[2] += count
    return [mean for mean, _, count in blocks for _ in range(int(count))]


class Curve:
    """
    A rising curve of tails against budgets, linear in the logarithm of the kept pages between measured ones.

    Args:
        budgets (`list[int]`): measured budgets, rising.
        tails (`list[float]`): of each one.
        weights (`list[float]`): tokens of each one.
        always (`int`): pages kept beside the budget.
    """

    def __init__(self, budgets: Sequence[int], tails: Sequence[float], weights: Sequence[float], always: int):
        self.budgets, self.always = list(budgets), always
        self.tails = rising(tails, weights)

    def __call__(self, budget: float) -> float:
        """The tail at a budget; beyond the measured ones that of the nearest."""
        return float(np.interp(self._place(budget), [self._place(b) for b in self.budgets], self.tails))

    def _place(self, budget: float) -> float:
        return math.log(max(budget + self.always, 0.5))

    def cheapest(self, target: float) -> int | None:
        """The smallest budget, not below the smallest measured, at which the curve meets the target; `None` if none."""
        if self.tails[-1] < target:
            return None
        index = next(i for i, tail in enumerate(self.tails) if tail >= target)
        if index == 0:
            return self.budgets[0]
        left, right = self.budgets[index - 1], self.budgets[index]
        return next((b for b in range(left + 1, right) if self(b) >= target), right)
