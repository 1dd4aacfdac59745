"""Measures the acceptance rate during training, and says what to do about its tail."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..rollout import RolloutOutput
from ..sparsity import SparsitySchedule
from .acceptance import AcceptanceBounds
from .controller import Decision, ScheduleController
from .histogram import AcceptanceHistogram
from .judge import TailJudge, Verdict
from .meter import RateMeter
from .sequences import MonitoredSequence, match_rows


ACTIONS = ("warn", "adapt", "densify", "stop")
"""What can be done about a breach: the values of `tail_action`."""

STATISTICS = ("auto", "lower", "exact")
"""What can be compared with the threshold: the values of `tail_statistic`."""

STATE_FILE = "monitor.json"
MIN_LOGGED = 20
"""Tokens below which a tail is not logged: of fewer, the 5th percentile is hardly more than the smallest."""


@dataclass(frozen=True)
class BatchReport:
    """
    What a monitored batch led to, the same on all processes.

    Attributes:
        verdicts (`list[Verdict]`): of the bins that had enough new tokens.
        decisions (`list[Decision]`): budgets that the controller moved.
        schedule (`SparsitySchedule`): for the next rollout.
        messages (`list[str]`): what to tell the user, each once.
        stop (`bool`): whether training is to end.
    """

    verdicts: list[Verdict]
    decisions: list[Decision]
    schedule: SparsitySchedule
    messages: list[str]
    stop: bool = False


class TailMonitor:
    """
    Pools the acceptance rates of some sequences of each batch by length bin, over processes, steps and resumed runs.

    Every process has one. For each generation batch it is called in this order: [`begin_batch`]; around each rollout
    [`choose`] and [`record`]; [`around_policy_pass`], where the batch goes through the policy anyway; [`update`].

    Args:
        model ([`~transformers.PreTrainedModel`]): the policy, possibly a `PeftModel`.
        schedule (`SparsitySchedule`): of the rollouts; not a dense one.
        threshold (`float`): what the tail of each bin should be at or above, in (0, 1).
        action (`str`, *optional*, defaults to `"warn"`): on a breach: one of `ACTIONS`.
        share (`float`, *optional*, defaults to `0.0625`): part of the sequences to monitor, on each process.
        every (`int`, *optional*, defaults to `1`): generation batches from a monitored one to the next.
        statistic (`str`, *optional*, defaults to `"auto"`): what is compared with the threshold: one of `STATISTICS`.
        top_k (`int`, *optional*, defaults to `20`): tokens that the bounds know of each distribution.
        min_tokens (`int`), confidence (`float`): see [`TailJudge`].
        floor_every (`int`, *optional*, defaults to `100`): monitored batches from one measurement of the noise floor to
            the next.
        min_budget (`int`), max_budget (`int`, *optional*): see [`ScheduleController`].
        temperature (`float`, *optional*, defaults to `1.0`): sampling temperature.
        process_index (`int`, *optional*, defaults to `0`): of this process, which monitors sequences of its own.

    Raises:
        ValueError: for an argument out of range, or a model that cannot be scored in parts.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        schedule: SparsitySchedule,
        *,
        threshold: float,
        action: str = "warn",
        share: float = 0.0625,
        every: int = 1,
        statistic: str = "auto",
        top_k: int = 20,
        min_tokens: int = 400,
        confidence: float = 0.98,
        floor_every: int = 100,
        min_budget: int = 8,
        max_budget: int | None = None,
        temperature: float = 1.0,
        process_index: int = 0,
    ):
        for name, value, known in (("action", action, ACTIONS), ("statistic", statistic, STATISTICS)):
            if value not in known:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(known)}.")
        if not 0 < share <= 1:
            raise ValueError(f"share={share} is not in (0, 1].")
        for name, number in (("every", every), ("top_k", top_k), ("floor_every", floor_every)):
            if number < 1:
                raise ValueError(f"{name}={number} must be at least 1.")
        self.meter = RateMeter(model, top_k, temperature)
        self.threshold, self.action, self.top_k = threshold, action, top_k
        self.share, self.every, self.floor_every, self.process_index = share, every, floor_every, process_index
        self.sparse_schedule = schedule
        if action != "adapt":
            max_budget = None
        self.controller = ScheduleController(schedule, min_budget=min_budget, max_budget=max_budget)
        self.judge = TailJudge(threshold, min_tokens, confidence, schedule.bin_tokens)
        self.statistic: str | None = None if statistic == "auto" else statistic
        self.is_densified = False
        self.history: list[dict[str, float]] = []
        names = ("lower", "upper", "exact")
        self.pooled = {name: AcceptanceHistogram(schedule.bin_tokens) for name in names}
        self.floor = {name: AcceptanceHistogram(schedule.bin_tokens) for name in ("lower", "exact")}
        self._window = {name: AcceptanceHistogram(schedule.bin_tokens) for name in names}
        self._window_batches = self._window_breaches = self._window_raised = self._window_lowered = 0
        self._breached: set[int] = set()
        self._sequences: list[MonitoredSequence] = []
        self._hidden_states: Mapping[int, torch.Tensor] = {}
        self._batches = self._rollouts = 0
        self._is_active = False

    @property
    def schedule(self) -> SparsitySchedule:
        """For the next rollout."""
        return replace(self.sparse_schedule, budgets=()) if self.is_densified else self.sparse_schedule

    @property
    def judged(self) -> AcceptanceHistogram:
        """What is compared with the threshold, pooled for as long as the budgets of each bin are what they are."""
        return self.pooled[self.statistic or "lower"]

    def begin_batch(self, monitored: bool = True) -> None:
        """A generation batch starts; `monitored=False` for one to leave out, such as of an evaluation."""
        self._sequences, self._hidden_states = [], {}
        self._is_active = False
        if monitored:
            self._is_active = self._batches % self.every == 0
            self._batches += 1
            self._rollouts = 0

    def choose(self, num_sequences: int) -> list[int]:
        """Which of the sequences of a rollout to ask the engine's top-k for: the same ones in a resumed run."""
        if not self._is_active or num_sequences == 0:
            return []
        generator = np.random.default_rng([self._batches, self._rollouts, self.process_index])
        self._rollouts += 1
        # Less than one sequence a batch is one every few batches
        batch, wanted = (self._batches - 1) // self.every, self.share * num_sequences
        number = min(num_sequences, math.ceil(wanted * (batch + 1)) - math.ceil(wanted * batch))
        return sorted(generator.choice(num_sequences, number, replace=False).tolist())

    def record(self, prompt_ids: Sequence[Sequence[int]], output: RolloutOutput, chosen: Collection[int]) -> None:
        """Keep what the engine returned for the sequences that [`choose`] gave."""
        if output.top_ids is None or output.top_logprobs is None:
            return
        for index in chosen:
            self._sequences.append(
                MonitoredSequence(
                    [*prompt_ids[index], *output.completion_ids[index]],
                    len(prompt_ids[index]),
                    torch.tensor(output.top_ids[index]),
                    torch.tensor(output.top_logprobs[index], dtype=torch.float32),
                )
            )

    @contextmanager
    def around_policy_pass(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, num_tokens: int
    ) -> Iterator[None]:
        """
        A context in which a batch goes through the policy, from which the dense side is taken.

        Args:
            input_ids, attention_mask (`torch.Tensor`): `(batch, length)`, see [`match_rows`].
            num_tokens (`int`): columns at the end that hold the completions.
        """
        rows = match_rows(self._sequences, input_ids, attention_mask, num_tokens)
        if not rows:
            yield
            return
        with self.meter.scorer.capture(rows, num_tokens) as self._hidden_states:
            yield

    def update(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        mask: torch.Tensor,
        *,
        step: int = 0,
        total: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
        largest: Callable[[int], int] = lambda number: number,
        sparse_mode: Callable[[], AbstractContextManager] = nullcontext,
    ) -> BatchReport | None:
        """
        Measure the batch, and decide. Every process calls this for every batch.

        Args:
            input_ids, attention_mask (`torch.Tensor`): `(batch, length)`, see [`match_rows`].
            mask (`torch.Tensor`): `(batch, num_tokens)` bool, the completion tokens that count.
            step (`int`, *optional*): training step, for the record.
            total, largest (`Callable`, *optional*): see [`AcceptanceHistogram.reduce`].
            sparse_mode (`Callable`, *optional*): makes a context in which the model is the actor.

        Returns:
            [`BatchReport`], or `None` for a batch that is not monitored.
        """
        if not self._is_active:
            return None
        self._is_active = False
        self._window_batches += 1
        if all(sequence.row is None for sequence in self._sequences):
            match_rows(self._sequences, input_ids, attention_mask, mask.shape[1])
        measured = {name: AcceptanceHistogram(self.sparse_schedule.bin_tokens) for name in self.pooled}
        floor = {name: AcceptanceHistogram(self.sparse_schedule.bin_tokens) for name in self.floor}
        # Until there are tokens enough to choose the statistic by it, too
        wants_floor = ((self._batches - 1) // self.every) % self.floor_every == 0 or self.statistic is None
        for sequence in self._sequences:
            if sequence.row is None:
                continue
            dense = self.meter.dense(sequence, self._hidden_states.get(sequence.row), self.sparse_schedule)
            _count(
                measured,
                *self.meter.rates(
                    sequence,
                    dense,
                    mask[sequence.row],
                    self.sparse_schedule,
                    exact=self.statistic == "exact",
                    by_pass=self.is_densified,
                    sparse_mode=sparse_mode,
                ),
            )
            if wants_floor:
                _count(floor, *self.meter.floor(sequence, dense, self.sparse_schedule))
                wants_floor = False
        self._sequences, self._hidden_states = [], {}
        for histograms, pools in ((measured, [self.pooled, self._window]), (floor, [self.floor])):
            for name, histogram in histograms.items():
                histogram.reduce(total, largest)
                for pool in pools:
                    pool[name].merge(histogram)
        return self._decide(measured, step)

    def _decide(self, measured: Mapping[str, AcceptanceHistogram], step: int) -> BatchReport:
        messages: list[str] = []
        if self.statistic is None and self.floor["lower"].tokens() >= MIN_LOGGED:
            self._choose_statistic(messages)
        nothing = AcceptanceHistogram(self.sparse_schedule.bin_tokens)
        judged = nothing if self.statistic is None else measured[self.statistic]
        verdicts = self.judge.update(judged)
        breaches = [verdict for verdict in verdicts if verdict.is_breach]
        self._window_breaches += len(breaches)
        if verdicts and judged.tokens() >= MIN_LOGGED:
            worst = min(verdicts, key=lambda verdict: verdict.recent.value)
            self.history.append({"step": step, "tail": judged.percentile(), "worst": worst.recent.value})
        decisions: list[Decision] = []
        if self.is_densified:
            self._recover(verdicts, messages)
        elif self.action == "adapt":
            decisions = self._adapt(verdicts, step, messages)
        elif breaches and self.action == "densify":
            self.is_densified = True
            self._breached = {verdict.index for verdict in breaches}
            self.judge.forget()
            messages.append(f"{_describe(breaches)} Rollouts are dense until it recovers (tail_action='densify').")
        elif breaches and self.action == "stop":
            messages.append(f"{_describe(breaches)} Training stops (tail_action='stop').")
        else:
            new = [verdict for verdict in breaches if verdict.index not in self._breached]
            self._breached.update(verdict.index for verdict in new)
            if new:
                messages.append(
                    f"{_describe(new)} Use a schedule with larger budgets, or tail_action='adapt'. This is said once for "
                    "each bin; see the metric sparrow/tail_breaches."
                )
        return BatchReport(verdicts, decisions, self.schedule, messages, bool(breaches) and self.action == "stop")

    def _choose_statistic(self, messages: list[str]) -> None:
        """The paper's lower bound, unless the top-k of flat distributions leaves out too much for it."""
        floor = self.floor["lower"].percentile()
        halfway = (1 + self.threshold) / 2
        self.statistic = "lower" if floor >= halfway else "exact"
        if self.statistic == "exact":
            messages.append(
                f"The top-{self.top_k} lower bound of the acceptance rate of the dense policy with itself has a tail of "
                f"{floor:.3f}, below {halfway:.3f}: the model's distributions are too flat for it. The threshold of "
                f"{self.threshold} is compared with the exact rate instead, which takes one more pass over the monitored "
                "sequences (tail_statistic='exact'). A larger tail_top_k tightens the bound."
            )

    def _adapt(self, verdicts: list[Verdict], step: int, messages: list[str]) -> list[Decision]:
        decisions = self.controller.update(verdicts, step)
        self.sparse_schedule = self.controller.schedule
        if decisions:
            # Errors carry over, so what was measured in later bins is of the old budgets too
            first = min(decision.index for decision in decisions)
            changed = range(first, max(len(self.pooled["lower"]), len(self.sparse_schedule.budgets)))
            self.judge.forget(changed)
            for histogram in self.pooled.values():
                histogram.clear(changed)
        for decision in decisions:
            up = decision.new > decision.old
            self._window_raised += up
            self._window_lowered += not up
            messages.append(
                f"Step {step}: the budget of bin {decision.index} goes from {decision.old} to {decision.new} pages "
                f"({decision.reason}, tail {decision.tail:.3f}, threshold {self.threshold})."
            )
        return decisions

    def _recover(self, verdicts: list[Verdict], messages: list[str]) -> None:
        """Back to sparse rollouts where the sparse schedule, measured on the dense completions, meets the threshold."""
        self._breached -= {verdict.index for verdict in verdicts if verdict.recent.value >= self.threshold}
        self._breached |= {verdict.index for verdict in verdicts if verdict.is_breach}
        if verdicts and not self._breached:
            self.is_densified = False
            self.judge.forget()
            messages.append("The tail of the sparse schedule has recovered, and rollouts are sparse again.")

    def pop_metrics(self) -> dict[str, float]:
        """The metrics of the batches since the last call, by name."""
        metrics: dict[str, float] = {}
        if not self._window_batches:
            return metrics
        judged = self._window[self.statistic or "lower"]
        if judged.tokens() >= MIN_LOGGED:
            metrics["tail"] = judged.percentile()
            metrics["acceptance"] = judged.mean()
            metrics["tail_tokens"] = judged.tokens()
            metrics["tail_breaches"] = float(self._window_breaches)
            for name in ("lower", "upper"):
                metrics[f"tail_{name}"] = self._window[name].percentile()
                metrics[f"acceptance_{name}"] = self._window[name].mean()
            for index in range(len(judged)):
                if judged.tokens(index) >= MIN_LOGGED:
                    metrics[f"tail/bin_{index}"] = judged.percentile(index=index)
                    metrics[f"acceptance/bin_{index}"] = judged.mean(index)
                    metrics[f"tail_lower/bin_{index}"] = self._window["lower"].percentile(index=index)
                    metrics[f"tail_upper/bin_{index}"] = self._window["upper"].percentile(index=index)
            if self.action == "adapt":
                metrics["budgets_raised"] = float(self._window_raised)
                metrics["budgets_lowered"] = float(self._window_lowered)
            if self.action == "densify":
                metrics["densified"] = float(self.is_densified)
        if not self.schedule.is_dense:
            for index, budget in enumerate(self.schedule.budgets):
                metrics[f"budget/bin_{index}"] = float(budget)
        floor = self.floor[self.statistic or "lower"]
        if floor.tokens() >= MIN_LOGGED:
            metrics["tail_floor"] = floor.percentile()
            metrics["acceptance_floor"] = floor.mean()
        for histogram in self._window.values():
            histogram.clear()
        self._window_batches = self._window_breaches = self._window_raised = self._window_lowered = 0
        return metrics

    def report(self) -> dict[str, Any]:
        """Tail and mean of each bin, pooled for as long as its budget is what it is: what a model card shows."""
        floor, judged = self.floor[self.statistic or "lower"], self.judged
        bins = []
        for index in (index for index in range(len(judged)) if judged.tokens(index)):
            tail, first = judged.tail(index), index * judged.bin_tokens
            bins.append(
                {
                    "first": first,
                    "last": first + judged.bin_tokens - 1,
                    "tokens": int(tail.tokens),
                    "tail": tail.value,
                    "low": tail.low,
                    "high": tail.high,
                    "mean": judged.mean(index),
                }
            )
        return {
            "statistic": self.statistic,
            "threshold": self.threshold,
            "floor": floor.percentile() if floor.tokens() else None,
            "bins": bins,
        }

    def save(self, folder: str | Path) -> None:
        """Write the state into a folder (made if missing)."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / STATE_FILE).write_text(json.dumps(self.state_dict()), encoding="utf-8")

    def load(self, folder: str | Path) -> str | None:
        """
        Go on from a saved state, if there is one.

        Returns:
            `str`, *optional*: what to tell the user, where it was saved for another schedule and is not used.
        """
        path = Path(folder) / STATE_FILE
        if not path.is_file():
            return None
        state = json.loads(path.read_text(encoding="utf-8"))
        if not self.controller.load_state_dict(state["controller"]):
            return _of_another_schedule(path)
        self.sparse_schedule = self.controller.schedule
        if self.statistic in (None, state["statistic"]):  # tails of two statistics do not add up
            self.judge.load_state_dict(state["judge"])
        self._batches, self.is_densified = state["batches"], state["is_densified"]
        self._breached, self.history = set(state["breached"]), state["history"]
        self.statistic = state["statistic"] if self.statistic is None else self.statistic
        for pools, name_of in ((self.pooled, "pooled"), (self.floor, "floor")):
            for name, histogram in pools.items():
                histogram.load_state_dict(state[name_of][name])
        return None

    def state_dict(self) -> dict[str, Any]:
        """Plain Python values."""
        return {
            "batches": self._batches,
            "statistic": self.statistic,
            "is_densified": self.is_densified,
            "breached": sorted(self._breached),
            "history": self.history,
            "controller": self.controller.state_dict(),
            "judge": self.judge.state_dict(),
            "pooled": {name: histogram.state_dict() for name, histogram in self.pooled.items()},
            "floor": {name: histogram.state_dict() for name, histogram in self.floor.items()},
        }


def saved_schedule(folder: str | Path, schedule: SparsitySchedule) -> tuple[SparsitySchedule, str | None]:
    """
    What a run without a monitor goes on with from a checkpoint of one with a monitor.

    Args:
        folder (`str` or `Path`): where [`TailMonitor.save`] wrote its state, if it did.
        schedule (`SparsitySchedule`): that this run starts with.

    Returns:
        `tuple[SparsitySchedule, str | None]`: the schedule of the interrupted run's next rollout, or `schedule` where
        that one was another to begin with; and what to tell the user, where the monitor had changed something.
    """
    path = Path(folder) / STATE_FILE
    if not path.is_file():
        return schedule, None
    state = json.loads(path.read_text(encoding="utf-8"))
    initial = SparsitySchedule.from_dict(state["controller"]["initial"])
    saved = replace(initial, budgets=() if state["is_densified"] else tuple(state["controller"]["budgets"]))
    if saved == initial:
        return schedule, None
    if initial != schedule:
        return schedule, _of_another_schedule(path)
    if saved.is_dense:
        return saved, (
            f"By {path} the interrupted run had turned to dense rollouts (tail_action='densify'), and this one goes on "
            "with them. With tail_monitor=False nothing finds out when the tail has recovered: resume with "
            "tail_monitor=True for that."
        )
    return saved, (
        f"By {path} the tail monitor of the interrupted run had changed the budgets from {list(initial.budgets)} to "
        f"{list(saved.budgets)}, and this run goes on with them. With tail_monitor=False they stay as they are."
    )


def _of_another_schedule(path: Path) -> str:
    return (
        f"{path} was saved for another sparse_schedule than this run starts with, so the measured tails and the changed "
        "budgets are not taken from it. Resume with the same sparse_schedule to go on from them."
    )


def _count(histograms: Mapping[str, AcceptanceHistogram], positions: torch.Tensor, bounds: AcceptanceBounds) -> None:
    for name, rates in (("lower", bounds.top_k), ("upper", bounds.upper), ("exact", bounds.exact)):
        if rates is not None and name in histograms:
            histograms[name].add(positions, rates)


def _describe(breaches: Sequence[Verdict]) -> str:
    parts = [
        f"bin {verdict.index}: {verdict.tail:.3f} from {verdict.latest.tokens:.0f} tokens" for verdict in breaches
    ]
    return (
        f"The tail of the acceptance rate is below the threshold of {breaches[0].threshold} ({'; '.join(parts)}): the "
        "sparse actor is too far from the policy there."
    )
