"""How close the sparse actor is to the dense policy: the acceptance rate, its tail, and what is done about it."""

from .acceptance import (
    AcceptanceBounds,
    LazyLogits,
    acceptance_bounds,
    acceptance_rate,
    top_k_bounds,
    top_logprobs,
)
from .histogram import AcceptanceHistogram, ScaledBetaFit, TailEstimate


__all__ = [
    "AcceptanceBounds",
    "AcceptanceHistogram",
    "LazyLogits",
    "ScaledBetaFit",
    "TailEstimate",
    "acceptance_bounds",
    "acceptance_rate",
    "top_k_bounds",
    "top_logprobs",
]
