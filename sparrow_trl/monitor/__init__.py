"""How close the sparse actor is to the dense policy: the acceptance rate, its tail, and what is done about it."""

from .acceptance import (
    AcceptanceBounds,
    LazyLogits,
    acceptance_bounds,
    acceptance_rate,
    top_k_bounds,
    top_logprobs,
)
from .controller import Decision, ScheduleController
from .histogram import AcceptanceHistogram, ScaledBetaFit, TailEstimate
from .judge import TailJudge, Verdict
from .plots import write_plots
from .scoring import Scorer
from .tail_monitor import ACTIONS, STATISTICS, BatchReport, TailMonitor


__all__ = [
    "ACTIONS",
    "STATISTICS",
    "AcceptanceBounds",
    "AcceptanceHistogram",
    "BatchReport",
    "Decision",
    "LazyLogits",
    "ScaledBetaFit",
    "ScheduleController",
    "Scorer",
    "TailEstimate",
    "TailJudge",
    "TailMonitor",
    "Verdict",
    "acceptance_bounds",
    "acceptance_rate",
    "top_k_bounds",
    "top_logprobs",
    "write_plots",
]
