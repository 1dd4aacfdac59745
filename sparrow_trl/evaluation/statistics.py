"""Numbers from right and wrong samples: means, unbiased pass@k, bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


Samples = Sequence[Sequence[bool | float]]
"""For each problem, whether each of its samples is right."""


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    r"""
    Unbiased estimate of the chance that at least one of `k` samples is right, from `num_samples` of which `num_right` are:
    \( 1 - \binom{n-c}{k} / \binom{n}{k} \) (Chen et al., arXiv 2107.03374), as a product so that nothing overflows.

    Raises:
        ValueError: `k` is not from 1 to `num_samples`, or `num_right` not from 0 to it.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k} must be from 1 to the number of samples, {num_samples}; draw more (num_samples).")
    if not 0 <= num_right <= num_samples:
        raise ValueError(f"num_right={num_right} must be from 0 to the number of samples, {num_samples}.")
    wrong = num_samples - num_right
    if wrong < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(wrong + 1, num_samples + 1)))


def mean_pass_at_k(samples: Samples, k: int) -> float:
    """`pass_at_k`, averaged over problems."""
    return float(np.mean([pass_at_k(len(row), int(sum(map(bool, row))), k) for row in samples]))


def bootstrap_interval(
    values: Sequence[float], level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """
    Percentile bootstrap interval of a mean over problems. Problems are drawn, with all their samples: samples of one
    problem are not independent.

    Args:
        values (`list[float]`): one number a problem.
        level (`float`, *optional*, defaults to `0.95`): coverage.
        resamples (`int`, *optional*, defaults to `2000`): times that as many problems are drawn.
        seed (`int`, *optional*, defaults to `0`): seed of the draws.

    Returns:
        `tuple[float, float]`: lower and upper end.
    """
    if not len(values):
        raise ValueError("There are no problems to draw from.")
    if not 0 < level < 1:
        raise ValueError(f"level={level} must be between 0 and 1.")
    data = np.asarray(values, dtype=np.float64)
    random = np.random.default_rng(seed)
    means = np.array([data[random.integers(0, len(data), len(data))].mean() for _ in range(resamples)])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def summarise(samples: Samples, pass_at: Sequence[int], resamples: int = 2000, seed: int = 0) -> dict[str, object]:
    """
    Mean and pass@k of a suite with their intervals.

    Args:
        samples: for each problem, whether each of its samples is right.
        pass_at (`list[int]`): values of k; those above the number of samples are left out.

    Returns:
        `dict`: `mean`, `mean_interval`, and `pass_at`: k -> `{"value", "interval"}`.
    """

    def with_interval(of: Callable[[Sequence[bool | float]], float]) -> tuple[float, tuple[float, float]]:
        values = [of(row) for row in samples]
        return float(np.mean(values)), bootstrap_interval(values, resamples=resamples, seed=seed)

    mean, interval = with_interval(lambda row: float(np.mean(row)))
    passes = {}
    for k in sorted({k for k in pass_at if k <= min(map(len, samples))}):
        value, ends = with_interval(lambda row, k=k: pass_at_k(len(row), int(sum(map(bool, row))), k))  # type: ignore[misc]
        passes[str(k)] = {"value": value, "interval": list(ends)}
    return {"mean": mean, "mean_interval": list(interval), "pass_at": passes}
