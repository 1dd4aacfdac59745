"""The part of the trainer that watches the tail of the acceptance rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch

from .hub.publishing import PublishingTrainer
from .monitor import TailMonitor
from .monitor.callback import TailCallback
from .monitor.tail_monitor import STATE_FILE, saved_schedule
from .processes import warn
from .rollout import RolloutOutput
from .sparsity import SparsitySchedule
from .sparsity.schedule import RECORD_FOLDER
from .trl_seams import ScoredRollout


class MonitoredTrainer(PublishingTrainer):
    """
    Measures the acceptance rate of some sequences of each batch, logs it, and acts on its tail. What it measures with is a
    [`TailMonitor`]; here it is told of the batches.

    A subclass calls [`start_tail_monitor`] at the end of its `__init__`, and [`choose_monitored`] and
    [`record_monitored`] around each rollout.
    """

    _tail_monitor: TailMonitor | None = None
    _initial_schedule: SparsitySchedule
    _saved_state: bytes | None = None  # of the monitor of an interrupted run, where this one has none

    @property
    def tail_monitor(self) -> TailMonitor | None:
        """What measures the acceptance rate; `None` where it is off or the schedule is dense."""
        return self._tail_monitor

    def start_tail_monitor(self, schedule: SparsitySchedule) -> None:
        """Measure from now on, if the configuration says so and the schedule is sparse."""
        args = self.args
        self._initial_schedule = schedule
        if not args.tail_monitor or schedule.is_dense:
            return
        self._tail_monitor = TailMonitor(
            self.accelerator.unwrap_model(self.model, keep_torch_compile=False),
            schedule,
            threshold=args.sparse_target if args.tail_threshold is None else args.tail_threshold,
            action=args.tail_action,
            share=args.tail_share,
            every=args.tail_every,
            statistic=args.tail_statistic,
            top_k=args.tail_top_k,
            min_tokens=args.tail_min_tokens,
            confidence=args.tail_confidence,
            floor_every=args.tail_floor_every,
            min_budget=args.tail_min_budget,
            max_budget=args.tail_max_budget,
            temperature=args.temperature,
            process_index=self.accelerator.process_index,
        )
        self._tail_callback = TailCallback(self._tail_monitor, self.accelerator.is_main_process, args.report_to or [])
        self.add_callback(self._tail_callback)

    def actor_mode(self, schedule: SparsitySchedule) -> AbstractContextManager:
        """A context in which the model is the actor of `schedule`, where the actor has more than the policy."""
        return nullcontext()

    def choose_monitored(self, num_sequences: int) -> list[int]:
        """Which sequences of a rollout the engine has to report the most likely tokens of."""
        return [] if self._tail_monitor is None else self._tail_monitor.choose(num_sequences)

    def record_monitored(
        self, prompt_ids: Sequence[Sequence[int]], output: RolloutOutput, monitored: list[int]
    ) -> None:
        if self._tail_monitor is not None:
            self._tail_monitor.record(prompt_ids, output, monitored)

    def before_batch(self) -> None:
        super().before_batch()
        if self._tail_monitor is not None:
            self._tail_monitor.begin_batch(monitored=self.metrics_mode == "train")

    def around_policy_pass(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, num_tokens: int
    ) -> AbstractContextManager:
        if self._tail_monitor is None:
            return nullcontext()
        return self._tail_monitor.around_policy_pass(input_ids, attention_mask, num_tokens)

    def after_rollout_scored(self, scored: ScoredRollout) -> None:
        super().after_rollout_scored(scored)
        if self._tail_monitor is None:
            return
        with torch.no_grad(), self.accelerator.autocast():
            report = self._tail_monitor.update(
                torch.cat([scored.prompt_ids, scored.completion_ids], dim=1),
                torch.cat([scored.prompt_mask, scored.completion_mask], dim=1),
                scored.mask,
                step=self.state.global_step,
                sparse_mode=partial(self.actor_mode, self._tail_monitor.sparse_schedule),
                **self._pooling(),
            )
        if report is None:
            return
        self.rollout_schedule = report.schedule
        self._tail_callback.tell(report)
        if report.stop:
            self.control.should_training_stop = True

    def _pooling(self) -> dict[str, Callable]:
        """How numbers of all processes become one; nothing to do for one process."""
        if self.accelerator.num_processes == 1:
            return {}
        accelerator, device = self.accelerator, self.accelerator.device
        return {
            "total": lambda tensor: accelerator.reduce(tensor.to(device), reduction="sum"),
            "largest": lambda number: int(accelerator.gather(torch.tensor([number], device=device)).max()),
        }

    def save_beside_model(self, folder: str) -> None:
        super().save_beside_model(folder)
        if self._tail_monitor is not None:
            self._tail_callback.write(folder)

    def save_state(self, folder: str) -> None:
        super().save_state(folder)
        if self._tail_monitor is not None:
            self._tail_monitor.save(Path(folder) / RECORD_FOLDER)
        elif self._saved_state is not None:
            path = Path(folder) / RECORD_FOLDER / STATE_FILE
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self._saved_state)

    def load_state(self, folder: str) -> None:
        super().load_state(folder)
        record = Path(folder) / RECORD_FOLDER
        if self._tail_monitor is None:
            schedule, message = saved_schedule(record, self._initial_schedule)
            if schedule != self._initial_schedule:
                self._saved_state = (record / STATE_FILE).read_bytes()
        else:
            message = self._tail_monitor.load(record)
            schedule = self._tail_monitor.schedule
        if message is not None:
            warn(message)
        if schedule != self.rollout_schedule:  # an engine that a rollout_func may never ask for is not built for it
            self.rollout_schedule = schedule

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self._tail_monitor is not None and self.metrics_mode == "train":
            for name, value in self._tail_monitor.pop_metrics().items():
                self.log_sparrow_metric(name, value)
        super().log(logs, start_time)
