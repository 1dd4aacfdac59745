"""pass@k against the closed form and against drawing every subset; intervals against what is known of them."""

from fractions import Fraction
from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow_trl.evaluation.statistics import (
    bootstrap_interval,
    mean_pass_at_k,
    pass_at_k,
    summarise,
)


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_closed_form(case):
    n, right, k = case
    assert pass_at_k(n, right, k) == pytest.approx(float(1 - Fraction(comb(n - right, k), comb(n, k))), abs=1e-12)


@pytest.mark.parametrize("right", range(7))
@pytest.mark.parametrize("k", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(right, k):
    samples = [True] * right + [False] * (6 - right)
    subsets = list(combinations(samples, k))
    assert pass_at_k(6, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_is_unbiased():
    random = np.random.default_rng(0)
    draws = [pass_at_k(8, int(random.binomial(8, 0.3)), 4) for _ in range(20_000)]
    assert np.mean(draws) == pytest.approx(1 - 0.7**4, abs=4 * np.std(draws) / np.sqrt(20_000))


@pytest.mark.parametrize(
    ("n", "right", "k", "said"),
    [(4, 1, 5, "k=5"), (4, 1, 0, "k=0"), (4, 5, 1, "num_right=5"), (4, -1, 1, "num_right=-1")],
)
def test_mistakes(n, right, k, said):
    with pytest.raises(ValueError, match=said):
        pass_at_k(n, right, k)


def test_means():
    samples = [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
    assert summarise(samples, [])["mean"] == pytest.approx(0.5)
    assert mean_pass_at_k(samples, 1) == pytest.approx(0.5)
    assert mean_pass_at_k(samples, 2) == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert mean_pass_at_k(samples, 4) == pytest.approx(2 / 3)


def test_an_interval_is_that_of_the_normal_approximation_where_that_holds():
    values = np.random.default_rng(1).random(400)
    low, high = bootstrap_interval(values)
    half = 1.96 * values.std() / np.sqrt(400)
    assert low == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.15 * half)
    assert bootstrap_interval(values) == (low, high)
    narrow = bootstrap_interval(values, level=0.5)
    assert low < narrow[0] < narrow[1] < high


def test_intervals_of_constants_and_mistakes():
    assert bootstrap_interval([0.25] * 5) == (0.25, 0.25)
    with pytest.raises(ValueError, match="no problems"):
        bootstrap_interval([])
    with pytest.raises(ValueError, match=r"level=1\.5"):
        bootstrap_interval([1.0], level=1.5)


def test_a_summary_draws_problems_and_leaves_out_what_is_too_large():
    samples = [[1, 0], [1, 1], [0, 0]] * 10
    result = summarise(samples, (1, 2, 16))
    assert result["mean"] == pytest.approx(0.5)
    assert list(result["pass_at"]) == ["1", "2"]
    assert result["pass_at"]["1"]["value"] == pytest.approx(0.5)
    assert result["pass_at"]["2"]["value"] == pytest.approx(2 / 3)
    assert result["mean_interval"] == list(bootstrap_interval([0.5, 1.0, 0.0] * 10))
