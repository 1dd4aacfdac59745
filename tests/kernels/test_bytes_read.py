"""What the kernels read, counted in Triton's interpreter, against the least that the op has to read."""

import os

import pytest
import torch

from interpreter import by_kernel, count_bytes
from pools import make_pool, make_query
from sparrow_kernels.paged_attention import paged_attention
from sparrow_kernels.select_pages import select_pages
from sparrow_kernels.store_kv import store_kv


pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="only the interpreter counts bytes")


def bytes_of(*tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.fixture(params=[(1, 1, 64), (2, 2, 128), (1, 5, 128), (1, 8, 64), (2, 4, 80)], ids=str)
def case(request):
    """Sequences of some thousand tokens in bfloat16: `(pool, query)`."""
    kv_heads, group, head_dim = request.param
    pool = make_pool([2003, 4096], kv_heads=kv_heads, head_dim=head_dim, dtype=torch.bfloat16)
    return pool, make_query(pool, group)


def test_dense_attention(case):
    pool, query = case
    with count_bytes(keys=pool.key_pages, values=pool.value_pages) as counts:
        paged_attention(query, pool.key_pages, pool.value_pages, pool.table, pool.positions, scaling=0.3)
    tokens = int((pool.positions + 1).sum())
    kv_heads, _, page_size, head_dim = pool.key_pages.shape
    least = kv_heads * tokens * 2 * head_dim * 2
    assert sum(v for (_, name), v in counts.items() if name in ("keys", "values")) == least
    pages = int((pool.positions // page_size + 1).sum())
    assert counts.total() <= 1.05 * (least + 8 * pages + bytes_of(query, pool.positions))


def test_sparse_attention(case):
    pool, query = case
    budgets = torch.tensor([29, 61])
    options = {"page_size": 16, "sink_pages": 1, "recent_pages": 2, "max_selected": 64}
    pages = select_pages(query, pool.landmarks, pool.table, pool.positions, budgets, **options)
    with count_bytes(keys=pool.key_pages, values=pool.value_pages) as counts:
        paged_attention(query, pool.key_pages, pool.value_pages, pool.table, pool.positions, *pages, scaling=0.3)
    kv_heads, _, page_size, head_dim = pool.key_pages.shape
    chosen = int(pages[1].sum())
    unfilled = int((page_size - 1 - pool.positions % page_size).sum())
    least = kv_heads * (chosen * page_size - unfilled) * 2 * head_dim * 2
    assert sum(v for (_, name), v in counts.items() if name in ("keys", "values")) == least
    assert counts.total() <= 1.05 * (least + kv_heads * chosen * (4 + 8) + bytes_of(query, pool.positions))


def test_several_queries_share_what_they_read():
    """Four queries of a sequence read its keys and values once."""
    pool = make_pool([2003], head_dim=128, dtype=torch.bfloat16)
    query = make_query(pool, 2, 4)
    positions = torch.arange(1999, 2003)
    with count_bytes(keys=pool.key_pages, values=pool.value_pages) as counts:
        paged_attention(
            query, pool.key_pages, pool.value_pages, pool.table.expand(4, -1), positions, scaling=0.3,
            query_starts=torch.tensor([0, 4]), max_queries=4,
        )  # fmt: skip
    least = 2 * 2003 * 2 * 128 * 2
    assert sum(v for (_, name), v in counts.items() if name in ("keys", "values")) == least
    assert counts.total() <= 1.05 * (least + bytes_of(query, pool.table))


@pytest.mark.parametrize("window", [100, 512])
def test_a_window_reads_no_more_than_it_sees(window):
    pool = make_pool([2003, 50], kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    with count_bytes(keys=pool.key_pages) as counts:
        paged_attention(
            make_query(pool, 2), pool.key_pages, pool.value_pages, pool.table, pool.positions, scaling=0.3,
            sliding_window=window,
        )  # fmt: skip
    assert counts["paged_attention_kernel", "keys"] == (window + 50) * 64 * 2


def test_scoring(case):
    pool, query = case
    budgets = torch.tensor([29, 61])
    options = {"page_size": 16, "sink_pages": 1, "recent_pages": 2, "max_selected": 64}
    with count_bytes(landmarks=pool.landmarks) as counts:
        select_pages(query, pool.landmarks, pool.table, pool.positions, budgets, **options)
    kv_heads, _, head_dim = pool.landmarks.shape
    candidates = int((pool.positions // 16 + 1 - 3).sum())
    least = kv_heads * candidates * head_dim * 2
    assert counts["score_pages_kernel", "landmarks"] == least
    table = kv_heads * candidates * 8
    total = by_kernel(counts)
    assert total["score_pages_kernel"] <= 1.1 * (least + table + bytes_of(query, pool.positions, budgets))
    # The second kernel reads the scores, once.
    assert total["select_pages_kernel"] <= kv_heads * candidates * 4 + 2 * kv_heads * 16


def test_scoring_reads_nothing_where_no_page_is_left_out():
    pool = make_pool([100, 500, 0], head_dim=64)
    budgets = torch.tensor([4, 1000, 5])
    with count_bytes(landmarks=pool.landmarks) as counts:
        select_pages(
            make_query(pool, 2), pool.landmarks, pool.table, pool.positions, budgets,
            page_size=16, sink_pages=1, recent_pages=2, max_selected=32,
        )  # fmt: skip
    assert counts["score_pages_kernel", "landmarks"] == 0


def test_store_kv_reads_old_keys_only_for_a_full_page():
    pool = make_pool([16, 16], head_dim=64)
    key, slots = torch.randn(2, 2, 64), torch.tensor([5, 16 + 15])
    with count_bytes(pages=pool.key_pages) as counts:
        store_kv(key, key, slots, pool.key_pages, pool.value_pages, pool.landmarks)
    assert counts["store_kv_kernel", "pages"] == 2 * 15 * 64 * 4


def test_masked_lanes_do_not_count_and_equal_addresses_count_once():
    import triton
    import triton.language as tl

    @triton.jit
    def load_kernel(data_ptr, out_ptr, count, BLOCK: tl.constexpr):
        index = tl.arange(0, BLOCK)
        data = tl.load(data_ptr + index // 4, mask=index < count, other=0.0)
        tl.store(out_ptr + index, data)

    data, out = torch.arange(32.0), torch.zeros(64)
    with count_bytes(data=data) as counts:
        load_kernel[(1,)](data, out, 41, BLOCK=64)
    assert counts == {("load_kernel", "data"): 11 * 4}
    assert out[40] == 10
