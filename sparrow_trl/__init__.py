"""Faster long-context GRPO for TRL: sample with sparse attention, train the dense model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any


__version__ = "0.1.0.dev0"

# Imported on first use, so that `import sparrow_trl` costs neither torch nor TRL.
_EXPORTS = {
    "RolloutEngine": "rollout",
    "RolloutOutput": "rollout",
    "SparrowGRPOConfig": "config",
    "SparrowGRPOTrainer": "trainer",
    "SparsitySchedule": "sparsity",
    "calibrate_schedule": "sparsity.calibration",
}

__all__ = [
    "RolloutEngine",
    "RolloutOutput",
    "SparrowGRPOConfig",
    "SparrowGRPOTrainer",
    "SparsitySchedule",
    "__version__",
    "calibrate_schedule",
]

if TYPE_CHECKING:
    from .config import SparrowGRPOConfig
    from .rollout import RolloutEngine, RolloutOutput
    from .sparsity import SparsitySchedule
    from .sparsity.calibration import calibrate_schedule
    from .trainer import SparrowGRPOTrainer


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
