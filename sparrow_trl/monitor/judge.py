"""Whether the tail of a length bin is below its threshold, from the tokens that keep coming in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .histogram import AcceptanceHistogram, TailEstimate


MEMORY = 0.9
"""What an older look counts for at each new one, so that about ten looks count."""


@dataclass(frozen=True)
class Verdict:
    """
    What one look at a bin found.

    Attributes:
        index (`int`): the bin.
        latest (`TailEstimate`): of the tokens since the look before.
        recent (`TailEstimate`): of the last looks too, older ones counting for less.
        threshold (`float`): what the tail should be at or above.
    """

    index: int
    latest: TailEstimate
    recent: TailEstimate
    threshold: float

    @property
    def is_breach(self) -> bool:
        """Whether a confidence interval lies below the threshold: the latest tokens' for a sudden fall, the recent ones'
        for a small lasting one."""
        return self.latest.high < self.threshold or self.recent.high < self.threshold

    @property
    def tail(self) -> float:
        """The estimate that shows the breach; of the recent tokens where there is none."""
        return self.latest.value if self.latest.high < self.threshold else self.recent.value


class TailJudge:
    """
    Looks at a bin whenever enough new tokens of it are there, and compares confidence intervals, not estimates, with the
    threshold, so that noise is not taken for a fall.

    Args:
        threshold (`float`): what the tail should be at or above, in (0, 1).
        min_tokens (`int`, *optional*, defaults to `400`): new tokens in a bin before it is looked at.
        confidence (`float`, *optional*, defaults to `0.98`): of the intervals.
        bin_tokens (`int`, *optional*, defaults to `2000`): width of a bin.

    Raises:
        ValueError: for an argument out of range.
    """

    def __init__(self, threshold: float, min_tokens: int = 400, confidence: float = 0.98, bin_tokens: int = 2000):
        for name, value in (("threshold", threshold), ("confidence", confidence)):
            if not 0 < value < 1:
                raise ValueError(f"{name}={value} is not in (0, 1).")
        if min_tokens < 20:
            raise ValueError(f"min_tokens={min_tokens} is below 20, too few for a 5th percentile.")
        self.threshold, self.min_tokens, self.confidence = threshold, min_tokens, confidence
        self._pending = AcceptanceHistogram(bin_tokens)
        self._recent = AcceptanceHistogram(bin_tokens)

    def update(self, histogram: AcceptanceHistogram) -> list[Verdict]:
        """
        Add new tokens and look at the bins that have enough.

        Args:
            histogram ([`AcceptanceHistogram`]): of the new tokens, the same on all processes.

        Returns:
            `list[Verdict]`: of these bins, in their order.
        """
        self._pending.merge(histogram)
        looked = [i for i in range(len(self._pending)) if self._pending.tokens(i) >= self.min_tokens]
        latest = AcceptanceHistogram(self._pending.bin_tokens)
        latest.merge(self._pending)
        latest.clear(i for i in range(len(latest)) if i not in looked)
        self._pending.clear(looked)
        for index in looked:
            if index < len(self._recent):
                self._recent.counts[index] *= MEMORY
                self._recent.sums[index] *= MEMORY
        self._recent.merge(latest)
        return [
            Verdict(
                index,
                latest.tail(index, self.confidence),
                self._recent.tail(index, self.confidence),
                self.threshold,
            )
            for index in looked
        ]

    def forget(self, bins: Iterable[int] | None = None) -> None:
        """Forget the tokens of some bins, by default of all: they were sampled with other budgets."""
        bins = None if bins is None else list(bins)
        self._pending.clear(bins)
        self._recent.clear(bins)

    def state_dict(self) -> dict[str, Any]:
        return {"pending": self._pending.state_dict(), "recent": self._recent.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pending.load_state_dict(state["pending"])
        self._recent.load_state_dict(state["recent"])
