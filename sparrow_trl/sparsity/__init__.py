"""How much of the KV cache a query reads: the sparsity schedule and its published presets."""

from .schedule import DEFAULT_TARGET, DENSE_BUDGET, SCHEDULE_FILE, SparsitySchedule, is_hub_repo


__all__ = ["DEFAULT_TARGET", "DENSE_BUDGET", "SCHEDULE_FILE", "SparsitySchedule", "is_hub_repo"]
