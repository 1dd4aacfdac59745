"""`select_pages` in Triton chooses what the reference op chooses, in ascending order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import benchmark_select_pages
from pools import DEVICE, DTYPES, make_pool, make_query, poison
from sparrow_kernels import reference
from sparrow_kernels import select_pages as op
from sparrow_kernels.select_pages import select_pages


FAST = settings(max_examples=25, deadline=None, derandomize=True)


def choose(pool, query, budgets, sink=1, recent=2, max_selected=None, page_size=None, positions=None):
    """The op on poisoned scratch and output; its choice as `(num_queries, num_kv_heads, max_pages)` bool."""
    page_size = page_size or pool.key_pages.shape[2]
    kv_heads, max_pages = pool.landmarks.shape[0], pool.table.shape[1]
    positions = pool.positions if positions is None else positions
    num_queries = len(positions)
    max_selected = max_selected or max_pages
    budgets = torch.as_tensor(budgets, device=DEVICE)
    out = poison(num_queries, kv_heads, max_selected, dtype=torch.int32), poison(num_queries, dtype=torch.int32)
    page_list, num_selected = select_pages(
        query, pool.landmarks, pool.table, positions, budgets, page_size=page_size, sink_pages=sink,
        recent_pages=recent, max_selected=max_selected, out=out, scores=poison(num_queries * kv_heads * max_pages),
    )  # fmt: skip
    assert page_list is out[0] and num_selected is out[1]
    chosen = torch.zeros(num_queries, kv_heads, max_pages, dtype=torch.bool)
    for i, count in enumerate(num_selected.tolist()):
        rest = page_list[i, :, count:]
        assert (rest == -(2**30)).all()  # nothing is written beyond the list
        for head in range(kv_heads):
            pages = page_list[i, head, :count].tolist()
            assert pages == sorted(set(pages))
            chosen[i, head, pages] = True
    return chosen


def expect(pool, query, budgets, sink=1, recent=2):
    """The choice of the reference, its scores in float64; rows of padding choose nothing."""
    chosen = torch.zeros(len(pool.positions), pool.landmarks.shape[0], pool.table.shape[1], dtype=torch.bool)
    rows = pool.positions >= 0
    chosen[rows.cpu()] = reference.select_pages(
        query[rows].double(), pool.landmarks.double(), pool.table[rows].long(), pool.positions[rows],
        torch.as_tensor(budgets, device=DEVICE)[rows], pool.key_pages.shape[2], sink, recent,
    ).cpu()  # fmt: skip
    return chosen


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (2, 3), (1, 8), (3, 2), (2, 5)])
def test_shapes(kv_heads, group, head_dim, dtype):
    pool = make_pool([16 * 21 + 3, 0, 1, 16 * 9], kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    query = make_query(pool, group)
    assert torch.equal(choose(pool, query, [5, 3, 3, 1]), expect(pool, query, [5, 3, 3, 1]))


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize(("sink", "recent"), [(0, 1), (1, 2), (3, 4)])
def test_boundaries(page_size, sink, recent):
    """Contexts just before, at and after the last page that still fits, and page boundaries; all in one launch."""
    budget = 2
    fits = (sink + recent + budget) * page_size
    lengths = [1, page_size, page_size + 1, fits - 1, fits, fits + 1, fits + page_size, fits + page_size + 1]
    pool = make_pool(lengths, page_size, head_dim=16)
    query = make_query(pool, 2)
    chosen = choose(pool, query, [budget] * len(lengths), sink, recent)
    assert torch.equal(chosen, expect(pool, query, [budget] * len(lengths), sink, recent))
    pages = [-(-length // page_size) for length in lengths]
    assert chosen[:, 0].sum(1).tolist() == [min(count, sink + recent + budget) for count in pages]


def test_budgets_differ_by_query():
    lengths = [16 * 40 + 7] * 9
    pool = make_pool(lengths, head_dim=16, table_dtype=torch.int32)
    query, budgets = make_query(pool, 2), [0, 1, 2, 7, 35, 37, 38, 39, 2**30]
    assert torch.equal(choose(pool, query, budgets), expect(pool, query, budgets))


@pytest.mark.parametrize("budget", [1, 2, 3, 6, 11, 17, 18])
def test_of_equal_scores_the_earlier_page_wins(budget):
    """Small integers: scores are exact, with many ties, zeros of both signs among them."""
    pool = make_pool([16 * 21], kv_heads=3, head_dim=16)
    generator = torch.Generator().manual_seed(budget)
    pool.landmarks[:] = torch.randint(-1, 2, pool.landmarks.shape, generator=generator).float().to(DEVICE)
    pool.landmarks[0] = 0.0
    pool.landmarks[1, :, 1:] = -0.0
    query = torch.randint(-1, 2, (1, 3, 16), generator=generator).float().to(DEVICE)
    query[:, 2, 2:] = 0
    assert torch.equal(choose(pool, query, [budget]), expect(pool, query, [budget]))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), 3e38, -3e38, 1e-45, -1e-45])
def test_extreme_scores(value):
    pool = make_pool([16 * 20], kv_heads=1, head_dim=16)
    pool.landmarks[:, pool.table[0, [4, 5, 9]], 0] = value
    query = torch.zeros(1, 1, 16, device=DEVICE)
    query[..., 0] = 1.0
    assert torch.equal(choose(pool, query, [5]), expect(pool, query, [5]))


def test_a_result_too_narrow_is_cut_not_overrun():
    pool = make_pool([16 * 20], kv_heads=2, head_dim=16)
    query = make_query(pool, 1)
    chosen = choose(pool, query, [9], max_selected=6)
    full = expect(pool, query, [9])
    for head in range(2):
        assert chosen[0, head].nonzero().flatten().tolist() == full[0, head].nonzero().flatten().tolist()[:6]


@FAST
@given(
    st.lists(st.tuples(st.integers(0, 700), st.integers(0, 50)), min_size=1, max_size=4),
    st.sampled_from([16, 32]),
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from([(1, 1), (2, 3), (1, 7)]),
    st.booleans(),
    st.integers(0, 99),
)
def test_property(rows, page_size, sink, recent, heads, integers, seed):
    lengths, budgets = zip(*rows, strict=True)
    if not any(lengths):
        return
    pool = make_pool(list(lengths), page_size, heads[0], head_dim=16, seed=seed)
    query = make_query(pool, heads[1], seed=seed + 1)
    if integers:  # ties everywhere
        query = torch.round(query)[:, :: heads[1]].repeat_interleave(heads[1], dim=1)  # so that their mean is exact
        pool.landmarks[:] = torch.round(pool.landmarks)
    chosen = choose(pool, query, list(budgets), sink, recent)
    assert torch.equal(chosen, expect(pool, query, list(budgets), sink, recent))


@pytest.mark.parametrize("num_pages", [2047, 2048, 2049, 8191, 8192])
def test_long_contexts(num_pages):
    """Up to 131,072 tokens: a landmark serves as the page itself."""
    pool = make_pool([1], kv_heads=1, head_dim=16)
    generator = torch.Generator().manual_seed(num_pages)
    pool.landmarks = torch.randn(1, num_pages, 16, generator=generator).to(DEVICE)
    pool.table = torch.randperm(num_pages, generator=generator)[None].to(DEVICE)
    pool.landmarks[:, pool.table[0, -2:]] = float("nan")
    pool.positions = torch.tensor([16 * num_pages - 1], device=DEVICE)
    query = torch.randn(1, 2, 16, generator=generator).to(DEVICE)
    assert torch.equal(choose(pool, query, [253]), expect(pool, query, [253]))


def test_many_queries():
    pool = make_pool([16 * 7 + i % 5 for i in range(64)], kv_heads=1, head_dim=16)
    query = make_query(pool, 1)
    budgets = [i % 6 for i in range(64)]
    assert torch.equal(choose(pool, query, budgets), expect(pool, query, budgets))


def test_no_queries():
    pool = make_pool([20], head_dim=16)
    nothing = pool.positions[:0]
    page_list, num_selected = select_pages(
        make_query(pool, 2)[:0], pool.landmarks, pool.table[:0], nothing, nothing, page_size=16, sink_pages=1,
        recent_pages=2, max_selected=4,
    )  # fmt: skip
    assert page_list.shape == (0, 2, 4) and num_selected.shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recent_pages": 0}, "recent_pages is 0, but must be at least 1"),
        ({"sink_pages": -1}, "sink_pages is -1"),
        ({"page_size": 24}, "page_size is 24"),
        ({"max_selected": 0}, "max_selected is 0"),
        ({"query": torch.zeros(2, 3, 16)}, "3 query heads are not a multiple of 2 KV heads"),
        ({"query": torch.zeros(2, 2, 12), "landmarks": torch.zeros(2, 4, 12)}, "head dim of `query` is 12"),
        ({"query": torch.zeros(2, 34, 16)}, "17 query heads share a KV head, but the kernels take at most 16"),
        ({"page_table": torch.zeros(2, op.MAX_PAGES + 1, dtype=torch.int64)}, "page_table has 8193 pages"),
        ({"scores": torch.zeros(3)}, "`scores` has 3 elements, but 16 are needed"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, r"`positions` has shape \(3,\)"),
    ],
)
def test_errors_name_the_argument(change, message):
    arguments = {
        "query": torch.zeros(2, 4, 16),
        "landmarks": torch.zeros(2, 9, 16),
        "page_table": torch.zeros(2, 4, dtype=torch.int64),
        "positions": torch.zeros(2, dtype=torch.int64),
        "budgets": torch.zeros(2, dtype=torch.int64),
        "page_size": 16,
        "sink_pages": 1,
        "recent_pages": 2,
        "max_selected": 4,
    }
    with pytest.raises(ValueError, match=message):
        select_pages(**arguments | change)


@pytest.mark.parametrize("shape", [(9, 3, 64), (16, 8, 128)], ids=str)
def test_the_gate_of_the_benchmark(shape):
    assert benchmark_select_pages.error(shape, DEVICE) < 1e-5
