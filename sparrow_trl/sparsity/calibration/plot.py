"""Pictures of a calibration and of measured tails."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..schedule import SparsitySchedule


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def _figure(columns: int, width: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("The plot needs matplotlib: pip install matplotlib.") from error
    figure = Figure(figsize=(width, 4.2), layout="constrained")
    figure.subplots(1, columns)
    return figure


def plot_calibration(schedule: SparsitySchedule, path: str | os.PathLike[str]) -> None:
    """
    Draw the tail against the budget for each measured bin, and the schedule with the bins that were not measured.

    Args:
        schedule (`SparsitySchedule`): as calibrated; the curves are in its provenance.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    figure = _figure(2, 11)
    curves, steps = figure.axes
    bins = schedule.provenance["bins"]
    for entry in bins:
        if not entry.get("budgets"):
            continue
        line = curves.plot(entry["budgets"], entry["tails"], marker="o", markersize=3, label=f"bin {entry['index']}")
        curves.fill_between(entry["budgets"], entry["low"], entry["high"], alpha=0.15, color=line[0].get_color())
    if schedule.target is not None:
        curves.axhline(schedule.target, color="grey", linestyle="--", linewidth=0.8)
    curves.set_xscale("log", base=2)
    curves.xaxis.set_major_formatter("{x:g}")
    curves.set_xlabel("budget (scored pages)")
    curves.set_ylabel("tail of the acceptance rate")
    curves.legend()
    width = schedule.bin_tokens
    for entry in bins:
        known = entry["status"] == "measured"
        left = entry["index"] * width
        steps.stairs(
            [entry["budget"]], [left, left + width], baseline=0, fill=True, color="tab:blue" if known else "lightgrey"
        )
    steps.set_xlabel("position of the query (tokens); grey: not measured")
    steps.set_ylabel("budget (scored pages)")
    figure.savefig(path)


def plot_tails(
    reports: dict[str, Any], target: float | None, path: str | os.PathLike[str] | None = None, ax: Axes | None = None
) -> Axes:
    """
    Draw tails against position, with their confidence intervals and the target.

    Args:
        reports (`dict[str, TailReport]`): a line for each, by its label.
        target (`float`, *optional*): the threshold.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    if ax is None:
        ax = _figure(1, 6.5).axes[0]
    for label, report in reports.items():
        width = report.schedule.bin_tokens
        known = [index for index in report.tails if report.is_known(index)]
        middles = [(index + 0.5) * width for index in known]
        tails = [report.tails[index] for index in known]
        spread = [[tail.value - tail.low for tail in tails], [tail.high - tail.value for tail in tails]]
        ax.errorbar(middles, [tail.value for tail in tails], yerr=spread, marker="o", capsize=3, label=label)
    if target is not None:
        ax.axhline(target, color="grey", linestyle="--", linewidth=0.8, label=f"target {target}")
    ax.set_xlabel("position of the query (tokens)")
    ax.set_ylabel("tail of the acceptance rate")
    ax.legend()
    if path is not None:
        ax.figure.canvas.figure.savefig(path)
    return ax
