"""The acceptance rate and its bounds, against sums over the whole vocabulary in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow_trl.monitor import LazyLogits, acceptance_bounds, acceptance_rate, top_k_bounds, top_logprobs
from sparrow_trl.monitor import acceptance as module


def random_logits(tokens, vocab_size, scale=3.0, seed=0, noise=0.5):
    """Two sides that are near each other, as dense and sparse are."""
    generator = torch.Generator().manual_seed(seed)
    dense = scale * torch.randn(tokens, vocab_size, generator=generator)
    return dense, dense + noise * torch.randn(tokens, vocab_size, generator=generator)


def brute_force(dense, sparse, temperature=1.0):
    """The definition, token by token and id by id."""
    rates = []
    for row_dense, row_sparse in zip(dense.double() / temperature, sparse.double() / temperature, strict=True):
        p, q = row_dense.exp() / row_dense.exp().sum(), row_sparse.exp() / row_sparse.exp().sum()
        rates.append(sum(min(a, b) for a, b in zip(p.tolist(), q.tolist(), strict=True)))
    return torch.tensor(rates)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk_tokens", [None, 1, 4, 100])
def test_rate_is_the_sum_over_the_vocabulary(temperature, chunk_tokens):
    dense, sparse = random_logits(11, 97)
    found = acceptance_rate(dense, sparse, temperature, chunk_tokens)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, brute_force(dense, sparse, temperature), rtol=0, atol=2e-6)
    assert found.min() < 0.9


def test_identical_distributions_have_rate_one_and_disjoint_ones_zero():
    dense, _ = random_logits(5, 50)
    assert acceptance_rate(dense, dense.clone()).tolist() == [1.0] * 5
    apart = torch.full((1, 10), -100.0)
    one, other = apart.clone(), apart.clone()
    one[0, 2], other[0, 3] = 100.0, 100.0
    assert acceptance_rate(one, other).item() == 0.0


def test_rates_near_one_keep_their_digits():
    """A millionth of a difference is seen in float32, which a sum of minima would round away."""
    dense = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0))
    sparse = dense.clone()
    sparse[0, 7] += 2e-3
    expected = 1 - brute_force(dense, sparse).item()
    assert 1 - acceptance_rate(dense, sparse).item() == pytest.approx(expected, rel=0.03)
    assert expected < 5e-6


def test_bf16_logits():
    dense, sparse = (side.bfloat16() for side in random_logits(4, 60))
    torch.testing.assert_close(acceptance_rate(dense, sparse), brute_force(dense, sparse), rtol=0, atol=2e-6)


def test_lazy_logits_are_never_all_there(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    head, hidden = torch.randn(301, 8, generator=generator), torch.randn(50, 8, generator=generator)
    other = hidden + 0.1 * torch.randn(50, 8, generator=generator)
    seen = []

    def project(rows):
        seen.append(len(rows))
        return rows @ head.T

    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 301 * 6)
    found = acceptance_rate(LazyLogits(hidden, project), LazyLogits(other, project))
    assert max(seen) == 6
    torch.testing.assert_close(found, brute_force(hidden @ head.T, other @ head.T), rtol=0, atol=2e-6)


def sorted_top(logits, k):
    """The k most likely ids and their log-probabilities, by sorting."""
    logprobs = logits.double().log_softmax(-1)
    order = logprobs.argsort(-1, descending=True)[:, :k]
    return order, logprobs.gather(-1, order)


def shared_top(dense, sparse, k):
    """The sum of minima over the ids in both top-k sets."""
    p, q = dense.double().softmax(-1), sparse.double().softmax(-1)
    totals = []
    for row in range(len(dense)):
        both = set(sorted_top(dense[row : row + 1], k)[0][0].tolist())
        both &= set(sorted_top(sparse[row : row + 1], k)[0][0].tolist())
        totals.append(sum(min(p[row, v].item(), q[row, v].item()) for v in both))
    return torch.tensor(totals, dtype=torch.float32)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocab_size=st.integers(2, 80),
    k=st.integers(1, 20),
    scale=st.floats(0.1, 8.0),
    noise=st.floats(0.0, 4.0),
)
def test_bounds_hold_the_exact_rate(seed, vocab_size, k, scale, noise):
    dense, sparse = random_logits(6, vocab_size, scale, seed, noise)
    k = min(k, vocab_size)
    exact = brute_force(dense, sparse)
    lower, upper = top_k_bounds(*top_logprobs(dense, k), *top_logprobs(sparse, k))
    full = acceptance_bounds(dense, *top_logprobs(sparse, k), chunk_tokens=4)
    torch.testing.assert_close(lower, shared_top(dense, sparse, k), rtol=0, atol=2e-6)
    torch.testing.assert_close(full.top_k, lower, rtol=0, atol=2e-6)
    slack = 4e-6
    for low, high in ((lower, upper), (full.lower, full.upper)):
        assert (low <= exact + slack).all()
        assert (exact <= high + slack).all()
        assert low.min() >= 0
        assert high.max() <= 1
    assert (full.lower >= full.top_k).all()
    if k == vocab_size:
        torch.testing.assert_close(lower, exact, rtol=0, atol=2e-6)
        torch.testing.assert_close(upper, exact, rtol=0, atol=2e-6)


def test_upper_bound_is_reached():
    """The rest of each side can be equal, so that no smaller bound would hold."""
    dense = torch.tensor([[0.5, 0.3, 0.1, 0.1]]).log()
    sparse = torch.tensor([[0.3, 0.5, 0.1, 0.1]]).log()
    lower, upper = top_k_bounds(*top_logprobs(dense, 2), *top_logprobs(sparse, 2))
    assert lower.item() == pytest.approx(0.6)
    assert upper.item() == pytest.approx(acceptance_rate(dense, sparse).item())


def test_bounds_from_a_full_side_use_the_temperature():
    dense, sparse = random_logits(5, 60)
    ids, logprobs = top_logprobs(sparse, 10, temperature=0.5)
    bounds, exact = acceptance_bounds(dense, ids, logprobs, temperature=0.5), brute_force(dense, sparse, 0.5)
    assert (bounds.lower <= exact + 2e-6).all()
    assert (exact <= bounds.upper + 2e-6).all()
    assert (bounds.upper - bounds.lower).max() < 0.2


def test_top_logprobs_are_sorted():
    logits, _ = random_logits(7, 40)
    ids, logprobs = top_logprobs(logits, 5, chunk_tokens=3)
    expected_ids, expected = sorted_top(logits, 5)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(logprobs, expected.float())


def test_no_tokens():
    empty = torch.empty(0, 10)
    assert acceptance_rate(empty, empty).shape == (0,)
    ids, logprobs = top_logprobs(empty, 3)
    assert acceptance_bounds(empty, ids, logprobs).upper.shape == (0,)


def test_bad_arguments():
    dense, sparse = random_logits(3, 10)
    with pytest.raises(ValueError, match=r"temperature=0"):
        acceptance_rate(dense, sparse, temperature=0)
    with pytest.raises(ValueError, match="3 tokens and sparse logits of 2"):
        acceptance_rate(dense, sparse[:2])
    with pytest.raises(ValueError, match=r"\(3, 10\) and sparse \(3, 9\)"):
        acceptance_rate(dense, sparse[:, :9])
    with pytest.raises(ValueError, match="chunk_tokens=0"):
        acceptance_rate(dense, sparse, chunk_tokens=0)
    with pytest.raises(ValueError, match="sparse ids of 2"):
        acceptance_bounds(dense, *top_logprobs(sparse[:2], 4))
