"""What attention reads while decoding, counted on the host from positions alone."""

from __future__ import annotations

import numpy as np

from ..sparsity import SparsitySchedule
from .cache import PagedKVCache


def selects_pages(schedule: SparsitySchedule, layer: int, sliding_window: int | None) -> bool:
    """Whether a layer chooses pages: the others attend exactly, to everything or to their window."""
    return not (schedule.is_dense or layer in schedule.dense_layers or sliding_window is not None)


def budgets_of(schedule: SparsitySchedule, positions: np.ndarray) -> np.ndarray:
    """`SparsitySchedule.budget_at` of many positions."""
    budgets = np.array(schedule.budgets, dtype=np.int64)
    return budgets[np.minimum(positions // schedule.bin_tokens, len(budgets) - 1)]


def candidates_of(schedule: SparsitySchedule, positions: np.ndarray) -> np.ndarray:
    """How many pages are scored for the queries at `positions`: all but the first ones and the last ones."""
    pages = positions // schedule.page_size + 1
    return np.maximum(pages - schedule.sink_pages - schedule.recent_pages, 0)


def leaves_pages_out(schedule: SparsitySchedule, positions: np.ndarray) -> bool:
    """Whether any of the queries at `positions` has more pages than it may read."""
    if schedule.is_dense:
        return False
    return bool((candidates_of(schedule, positions) > budgets_of(schedule, positions)).any())


class ReadCounter:
    """
    Bytes of keys, values and landmarks that decode steps read, and that dense ones would have read.

    Args:
        schedule (`SparsitySchedule`): sparsity of decode steps.
    """

    def __init__(self, schedule: SparsitySchedule):
        self.schedule = schedule
        self.read = self.dense = 0

    def add(
        self, positions: np.ndarray, cache: PagedKVCache, windows: dict[int, int | None], scores_pages: bool
    ) -> None:
        """
        Add decoded tokens.

        Args:
            positions (`np.ndarray`): `(num_tokens,)` int64, theirs.
            cache (`PagedKVCache`): knows the shapes of the layers.
            windows (`dict[int, int | None]`): sliding window of each layer.
            scores_pages (`bool`): whether layers that may choose pages did: where no query leaves one out they need not.
        """
        all_tokens = kept_tokens = int((positions + 1).sum())
        landmarks = 0
        if scores_pages:
            candidates = candidates_of(self.schedule, positions)
            left_out = np.maximum(candidates - budgets_of(self.schedule, positions), 0)
            kept_tokens -= int(left_out.sum()) * self.schedule.page_size
            landmarks = int(candidates.sum())
        for layer, (key_pages, value_pages, _) in cache.layers.items():
            element = key_pages.element_size() * key_pages.shape[0]
            per_token = element * (key_pages.shape[-1] + value_pages.shape[-1])
            window = windows.get(layer)
            tokens = all_tokens if window is None else int(np.minimum(positions + 1, window).sum())
            self.dense += tokens * per_token
            if scores_pages and selects_pages(self.schedule, layer, window):
                self.read += kept_tokens * per_token + landmarks * element * key_pages.shape[-1]
            else:
                self.read += tokens * per_token
