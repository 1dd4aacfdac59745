"""Keeps the tail of each length bin at its threshold by moving budgets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..sparsity import SparsitySchedule
from .judge import Verdict


STEP = 1.25
"""The factor between a budget and the next one."""

TAIL_PER_DOUBLING = 0.08
"""By how much the tail rises when a budget doubles. The published schedules of Qwen3 for the targets 0.80, 0.86 and 0.92
say 0.06 to 0.08, SmolLM2-135M between 8 and 64 pages 0.10."""

TAIL_PER_STEP = TAIL_PER_DOUBLING * math.log2(STEP)


@dataclass(frozen=True)
class Decision:
    """One change of a budget."""

    step: int
    index: int
    old: int
    new: int
    tail: float
    reason: str


class ScheduleController:
    """
    Raises the budget of a bin at once when its tail is below the threshold, and lowers it slowly when there is room.

    A bin is raised by as many steps of [`STEP`] as its deficit takes, when a confidence interval of its tail lies below
    the threshold. It is lowered by one step, when the interval lies above the threshold by more than the step will cost
    and half a step on top, and the bin was looked at `patience` times since its budget changed. Budgets stay
    between the bounds and never fall from one bin to the next.

    Args:
        schedule (`SparsitySchedule`): where to start; not a dense one.
        min_budget (`int`, *optional*, defaults to `8`): scored pages below which no budget is lowered.
        max_budget (`int`, *optional*): scored pages above which none is raised. By default a bin is raised until it
            reads all its pages.
        patience (`int`, *optional*, defaults to `50`): looks at a bin after a change of its budget, before it is
            lowered.

    Raises:
        ValueError: for an argument out of range.

    Attributes:
        schedule (`SparsitySchedule`): the schedule as it is now.
        decisions (`list[Decision]`): all changes so far.
    """

    def __init__(
        self,
        schedule: SparsitySchedule,
        *,
        min_budget: int = 8,
        max_budget: int | None = None,
        patience: int = 50,
    ):
        if schedule.is_dense:
            raise ValueError("A dense schedule has no budgets to control; give a sparse one.")
        if min_budget < 1:
            raise ValueError(f"min_budget={min_budget} must be at least 1.")
        if max_budget is not None and max_budget < max(min_budget, *schedule.budgets):
            raise ValueError(
                f"max_budget={max_budget} is below min_budget={min_budget} or the schedule's largest budget "
                f"{max(schedule.budgets)}."
            )
        if patience < 1:
            raise ValueError(f"patience={patience} must be at least 1.")
        self.initial = self.schedule = schedule
        self.min_budget, self.max_budget, self.patience = min_budget, max_budget, patience
        self.decisions: list[Decision] = []
        self._looks: dict[int, int] = {}  # at each bin, since its budget changed

    def update(self, verdicts: Iterable[Verdict], step: int = 0) -> list[Decision]:
        """
        Move budgets after a look at some bins.

        Args:
            verdicts (`Iterable[Verdict]`): of these bins.
            step (`int`, *optional*): training step, for the record.

        Returns:
            `list[Decision]`: what changed, in the order of the bins. `schedule` is then the new one.
        """
        budgets = list(self.schedule.budgets)
        decisions: list[Decision] = []
        for verdict in sorted(verdicts, key=lambda verdict: verdict.index):
            index = verdict.index
            budgets += budgets[-1:] * (index + 1 - len(budgets))
            self._looks[index] = self._looks.get(index, 0) + 1
            # A bin before this one may just have been raised above what was measured here
            if any(decision.index == index for decision in decisions):
                continue
            if verdict.is_breach:
                self._raise(verdict, budgets, decisions, step)
            elif self._has_room(verdict):
                self._lower(verdict, budgets, decisions, step)
        for decision in decisions:
            self._looks[decision.index] = 0
        while len(budgets) > len(self.initial.budgets) and budgets[-1] == budgets[-2]:
            budgets.pop()
        self.schedule = replace(self.schedule, budgets=tuple(budgets))
        self.decisions += decisions
        return decisions

    def _raise(self, verdict: Verdict, budgets: list[int], decisions: list[Decision], step: int) -> None:
        # A fifth of a step more than the estimate says, so that its noise seldom leaves the bin below
        steps = max(1, math.ceil((verdict.threshold - verdict.tail) / TAIL_PER_STEP + 0.2))
        new = min(max(_steps(budgets[verdict.index], steps), self.min_budget), self._ceiling(verdict.index))
        for index in range(verdict.index, len(budgets)):
            raised = min(new, self._ceiling(index))
            if budgets[index] < raised:
                reason = "below the threshold" if index == verdict.index else f"not below bin {verdict.index}"
                decisions.append(Decision(step, index, budgets[index], raised, verdict.tail, reason))
                budgets[index] = raised

    def _has_room(self, verdict: Verdict) -> bool:
        return (
            self._looks[verdict.index] >= self.patience
            and verdict.recent.low >= verdict.threshold + 1.5 * TAIL_PER_STEP
            and verdict.latest.value >= verdict.threshold
        )

    def _lower(self, verdict: Verdict, budgets: list[int], decisions: list[Decision], step: int) -> None:
        index, old = verdict.index, budgets[verdict.index]
        before = budgets[index - 1] if index else 0
        new = max(_steps(old, -1), self.min_budget, before)
        if new < old:
            decisions.append(Decision(step, index, old, new, verdict.tail, "room above the threshold"))
            if index == len(budgets) - 1:
                budgets.append(old)  # the last budget holds for all bins behind it too, which were not looked at
            budgets[index] = new

    def _ceiling(self, index: int) -> int:
        """All pages that a query of the bin could choose, or the bound."""
        pages = -(-(index + 1) * self.schedule.bin_tokens // self.schedule.page_size)
        return pages if self.max_budget is None else min(pages, self.max_budget)

    def state_dict(self) -> dict[str, Any]:
        """Plain Python values; [`load_state_dict`] is the inverse."""
        return {
            "initial": self.initial.to_dict(),
            "budgets": list(self.schedule.budgets),
            "looks": {str(index): looks for index, looks in self._looks.items()},
            "decisions": [asdict(decision) for decision in self.decisions],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """
        Go on from a stored state.

        Returns:
            `bool`: whether it was made for the same initial schedule; otherwise nothing is loaded.
        """
        if SparsitySchedule.from_dict(state["initial"]) != self.initial:
            return False
        self.schedule = replace(self.initial, budgets=tuple(state["budgets"]))
        self._looks = {int(index): looks for index, looks in state["looks"].items()}
        self.decisions = [Decision(**decision) for decision in state["decisions"]]
        return True


def _steps(budget: int, number: int) -> int:
    """A budget some steps up or down, at least a page away for each of them."""
    for _ in range(abs(number)):
        budget = max(budget + 1, round(budget * STEP)) if number > 0 else min(budget - 1, round(budget / STEP))
    return budget
