"""Log-probabilities in Triton equal those of a log-softmax in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pools import DEVICE, DTYPES
from sparrow_kernels import token_logprobs as op
from sparrow_kernels.token_logprobs import token_logprobs
from test_page_mask import poisoned


@pytest.fixture(autouse=True, scope="module")
def poisoned_scratch():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "scratch", poisoned)
        yield


def check(logits, tokens, temperature=1.0, top=20):
    found, best = token_logprobs(logits, tokens, temperature=temperature, top=top)
    expected = (logits.double() / temperature).log_softmax(-1)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected.gather(-1, tokens[:, None].long())[:, 0], atol=2e-5, rtol=1e-6)
    if top == 0:
        assert best is None
        return
    ids, values = best
    count = min(top, logits.shape[1])
    order = logits.float().argsort(dim=-1, descending=True, stable=True)[:, :count]
    assert ids.dtype == torch.int64
    assert torch.equal(ids, order)
    torch.testing.assert_close(values.double(), expected.gather(-1, order), atol=2e-5, rtol=1e-6)


def random_logits(num_rows, vocab_size, dtype=torch.float32, scale=5.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * scale
    tokens = torch.randint(vocab_size, (num_rows,), generator=generator)
    return logits.to(dtype).to(DEVICE), tokens.to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 19, 20, 4095, 4096, 4097, 49152])
def test_vocabularies(vocab_size, dtype):
    check(*random_logits(2, vocab_size, dtype), temperature=0.7)


@pytest.mark.parametrize("vocab_size", [151936, 262144])
def test_large_vocabularies(vocab_size):
    check(*random_logits(1, vocab_size), temperature=1.3)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.integers(1, 3),
    st.integers(1, 300),
    st.sampled_from([0, 1, 5, 20, 64]),
    st.floats(0.05, 10.0),
    st.integers(0, 99),
)
def test_property(num_rows, vocab_size, top, temperature, seed):
    check(*random_logits(num_rows, vocab_size, seed=seed), temperature, top)


def test_of_equal_logits_the_lower_id_comes_first():
    """Ties within a part of the vocabulary, between parts, and between zeros of either sign."""
    logits = torch.zeros(2, 9000, device=DEVICE)
    logits[0, ::2] = -0.0
    logits[1, 4000:8500:7] = 3.0
    check(logits, torch.tensor([5, 4007], device=DEVICE))


def test_banned_tokens_and_rows_that_are_a_slice():
    logits, tokens = random_logits(3, 5000)
    logits = logits[:, 3:]  # the rows are not aligned
    logits[:, 100:] = float("-inf")  # the second part has no token at all
    check(logits, tokens.clamp(max=99), top=20)
    logits[:, 5:] = float("-inf")
    ids, values = token_logprobs(logits, tokens.clamp(max=4), top=20)[1]
    assert ids[:, 5:].tolist() == [list(range(5, 20))] * 3
    assert (values[:, 5:] == float("-inf")).all()


def test_what_is_no_number_shows():
    logits = torch.zeros(5, 300, device=DEVICE)
    logits[0, 7] = float("nan")
    logits[1, 7] = float("inf")
    logits[2] = float("-inf")
    tokens = torch.tensor([1, 1, 1, -1, 300], device=DEVICE)
    assert token_logprobs(logits, tokens)[0].isnan().all()


@pytest.mark.parametrize(
    ("logits", "tokens", "options", "message"),
    [
        (torch.zeros(2, 9), torch.zeros(3, dtype=torch.int64), {}, "`tokens` has shape"),
        (torch.zeros(2, 9, dtype=torch.float64), torch.zeros(2, dtype=torch.int64), {}, "`logits` is float64"),
        (torch.zeros(2, 9), torch.zeros(2, dtype=torch.int64), {"temperature": 0.0}, "temperature is 0.0"),
        (torch.zeros(2, 9), torch.zeros(2, dtype=torch.int64), {"top": 65}, "top is 65"),
        (torch.zeros(2, 0), torch.zeros(2, dtype=torch.int64), {}, "no columns"),
    ],
)
def test_refusals(logits, tokens, options, message):
    with pytest.raises(ValueError, match=message):
        token_logprobs(logits, tokens, **options)
