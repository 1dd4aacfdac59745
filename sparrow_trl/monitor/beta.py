"""The scaled Beta distribution that acceptance rates below 0.999 follow (arXiv 2606.08446), fitted to a histogram."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch


class ScaledBetaFit(NamedTuple):
    """The values below `scale` as `scale * Beta(a, b)`."""

    a: float
    b: float
    scale: float
    share: float
    """Part of all values that lies below `scale`."""
    ks: float
    """Largest distance between the fitted distribution function and the empirical one (Kolmogorov-Smirnov)."""
    tokens: float
    """Values below `scale`."""


def fit_scaled_beta(edges: np.ndarray, counts: np.ndarray, total: float, scale: float) -> ScaledBetaFit:
    """
    Fit by maximum likelihood, each value taken at the middle of its cell.

    Args:
        edges (`np.ndarray`): `(num_cells + 1,)`, of the cells below `scale`, from 0 to `scale`.
        counts (`np.ndarray`): `(num_cells,)`.
        total (`float`): number of all values, those at and above `scale` included.
        scale (`float`): upper end of the distribution.

    Returns:
        [`ScaledBetaFit`]; NaN where fewer than two cells have values.
    """
    tokens = float(counts.sum())
    share = tokens / total if total else math.nan
    if np.count_nonzero(counts) < 2:
        return ScaledBetaFit(math.nan, math.nan, scale, share, math.nan, tokens)
    middles = (edges[:-1] + edges[1:]) / (2 * scale)
    weights = counts / tokens
    mean = float(weights @ middles)
    variance = float(weights @ (middles - mean) ** 2)
    size = max(mean * (1 - mean) / variance - 1, 1e-3)  # the method of moments, where Newton starts
    a, b = _maximize(
        mean * size,
        (1 - mean) * size,
        float(weights @ np.log(middles)),
        float(weights @ np.log1p(-middles)),
    )
    distances = np.abs(np.cumsum(weights)[:-1] - regularized_beta(edges[1:-1] / scale, a, b))
    return ScaledBetaFit(a, b, scale, share, float(distances.max()), tokens)


def _maximize(a: float, b: float, mean_log: float, mean_log_rest: float) -> tuple[float, float]:
    """The maximum of the likelihood of Beta(a, b), given the means of log(x) and log(1 - x): Newton's method."""
    for _ in range(200):
        digamma, trigamma = (
            torch.special.polygamma(order, torch.tensor([a, b, a + b], dtype=torch.float64)).tolist()
            for order in (0, 1)
        )
        gradient = np.array([digamma[0] - digamma[2] - mean_log, digamma[1] - digamma[2] - mean_log_rest])
        curvature = np.diag(trigamma[:2]) - trigamma[2]
        step = np.linalg.solve(curvature, gradient)
        # At most halved or doubled at a time, so that both stay positive
        new_a, new_b = np.clip([a - step[0], b - step[1]], [a / 2, b / 2], [2 * a, 2 * b]).tolist()
        converged = abs(new_a - a) < 1e-10 * a and abs(new_b - b) < 1e-10 * b
        a, b = new_a, new_b
        if converged:
            break
    return a, b


def regularized_beta(x: np.ndarray, a: float, b: float) -> np.ndarray:
    """
    The distribution function of Beta(a, b), by its continued fraction (Abramowitz and Stegun 26.5.8).

    Args:
        x (`np.ndarray`): float64, in (0, 1).
        a, b (`float`): above 0.
    """
    swap = x > (a + 1) / (a + b + 2)  # there the fraction of the other side, I_{1-x}(b, a), converges faster
    result = np.empty_like(x)
    result[~swap] = _lower_part(x[~swap], a, b)
    result[swap] = 1 - _lower_part(1 - x[swap], b, a)
    return result


def _lower_part(x: np.ndarray, a: float, b: float) -> np.ndarray:
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    return np.exp(a * np.log(x) + b * np.log1p(-x) - log_beta) / a * _fraction(x, a, b)


def _fraction(x: np.ndarray, a: float, b: float, terms: int = 500) -> np.ndarray:
    """1 / (1 + d1 x / (1 + d2 x / (1 + ...))), evaluated forward (modified Lentz)."""
    tiny = 1e-300
    value = np.ones_like(x)
    c, d = np.ones_like(x), np.zeros_like(x)
    for term in range(terms):
        m = term // 2
        if term == 0:
            coefficient = np.ones_like(x)
        elif term % 2:
            coefficient = -(a + m) * (a + b + m) / ((a + 2 * m) * (a + 2 * m + 1)) * x
        else:
            coefficient = m * (b - m) / ((a + 2 * m - 1) * (a + 2 * m)) * x
        d = 1 + coefficient * d
        d = 1 / np.where(np.abs(d) < tiny, tiny, d)
        c = 1 + coefficient / c
        c = np.where(np.abs(c) < tiny, tiny, c)
        factor = c * d
        value = value * factor
        if term and np.all(np.abs(factor - 1) < 1e-14):
            break
    # The first term made c = 2: the fraction is what follows the leading 1
    return value - 1
