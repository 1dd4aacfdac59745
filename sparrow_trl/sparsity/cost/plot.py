"""The picture of the speed-up."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_speedup(results: dict[str, Any], path: str | os.PathLike[str] | None = None, ax: Axes | None = None) -> Axes:
    """
    Draw the speed-up of steps and of rollouts against the context, with the crossover marked.

    Args:
        results (`dict`): what [`~sparrow_trl.sparsity.cost.report.compute`] returned.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("The plot needs matplotlib: pip install matplotlib.") from error
    if ax is None:
        ax = Figure(figsize=(7, 4), layout="constrained").subplots()
    curve = results["curve"]
    ax.plot(curve["context"], curve["step"], label="one step at this context")
    ax.plot(curve["context"], curve["rollout"], linestyle="--", label="a rollout up to this context")
    ax.axhline(1.0, color="grey", linewidth=0.8)
    crossover = results["crossover"]
    if crossover is not None:
        ax.axvline(crossover, color="tab:red", linestyle=":", label=f"sparse is faster from {crossover:,} tokens on")
    ax.set_xscale("log", base=2)
    ticks = [512 << doublings for doublings in range(9)]
    ticks = [tick for tick in ticks if curve["context"][0] <= tick <= curve["context"][-1]]
    ax.set_xticks(ticks, [f"{tick // 1024}K" if tick >= 1024 else str(tick) for tick in ticks])
    ax.minorticks_off()
    ax.set_xlabel("context (tokens)")
    ax.set_ylabel("predicted speed-up")
    ax.set_title(f"{results['model']['name']}, {results['chip']['name']}, batch {results['options']['batch']}")
    ax.legend()
    if path is not None:
        ax.figure.canvas.figure.savefig(path)
    return ax
