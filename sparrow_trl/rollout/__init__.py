"""The rollout engine."""

from .arguments import stop_ids
from .engine import RolloutEngine
from .output import RolloutOutput, RolloutStats
from .support import WITHOUT_SPARSITY, UnsupportedModelError, check_model_config, check_peft_config


__all__ = [
    "WITHOUT_SPARSITY",
    "RolloutEngine",
    "RolloutOutput",
    "RolloutStats",
    "UnsupportedModelError",
    "check_model_config",
    "check_peft_config",
    "stop_ids",
]
