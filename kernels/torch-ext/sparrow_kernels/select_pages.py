"""
Choose the pages that each query attends to: one launch scores the landmarks, another keeps the best.

The page chosen last is found by a binary search over the scores' bit patterns, as integers that are ordered like the
scores: exact, in registers, without sorting. Nothing about the launches depends on what the device holds.
"""

import torch
import triton
import triton.language as tl

from .checks import DTYPES, MAX_GROUP, check, check_group, check_head_dim, check_page_size, check_tensor


MAX_PAGES = 8192  # of a sequence: the scores of one query and head stay in registers
TILE_BYTES = 32768  # landmarks that one program of the scoring kernel has in flight


@triton.jit
def page_spans(position, budget, PAGE_SIZE: tl.constexpr, SINK_PAGES: tl.constexpr, RECENT_PAGES: tl.constexpr):
    """`(first, last, num_pages, kept)`: candidates are the pages `first .. last - 1`, and `kept` of them are."""
    num_pages = (position // PAGE_SIZE + 1).to(tl.int32)
    first = tl.minimum(num_pages, SINK_PAGES)
    last = tl.maximum(first, num_pages - RECENT_PAGES)
    kept = tl.maximum(tl.minimum(budget, last - first), 0).to(tl.int32)
    return first, last, num_pages, kept


@triton.jit(do_not_specialize=["num_kv_heads", "table_stride", "scores_stride"])
def score_pages_kernel(
    query_ptr,
    landmarks_ptr,
    page_table_ptr,
    positions_ptr,
    budgets_ptr,
    scores_ptr,
    num_kv_heads,
    query_stride_token,
    query_stride_head,
    landmarks_stride_head,
    landmarks_stride_page,
    table_stride,
    scores_stride,
    PAGE_SIZE: tl.constexpr,
    SINK_PAGES: tl.constexpr,
    RECENT_PAGES: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The scores of `BLOCK_P` pages for one query and KV head. Only candidates are read, and only where some are left
    out."""
    row = tl.program_id(0)
    query = (row // num_kv_heads).to(tl.int64)
    head = (row % num_kv_heads).to(tl.int64)
    position = tl.load(positions_ptr + query)
    if position < 0:
        return
    budget = tl.load(budgets_ptr + query)
    first, last, _, kept = page_spans(position, budget, PAGE_SIZE, SINK_PAGES, RECENT_PAGES)
    start = tl.program_id(1) * BLOCK_P
    if (kept == 0) | (kept == last - first) | (start >= last) | (start + BLOCK_P <= first):
        return

    pages = start + tl.arange(0, BLOCK_P)
    is_candidate = (pages >= first) & (pages < last)
    physical = tl.load(page_table_ptr + query * table_stride + pages, mask=is_candidate, other=0).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    landmarks = tl.load(
        landmarks_ptr + head * landmarks_stride_head + physical[:, None] * landmarks_stride_page + dims[None, :],
        mask=is_candidate[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    group = tl.arange(0, BLOCK_G)
    queries = tl.load(
        query_ptr + query * query_stride_token + (head * GROUP + group)[:, None] * query_stride_head + dims[None, :],
        mask=(group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    mean_query = tl.sum(queries.to(tl.float32), axis=0) / GROUP
    scores = tl.sum(landmarks.to(tl.float32) * mean_query[None, :], axis=1)
    tl.store(scores_ptr + row.to(tl.int64) * scores_stride + pages, scores, mask=is_candidate)


@triton.jit(do_not_specialize=["num_kv_heads", "scores_stride", "list_stride", "max_selected"])
def select_pages_kernel(
    scores_ptr,
    positions_ptr,
    budgets_ptr,
    page_list_ptr,
    num_selected_ptr,
    num_kv_heads,
    scores_stride,
    list_stride,
    max_selected,
    PAGE_SIZE: tl.constexpr,
    SINK_PAGES: tl.constexpr,
    RECENT_PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The chosen pages of one query and KV head, in ascending order."""
    row = tl.program_id(0)
    query = (row // num_kv_heads).to(tl.int64)
    position = tl.load(positions_ptr + query)
    if position < 0:
        if row % num_kv_heads == 0:
            tl.store(num_selected_ptr + query, 0)
        return
    budget = tl.load(budgets_ptr + query)
    first, last, num_pages, kept = page_spans(position, budget, PAGE_SIZE, SINK_PAGES, RECENT_PAGES)

    pages = tl.arange(0, BLOCK)
    is_candidate = (pages >= first) & (pages < last)
    chosen = (pages < num_pages) & (is_candidate == 0)
    if kept == last - first:
        chosen = pages < num_pages
    elif kept > 0:
        scores = tl.load(scores_ptr + row.to(tl.int64) * scores_stride + pages, mask=is_candidate, other=0.0)
        scores = tl.where(scores == 0.0, 0.0, scores)  # -0.0 ties with 0.0
        bits = scores.to(tl.int32, bitcast=True)
        keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # signed integers in the order of the scores

        # At least `kept` keys are >= low, fewer are >= high.
        low = tl.min(tl.where(is_candidate, keys, 0x7FFFFFFF), axis=0).to(tl.int64)
        high = tl.max(tl.where(is_candidate, keys, -0x80000000), axis=0).to(tl.int64) + 1
        num_above = last - first
        while (high - low > 1) & (num_above != kept):
            middle = (low + high) >> 1
            count = tl.sum((is_candidate & (keys >= middle.to(tl.int32))).to(tl.int32), axis=0)
            if count >= kept:
                low = middle
                num_above = count
            else:
                high = middle
        threshold = low.to(tl.int32)
        is_above = is_candidate & (keys > threshold)
        is_tie = is_candidate & (keys == threshold)
        num_ties = kept - tl.sum(is_above.to(tl.int32), axis=0)
        chosen = chosen | is_above | (is_tie & (tl.cumsum(is_tie.to(tl.int32), axis=0) <= num_ties))

    place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    page_list = page_list_ptr + row.to(tl.int64) * list_stride
    tl.store(page_list + place, pages, mask=chosen & (place < max_selected))
    if row % num_kv_heads == 0:
        num_selected = first + kept + num_pages - last
        tl.store(num_selected_ptr + query, tl.minimum(num_selected, max_selected))


def launch_options(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_pages: int,
    dtype: torch.dtype,
    page_size: int = 16,
    sink_pages: int = 1,
    recent_pages: int = 2,
) -> dict[str, dict]:
    """Keyword arguments of each kernel of the op, by kernel name, as they are launched for these shapes."""
    spans = {"PAGE_SIZE": page_size, "SINK_PAGES": sink_pages, "RECENT_PAGES": recent_pages}
    block_d = triton.next_power_of_2(head_dim)
    block_p = max(16, min(128, TILE_BYTES // (block_d * dtype.itemsize)))
    block = max(128, triton.next_power_of_2(max_pages))
    return {
        "score_pages_kernel": {
            **spans,
            "GROUP": num_heads // num_kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_G": triton.next_power_of_2(num_heads // num_kv_heads),
            "BLOCK_D": block_d,
            "BLOCK_P": block_p,
            "num_warps": 4,
        },
        "select_pages_kernel": {**spans, "BLOCK": block, "num_warps": 8 if block >= 2048 else 4},
    }


def select_pages(
    query: torch.Tensor,
    landmarks: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    budgets: torch.Tensor,
    *,
    page_size: int,
    sink_pages: int,
    recent_pages: int,
    max_selected: int,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    scores: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    See [`reference.select_pages`], whose scores have the precision of the query; here they are float32 whatever the
    dtypes. Of equal scores the earlier page wins.

    Args:
        query (`torch.Tensor`): `(num_queries, num_heads, head_dim)`.
        landmarks (`torch.Tensor`): `(num_kv_heads, num_pages, head_dim)`.
        page_table (`torch.Tensor`): `(num_queries, max_pages)` int64 or int32, at most 8,192 pages.
        positions (`torch.Tensor`): `(num_queries,)` int64 or int32; below 0 the row is padding and selects nothing.
        budgets (`torch.Tensor`): `(num_queries,)` int64 or int32, scored pages that each query keeps.
        max_selected (`int`): width of the result; the caller promises `budget + sink_pages + recent_pages` or
            `max_pages` at most, the device is not asked. Later pages than that would be left out.
        out (`tuple[torch.Tensor, torch.Tensor]`, *optional*): where to write the result.
        scores (`torch.Tensor`, *optional*): float32 scratch of `num_queries * num_kv_heads * max_pages` elements.

    Returns:
        `page_list` `(num_queries, num_kv_heads, max_selected)` int32, the chosen columns of the page table, ascending,
        sink and recent pages included, undefined after the first `num_selected`; `num_selected` `(num_queries,)` int32.

    Raises:
        `ValueError`: for shapes or dtypes that do not go together, or sizes that the kernels do not know.
    """
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads, max_pages = landmarks.shape[0], page_table.shape[1]
    integers = (torch.int64, torch.int32)
    check_tensor("query", query, (None, None, None), DTYPES)
    check_tensor("landmarks", landmarks, (None, None, head_dim), DTYPES)
    check_tensor("page_table", page_table, (num_queries, None), integers)
    check_tensor("positions", positions, (num_queries,), integers)
    check_tensor("budgets", budgets, (num_queries,), integers)
    check_page_size(page_size)
    check_head_dim("query", head_dim)
    group = check_group(num_heads, num_kv_heads)
    check(group <= MAX_GROUP, f"{group} query heads share a KV head, but the kernels take at most {MAX_GROUP}.")
    check(max_pages <= MAX_PAGES, f"page_table has {max_pages} pages a row, but selection takes at most {MAX_PAGES}.")
    check(sink_pages >= 0, f"sink_pages is {sink_pages}, but must be at least 0.")
    check(
        recent_pages >= 1, f"recent_pages is {recent_pages}, but must be at least 1: a page being filled has no score."
    )
    check(max_selected >= 1, f"max_selected is {max_selected}, but must be at least 1.")
    if out is None:
        page_list = torch.empty(num_queries, num_kv_heads, max_selected, dtype=torch.int32, device=query.device)
        num_selected = torch.empty(num_queries, dtype=torch.int32, device=query.device)
    else:
        page_list, num_selected = out
        check_tensor("out[0]", page_list, (num_queries, num_kv_heads, max_selected), (torch.int32,))
        check_tensor("out[1]", num_selected, (num_queries,), (torch.int32,))
        check(page_list.is_contiguous(), "`out[0]` must be contiguous.")
    size = num_queries * num_kv_heads * max_pages
    if scores is None:
        scores = torch.empty(size, dtype=torch.float32, device=query.device)
    check_tensor("scores", scores, (None,) * scores.dim(), (torch.float32,))
    check(scores.numel() >= size, f"`scores` has {scores.numel()} elements, but {size} are needed.")
    check(scores.is_contiguous(), "`scores` must be contiguous.")
    if num_queries == 0:
        return page_list, num_selected

    options = launch_options(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_pages=max_pages,
        dtype=landmarks.dtype,
        page_size=page_size,
        sink_pages=sink_pages,
        recent_pages=recent_pages,
    )
    rows = num_queries * num_kv_heads
    score = options["score_pages_kernel"]
    score_pages_kernel[(rows, triton.cdiv(max_pages, score["BLOCK_P"]))](
        query,
        landmarks,
        page_table,
        positions,
        budgets,
        scores,
        num_kv_heads,
        query.stride(0),
        query.stride(1),
        landmarks.stride(0),
        landmarks.stride(1),
        page_table.stride(0),
        max_pages,
        **score,
    )
    select_pages_kernel[(rows,)](
        scores,
        positions,
        budgets,
        page_list,
        num_selected,
        num_kv_heads,
        max_pages,
        max_selected,
        max_selected,
        **options["select_pages_kernel"],
    )
    return page_list, num_selected
