"""What a trainer logs about its rollouts."""

from collections.abc import Callable, Iterable

import torch

from .rollout import RolloutStats
from .sparsity import SparsitySchedule
from .trl_seams import ScoredRollout


_SUMS = (
    "tokens",  # that count in the loss and have a ratio
    "ratio",
    "clipped",
    "budgeted_tokens",
    "budget",
    "completion_tokens",
    "kv_bytes_read",
    "kv_bytes_dense",
    "preemptions",
)
_MAXIMA = ("ratio_max", "negative_ratio_min", "pages_peak", "seconds")


class RolloutMetrics:
    """
    The metrics of all rollouts between two logs, over all processes.

    Sums and extremes are kept, not averages, so that a mean is over tokens and not over batches, and the smallest of
    several batches is their smallest.

    Args:
        clip_min, clip_max (`float`, *optional*): bounds of the importance ratio.
        by_sequence (`bool`): whether the bounds hold for the ratio of a whole sequence.
    """

    def __init__(self, clip_min: float | None, clip_max: float | None, by_sequence: bool):
        self.clip_min = float("-inf") if clip_min is None else clip_min
        self.clip_max = float("inf") if clip_max is None else clip_max
        self.by_sequence = by_sequence
        self._reset()

    def _reset(self) -> None:
        self._batches = 0
        self._sums = dict.fromkeys(_SUMS, 0.0)
        self._maxima = dict.fromkeys(_MAXIMA, float("-inf"))

    def update(
        self,
        stats: Iterable[RolloutStats],
        scored: ScoredRollout,
        schedule: SparsitySchedule,
        gather: Callable[[torch.Tensor], torch.Tensor],
    ) -> float | None:
        """
        Add one generation batch. Every process calls this once for each batch.

        Args:
            stats (`Iterable[RolloutStats]`): of the rollouts of this process; several where tools were called.
            scored (`ScoredRollout`): the batch of this process.
            schedule (`SparsitySchedule`): under which it was sampled.
            gather (`Callable`): concatenates the tensors of all processes, as `Accelerator.gather` does.

        Returns:
            `float`, *optional*: the part of this batch's tokens whose ratio is out of bounds, where there are ratios.
        """
        local = {**self._of_stats(list(stats)), **self._of_ratios(scored), **self._of_budgets(scored, schedule)}
        names = (*_SUMS, *_MAXIMA)
        device = scored.mask.device
        # In float64, which counts bytes exactly
        vector = torch.stack([torch.as_tensor(local[name], dtype=torch.float64, device=device) for name in names])
        by_process = gather(vector).view(-1, len(names))
        sums = dict(zip(_SUMS, by_process[:, : len(_SUMS)].sum(dim=0).tolist(), strict=True))
        maxima = dict(zip(_MAXIMA, by_process[:, len(_SUMS) :].amax(dim=0).tolist(), strict=True))

        self._batches += 1
        # A step waits for its slowest process
        self._maxima["seconds"] = max(self._maxima["seconds"], 0.0) + maxima.pop("seconds")
        for name, value in sums.items():
            self._sums[name] += value
        for name, value in maxima.items():
            self._maxima[name] = max(self._maxima[name], value)
        return sums["clipped"] / sums["tokens"] if sums["tokens"] else None

    @staticmethod
    def _of_stats(stats: list[RolloutStats]) -> dict[str, float]:
        return {
            "completion_tokens": sum(s.completion_tokens for s in stats),
            "kv_bytes_read": sum(s.kv_bytes_read for s in stats),
            "kv_bytes_dense": sum(s.kv_bytes_dense for s in stats),
            "preemptions": sum(s.preemptions for s in stats),
            "pages_peak": max((s.pages_peak for s in stats), default=0),
            "seconds": sum(s.seconds for s in stats),
        }

    def _of_ratios(self, scored: ScoredRollout) -> dict[str, torch.Tensor | float]:
        if scored.policy_logprobs is None or scored.actor_logprobs is None or not scored.mask.any():
            nothing = float("-inf")
            return {"tokens": 0, "ratio": 0, "clipped": 0, "ratio_max": nothing, "negative_ratio_min": nothing}
        # A token without a log-probability (NaN) counts as one with ratio 1, as in TRL
        log_ratio = (scored.policy_logprobs - scored.actor_logprobs).float().nan_to_num(nan=0.0)
        log_ratio = log_ratio.masked_fill(~scored.mask, 0.0)
        ratio = log_ratio.exp()[scored.mask]
        bounded = ratio
        if self.by_sequence:
            bounded = log_ratio.sum(dim=1, keepdim=True).exp().expand_as(log_ratio)[scored.mask]
        return {
            "tokens": scored.mask.sum(),
            "ratio": ratio.sum(),
            "clipped": ((bounded < self.clip_min) | (bounded > self.clip_max)).sum(),
            "ratio_max": ratio.max(),
            "negative_ratio_min": -ratio.min(),
        }

    @staticmethod
    def _of_budgets(scored: ScoredRollout, schedule: SparsitySchedule) -> dict[str, torch.Tensor | float]:
        if schedule.is_dense:
            return {"budgeted_tokens": 0, "budget": 0}
        # A token is sampled by the query one position before it
        offsets = torch.arange(scored.mask.size(1), device=scored.mask.device) - 1
        positions = (scored.prompt_mask.sum(dim=1, keepdim=True) + offsets).clamp(min=0)
        return {"budgeted_tokens": scored.mask.sum(), "budget": schedule.budgets_at(positions)[scored.mask].sum()}

    def pop(self) -> dict[str, float]:
        """The metrics since the last call, by name."""
        metrics = {}
        if self._batches:
            sums, maxima = self._sums, self._maxima
            metrics["rollout_seconds"] = maxima["seconds"] / self._batches
            metrics["rollout_tokens_per_second"] = sums["completion_tokens"] / max(maxima["seconds"], 1e-9)
            metrics["preemptions"] = sums["preemptions"] / self._batches
            metrics["pages_peak"] = maxima["pages_peak"]
            # A completion of one token is sampled by the prefill, and nothing is decoded
            metrics["kv_share"] = sums["kv_bytes_read"] / sums["kv_bytes_dense"] if sums["kv_bytes_dense"] else 1.0
            if sums["budgeted_tokens"]:
                metrics["budget"] = sums["budget"] / sums["budgeted_tokens"]
            if sums["tokens"]:
                metrics["importance_ratio/mean"] = sums["ratio"] / sums["tokens"]
                metrics["importance_ratio/min"] = -maxima["negative_ratio_min"]
                metrics["importance_ratio/max"] = maxima["ratio_max"]
                metrics["clipped_fraction"] = sums["clipped"] / sums["tokens"]
        self._reset()
        return metrics
