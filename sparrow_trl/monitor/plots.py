"""The pictures of a tail monitor: tail against position, budget against position, tail over training."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from .histogram import AcceptanceHistogram


if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .tail_monitor import TailMonitor


def write_plots(monitor: TailMonitor, folder: str | Path) -> list[Path]:
    """
    Draw `tail_by_position.png`, `budget_by_position.png` and `tail_over_training.png` into a folder (made if missing).

    Returns:
        `list[Path]`: what was written; nothing where matplotlib is not installed or nothing was measured yet.
    """
    if find_spec("matplotlib") is None or not monitor.judged.tokens():
        return []
    from matplotlib.figure import Figure

    paths = []
    for name, draw in (
        ("tail_by_position", _tail_by_position),
        ("budget_by_position", _budget_by_position),
        ("tail_over_training", _tail_over_training),
    ):
        figure = Figure(figsize=(6, 4), layout="constrained")
        draw(monitor, figure.subplots())
        paths.append(Path(folder) / f"{name}.png")
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(paths[-1])
    return paths


def _tail_by_position(monitor: TailMonitor, ax: Axes) -> None:
    judged = monitor.judged
    bins = [index for index in range(len(judged)) if judged.tokens(index)]
    middles = [(index + 0.5) * judged.bin_tokens for index in bins]
    tails = [judged.tail(index) for index in bins]
    (line,) = ax.plot(middles, [tail.value for tail in tails], marker="o", label="tail")
    low, high = [tail.low for tail in tails], [tail.high for tail in tails]
    if len(bins) > 1:
        ax.fill_between(middles, low, high, alpha=0.25, color=line.get_color(), label="95 % confidence")
    else:
        ax.vlines(middles, low, high, color=line.get_color(), label="95 % confidence")
    ax.plot(middles, [judged.mean(index) for index in bins], marker=".", linestyle=":", label="mean")
    floor: AcceptanceHistogram = monitor.floor[monitor.statistic or "lower"]
    if floor.tokens():
        ax.axhline(floor.percentile(), linestyle=":", color="grey", label="dense against dense")
    ax.axhline(monitor.threshold, linestyle="--", color="black", label=f"threshold {monitor.threshold}")
    ax.set_xlabel("position of the query (tokens)")
    ax.set_ylabel("acceptance rate")
    ax.legend()


def _budget_by_position(monitor: TailMonitor, ax: Axes) -> None:
    now, start = monitor.sparse_schedule, monitor.controller.initial
    width, bins = now.bin_tokens, max(len(now.budgets), len(monitor.judged), 1)
    edges = [width * index for index in range(bins + 1)]
    for schedule, style, label in ((start, "--", "at the start"), (now, "-", "now")):
        budgets = [schedule.budget_at(edge) for edge in edges[:-1]]
        ax.stairs(budgets, edges, baseline=None, linestyle=style, label=label)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("position of the query (tokens)")
    ax.set_ylabel("scored pages")
    ax.legend()


def _tail_over_training(monitor: TailMonitor, ax: Axes) -> None:
    steps = [entry["step"] for entry in monitor.history]
    for name, label in (("tail", "all tokens of the batch"), ("worst", "worst bin")):
        ax.plot(steps, [entry[name] for entry in monitor.history], marker=".", label=label)
    ax.axhline(monitor.threshold, linestyle="--", color="black", label=f"threshold {monitor.threshold}")
    ax.set_xlabel("step")
    ax.set_ylabel("tail of the acceptance rate")
    ax.legend()
