"""DistillSparse in a training run: when the LoRA is on, when it is updated, and what of it is stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..sparsity import SparsitySchedule
from .adapter import ADAPTER_FOLDER, SparrowAdapter
from .samples import Sample
from .update import DistillStats, DistillUpdate


STATE_FILE = "sparrow/distill.pt"
"""Where the state of the LoRA's optimizer is stored in the folder of a checkpoint."""


class DistillSession:
    """
    Collects what the sparse actor sampled, and updates the LoRA when the policy's update on it is done.

    Args:
        adapter ([`SparrowAdapter`]): the LoRA.
        update ([`DistillUpdate`]): its update.
        every (`int`): generation batches from one update to the next.
        reuse_teacher (`bool`): whether samples keep the policy's log-probabilities from before its update.
    """

    def __init__(self, adapter: SparrowAdapter, update: DistillUpdate, every: int = 1, reuse_teacher: bool = False):
        self.adapter, self.updater, self.every, self.reuse_teacher = adapter, update, every, reuse_teacher
        self.batches = 0
        self._pending: list[tuple[list[Sample], SparsitySchedule]] = []

    @contextmanager
    def sampling(self, schedule: SparsitySchedule) -> Iterator[None]:
        """The LoRA is on inside, unless the schedule is dense: a dense actor is the policy itself."""
        if schedule.is_dense:
            yield
        else:
            with self.adapter.active():
                yield

    def add(self, samples: list[Sample], schedule: SparsitySchedule) -> None:
        """Keep the samples of a generation batch, which the policy is going to be updated on."""
        self._pending.append((samples, schedule))

    def update(self, all_batches: bool) -> DistillStats | None:
        """
        Update the LoRA on the oldest batches.

        Args:
            all_batches (`bool`): whether the policy's update on the newest batch is done too.

        Returns:
            `DistillStats` of the last update, or `None` where there was none.
        """
        stats = None
        while len(self._pending) > (0 if all_batches else 1):
            samples, schedule = self._pending.pop(0)
            if schedule.is_dense:
                continue
            self.batches += 1
            if self.batches % self.every == 0:
                stats = self.updater.update(samples, schedule)
        return stats

    def save_adapter(self, folder: str | Path) -> None:
        """Store the LoRA below the folder of a model."""
        self.adapter.save_pretrained(Path(folder) / ADAPTER_FOLDER)

    def save_state(self, folder: str | Path) -> None:
        """Store what a resumed run needs besides, in the folder of a checkpoint."""
        file = Path(folder) / STATE_FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"batches": self.batches, "update": self.updater.state_dict()}, file)

    def load(self, folder: str | Path) -> None:
        """
        Go on from a checkpoint.

        Raises:
            FileNotFoundError: the run that wrote it had no LoRA.
        """
        file = Path(folder) / STATE_FILE
        if not file.is_file():
            raise FileNotFoundError(
                f"{folder} has no {STATE_FILE}: the run that saved this checkpoint had distill_sparse=False or "
                "save_only_model=True. Resume it with distill_sparse=False, or start anew from its model."
            )
        self.adapter.load_weights(Path(folder) / ADAPTER_FOLDER)
        state = torch.load(file, map_location=self.updater.device, weights_only=True)
        self.batches = state["batches"]
        self.updater.load_state_dict(state["update"])
