"""The ops with static shapes equal the reference, whatever the holes, the padding and what lies in unused memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow_kernels import reference, static_ops


def pool(num_kv_heads, num_pages, page_size, head_dim, generator, dtype=torch.float32):
    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    shape = (num_kv_heads, num_pages, page_size, head_dim)
    return draw(*shape), draw(*shape), draw(num_kv_heads, num_pages, head_dim)


def tables(positions, page_size, num_pages, width, generator):
    """A table of distinct pages for each row, its unused columns pointing anywhere."""
    free = torch.randperm(num_pages, generator=generator).tolist()
    table = torch.randint(num_pages, (len(positions), width), generator=generator)
    for row, position in enumerate(positions):
        for column in range(position // page_size + 1):
            table[row, column] = free.pop()
    return table


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_selection_and_attention_equal_the_reference(data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    page_size, group, num_kv_heads = (data.draw(st.sampled_from(values)) for values in ((1, 4, 8), (1, 3), (1, 2)))
    positions = data.draw(st.lists(st.integers(-1, 6 * page_size), min_size=1, max_size=4))
    sink, recent = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 3))
    width, head_dim = 8, 8
    key_pages, value_pages, landmarks = pool(num_kv_heads, 32, page_size, head_dim, generator)
    if data.draw(st.booleans()):  # equal scores: the earlier page wins
        landmarks[:] = landmarks[:, :1]
    table = tables(positions, page_size, 32, width, generator)
    where = torch.tensor(positions)
    budgets = torch.randint(0, 5, (len(positions),), generator=generator)
    query = torch.randn(len(positions), num_kv_heads * group, head_dim, generator=generator)
    real = where >= 0
    expected = reference.select_pages(
        query[real], landmarks, table[real], where[real], budgets[real], page_size, sink, recent
    )
    listed, count = static_ops.select_pages(
        query, landmarks, table.int(), where, budgets, page_size=page_size, sink_pages=sink, recent_pages=recent,
        max_selected=min(width, int(budgets.max()) + sink + recent),
    )  # fmt: skip
    assert (count[~real] == 0).all()
    for row, chosen in zip(real.nonzero()[:, 0].tolist(), expected, strict=True):
        for head in range(num_kv_heads):
            pages = chosen[head].nonzero()[:, 0].tolist()
            assert listed[row, head, : count[row]].tolist() == pages
    for window, softcap in ((None, None), (2 * page_size + 1, 3.0), (1, None)):
        options = {"scaling": 0.3, "sliding_window": window, "softcap": softcap}
        dense = static_ops.paged_attention(query, key_pages, value_pages, table.int(), where, **options)
        assert (dense[~real] == 0).all()
        of_reference = reference.paged_attention(
            query[real], key_pages, value_pages, table[real], where[real], **options
        )
        torch.testing.assert_close(dense[real], of_reference, atol=1e-5, rtol=1e-5)
    sparse = static_ops.paged_attention(
        query, key_pages, value_pages, table.int(), where, listed, count, scaling=0.3, softcap=2.0
    )
    of_reference = reference.paged_attention(
        query[real], key_pages, value_pages, table[real], where[real], expected, scaling=0.3, softcap=2.0
    )
    torch.testing.assert_close(sparse[real], of_reference, atol=1e-5, rtol=1e-5)
    assert (sparse[~real] == 0).all()


@pytest.mark.parametrize("slots", [[5], [-1, -1], [-1, 7, 12, -1, 3], [4, 5, 6, 7, -1], [0, -1]])
@pytest.mark.parametrize("with_landmarks", [True, False])
def test_store_equals_the_reference(slots, with_landmarks):
    generator = torch.Generator().manual_seed(0)
    found, expected = ([t.clone() for t in pool(2, 4, 4, 8, torch.Generator().manual_seed(1))] for _ in range(2))
    key, value = torch.randn(2, len(slots), 2, 8, generator=generator)
    real = [i for i, slot in enumerate(slots) if slot >= 0]
    reference.store_kv(key[real], value[real], torch.tensor(slots)[real], *expected)
    if not with_landmarks:
        expected[2] = found[2].clone()
    static_ops.store_kv(key, value, torch.tensor(slots), *found[:2], found[2] if with_landmarks else None)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_token_logprobs(temperature):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 4
    tokens = torch.tensor([0, 49, 7])
    expected = (logits.double() / temperature).log_softmax(-1)
    found, top = static_ops.token_logprobs(logits, tokens, temperature=temperature, top=5)
    torch.testing.assert_close(found.double(), expected[range(3), tokens], atol=1e-5, rtol=0)
    ids, values = top
    assert ids.tolist() == expected.argsort(-1, descending=True)[:, :5].tolist()
    torch.testing.assert_close(values.double(), expected.gather(-1, ids), atol=1e-5, rtol=0)
    assert static_ops.token_logprobs(logits, tokens)[1] is None
