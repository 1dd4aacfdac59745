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


__all__ = [
    "AcceptanceBounds",
    "AcceptanceHistogram",
    "Decision",
    "LazyLogits",
    "ScaledBetaFit",
    "ScheduleController",
    "TailEstimate",
    "TailJudge",
    "Verdict",
    "acceptance_bounds",
    "acceptance_rate",
    "top_k_bounds",
    "top_logprobs",
]
