"""What a calibration and a check of a schedule give, and how a schedule's provenance tells of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ..schedule import SparsitySchedule
from .curves import Tail
from .options import CalibrationOptions
from .search import BinSearch


@dataclass
class TailReport:
    """
    Tails of a schedule on its own trajectories.

    Attributes:
        schedule (`SparsitySchedule`): what was measured.
        tails (`dict[int, Tail]`): of each bin that has tokens.
        min_tokens (`int`): independent tokens that a bin needs to be judged.
        source (`dict`): the data.
        way (`str`): how the bins were reached.
    """

    schedule: SparsitySchedule
    tails: dict[int, Tail]
    min_tokens: int
    source: dict[str, Any]
    way: str

    def is_known(self, index: int) -> bool:
        """Whether a bin has enough tokens."""
        return index in self.tails and self.tails[index].effective_tokens >= self.min_tokens

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "schedule": self.schedule.to_dict(),
            "source": self.source,
            "way": self.way,
            "bins": [
                {
                    "index": index,
                    "budget": self.schedule.budget_at(index * self.schedule.bin_tokens),
                    "enough_tokens": self.is_known(index),
                    **asdict(tail),
                }
                for index, tail in self.tails.items()
            ],
        }


@dataclass
class Calibration:
    """
    The schedule found, and how.

    Attributes:
        schedule (`SparsitySchedule`): with its provenance.
        searches (`dict[int, BinSearch]`): of each bin the budgets measured, with dense pasts.
        checks (`list[TailReport]`): of the schedules checked, the last one last.
        effect (`float`): design effect of the search.
    """

    schedule: SparsitySchedule
    searches: dict[int, BinSearch]
    checks: list[TailReport] = field(default_factory=list)
    effect: float = 1.0


def described_bins(calibration: Calibration, options: CalibrationOptions) -> list[dict[str, Any]]:
    """Of each bin of the schedule, its budget, whether that was measured, and the curve."""
    described = []
    for index, budget in enumerate(calibration.schedule.budgets):
        entry: dict[str, Any] = {"index": index, "budget": budget, "status": "extrapolated"}
        search = calibration.searches.get(index)
        if search is not None:
            tails = search.tails(calibration.effect, options.confidence)
            enough = min(tail.effective_tokens for tail in tails.values()) >= options.min_tokens
            entry["status"] = "measured" if enough else "extrapolated: too few tokens"
            entry["budgets"] = list(tails)
            for name in ("value", "low", "high", "mean", "tokens"):
                entry[{"value": "tails"}.get(name, name)] = [getattr(tail, name) for tail in tails.values()]
        if calibration.checks and index in calibration.checks[-1].tails:
            checked = calibration.checks[-1]
            is_same = checked.schedule.budgets[index] == budget
            tail = checked.tails[index]
            if not tail.has_low_end(options.confidence):
                entry["check"] = "too few tokens"
            elif not is_same:
                entry["check"] = "raised after the last check"
            else:
                entry["check"] = "passed" if tail.low >= options.target else "below the target"
        described.append(entry)
    return described


def described_check(check: TailReport) -> dict[str, Any]:
    return {
        "budgets": list(check.schedule.budgets),
        "bins": [{"index": index, **asdict(tail)} for index, tail in check.tails.items()],
    }
