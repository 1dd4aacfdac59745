"""`paged_attention` in Triton equals the reference op in float64, whatever lies in slots that no query sees."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import benchmark_paged_attention
from pools import DEVICE, DTYPES, assert_close, make_pool, make_query, poison
from sparrow_kernels import paged_attention as op
from sparrow_kernels import reference
from sparrow_kernels.paged_attention import paged_attention, scratch_size, split_sizes
from sparrow_kernels.select_pages import select_pages


FAST = settings(max_examples=25, deadline=None, derandomize=True)


@pytest.fixture
def short_chunks(monkeypatch):
    """Chunks of 64 tokens, so that short contexts have many."""
    monkeypatch.setattr(op, "MIN_CHUNK", 64)


def expect(pool, query, chosen=None, positions=None, table=None, **options):
    """The reference in float64; rows of padding give 0."""
    positions = pool.positions if positions is None else positions
    table = pool.table if table is None else table
    out = torch.zeros(*query.shape[:2], pool.value_pages.shape[3], dtype=torch.float64, device=DEVICE)
    rows = positions >= 0
    if rows.any():
        out[rows] = reference.paged_attention(
            query[rows].double(), *pool.double(), table[rows].long(), positions[rows],
            None if chosen is None else chosen[rows], **options,
        )  # fmt: skip
    return out


def attend(pool, query, page_list=None, num_selected=None, *, positions=None, table=None, **options):
    """The op with poisoned output and scratch."""
    kv_heads, _, page_size, _ = pool.key_pages.shape
    table = pool.table if table is None else table
    starts = options.get("query_starts")
    _, num_splits = split_sizes(
        num_sequences=len(query) if starts is None else len(starts) - 1,
        num_kv_heads=kv_heads,
        page_size=page_size,
        max_pages=table.shape[1],
        max_queries=options.get("max_queries", 1),
        sliding_window=options.get("sliding_window"),
        max_selected=None if page_list is None else page_list.shape[2],
    )
    value_dim = pool.value_pages.shape[3]
    out = poison(*query.shape[:2], value_dim, dtype=query.dtype)
    scratch = poison(scratch_size(len(query), query.shape[1], value_dim, num_splits))
    found = paged_attention(
        query, pool.key_pages, pool.value_pages, table, pool.positions if positions is None else positions,
        page_list, num_selected, out=out, scratch=scratch, **options,
    )  # fmt: skip
    assert found is out
    return out


def choose(pool, query, budgets, max_selected=None):
    """Pages as `select_pages` lists them, and as a mask."""
    page_list, num_selected = select_pages(
        query, pool.landmarks, pool.table, pool.positions, torch.as_tensor(budgets, device=DEVICE),
        page_size=pool.key_pages.shape[2], sink_pages=1, recent_pages=2,
        max_selected=max_selected or pool.table.shape[1],
    )  # fmt: skip
    chosen = torch.zeros(len(query), pool.landmarks.shape[0], pool.table.shape[1], dtype=torch.bool, device=DEVICE)
    for i, count in enumerate(num_selected.tolist()):
        chosen[i].scatter_(1, page_list[i, :, :count].long(), True)
        page_list[i, :, count:] = 2**30  # undefined, so not to be read
    return page_list, num_selected, chosen


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_shapes(sparse, head_dim, dtype, short_chunks):
    pool = make_pool([16 * 18 + 5, 1, 0, 16 * 9], head_dim=head_dim, dtype=dtype)
    query = make_query(pool, 3)
    pages = choose(pool, query, [5, 2, 2, 1]) if sparse else (None, None, None)
    out = attend(pool, query, *pages[:2], scaling=0.3)
    assert_close(out, expect(pool, query, pages[2], scaling=0.3))
    assert (out[2] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_groups(kv_heads, group, dtype):
    pool = make_pool([16 * 20 + 5, 16 * 7], kv_heads=kv_heads, dtype=dtype)
    query = make_query(pool, group)
    assert_close(attend(pool, query, scaling=0.3), expect(pool, query, scaling=0.3))
    page_list, num_selected, chosen = choose(pool, query, [3, 9])
    assert_close(attend(pool, query, page_list, num_selected, scaling=0.3), expect(pool, query, chosen, scaling=0.3))


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_boundaries(sparse, page_size, short_chunks):
    """Around the ends of pages, of blocks of keys and of chunks; and where the budget just does not leave a page out."""
    lengths = [n + d for n in (page_size, 64, 128, 4 * page_size, 5 * page_size) for d in (-1, 0, 1)]
    pool = make_pool(lengths, page_size, kv_heads=1, head_dim=64, table_dtype=torch.int32)
    query = make_query(pool, 2)
    pages = choose(pool, query, [1] * len(lengths), 4) if sparse else (None, None, None)
    out = attend(pool, query, *pages[:2], scaling=0.3)
    assert_close(out, expect(pool, query, pages[2], scaling=0.3))


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 64, 65, 1000])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_sliding_window(sparse, window, short_chunks):
    """Pages before the window are freed: the page table points elsewhere, at NaN."""
    lengths = [1, 16, 17, 64, 65, 200, 333, 0]
    pool = make_pool(lengths, head_dim=64, window=None if sparse else window)
    query = make_query(pool, 2)
    pages = choose(pool, query, [2] * len(lengths)) if sparse else (None, None, None)
    out = attend(pool, query, *pages[:2], scaling=0.3, sliding_window=window)
    assert_close(out, expect(pool, query, pages[2], scaling=0.3, sliding_window=window))


@pytest.mark.parametrize("softcap", [0.5, 2.0, 50.0])
@pytest.mark.parametrize("scaling", [1e-3, 0.3, 5.0])
def test_softcap(softcap, scaling):
    pool = make_pool([40, 333], head_dim=64)
    query = make_query(pool, 2)
    out = attend(pool, query, scaling=scaling, softcap=softcap)
    assert_close(out, expect(pool, query, scaling=scaling, softcap=softcap))
    page_list, num_selected, chosen = choose(pool, query, [2, 5])
    out = attend(pool, query, page_list, num_selected, scaling=scaling, softcap=softcap, sliding_window=40)
    assert_close(out, expect(pool, query, chosen, scaling=scaling, softcap=softcap, sliding_window=40))


def test_scores_far_apart(short_chunks):
    """One key takes all the weight, and others are tiny beyond what exp2 can tell from 0."""
    pool = make_pool([333], head_dim=64)
    query = 100 * make_query(pool, 2)
    assert_close(attend(pool, query, scaling=1.0), expect(pool, query, scaling=1.0))


def pack(counts, lengths, max_queries):
    """Rows `(sequence, position)` of the last `counts[i]` tokens of each sequence, and `query_starts`."""
    rows = [(i, lengths[i] - n + j) for i, n in enumerate(counts) for j in range(n)]
    assert max(counts) <= max_queries
    starts = torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], dtype=torch.int32, device=DEVICE)
    sequences, positions = (torch.tensor(column, device=DEVICE) for column in zip(*rows, strict=True))
    return sequences, positions, starts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("max_queries", [1, 2, 5, 16])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_several_queries_of_a_sequence(group, max_queries, dtype, short_chunks):
    lengths = [max_queries, 16 * 10, 200]
    counts = [max_queries, 1, max_queries // 2]
    pool = make_pool(lengths, head_dim=64, kv_heads=2, dtype=dtype)
    sequences, positions, starts = pack(counts, lengths, max_queries)
    query, table = make_query(pool, group, len(positions)), pool.table[sequences]
    options = {"positions": positions, "table": table, "scaling": 0.3}
    out = attend(pool, query, query_starts=starts, max_queries=max_queries, **options)
    assert_close(out, expect(pool, query, **options))


@pytest.mark.parametrize("window", [1, 7, 16, 40, 1000])
def test_several_queries_with_a_window(window, short_chunks):
    lengths, counts = [200, 16, 81, 330], [4, 3, 0, 2]
    pool = make_pool(lengths, head_dim=64)
    sequences, positions, starts = pack(counts, lengths, 4)
    query, table = make_query(pool, 2, len(positions)), pool.table[sequences]
    options = {"positions": positions, "table": table, "scaling": 0.3, "sliding_window": window, "softcap": 3.0}
    out = attend(pool, query, query_starts=starts, max_queries=4, **options)
    assert_close(out, expect(pool, query, **options))


def test_padding_among_several_queries(short_chunks):
    """A sequence whose last queries are padding, a sequence of padding alone, and rows of no sequence."""
    pool = make_pool([100, 200, 50], head_dim=64)
    positions = torch.tensor([97, 98, -1, -1, 199, -1], device=DEVICE)
    table = pool.table[[0, 0, 0, 2, 1, 2]]
    query = make_query(pool, 2, 6)
    starts = torch.tensor([0, 3, 4, 5], device=DEVICE)
    options = {"positions": positions, "table": table, "scaling": 0.3}
    expected = expect(pool, query, **options)
    out = paged_attention(
        query, pool.key_pages, pool.value_pages, table, positions, scaling=0.3, query_starts=starts, max_queries=3
    )
    assert_close(out, expected)
    assert (out[[2, 3, 5]] == 0).all()
    out = attend(pool, query, query_starts=starts, max_queries=3, **options)
    assert_close(out[:5], expected[:5])
    assert out[5].isnan().all()  # left alone


@FAST
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 12)), min_size=1, max_size=4),
    st.sampled_from([16, 32, 64]),
    st.sampled_from([(1, 1), (2, 3), (1, 7)]),
    st.sampled_from([(64, None), (80, None), (64, 128)]),
    st.sampled_from([None, 1, 20, 64, 500]),
    st.sampled_from([None, 2.0]),
    st.booleans(),
    st.sampled_from([32, 64, 256]),
    st.integers(0, 99),
)
def test_property(rows, page_size, heads, dims, window, softcap, sparse, chunk, seed):
    lengths, budgets = zip(*rows, strict=True)
    if not any(lengths):
        return
    pool = make_pool(
        list(lengths), page_size, heads[0], dims[0], value_dim=dims[1], window=None if sparse else window, seed=seed
    )
    query = make_query(pool, heads[1], seed=seed + 1)
    options = {"scaling": 0.3, "sliding_window": window, "softcap": softcap}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "MIN_CHUNK", chunk)
        pages = choose(pool, query, list(budgets)) if sparse else (None, None, None)
        out = attend(pool, query, *pages[:2], **options)
    assert_close(out, expect(pool, query, pages[2], **options))


def test_many_sequences():
    pool = make_pool([1 + i for i in range(96)], kv_heads=1, head_dim=16)
    query = make_query(pool, 1)
    assert_close(attend(pool, query, scaling=0.3), expect(pool, query, scaling=0.3))


def test_no_queries():
    pool = make_pool([20], head_dim=64)
    out = paged_attention(
        make_query(pool, 2)[:0], pool.key_pages, pool.value_pages, pool.table[:0], pool.positions[:0], scaling=0.3
    )
    assert out.shape == (0, 4, 64)


def test_one_chunk_needs_no_scratch():
    assert scratch_size(7, 4, 64, 1) == 0
    assert split_sizes(num_sequences=1, num_kv_heads=1, page_size=16, max_pages=16) == (op.MIN_CHUNK, 1)
    assert split_sizes(num_sequences=1, num_kv_heads=1, page_size=16, max_pages=17) == (op.MIN_CHUNK, 2)


def test_chunks_by_shape():
    """32 sequences of 32K tokens with 8 KV heads, all and 256 pages of 16; and one sequence at the limit."""
    sizes = {"num_kv_heads": 8, "page_size": 16}
    assert split_sizes(num_sequences=32, max_pages=2048, **sizes) == (1024, 32)
    assert split_sizes(num_sequences=32, max_pages=2048, max_selected=256, **sizes) == (512, 8)
    assert split_sizes(num_sequences=1, max_pages=8192, **sizes) == (512, 256)
    assert split_sizes(num_sequences=32, max_pages=2048, sliding_window=512, **sizes)[1] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 4, 64, dtype=torch.bfloat16)}, "`query` is bfloat16, but must be float32"),
        ({"query": torch.zeros(2, 3, 64)}, "3 query heads are not a multiple of 2 KV heads"),
        ({"query": torch.zeros(2, 34, 64)}, "17 query heads share a KV head, but the kernels take at most 16"),
        ({"query": torch.zeros(2, 4, 32)}, r"`query` has shape \(2, 4, 32\)"),
        ({"page_table": torch.zeros(3, 4, dtype=torch.int64)}, r"`page_table` has shape \(3, 4\)"),
        ({"max_queries": 17}, "max_queries is 17, but must be 1 to 16"),
        ({"max_queries": 2}, "max_queries is 2, which asks for query_starts"),
        ({"sliding_window": 0}, "sliding_window is 0, but must be at least 1"),
        ({"softcap": 0.0}, "softcap is 0.0, but must be above 0"),
        ({"num_selected": torch.zeros(2, dtype=torch.int32)}, "page_list and num_selected come together"),
        ({"out": torch.zeros(2, 4, 32)}, r"`out` has shape \(2, 4, 32\)"),
        ({"scratch": torch.zeros(7)}, "`scratch` has 7 elements, but 1040 are needed"),
    ],
)
def test_errors_name_the_argument(change, message):
    arguments = {
        "query": torch.zeros(2, 4, 64),
        "key_pages": torch.zeros(2, 9, 16, 64),
        "value_pages": torch.zeros(2, 9, 16, 64),
        "page_table": torch.zeros(2, 20, dtype=torch.int64),
        "positions": torch.zeros(2, dtype=torch.int64),
        "scaling": 0.3,
    }
    with pytest.raises(ValueError, match=message):
        paged_attention(**arguments | change)


@pytest.mark.parametrize("shape", [(9, 3, 64), (16, 8, 128)], ids=str)
def test_the_gate_of_the_benchmark(shape):
    assert benchmark_paged_attention.error(shape, DEVICE) < 1e-5
