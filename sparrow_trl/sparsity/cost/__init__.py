"""The cost model: what a decode step reads and computes, dense and sparse, and what follows for its speed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any


# Imported on first use, so that `sparrow --help` costs no NumPy.
_EXPORTS = {
    "CHIPS": "chips",
    "Candidate": "frontier",
    "Chip": "chips",
    "Cost": "decode",
    "ModelShape": "shape",
    "TailCurve": "frontier",
    "cheapest_budgets": "frontier",
    "cheapest_schedule": "frontier",
    "crossover": "decode",
    "measure_chip": "chips",
    "rollout_cost": "decode",
    "speedup": "decode",
    "step_cost": "decode",
}

__all__ = [
    "CHIPS",
    "Candidate",
    "Chip",
    "Cost",
    "ModelShape",
    "TailCurve",
    "cheapest_budgets",
    "cheapest_schedule",
    "crossover",
    "measure_chip",
    "rollout_cost",
    "speedup",
    "step_cost",
]

if TYPE_CHECKING:
    from .chips import CHIPS, Chip, measure_chip
    from .decode import Cost, crossover, rollout_cost, speedup, step_cost
    from .frontier import Candidate, TailCurve, cheapest_budgets, cheapest_schedule
    from .shape import ModelShape


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value
    return value
