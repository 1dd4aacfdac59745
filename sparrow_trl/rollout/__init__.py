"""The rollout engine."""

from .engine import RolloutEngine
from .output import RolloutOutput, RolloutStats
from .support import UnsupportedModelError, check_model_config


__all__ = ["RolloutEngine", "RolloutOutput", "RolloutStats", "UnsupportedModelError", "check_model_config"]
