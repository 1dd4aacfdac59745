"""The picture of a schedule."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .schedule import SparsitySchedule


def plot_schedule(schedule: SparsitySchedule, path: str | os.PathLike[str] | None, ax: Axes | None) -> Axes:
    """See [`SparsitySchedule.plot`]."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("SparsitySchedule.plot needs matplotlib: pip install matplotlib.") from error
    if ax is None:
        ax = Figure(figsize=(6, 4), layout="constrained").subplots()
    # One more bin than there are budgets shows that the last one goes on.
    end = schedule.bin_tokens * (len(schedule.budgets) + 1)
    edges = list(range(0, end + 1, schedule.bin_tokens))
    always = schedule.sink_pages + schedule.recent_pages
    if not schedule.is_dense:
        kept = [(schedule.budget_at(edge) + always) * schedule.page_size for edge in edges[:-1]]
        ax.stairs(kept, edges, baseline=None, label="kept by a sparse layer")
        ax.set_ylim(0, 1.15 * max(kept))
    ax.plot([0, end], [0, end], linestyle="--", color="grey", label="dense")
    ax.set_xlabel("position of the query (tokens)")
    ax.set_ylabel("tokens attended to")
    ax.legend()
    if path is not None:
        ax.figure.canvas.figure.savefig(path)
    return ax
