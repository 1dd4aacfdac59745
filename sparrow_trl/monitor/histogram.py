"""Acceptance rates pooled by length bin: counts that add over processes, steps and resumed runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from .beta import ScaledBetaFit, fit_scaled_beta


TAIL_QUANTILE = 0.05
"""The tail is the 5th percentile (arXiv 2606.08446)."""

# Cells in millionths: (start, stop, width). Narrow where thresholds are, and narrower towards 1, where most tokens lie.
_CELLS = ((0, 500_000, 1000), (500_000, 990_000, 200), (990_000, 999_900, 10), (999_900, 1_000_000, 1))

EDGES = np.array([edge for start, stop, width in _CELLS for edge in range(start, stop, width)] + [10**6]) / 1e6
"""`(num_cells + 1,)` float64, from 0 to 1. A cell holds the values from its lower edge up to, not including, its upper
one; the last holds 1 too."""

NUM_CELLS = len(EDGES) - 1


class TailEstimate(NamedTuple):
    """A percentile of pooled values with its confidence interval. All are NaN, and the interval [0, 1], without values."""

    value: float
    low: float
    high: float
    tokens: float


class AcceptanceHistogram:
    """
    A fine histogram of acceptance rates for each length bin.

    Two of them add up exactly, which percentiles do not. A percentile read from one differs from NumPy's of the raw
    values by at most the width of a cell there: 0.001 below 0.5, 0.0002 up to 0.99, then 0.00001, and 0.000001 from
    0.9999 on. The mean is that of the raw values.

    Args:
        bin_tokens (`int`, *optional*, defaults to `2000`): width of a bin in tokens of position. Bin b holds the tokens
            whose querying token is at a position from `b * bin_tokens` up to `(b + 1) * bin_tokens - 1`.
        num_bins (`int`, *optional*): put the positions behind the last bin into it, as a schedule does. By default
            there is a bin for every position.

    Attributes:
        counts (`torch.Tensor`): `(bins so far, NUM_CELLS)` float64, on the CPU.
        sums (`torch.Tensor`): `(bins so far,)` float64, sums of the raw values.
    """

    def __init__(self, bin_tokens: int = 2000, num_bins: int | None = None):
        for name, value in (("bin_tokens", bin_tokens), ("num_bins", num_bins)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        self.bin_tokens, self.num_bins = bin_tokens, num_bins
        self.counts = torch.zeros(0, NUM_CELLS, dtype=torch.float64)
        self.sums = torch.zeros(0, dtype=torch.float64)

    def __len__(self) -> int:
        """How many bins there are, from the first to the last that has values."""
        return len(self.sums)

    def add(self, positions: torch.Tensor, values: torch.Tensor) -> None:
        """
        Count acceptance rates.

        Args:
            positions (`torch.Tensor`): `(num_tokens,)` integer, 0-based positions of the querying tokens (one before
                the sampled tokens).
            values (`torch.Tensor`): `(num_tokens,)` floating, in [0, 1].

        Raises:
            ValueError: where the shapes differ, or a value is not in [0, 1].
        """
        if positions.shape != values.shape or positions.dim() != 1:
            raise ValueError(
                f"positions {tuple(positions.shape)} and values {tuple(values.shape)} must be equal rows."
            )
        if len(values) == 0:
            return
        values, bins = values.detach().cpu().double(), positions.detach().cpu().long() // self.bin_tokens
        low, high = values.min().item(), values.max().item()
        if not (low >= 0 and high <= 1) or bins.min() < 0:
            raise ValueError(
                f"Acceptance rates lie in [0, 1] and positions are not negative, but there are rates from {low} to "
                f"{high} and positions from {positions.min().item()}."
            )
        if self.num_bins is not None:
            bins = bins.clamp(max=self.num_bins - 1)
        self._grow(int(bins.max()) + 1)
        cells = (torch.bucketize(values, _edges(), right=True) - 1).clamp_(max=NUM_CELLS - 1)
        flat = torch.bincount(bins * NUM_CELLS + cells, minlength=self.counts.numel())
        self.counts += flat.view_as(self.counts)
        self.sums.index_add_(0, bins, values)

    def merge(self, other: AcceptanceHistogram, weight: float = 1.0) -> None:
        """Add the counts of another histogram, or `weight` times them."""
        if (other.bin_tokens, other.num_bins) != (self.bin_tokens, self.num_bins):
            raise ValueError(
                f"Histograms with bin_tokens={self.bin_tokens}, num_bins={self.num_bins} and bin_tokens="
                f"{other.bin_tokens}, num_bins={other.num_bins} do not add up."
            )
        self._grow(len(other))
        self.counts[: len(other)] += weight * other.counts
        self.sums[: len(other)] += weight * other.sums

    def clear(self, bins: Iterable[int] | None = None) -> None:
        """Forget the counts of some bins, by default of all."""
        for index in range(len(self)) if bins is None else bins:
            if index < len(self):
                self.counts[index] = 0
                self.sums[index] = 0

    def reduce(self, total: Callable[[torch.Tensor], torch.Tensor], largest: Callable[[int], int]) -> None:
        """
        Add up the counts of all processes, on all of them.

        Args:
            total (`Callable`): sums a tensor over the processes.
            largest (`Callable`): the largest of the processes' numbers.
        """
        self._grow(largest(len(self)))
        if len(self):
            both = total(torch.cat([self.counts, self.sums[:, None]], dim=1)).cpu()
            self.counts, self.sums = both[:, :-1].contiguous(), both[:, -1].contiguous()

    def tokens(self, index: int | None = None) -> float:
        """How many values were counted in a bin, by default in all."""
        return float(self._cells(index).sum())

    def mean(self, index: int | None = None) -> float:
        """Mean of the values of a bin, by default of all; NaN without values."""
        total = self.sums.sum() if index is None else self.sums[index] if index < len(self) else torch.tensor(0.0)
        tokens = self.tokens(index)
        return float(total) / tokens if tokens else math.nan

    def percentile(self, quantile: float = TAIL_QUANTILE, index: int | None = None) -> float:
        """
        A percentile as NumPy defines it (linear between order statistics), by default of all bins; NaN without values.

        Args:
            quantile (`float`, *optional*, defaults to `0.05`): in [0, 1].
            index (`int`, *optional*): the bin.
        """
        cells = self._cells(index)
        return self._percentile(cells.cumsum(), quantile) if cells.any() else math.nan

    def tail(
        self, index: int | None = None, confidence: float = 0.95, quantile: float = TAIL_QUANTILE
    ) -> TailEstimate:
        """
        The tail of a bin, by default of all, with a confidence interval.

        The interval lies between two order statistics, chosen by the binomial distribution of how many values fall
        below the true percentile, and its ends are the outer edges of their cells. So it holds with at least the
        stated confidence for independent tokens of any distribution. Tokens of one sequence are not quite independent.

        Args:
            index (`int`, *optional*): the bin.
            confidence (`float`, *optional*, defaults to `0.95`): in (0, 1).
            quantile (`float`, *optional*, defaults to `0.05`): in (0, 1).
        """
        if not 0 < confidence < 1 or not 0 < quantile < 1:
            raise ValueError(f"confidence={confidence} and quantile={quantile} must be in (0, 1).")
        cells = self._cells(index)
        tokens = float(cells.sum())
        if not tokens:
            return TailEstimate(math.nan, 0.0, 1.0, 0.0)
        cumulative = cells.cumsum()
        below, above = order_statistics(int(tokens), quantile, confidence)
        low = 0.0 if below is None else float(EDGES[_cell_of(cumulative, below)])
        high = 1.0 if above is None else float(EDGES[_cell_of(cumulative, above) + 1])
        return TailEstimate(self._percentile(cumulative, quantile), low, high, tokens)

    def fit_beta(self, index: int | None = None, scale: float = 0.999) -> ScaledBetaFit:
        """
        The scaled Beta distribution of the values below `scale`, of a bin or of all.

        Args:
            index (`int`, *optional*): the bin.
            scale (`float`, *optional*, defaults to `0.999`): one of `EDGES`.
        """
        cut = int(np.argmin(np.abs(EDGES - scale)))
        if cut < 2 or abs(EDGES[cut] - scale) > 1e-9:
            raise ValueError(f"scale={scale} is not an edge of a cell; use 0.999, 0.99 or another one of EDGES.")
        cells = self._cells(index)
        return fit_scaled_beta(EDGES[: cut + 1], cells[:cut], float(cells.sum()), scale)

    def state_dict(self) -> dict[str, Any]:
        """The histogram as plain Python values, cells without values left out; [`load_state_dict`] is its inverse."""
        places = self.counts.nonzero().tolist()
        return {
            "bin_tokens": self.bin_tokens,
            "num_bins": self.num_bins,
            "edges": [list(cells) for cells in _CELLS],
            "sums": self.sums.tolist(),
            "counts": [[index, cell, float(self.counts[index, cell])] for index, cell in places],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the counts by stored ones, with their bins."""
        if [tuple(cells) for cells in state["edges"]] != list(_CELLS):
            raise ValueError("The stored histogram has other cells than this version of sparrow_trl uses.")
        self.bin_tokens, self.num_bins = state["bin_tokens"], state["num_bins"]
        self.sums = torch.tensor(state["sums"], dtype=torch.float64)
        self.counts = torch.zeros(len(self.sums), NUM_CELLS, dtype=torch.float64)
        for index, cell, count in state["counts"]:
            self.counts[index, cell] = count

    def _grow(self, bins: int) -> None:
        missing = bins - len(self)
        if missing > 0:
            self.counts = torch.cat([self.counts, self.counts.new_zeros(missing, NUM_CELLS)])
            self.sums = torch.cat([self.sums, self.sums.new_zeros(missing)])

    def _cells(self, index: int | None) -> np.ndarray:
        if index is None:
            return self.counts.sum(0).numpy()
        return self.counts[index].numpy() if index < len(self) else np.zeros(NUM_CELLS)

    @staticmethod
    def _percentile(cumulative: np.ndarray, quantile: float) -> float:
        rank = quantile * max(cumulative[-1] - 1, 0)
        lower, upper = (_order_statistic(cumulative, whole) for whole in (math.floor(rank), math.ceil(rank)))
        return float(lower + (rank - math.floor(rank)) * (upper - lower))


@lru_cache(maxsize=1)
def _edges() -> torch.Tensor:
    return torch.from_numpy(EDGES)


def _cell_of(cumulative: np.ndarray, rank: float) -> int:
    """The cell of the value with this 0-based rank."""
    return min(int(np.searchsorted(cumulative, rank, side="right")), NUM_CELLS - 1)


def _order_statistic(cumulative: np.ndarray, rank: float) -> float:
    """The value with a 0-based rank, as if the values of a cell lay evenly in it."""
    rank = min(rank, cumulative[-1] - 0.5)
    cell = _cell_of(cumulative, rank)
    before = cumulative[cell - 1] if cell else 0.0
    place = min((rank - before + 0.5) / (cumulative[cell] - before), 1.0)
    return float(EDGES[cell] + place * (EDGES[cell + 1] - EDGES[cell]))


@lru_cache(maxsize=4096)
def order_statistics(tokens: int, quantile: float, confidence: float) -> tuple[int | None, int | None]:
    """
    Between which two of `tokens` sorted independent values the true percentile lies with at least this confidence.

    How many of them lie below the percentile is binomial. The two are the innermost for which each side is missed with
    at most half of `1 - confidence`.

    Returns:
        `tuple[int | None, int | None]`: 0-based ranks; `None` where no value is far enough out.
    """
    miss = (1 - confidence) / 2
    mean, deviation = tokens * quantile, math.sqrt(tokens * quantile * (1 - quantile))
    # Beyond 12 standard deviations, and 40 values for small means, there is less than 1e-16
    first, last = max(0, int(mean - 12 * deviation - 40)), min(tokens, int(mean + 12 * deviation + 40))
    k = torch.arange(first, last + 1, dtype=torch.float64)
    log_choose = math.lgamma(tokens + 1) - torch.lgamma(k + 1) - torch.lgamma(tokens - k + 1)
    weights = (log_choose + k * math.log(quantile) + (tokens - k) * math.log1p(-quantile)).exp().numpy()
    at_most = weights.cumsum()  # P(B <= k)
    at_least = weights[::-1].cumsum()[::-1]  # P(B >= k)
    # The value of 1-based rank l is above the percentile where B <= l - 1
    left = np.flatnonzero(at_most <= miss)
    right = np.flatnonzero(at_least <= miss)
    below = first + int(left[-1]) if len(left) else None
    above = first + int(right[0]) - 1 if len(right) else None
    return below, above
