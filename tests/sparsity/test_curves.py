"""Tails with confidence, curves, the search of a budget, and where stretches go."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow_trl.sparsity.calibration.curves import Curve, design_effect, rising, tail_of
from sparrow_trl.sparsity.calibration.plan import bins_within, place_stretches
from sparrow_trl.sparsity.calibration.search import BinSearch, extrapolate, shared_effect


def test_the_tail_is_numpys_percentile():
    rng = np.random.default_rng(0)
    stretches = [rng.beta(8, 1, size) for size in (50, 80, 3, 120)]
    tail = tail_of(stretches)
    pooled = np.concatenate(stretches)
    assert tail.value == np.percentile(pooled, 5)
    assert tail.mean == pytest.approx(pooled.mean()) and tail.tokens == 253
    assert tail.low <= tail.value <= tail.high


@pytest.mark.parametrize("tokens", [300, 2000])
def test_intervals_hold_the_true_percentile_as_often_as_they_say(tokens):
    rng = np.random.default_rng(1)
    truth = 0.05**0.25  # of Beta(4, 1)
    hits = 0
    for _ in range(600):
        tail = tail_of([rng.beta(4, 1, tokens)], effect=1.0, confidence=0.9)
        hits += tail.low <= truth <= tail.high
    assert 0.875 < hits / 600 < 0.97


def test_tokens_that_repeat_count_once():
    """Twenty copies of each value in a stretch of its own: the design effect is the number of copies."""
    rng = np.random.default_rng(2)
    values = rng.beta(4, 1, 2000)
    repeated = [np.full(20, value) for value in values]
    assert design_effect(repeated) == pytest.approx(20, rel=0.1)
    once, copies = tail_of([values], effect=1.0), tail_of(repeated)
    assert copies.effective_tokens == pytest.approx(2000, rel=0.1)
    assert (copies.low, copies.high) == pytest.approx((once.low, once.high), abs=4e-3)


def test_independent_tokens_have_an_effect_near_one():
    rng = np.random.default_rng(3)
    groups = [[rng.beta(4, 1, 64) for _ in range(16)] for _ in range(40)]
    assert 1.0 <= shared_effect(groups) < 1.25
    assert design_effect([np.ones(10), np.ones(10)]) == 1.0
    assert design_effect([np.array([0.5])]) == 1.0


def test_no_tokens():
    tail = tail_of([np.empty(0)])
    assert (tail.low, tail.high, tail.tokens) == (0.0, 1.0, 0) and math.isnan(tail.value)


def test_a_tail_of_few_tokens_has_no_lower_end():
    assert tail_of([np.full(58, 0.9)], effect=1.0, confidence=0.9).low == 0.0
    assert tail_of([np.full(59, 0.9)], effect=1.0, confidence=0.9).low == 0.9


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 9)), min_size=1, max_size=7))
@settings(max_examples=60, deadline=None)
def test_rising_is_the_least_squares_fit(points):
    """Against the max-min formula of isotonic regression."""
    values, weights = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    count = len(values)

    def mean(i, j):
        return np.average(values[i : j + 1], weights=weights[i : j + 1])

    expected = [max(min(mean(i, j) for j in range(k, count)) for i in range(k + 1)) for k in range(count)]
    assert rising(values, weights) == pytest.approx(expected, abs=1e-9)


def test_a_curve_interpolates_in_the_log_of_kept_pages():
    curve = Curve([5, 13, 29], [0.7, 0.8, 0.9], [1, 1, 1], always=3)
    assert curve(5) == 0.7 and curve(13) == pytest.approx(0.8) and curve(100) == 0.9 and curve(1) == 0.7
    assert curve(math.sqrt(8 * 16) - 3) == pytest.approx(0.75)


@given(st.floats(0.5, 0.99))
@settings(max_examples=60, deadline=None)
def test_cheapest_is_the_first_budget_that_meets_the_target(target):
    curve = Curve([4, 9, 20, 41], [0.6, 0.75, 0.74, 0.95], [3, 1, 1, 2], always=3)
    expected = next((budget for budget in range(4, 42) if curve(budget) >= target), None)
    assert curve.cheapest(target) == expected


def simulated(search, truth, target, seed, tokens=1024, first_effect=1.0):
    """Run a search against a known curve: rates are Beta-like with the 5th percentile `truth(budget)`."""
    rng = np.random.default_rng(seed)
    uniforms = rng.random(tokens)
    rounds = 0
    while (budget := search.next_budget(target, first_effect, 0.9)) is not None:
        power = math.log(truth(budget)) / math.log(0.05)
        search.measured[budget] = np.split(uniforms**power, 16)
        rounds += 1
        assert rounds < 12
    return rounds


@pytest.mark.parametrize("needed", [3, 12, 40, 90, 300])
@pytest.mark.parametrize("seed", range(4))
def test_the_search_finds_the_budget(needed, seed):
    """The cheapest budget lies at or above the true one, and not far above."""
    search = BinSearch(3, largest=497, first=64, always=3)
    rounds = simulated(search, lambda budget: max(0.05, 1 - 0.14 * ((needed + 3) / (budget + 3)) ** 0.7), 0.86, seed)
    assert rounds <= 8
    curve = search.curve(search.tails(1.0, 0.9), "low")
    found = curve.cheapest(0.86)
    assert needed * 0.97 - 1 <= found <= needed * 1.6 + 3


def test_a_search_ends_at_the_whole_bin():
    search = BinSearch(0, largest=122, first=32, always=3)
    assert simulated(search, lambda budget: 0.5, 0.86, 0) <= 4
    assert max(search.measured) == 122 and search.curve(search.tails(1.0, 0.9), "low").cheapest(0.86) is None
    easy = BinSearch(0, largest=122, first=32, always=3)
    simulated(easy, lambda budget: 0.99, 0.86, 0)
    assert min(easy.measured) == 2


def test_moved_budgets_follow_the_power_law():
    search = BinSearch(1, largest=400, first=32, always=3)
    truth = lambda budget: 1 - 0.5 * (budget + 3) ** -0.4  # noqa: E731
    rng = np.random.default_rng(0).random(200_000)
    for budget in (10, 20, 40, 80):
        search.measured[budget] = [rng ** (math.log(truth(budget)) / math.log(0.05))]
    slope = search.slope(search.tails(1.0, 0.9))
    assert slope == pytest.approx(0.4, abs=0.02)
    moved = search.moved(20, truth(20), truth(30), slope)
    assert 29 <= moved <= 32
    assert search.moved(20, 0.5, 0.999, 0.3) == 400


def test_extrapolation_is_conservative():
    assert extrapolate({0: 20, 1: 30, 3: 45}, 6, 2000) == [20, 30, 45, 45, 58, 71]
    assert extrapolate({2: 30}, 4, 2000) == [30, 30, 30, 42]
    assert extrapolate({0: 20, 1: 18}, 2, 2000) == [20, 20]
    with pytest.raises(ValueError):
        extrapolate({}, 3, 2000)


@given(
    st.integers(1, 40), st.integers(1, 30), st.lists(st.integers(60, 900), min_size=1, max_size=4), st.integers(1, 50)
)
@settings(max_examples=80, deadline=None)
def test_stretches_lie_inside_their_bins_and_texts(per_bin, length, lengths, prompt):
    placed = place_stretches(
        lengths, [prompt] * len(lengths), range(4), bin_tokens=200, max_context=700, per_bin=per_bin, length=length
    )
    streams = [s.stream for group in placed.values() for s in group]
    assert len(set(streams)) == len(streams)
    for index, group in placed.items():
        for stretch in group:
            assert max(200 * index, prompt - 1) <= stretch.start
            assert stretch.stop <= min(200 * index + 200, 700)
            assert stretch.start < lengths[stretch.text]
        if max(lengths) >= 200 * index + 200 and 200 * index + 200 <= 700:
            assert len(group) == per_bin


def test_stretches_cover_a_bin_evenly_and_share_the_texts():
    placed = place_stretches([5000] * 3, [1] * 3, [1], bin_tokens=2000, max_context=4000, per_bin=9, length=100)[1]
    starts = [stretch.start for stretch in placed]
    assert starts[0] == 2000 and starts[-1] == 3900
    assert set(np.diff(starts)) <= {237, 238}
    assert [stretch.text for stretch in placed] == [0, 1, 2] * 3


@pytest.mark.parametrize(("context", "bins"), [(8000, 4), (8192, 4), (8999, 4), (9000, 5), (1000, 1), (999, 0)])
def test_half_a_bin_counts(context, bins):
    assert bins_within(context, 2000) == bins
