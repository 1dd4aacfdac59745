"""The rollout engine."""

from .arguments import stop_ids
from .engine import RolloutEngine
from .output import RolloutOutput, RolloutStats
from .support import UnsupportedModelError, check_model_config, check_peft_config


__all__ = [
    "RolloutEngine",
    "RolloutOutput",
    "RolloutStats",
    "UnsupportedModelError",
    "check_model_config",
    "check_peft_config",
    "stop_ids",
]
