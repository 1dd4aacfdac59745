"""How much of the KV cache a query reads: the sparsity schedule and its published presets."""

from .schedule import DENSE_BUDGET, SCHEDULE_FILE, SparsitySchedule


__all__ = ["DENSE_BUDGET", "SCHEDULE_FILE", "SparsitySchedule"]
