"""The fast ops equal the reference ops: over shapes, dtypes, page layouts and budgets, with NaN in all scratch memory."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from sparrow_kernels import reference, torch_ops


FAST = settings(max_examples=40, deadline=None, derandomize=True)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class PoisonedWorkspace(torch_ops.Workspace):
    """Hands out scratch tensors full of NaN."""

    def get(self, name, shape, like):
        return super().get(name, shape, like).fill_(float("nan"))


@dataclass
class Pool:
    """The pages of several sequences, and all that the ops take beside the queries."""

    keys: list  # (num_tokens, num_kv_heads, head_dim) of each sequence, as stored
    values: list
    key_pages: torch.Tensor
    value_pages: torch.Tensor
    landmarks: torch.Tensor
    table: torch.Tensor
    positions: torch.Tensor  # of each sequence's last token, which is the query
    runs: list

    @property
    def sizes(self):
        kv_heads, num_pages, page_size, _ = self.key_pages.shape
        return {"page_size": page_size, "num_kv_heads": kv_heads, "num_pages": num_pages}


def make_pool(lengths, page_size, kv_heads, head_dim, layout="scattered", dtype=torch.float32, value_dim=None, seed=0):
    """`layout`: "contiguous", "scattered", or "shared" (all sequences begin with the full pages of the first one).
    Slots that no token fills hold large finite numbers, as a recycled page may; so do pages that nobody owns."""
    generator = torch.Generator().manual_seed(seed)
    value_dim = value_dim or head_dim
    counts = [-(-length // page_size) for length in lengths]
    shared = min(lengths) // page_size if layout == "shared" else 0
    free = list(range(1, 3 + 2 * sum(counts)))
    if layout == "scattered":
        free = [free[i] for i in torch.randperm(len(free), generator=generator).tolist()]
    common = [free.pop(0) for _ in range(shared)]
    pages = [common + [free.pop(0) for _ in range(count - shared)] for count in counts]
    num_pages = 4 + 2 * sum(counts)
    shapes = {"key": head_dim, "value": value_dim}
    pools = {
        name: (torch.randn(kv_heads, num_pages, page_size, dim, generator=generator) * 50).to(dtype)
        for name, dim in shapes.items()
    }
    landmarks = (torch.randn(kv_heads, num_pages, head_dim, generator=generator) * 50).to(dtype)
    tokens = {name: [] for name in shapes}
    prefix = {
        name: torch.randn(shared * page_size, kv_heads, dim, generator=generator) for name, dim in shapes.items()
    }
    for length, table in zip(lengths, pages, strict=True):
        for name, dim in shapes.items():
            own = torch.randn(length - shared * page_size, kv_heads, dim, generator=generator)
            tokens[name].append(torch.cat([prefix[name], own]).to(dtype))
            for place in range(length):
                pools[name][:, table[place // page_size], place % page_size] = tokens[name][-1][place]
        for place in range(length // page_size):
            mean = pools["key"][:, table[place]].float().mean(1)
            landmarks[:, table[place]] = mean.to(dtype)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
    runs = []
    for i, (row, length) in enumerate(zip(pages, lengths, strict=True)):
        table[i, : len(row)] = torch.tensor(row)
        cuts = [j for j in range(1, len(row)) if row[j] != row[j - 1] + 1 or j == shared]
        pieces = zip([0, *cuts], [*cuts, len(row)], strict=True)
        runs.append([(row[a], min(b * page_size, length) - a * page_size) for a, b in pieces])
    positions = torch.tensor(lengths) - 1
    return Pool(tokens["key"], tokens["value"], pools["key"], pools["value"], landmarks, table, positions, runs)


def make_query(pool, group, seed=1):
    shape = len(pool.positions), pool.key_pages.shape[0] * group, pool.key_pages.shape[3]
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(pool.key_pages.dtype)


def relative(found, expected):
    found, expected = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    return ((found - expected).norm() / expected.norm()).item()


def assert_equal(found, expected):
    """fp32: 1e-5 everywhere; lower precision: 1e-2 in relative norm."""
    assert not found.isnan().any()
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, torch.as_tensor(expected).float(), atol=1e-5, rtol=1e-5)
    else:
        assert relative(found, expected) < 1e-2


def sparse(pool, query, budgets, sink=1, recent=2, scaling=0.3, softcap=None, work=None):
    """The three ops of a sparse layer, and the choice of pages as the reference gives it."""
    work = work or PoisonedWorkspace()
    plan = torch_ops.plan_sparse(
        pool.table, pool.positions, torch.as_tensor(budgets),
        sink_pages=sink, recent_pages=recent, dtype=query.dtype, **pool.sizes,
    )  # fmt: skip
    rows = torch_ops.select_rows(query, pool.landmarks, plan, work)
    out = torch_ops.attend_rows(
        query, pool.key_pages, pool.value_pages, rows, plan.token_mask, work, scaling=scaling, softcap=softcap
    )
    return out, chosen_pages(pool, rows, plan.token_mask)


def chosen_pages(pool, rows, token_mask):
    """`(num_queries, num_kv_heads, max_pages)` bool. No page may be chosen twice."""
    kv_heads, num_pages, page_size, _ = pool.key_pages.shape
    chosen = torch.zeros(len(rows), kv_heads, pool.table.shape[1], dtype=torch.bool)
    seen = (token_mask[:, 0, 0] == 0).unflatten(-1, (-1, page_size)).any(-1)
    for i, row in enumerate(rows.tolist()):
        owned = pool.table[i, : int(pool.positions[i]) // page_size + 1].tolist()
        for head in range(kv_heads):
            visible = [r - head * num_pages for r, s in zip(row[head], seen[i].tolist(), strict=True) if s]
            assert len(set(visible)) == len(visible)
            for page in visible:
                chosen[i, head, owned.index(page)] = True
    return chosen


def check_sparse(pool, group, budgets, sink=1, recent=2, softcap=None):
    query = make_query(pool, group)
    out, chosen = sparse(pool, query, budgets, sink, recent, softcap=softcap)
    page_size = pool.sizes["page_size"]
    if query.dtype == torch.float32:  # of nearly equal scores, lower precision may choose another
        expected = reference.select_pages(
            query, pool.landmarks, pool.table, pool.positions, torch.as_tensor(budgets), page_size, sink, recent
        )
        assert torch.equal(chosen, expected)
    for i, position in enumerate(pool.positions.tolist()):
        num_pages = position // page_size + 1
        forced = [p for p in range(num_pages) if p < sink or p >= num_pages - recent]
        assert chosen[i, :, forced].all()
        assert (chosen[i].sum(-1) == len(forced) + min(int(budgets[i]), num_pages - len(forced))).all()
    expected = reference.paged_attention(
        query.float(), pool.key_pages.float(), pool.value_pages.float(), pool.table, pool.positions, chosen,
        scaling=0.3, softcap=softcap,
    )  # fmt: skip
    assert_equal(out, expected)


# Ragged: less than a page, exactly pages, one token more, no more than sink and recent pages, many.
def ragged(page_size):
    return [1, page_size, page_size + 1, 3 * page_size, 3 * page_size + 1, 9 * page_size - 1, 14 * page_size]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "scattered", "shared"])
@pytest.mark.parametrize("page_size", [1, 8, 16, 32, 64])
def test_sparse_attention_over_page_sizes_and_layouts(page_size, layout, dtype):
    lengths = [5 * page_size + n for n in ragged(page_size)] if layout == "shared" else ragged(page_size)
    pool = make_pool(lengths, page_size, 2, 16, layout, dtype)
    check_sparse(pool, 2, [0, 1, 2, 3, 1, 2, 2**30])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", range(1, 9))
def test_sparse_attention_over_heads(group, head_dim, dtype):
    kv_heads = 3 if group < 4 else 1
    check_sparse(make_pool([70, 33, 7], 8, kv_heads, head_dim, dtype=dtype), group, [1, 2, 3])


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sink", [0, 1, 2])
@pytest.mark.parametrize("recent", [1, 2, 3])
@pytest.mark.parametrize("budgets", [[0] * 7, [1] * 7, [0, 5, 0, 2**30, 1, 2, 3], [2**30] * 7], ids=str)
def test_sparse_attention_over_sinks_and_recents(budgets, recent, sink, softcap):
    check_sparse(make_pool(ragged(4), 4, 2, 8), 2, budgets, sink, recent, softcap)


def test_values_of_another_width():
    check_sparse(make_pool(ragged(4), 4, 2, 8, value_dim=12), 2, [2] * 7)


def test_slices_of_queries_that_are_gathered_one_after_the_other(monkeypatch):
    monkeypatch.setitem(torch_ops.GATHER_BYTES, "cpu", 2500)  # less than two queries' keys
    check_sparse(make_pool(ragged(4), 4, 2, 8), 2, [2] * 7)


def test_workspace_is_reused_for_smaller_and_larger_shapes():
    work = PoisonedWorkspace()
    for lengths in ([90, 11], [200, 17, 44], [30]):
        pool = make_pool(lengths, 8, 2, 16)
        query, budgets = make_query(pool, 2), [1] * len(lengths)
        out, _ = sparse(pool, query, budgets, work=work)
        assert torch.equal(out, sparse(pool, query, budgets)[0])
    assert len(work.tensors) == 3  # landmarks, keys, values


@FAST
@given(
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from([0, 1, 2, 5, 2**30])), min_size=1, max_size=5),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 3),
    st.integers(1, 8),
    st.sampled_from([1, 4, 9]),
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from(["contiguous", "scattered", "shared"]),
    st.integers(0, 99),
)
def test_sparse_attention_property(rows, page_size, kv_heads, group, head_dim, sink, recent, layout, seed):
    lengths, budgets = zip(*rows, strict=True)
    check_sparse(make_pool(lengths, page_size, kv_heads, head_dim, layout, seed=seed), group, budgets, sink, recent)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_low_precision_against_float64(dtype):
    """The whole chain against loops in float64, over the stored keys; its choice of pages is nearly the best one."""
    pool = make_pool([75, 40, 130], 8, 2, 64, dtype=dtype)
    query, budgets = make_query(pool, 2), [2, 1, 4]
    out, chosen = sparse(pool, query, budgets, scaling=0.125)
    found, expected = [], []
    for i, position in enumerate(pool.positions.tolist()):
        for head in range(4):
            keys, values = (x[i][:, head // 2].double().numpy() for x in (pool.keys, pool.values))
            pages = set(chosen[i, head // 2].nonzero().flatten().tolist())
            tokens = oracle.visible_tokens(position, pages, page_size=8)
            found.append(out[i, head].double().numpy())
            expected.append(oracle.attend(query[i, head].double().numpy(), keys, values, tokens, scaling=0.125))
    assert relative(np.stack(found), np.stack(expected)) < 1e-2
    exact = reference.select_pages(
        query.double(), pool.landmarks.double(), pool.table, pool.positions, torch.tensor(budgets), 8, 1, 2
    )
    assert (chosen == exact).float().mean() > 0.97


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("window", [None, 1, 5, 8, 17, 500])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("page_size", [1, 8, 32])
def test_window_attention(page_size, softcap, window, dtype):
    pool = make_pool([1, 7, 8, 9, 40, 100], page_size, 2, 16, dtype=dtype)
    query = make_query(pool, 3)
    rows, mask = torch_ops.plan_window(pool.table, pool.positions, window, dtype=dtype, **pool.sizes)
    out = torch_ops.attend_rows(
        query, pool.key_pages, pool.value_pages, rows, mask, PoisonedWorkspace(), scaling=0.3, softcap=softcap
    )
    expected = reference.paged_attention(
        query.float(), pool.key_pages.float(), pool.value_pages.float(), pool.table, pool.positions,
        scaling=0.3, sliding_window=window, softcap=softcap,
    )  # fmt: skip
    assert_equal(out, expected)
    if window is not None:  # no more pages than the window touches
        assert rows.shape[-1] <= -(-window // page_size) + 1


@FAST
@given(
    st.lists(st.integers(1, 2500), min_size=1, max_size=5),
    st.sampled_from(["contiguous", "scattered", "shared"]),
    st.sampled_from([8, 64]),
    st.sampled_from([(1, 1), (2, 3), (1, 8)]),
    st.integers(0, 99),
)
def test_segments_property(lengths, layout, page_size, heads, seed):
    pool = make_pool(lengths, page_size, heads[0], 8, layout, seed=seed)
    check_segments(pool, heads[1])


def check_segments(pool, group):
    query = make_query(pool, group)
    segments = torch_ops.plan_segments(pool.runs)
    out = torch_ops.attend_segments(query, pool.key_pages, pool.value_pages, segments, scaling=0.3)
    expected = reference.paged_attention(
        query.float(), pool.key_pages.float(), pool.value_pages.float(), pool.table, pool.positions, scaling=0.3
    )
    assert_equal(out, expected)
    return segments


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_segments_over_heads(group, head_dim, dtype):
    check_segments(make_pool([100, 33, 7, 600], 8, 2, head_dim, "contiguous", dtype), group)


def test_a_run_that_neighbours_share_is_one_segment():
    pool = make_pool([700, 701, 650, 660], 16, 2, 16, "shared")
    segments = check_segments(pool, 2)
    assert [(s.first_query, s.last_query, s.num_tokens) for s in segments if s.level == 0] == [(0, 4, 640)]
    assert len([s for s in segments if s.level == 1]) == 4


def test_segments_of_several_groups_and_levels():
    """Two groups that share prompts; in one of them a sequence has gone on elsewhere, and one has not begun."""
    pool = make_pool([40] * 5, 4, 1, 8, "contiguous")
    for i in (1, 2):  # 0, 1 and 2 share five pages, 3 and 4 share ten
        pool.table[i, :5] = pool.table[0, :5]
    pool.table[4] = pool.table[3]
    pool.table[1, 7] = pool.key_pages.shape[1] - 1
    pool.positions = torch.tensor([39, 37, 19, 39, 39])
    pool.runs = []
    for row, position in zip(pool.table.tolist(), pool.positions.tolist(), strict=True):
        cuts = [j for j in range(1, position // 4 + 1) if row[j] != row[j - 1] + 1 or j == 5]
        ends = [*cuts, position // 4 + 1]
        starts = zip([0, *cuts], ends, strict=True)
        pool.runs.append([(row[a], min(4 * b, position + 1) - 4 * a) for a, b in starts])
    segments = check_segments(pool, 2)
    shared = [(s.level, s.first_query, s.last_query) for s in segments if s.last_query - s.first_query > 1]
    assert shared == [(0, 0, 3), (0, 3, 5), (1, 3, 5)]
    assert max(segment.level for segment in segments) == 3
    covered = [0] * 5
    for segment in segments:
        for i in range(segment.first_query, segment.last_query):
            covered[i] += segment.num_tokens
    assert covered == (pool.positions + 1).tolist()


@pytest.mark.parametrize("num_tokens", [1, 511, 512, 513, 1024, 1025])
def test_cuts_cover_a_segment_once(num_tokens):
    cuts = torch_ops.Segment(0, 0, 1, 0, num_tokens).cuts()
    covered = [token for first, length, parts in cuts for token in range(first, first + parts * length)]
    assert covered == list(range(num_tokens))
    assert sum(parts for _, _, parts in cuts) <= torch_ops.PARTS


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_store_kv(page_size, dtype):
    generator = torch.Generator().manual_seed(0)
    pools = [torch.zeros(2, 20, page_size, 6), torch.zeros(2, 20, page_size, 5), torch.zeros(2, 20, 6)]
    pools = [pool.to(dtype) for pool in pools]
    expected = [pool.clone() for pool in pools]
    for count in (37, 1, 1, 16, 3):
        key = torch.randn(count, 2, 6, generator=generator).to(dtype)
        value = torch.randn(count, 2, 5, generator=generator).to(dtype)
        slots = torch.randperm(20 * page_size, generator=generator)[:count]
        count = len(slots)
        full = slots[slots % page_size == page_size - 1] // page_size
        torch_ops.store_kv(key[:count], value[:count], slots, full if len(full) else None, *pools)
        reference.store_kv(key[:count], value[:count], slots, *expected)
        for found, wanted in zip(pools, expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-2 if dtype != torch.float32 else 1e-5)
    landmarks = pools[2].clone()
    torch_ops.store_kv(key, value, slots, full if len(full) else None, *pools[:2], None)
    assert torch.equal(pools[2], landmarks)


@pytest.mark.parametrize("layout", ["contiguous", "scattered"])
def test_gather_run(layout):
    pool = make_pool([45], 8, 2, 6, layout)
    pages = pool.table[0]
    out = torch_ops.gather_run(pool.key_pages, pool.runs[0], pages, PoisonedWorkspace(), "keys")
    assert torch.equal(out, pool.keys[0].transpose(0, 1))
    assert (out.untyped_storage().data_ptr() == pool.key_pages.untyped_storage().data_ptr()) == (
        layout == "contiguous"
    )


@FAST
@given(st.integers(0, 20), st.integers(1, 12), st.sampled_from([None, 1, 3, 100]))
def test_causal_mask(first, num_queries, window):
    num_tokens = first + num_queries
    mask = torch_ops.causal_mask(first, num_queries, num_tokens, window, torch.device("cpu"))
    expected = torch.zeros(num_queries, num_tokens, dtype=torch.bool)
    for i in range(num_queries):
        expected[i, oracle.visible_tokens(first + i, window=window)] = True
    if mask is None:  # the plain causal mask of a square
        assert torch.equal(expected, torch.ones(num_queries, num_tokens).tril().bool())
    else:
        assert torch.equal(mask, expected)


@pytest.mark.parametrize("is_causal", [False, True])
def test_masked_attention_with_softcap_equals_without_where_the_cap_is_far(is_causal):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 8, generator=generator) for heads in (6, 2, 2))
    masks = [None] if is_causal else [None, torch.rand(9, 9, generator=generator) < 0.7, torch.randn(9, 9)]
    for mask in masks:
        if mask is not None and mask.dtype == torch.bool:
            mask.fill_diagonal_(True)
        capped, plain = (
            torch_ops.masked_attention(query, key, value, mask, scaling=0.2, softcap=cap, is_causal=is_causal)
            for cap in (1e5, None)
        )
        torch.testing.assert_close(capped, plain, atol=1e-5, rtol=1e-5)
