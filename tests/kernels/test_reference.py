"""The reference ops mean what the method says: compared with loops written from its definitions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from sparrow_kernels import reference


FAST = settings(max_examples=30, deadline=None, derandomize=True)

shapes = st.fixed_dictionaries(
    {
        "kv_heads": st.integers(1, 3),
        "group": st.integers(1, 4),
        "head_dim": st.sampled_from([1, 3, 8]),
        "page_size": st.sampled_from([1, 2, 4, 8]),
        "sink": st.integers(0, 2),
        "recent": st.integers(1, 3),
    }
)


def paged(keys, page_size, order):
    """`(num_tokens, num_kv_heads, head_dim)` laid out in pages: page `i` of the sequence at `order[i]` of the pool.
    What no token fills holds large numbers, that a wrong mask would let through."""
    num_tokens, heads, dim = keys.shape
    pool = torch.full((heads, max(order) + 1, page_size, dim), 1e3)
    for token in range(num_tokens):
        pool[:, order[token // page_size], token % page_size] = keys[token]
    return pool


def landmarks_of(keys, page_size, order):
    num_pages = len(keys) // page_size
    landmarks = torch.full((keys.shape[1], max(order) + 1, keys.shape[2]), 1e3)
    for page in range(num_pages):
        landmarks[:, order[page]] = keys[page * page_size : (page + 1) * page_size].mean(0)
    return landmarks


def sequence(shape, num_tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    kv = shape["kv_heads"], shape["head_dim"]
    query = torch.randn(num_tokens, kv[0] * shape["group"], kv[1], generator=generator)
    key, value = (torch.randn(num_tokens, *kv, generator=generator) for _ in range(2))
    order = torch.randperm(2 * (num_tokens // shape["page_size"] + 1), generator=generator).tolist()
    return query, key, value, order[: num_tokens // shape["page_size"] + 1]


def test_store_kv_writes_slots_and_landmarks_of_pages_that_fill_up():
    pools = [torch.zeros(2, 5, 4, 3), torch.zeros(2, 5, 4, 2), torch.full((2, 5, 3), 7.0)]
    key, value = torch.randn(6, 2, 3), torch.randn(6, 2, 2)
    slots = [4 * 3 + 1, 4 * 3 + 2, 4 * 3 + 3, 0, 4 * 1 + 3, 4 * 4 + 2]
    pools[0][:, 3, 0] = old = torch.randn(2, 3)

    reference.store_kv(key, value, torch.tensor(slots), *pools)

    for token, slot in enumerate(slots):
        assert torch.equal(pools[0][:, slot // 4, slot % 4], key[token])
        assert torch.equal(pools[1][:, slot // 4, slot % 4], value[token])
    torch.testing.assert_close(pools[2][:, 3], (old + key[0] + key[1] + key[2]) / 4)
    torch.testing.assert_close(pools[2][:, 1], key[4] / 4)
    for page in (0, 2, 4):  # their last slot was not written
        assert torch.equal(pools[2][:, page], torch.full((2, 3), 7.0))


@FAST
@given(shapes, st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), min_size=1, max_size=4), st.integers(0, 99))
def test_select_pages(shape, queries, seed):
    page_size = shape["page_size"]
    num_tokens = max(position for position, _ in queries) + 1
    query, key, _, order = sequence(shape, num_tokens, seed)
    positions = torch.tensor([position for position, _ in queries])
    chosen = reference.select_pages(
        query[positions],
        landmarks_of(key, page_size, order),
        torch.tensor(order).expand(len(queries), -1),
        positions,
        torch.tensor([budget for _, budget in queries]),
        page_size,
        shape["sink"],
        shape["recent"],
    )
    for i, (position, budget) in enumerate(queries):
        for head in range(shape["kv_heads"]):
            group = query[position, head * shape["group"] : (head + 1) * shape["group"]].numpy()
            expected = oracle.choose_pages(
                group, key[:, head].numpy(), position, budget,
                page_size=page_size, sink=shape["sink"], recent=shape["recent"],
            )  # fmt: skip
            assert set(chosen[i, head].nonzero().flatten().tolist()) == expected


def test_of_equal_scores_the_earlier_page_wins():
    landmarks = torch.ones(1, 9, 2)
    chosen = reference.select_pages(
        torch.ones(1, 2, 2), landmarks, torch.arange(9)[None], torch.tensor([33]), torch.tensor([2]), 4, 1, 2
    )
    assert chosen[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 7, 8]


def test_published_layout_at_a_boundary():
    """16 tokens a page, 1 sink and 2 recent pages, budget 1: positions 63 and 64 have no and one page to leave out."""
    landmarks = torch.arange(6.0)[None, :, None]
    table = torch.arange(6).expand(3, -1)
    positions, budgets = torch.tensor([63, 64, 80]), torch.tensor([1, 1, 1])
    chosen = reference.select_pages(torch.ones(3, 1, 1), landmarks, table, positions, budgets, 16, 1, 2)
    assert [row.nonzero().flatten().tolist() for row in chosen[:, 0]] == [[0, 1, 2, 3], [0, 2, 3, 4], [0, 3, 4, 5]]


@FAST
@given(
    shapes,
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from([None, 1, 5, 64]),
    st.sampled_from([None, 2.0]),
    st.integers(0, 99),
)
def test_paged_attention(shape, positions, chooses, window, softcap, seed):
    page_size, group = shape["page_size"], shape["group"]
    query, key, value, order = sequence(shape, max(positions) + 1, seed)
    rows = torch.tensor(positions)
    chosen = torch.ones(len(positions), shape["kv_heads"], len(order), dtype=torch.bool)
    if chooses:  # any choice will do, as long as the query's own page is in it
        chosen = torch.rand(chosen.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
        chosen[torch.arange(len(positions)), :, rows // page_size] = True
    out = reference.paged_attention(
        query[rows],
        paged(key, page_size, order),
        paged(value, page_size, order),
        torch.tensor(order).expand(len(positions), -1),
        rows,
        chosen if chooses else None,
        scaling=0.4,
        sliding_window=window,
        softcap=softcap,
    )
    for i, position in enumerate(positions):
        for head in range(shape["kv_heads"] * group):
            kv_head = head // group
            pages = set(chosen[i, kv_head].nonzero().flatten().tolist())
            tokens = oracle.visible_tokens(position, pages, page_size=page_size, window=window)
            keys, values = key[:, kv_head].numpy(), value[:, kv_head].numpy()
            expected = oracle.attend(query[position, head].numpy(), keys, values, tokens, scaling=0.4, softcap=softcap)
            np.testing.assert_allclose(out[i, head].numpy(), expected, atol=1e-5)


@FAST
@given(
    shapes,
    st.integers(1, 36),
    st.integers(1, 20),
    st.sampled_from([None, "rising", 0, 1, 2, 2**30]),
    st.sampled_from([None, 1, 7]),
    st.sampled_from([None, 2.0]),
    st.integers(0, 99),
)
def test_teacher_forced_attention(shape, num_tokens, prompt_length, budget, window, softcap, seed):
    query, key, value, _ = sequence(shape, num_tokens, seed)
    budgets = None
    if budget is not None:
        budgets = torch.arange(num_tokens) // 8 if budget == "rising" else torch.full((num_tokens,), budget)
    out = reference.teacher_forced_attention(
        query,
        key,
        value,
        min(prompt_length, num_tokens),
        budgets,
        page_size=shape["page_size"],
        sink_pages=shape["sink"],
        recent_pages=shape["recent"],
        scaling=0.4,
        sliding_window=window,
        softcap=softcap,
    )
    expected = oracle.whole_sequence(
        query.numpy(), key.numpy(), value.numpy(), min(prompt_length, num_tokens), budgets,
        page_size=shape["page_size"], sink=shape["sink"], recent=shape["recent"],
        scaling=0.4, window=window, softcap=softcap,
    )  # fmt: skip
    np.testing.assert_allclose(out.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_of_teacher_forced_attention(softcap):
    """In float64 the gradients are those of finite differences, so the choice of pages itself carries none."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(11, heads, 2, dtype=torch.float64, generator=generator, requires_grad=True) for heads in (4, 2, 2)
    )

    def attend(query, key, value):
        return reference.teacher_forced_attention(
            query, key, value, 3, torch.arange(11) // 5, page_size=2, sink_pages=1, recent_pages=2,
            scaling=0.7, softcap=softcap,
        )  # fmt: skip

    assert torch.autograd.gradcheck(attend, (query, key, value))
