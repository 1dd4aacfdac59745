"""Pooled histograms against NumPy on the raw values, and their statistics against other ways to compute them."""

import json
import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow_trl.monitor import AcceptanceHistogram
from sparrow_trl.monitor.beta import regularized_beta
from sparrow_trl.monitor.histogram import EDGES, order_statistics


def acceptance_like(tokens, seed=0, at_one=0.4):
    """Many values near 1, and a tail."""
    generator = np.random.default_rng(seed)
    values = generator.beta(6.0, 0.6, tokens)
    values[generator.random(tokens) < at_one] = 1.0
    return values


def histogram_of(values, positions=None, **options):
    histogram = AcceptanceHistogram(**options)
    positions = np.zeros(len(values), dtype=np.int64) if positions is None else positions
    histogram.add(torch.from_numpy(positions), torch.from_numpy(values))
    return histogram


def cell_width(value):
    return max(
        width for low, high, width in zip(EDGES[:-1], EDGES[1:], np.diff(EDGES), strict=True) if low <= value <= high
    )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    tokens=st.integers(1, 400),
    quantile=st.sampled_from([0.0, 0.01, 0.05, 0.37, 0.5, 0.95, 1.0]),
)
def test_percentiles_are_numpys_within_a_cell(seed, tokens, quantile):
    values = acceptance_like(tokens, seed)
    found = histogram_of(values).percentile(quantile)
    ordered = np.sort(values)
    rank = quantile * (tokens - 1)
    allowed = max(cell_width(ordered[math.floor(rank)]), cell_width(ordered[math.ceil(rank)]))
    assert abs(found - np.quantile(values, quantile)) <= allowed + 1e-12


def test_tail_of_many_values_is_numpys_to_a_fraction_of_a_cell():
    values = acceptance_like(100_000, at_one=0.8)
    histogram = histogram_of(values)
    assert histogram.percentile(0.05) == pytest.approx(np.quantile(values, 0.05), abs=2e-4)
    assert histogram.percentile(0.15) == pytest.approx(np.quantile(values, 0.15), abs=2e-5)
    assert histogram.mean() == pytest.approx(values.mean(), abs=1e-12)
    assert histogram.tokens() == 100_000


def test_edges():
    assert EDGES[0] == 0
    assert EDGES[-1] == 1
    assert (np.diff(EDGES) > 0).all()
    for value, width in ((0.3, 1e-3), (0.86, 2e-4), (0.995, 1e-5), (0.99995, 1e-6)):
        assert cell_width(value) == pytest.approx(width)
    for value in (0.86, 0.999):
        assert np.abs(EDGES - value).min() < 1e-12


def test_a_bin_holds_its_positions():
    positions = np.array([0, 1999, 2000, 3999, 4000, 11_999])
    values = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    histogram = histogram_of(values, positions)
    assert len(histogram) == 6
    assert [histogram.tokens(index) for index in range(8)] == [2, 2, 1, 0, 0, 1, 0, 0]
    assert [histogram.mean(index) for index in (0, 1, 2, 5)] == pytest.approx([0.15, 0.35, 0.5, 0.6])
    assert math.isnan(histogram.mean(3))
    assert math.isnan(histogram.percentile(0.05, 7))
    last_is_open = histogram_of(values, positions, num_bins=2)
    assert [last_is_open.tokens(index) for index in range(2)] == [2, 4]
    narrow = histogram_of(values, positions, bin_tokens=100)
    assert narrow.tokens(19) == 1
    assert narrow.tokens(20) == 1


def test_parts_add_up_to_the_whole():
    """Two processes and three steps give the counts that one would have; their percentiles do not average to its."""
    values, positions = acceptance_like(3000), np.random.default_rng(1).integers(0, 9000, 3000)
    values[positions > 6000] **= 2
    whole, pooled, tails = histogram_of(values, positions), AcceptanceHistogram(), []
    for part in np.array_split(np.arange(3000)[np.argsort(values)], 6):
        piece = histogram_of(values[part], positions[part])
        pooled.merge(piece)
        tails.append(piece.percentile())
    assert torch.equal(pooled.counts, whole.counts)
    torch.testing.assert_close(pooled.sums, whole.sums)
    assert pooled.percentile() == whole.percentile()
    assert abs(np.mean(tails) - whole.percentile()) > 0.05


def test_reduce_adds_processes_of_different_lengths():
    short, long = histogram_of(np.array([0.5]), np.array([10])), histogram_of(np.array([0.7]), np.array([4500]))
    other = {}

    def total(tensor):
        other["shape"] = tensor.shape
        padded = torch.cat([torch.cat([long.counts, long.sums[:, None]], 1)])
        return tensor + padded

    short.reduce(total, lambda length: max(length, len(long)))
    assert other["shape"][0] == 3
    assert [short.tokens(index) for index in range(3)] == [1, 0, 1]
    assert short.mean(2) == pytest.approx(0.7)


def test_state_survives_json():
    histogram = histogram_of(acceptance_like(500), np.random.default_rng(0).integers(0, 9000, 500), num_bins=4)
    loaded = AcceptanceHistogram()
    loaded.load_state_dict(json.loads(json.dumps(histogram.state_dict())))
    assert torch.equal(loaded.counts, histogram.counts)
    assert torch.equal(loaded.sums, histogram.sums)
    for side in (loaded, histogram):
        side.add(torch.tensor([100_000]), torch.tensor([0.25]))
    assert torch.equal(loaded.counts, histogram.counts)
    state = histogram.state_dict()
    state["edges"] = state["edges"][1:]
    with pytest.raises(ValueError, match="other cells"):
        loaded.load_state_dict(state)


def binomial(tokens, k, quantile):
    return math.comb(tokens, k) * quantile**k * (1 - quantile) ** (tokens - k)


@pytest.mark.parametrize("tokens", [1, 30, 72, 73, 400, 1000])
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_order_statistics_are_the_innermost_that_keep_the_confidence(tokens, confidence):
    below, above = order_statistics(tokens, 0.05, confidence)
    miss = (1 - confidence) / 2

    def missed_below(rank):  # the percentile lies below the value of this 0-based rank
        return sum(binomial(tokens, k, 0.05) for k in range(rank + 1))

    def missed_above(rank):
        return sum(binomial(tokens, k, 0.05) for k in range(rank + 1, tokens + 1))

    assert below is None or missed_below(below) <= miss
    assert missed_below(0 if below is None else below + 1) > miss
    assert above is None or missed_above(above) <= miss
    assert missed_above(tokens - 1 if above is None else above - 1) > miss


def test_order_statistics_of_many_tokens_follow_the_normal_distribution():
    tokens = 10_000_000
    below, above = order_statistics(tokens, 0.05, 0.95)
    half = 1.959964 * math.sqrt(tokens * 0.05 * 0.95)
    assert below == pytest.approx(tokens * 0.05 - half, abs=3)
    assert above == pytest.approx(tokens * 0.05 + half, abs=3)


def test_interval_covers_the_true_tail_as_often_as_it_says():
    true, hits = 0.05 ** (1 / 6), 0  # of the largest of six uniform numbers
    generator = np.random.default_rng(0)
    for _ in range(400):
        tail = histogram_of(generator.random((300, 6)).max(axis=1)).tail(confidence=0.9)
        assert tail.low <= tail.value <= tail.high
        hits += tail.low <= true <= tail.high
    assert 0.88 <= hits / 400 <= 0.97


def test_interval_without_enough_values_is_open():
    tail = histogram_of(np.array([0.9, 0.95])).tail()
    assert (tail.low, tail.tokens) == (0.0, 2)
    assert 0.9 <= tail.value <= tail.high
    nothing = AcceptanceHistogram().tail()
    assert math.isnan(nothing.value)
    assert (nothing.low, nothing.high, nothing.tokens) == (0.0, 1.0, 0.0)


@pytest.mark.parametrize(("a", "b"), [(0.5, 0.5), (1.0, 1.0), (2.0, 3.0), (8.3, 0.7), (0.2, 5.0), (30.0, 40.0)])
def test_regularized_beta(a, b):
    x = np.linspace(0.002, 0.998, 25)
    expected = [float(mpmath.betainc(a, b, 0, value, regularized=True)) for value in x]
    assert regularized_beta(x, a, b) == pytest.approx(expected, abs=1e-12)


def test_beta_fit_finds_the_distribution_and_its_distance():
    generator = np.random.default_rng(0)
    values = np.concatenate([0.999 * generator.beta(5.0, 0.8, 50_000), np.ones(150_000)])
    fit = histogram_of(values).fit_beta()
    assert fit.a == pytest.approx(5.0, rel=0.03)
    assert fit.b == pytest.approx(0.8, rel=0.03)
    assert fit.share == pytest.approx(0.25, abs=1e-3)
    assert fit.tokens == 50_000
    assert fit.ks < 0.01
    halves = np.concatenate([np.full(500, 0.2), np.full(500, 0.8)])
    poor = histogram_of(halves).fit_beta()
    distance = abs(0.5 - float(mpmath.betainc(poor.a, poor.b, 0, 0.8 / 0.999, regularized=True)))
    assert poor.ks >= distance - 1e-3
    assert poor.ks > 0.2


def test_beta_fit_of_too_little():
    fit = histogram_of(np.array([1.0, 1.0])).fit_beta()
    assert math.isnan(fit.a)
    assert fit.share == 0
    with pytest.raises(ValueError, match=r"scale=0\.9991234"):
        histogram_of(np.array([0.5])).fit_beta(scale=0.9991234)


def test_clear_forgets_bins():
    histogram = histogram_of(np.array([0.1, 0.2, 0.3]), np.array([0, 2000, 4000]))
    histogram.clear([1, 7])
    assert [histogram.tokens(index) for index in range(3)] == [1, 0, 1]
    histogram.clear()
    assert histogram.tokens() == 0


def test_bad_values():
    histogram = AcceptanceHistogram()
    with pytest.raises(ValueError, match=r"1\.5"):
        histogram.add(torch.tensor([0]), torch.tensor([1.5]))
    with pytest.raises(ValueError, match="nan"):
        histogram.add(torch.tensor([0]), torch.tensor([math.nan]))
    with pytest.raises(ValueError, match="position"):
        histogram.add(torch.tensor([-1]), torch.tensor([0.5]))
    with pytest.raises(ValueError, match="equal rows"):
        histogram.add(torch.tensor([0, 1]), torch.tensor([0.5]))
    with pytest.raises(ValueError, match="bin_tokens=0"):
        AcceptanceHistogram(bin_tokens=0)
    with pytest.raises(ValueError, match="do not add up"):
        histogram.merge(AcceptanceHistogram(bin_tokens=100))
    with pytest.raises(ValueError, match="confidence=1"):
        histogram.tail(confidence=1)
