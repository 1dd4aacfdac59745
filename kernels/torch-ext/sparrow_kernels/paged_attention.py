"""
Attention over the pages of a KV pool: the pages that [`select_pages`] chose, or all of a sequence.

The keys of a sequence are split into chunks, one program each, and a second launch merges their results (as in
Flash-Decoding). The query heads of a group, and up to 16 queries of a sequence, share what a program reads. How many
chunks there are depends on shapes alone; programs whose chunk lies beyond a sequence end at once.
"""

import math

import torch
import triton
import triton.language as tl

from .checks import MAX_GROUP, check, check_group, check_pool, check_tensor
from .launch import gpu_family


MAX_QUERIES = 16
MIN_CHUNK, MAX_CHUNK = 256, 1024  # tokens
MIN_PROGRAMS = 2048  # chunks are no longer than gives so many: about four for each place on the largest chips
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def tanh(x):
    """From `exp2` alone, since the maths libraries differ by device; the series keeps small values exact."""
    power = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    far = (1.0 - power) / (1.0 + power)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(square < 0.01, near, tl.where(x < 0.0, -far, far))


@triton.jit
def token_span(
    positions_ptr,
    query_starts_ptr,
    num_selected_ptr,
    sequence,
    window,
    SPARSE: tl.constexpr,
    PACKED: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """
    `(first_query, num_queries, oldest, begin, end)` of a sequence: its queries see no token before `oldest`, and chunks
    are cut from `begin .. end - 1`. Those count the tokens of the sequence, or of the listed pages where there is a list.
    """
    if PACKED:
        first_query = tl.load(query_starts_ptr + sequence).to(tl.int64)
        num_queries = (tl.load(query_starts_ptr + sequence + 1) - first_query).to(tl.int32)
        index = tl.arange(0, BLOCK_Q)
        positions = tl.load(positions_ptr + first_query + index, mask=index < num_queries, other=-1).to(tl.int32)
        latest = tl.max(positions, axis=0)
        earliest = tl.min(tl.where(positions >= 0, positions, 0x7FFFFFFF), axis=0)
    else:
        first_query = sequence.to(tl.int64)
        num_queries = 1
        latest = tl.load(positions_ptr + first_query).to(tl.int32)
        earliest = latest
    oldest = 0
    if WINDOW:
        oldest = tl.maximum(tl.minimum(earliest, latest) - window + 1, 0)  # 0 where all rows are padding
    if SPARSE:
        begin = 0
        count = tl.load(num_selected_ptr + first_query)
        # The last page listed is the one being filled: it ends at the query.
        end = tl.where(latest < 0, 0, count * PAGE_SIZE - (PAGE_SIZE - 1 - latest % PAGE_SIZE))
    else:
        begin = oldest // PAGE_SIZE * PAGE_SIZE
        end = latest + 1
    return first_query, num_queries, oldest, begin, end


@triton.jit(do_not_specialize=["num_kv_heads", "table_stride", "list_stride", "window", "chunk", "num_splits"])
def paged_attention_kernel(
    query_ptr,
    key_pages_ptr,
    value_pages_ptr,
    page_table_ptr,
    positions_ptr,
    page_list_ptr,
    num_selected_ptr,
    query_starts_ptr,
    out_ptr,
    partial_ptr,
    partial_lse_ptr,
    num_kv_heads,
    query_stride_token,
    query_stride_head,
    key_stride_head,
    key_stride_page,
    key_stride_slot,
    value_stride_head,
    value_stride_page,
    value_stride_slot,
    table_stride,
    list_stride,
    out_stride_token,
    out_stride_head,
    scaling,
    softcap,
    window,
    chunk,
    num_splits,
    SPARSE: tl.constexpr,
    PACKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One chunk of tokens for the queries of one sequence and the heads of one group. A row of the tiles is a query and
    head: `row // GROUP` and `row % GROUP`."""
    sequence = tl.program_id(0) // num_kv_heads
    head = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    split = tl.program_id(1)
    first_query, num_queries, oldest, begin, end = token_span(
        positions_ptr, query_starts_ptr, num_selected_ptr, sequence, window, SPARSE, PACKED, WINDOW, PAGE_SIZE, BLOCK_Q
    )
    start = begin + split * chunk
    stop = tl.minimum(start + chunk, end)
    if ONE_SPLIT == 0:  # noqa: SIM102 (one is known when compiling)
        if start >= end:
            return

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_DV)
    row_query = first_query + rows // GROUP
    row_head = head * GROUP + rows % GROUP
    is_row = rows < num_queries * GROUP
    query = tl.load(
        query_ptr + (row_query * query_stride_token + row_head * query_stride_head)[:, None] + dims[None, :],
        mask=is_row[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    if PACKED:
        row_position = tl.load(positions_ptr + row_query, mask=is_row, other=-1).to(tl.int32)
    key_base = key_pages_ptr + head * key_stride_head
    value_base = value_pages_ptr + head * value_stride_head
    table = page_table_ptr + first_query * table_stride
    page_list = page_list_ptr + (first_query * num_kv_heads + head) * list_stride

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    # The pages of a block are looked up while the one before is worked on, and the places of a list one block earlier
    # still: else each copy of keys would wait for them.
    places = start + tl.arange(0, BLOCK_N)
    logical = places // PAGE_SIZE
    next_logical = (places + BLOCK_N) // PAGE_SIZE
    if SPARSE:
        logical = tl.load(page_list + logical, mask=places < stop, other=0)
        next_logical = tl.load(page_list + next_logical, mask=places + BLOCK_N < stop, other=0)
    physical = tl.load(table + logical, mask=places < stop, other=0).to(tl.int32)
    for block in range(start, stop, BLOCK_N):
        places = block + tl.arange(0, BLOCK_N)
        slots = places % PAGE_SIZE
        pages = physical.to(tl.int64)
        tokens = places
        # What no query sees is not read: it may hold NaN.
        is_read = places < stop
        if SPARSE:
            if WINDOW:
                tokens = tl.load(page_list + places // PAGE_SIZE, mask=is_read, other=0) * PAGE_SIZE + slots
            physical = tl.load(table + next_logical, mask=places + BLOCK_N < stop, other=0).to(tl.int32)
            next_logical = (places + 2 * BLOCK_N) // PAGE_SIZE
            next_logical = tl.load(page_list + next_logical, mask=places + 2 * BLOCK_N < stop, other=0)
        else:
            physical = tl.load(table + (places + BLOCK_N) // PAGE_SIZE, mask=places + BLOCK_N < stop, other=0)
            physical = physical.to(tl.int32)
        if WINDOW:
            is_read = is_read & (tokens >= oldest)
        key = tl.load(
            key_base + (pages * key_stride_page + slots * key_stride_slot)[:, None] + dims[None, :],
            mask=is_read[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scaling
        if SOFTCAP:
            scores = softcap * tanh(scores / softcap)
        is_seen = is_read[None, :] & is_row[:, None]
        if PACKED:
            is_seen = is_seen & (tokens[None, :] <= row_position[:, None])
            if WINDOW:
                is_seen = is_seen & (tokens[None, :] > row_position[:, None] - window)
        scores = tl.where(is_seen, scores * LOG2_E, float("-inf"))

        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(highest - shift)
        total = total * decay + tl.sum(weights, axis=1)
        value = tl.load(
            value_base + (pages * value_stride_page + slots * value_stride_slot)[:, None] + value_dims[None, :],
            mask=is_read[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0.0,
        )
        acc = tl.dot(weights.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
        highest = new_highest

    is_empty = total == 0.0
    acc = acc / tl.where(is_empty, 1.0, total)[:, None]
    in_value = is_row[:, None] & (value_dims < VALUE_DIM)[None, :]
    if ONE_SPLIT:
        out = out_ptr + (row_query * out_stride_token + row_head * out_stride_head)[:, None] + value_dims[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=in_value)
    else:
        partial = (row_query * (num_kv_heads * GROUP) + row_head) * num_splits + split
        tl.store(partial_ptr + (partial * VALUE_DIM)[:, None] + value_dims[None, :], acc, mask=in_value)
        lse = tl.where(is_empty, float("-inf"), highest + tl.log2(tl.where(is_empty, 1.0, total)))
        tl.store(partial_lse_ptr + partial, lse, mask=is_row)


@triton.jit(do_not_specialize=["num_heads", "window", "chunk", "num_splits", "max_queries"])
def merge_splits_kernel(
    positions_ptr,
    num_selected_ptr,
    query_starts_ptr,
    out_ptr,
    partial_ptr,
    partial_lse_ptr,
    num_heads,
    out_stride_token,
    out_stride_head,
    window,
    chunk,
    num_splits,
    max_queries,
    SPARSE: tl.constexpr,
    PACKED: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """The output of one query and head, from the partial results of its chunks and their log-sum-exp to base 2."""
    sequence = tl.program_id(0) // max_queries
    head = tl.program_id(1)
    first_query, num_queries, _, begin, end = token_span(
        positions_ptr, query_starts_ptr, num_selected_ptr, sequence, window, SPARSE, PACKED, WINDOW, PAGE_SIZE, BLOCK_Q
    )
    index = tl.program_id(0) % max_queries
    if index >= num_queries:
        return
    query = first_query + index
    used_splits = tl.cdiv(tl.maximum(end - begin, 0), chunk)

    dims = tl.arange(0, BLOCK_DV)
    base = (query * num_heads + head) * num_splits
    highest = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for block in range(0, used_splits, BLOCK_S):
        splits = block + tl.arange(0, BLOCK_S)
        is_used = splits < used_splits
        lse = tl.load(partial_lse_ptr + base + splits, mask=is_used, other=float("-inf"))
        partial = tl.load(
            partial_ptr + ((base + splits) * VALUE_DIM)[:, None] + dims[None, :],
            mask=is_used[:, None] & (dims < VALUE_DIM)[None, :],
            other=0.0,
        )
        new_highest = tl.maximum(highest, tl.max(lse, axis=0))
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(lse - shift)
        decay = tl.exp2(highest - shift)
        total = total * decay + tl.sum(weights, axis=0)
        acc = acc * decay + tl.sum(partial * weights[:, None], axis=0)
        highest = new_highest
    acc = acc / tl.where(total == 0.0, 1.0, total)
    out = out_ptr + query * out_stride_token + head * out_stride_head + dims
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=dims < VALUE_DIM)


def split_sizes(
    *,
    num_sequences: int,
    num_kv_heads: int,
    page_size: int,
    max_pages: int,
    max_queries: int = 1,
    sliding_window: int | None = None,
    max_selected: int | None = None,
) -> tuple[int, int]:
    """`(chunk, num_splits)`: tokens of a chunk, and chunks of a sequence at most, from static sizes alone."""
    tokens = (max_pages if max_selected is None else max_selected) * page_size
    if max_selected is None and sliding_window is not None:
        tokens = min(tokens, sliding_window + max_queries + page_size)
    chunk = MAX_CHUNK
    while chunk > MIN_CHUNK and num_sequences * num_kv_heads * triton.cdiv(tokens, chunk) < MIN_PROGRAMS:
        chunk //= 2
    return chunk, max(1, triton.cdiv(tokens, chunk))


def scratch_size(num_queries: int, num_heads: int, value_dim: int, num_splits: int) -> int:
    """float32 elements of scratch that a call needs."""
    return 0 if num_splits == 1 else num_queries * num_heads * num_splits * (value_dim + 1)


def launch_options(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    num_splits: int,
    value_dim: int | None = None,
    sparse: bool = False,
    packed: bool = False,
    max_queries: int = 1,
    sliding_window: int | None = None,
    softcap: float | None = None,
    family: str = "ampere",
) -> dict[str, dict]:
    """
    Keyword arguments of each kernel of the op, by kernel name, as they are launched for these shapes. `sparse` says that a
    page list is given, `packed` that `query_starts` are; `family` is what [`gpu_family`] returns.
    """
    value_dim = value_dim or head_dim
    group = num_heads // num_kv_heads
    block_d, block_dv = triton.next_power_of_2(head_dim), triton.next_power_of_2(value_dim)
    block_m = max(16, triton.next_power_of_2(max_queries * group))
    # Keys and values of a block: registers hold them where there are no asynchronous copies, or other rows beside them.
    tile_bytes = 16384 if block_m >= 64 or family == "turing" else 32768
    fitting = tile_bytes // ((block_d + block_dv) * dtype.itemsize)  # no power of two where the widths differ
    block_n = max(16, min(128, triton.next_power_of_2(fitting + 1) // 2))
    num_warps = 4 if block_m < 64 else 8
    if family == "turing" and max_queries > 1:  # no matrix units: both factors of a product lie in registers
        block_n, num_warps = max(16, 4096 // (block_d + block_dv)), 8
    variant = {
        "SPARSE": sparse,
        "PACKED": packed,
        "WINDOW": sliding_window is not None,
        "PAGE_SIZE": page_size,
        "VALUE_DIM": value_dim,
        "BLOCK_Q": triton.next_power_of_2(max_queries),
        "BLOCK_DV": block_dv,
    }
    options = {
        "paged_attention_kernel": {
            **variant,
            "SOFTCAP": softcap is not None,
            "ONE_SPLIT": num_splits == 1,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_D": block_d,
            "num_warps": num_warps,
            "num_stages": 2 if family == "cdna" or block_m > 64 else 3,
        }
    }
    if num_splits > 1:
        options["merge_splits_kernel"] = {**variant, "BLOCK_S": 16, "num_warps": 2}
    return options


def paged_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    page_list: torch.Tensor | None = None,
    num_selected: torch.Tensor | None = None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    query_starts: torch.Tensor | None = None,
    max_queries: int = 1,
    out: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    See [`reference.paged_attention`]. Slots that no query sees are not read, whatever they hold.

    Args:
        query (`torch.Tensor`): `(num_queries, num_heads, head_dim)`, in the dtype of the pool.
        page_table (`torch.Tensor`): `(num_queries, max_pages)` int64 or int32.
        positions (`torch.Tensor`): `(num_queries,)` int64 or int32; below 0 the row is padding and its output 0.
        page_list, num_selected (`torch.Tensor`, *optional*): result of [`select_pages`]: ascending, the page of the query
            itself last. Without it, all pages.
        query_starts (`torch.Tensor`, *optional*): `(num_sequences + 1,)` int32 or int64. Sequence `i` has the queries
            `query_starts[i] .. query_starts[i + 1] - 1`, `max_queries` at most; they share the row of the page table of
            the first, padding comes after the others. Not together with `page_list`. Rows of no sequence give 0.
        max_queries (`int`): 1 to 16.
        out (`torch.Tensor`, *optional*): where to write the result, of which rows of no sequence are left alone.
        scratch (`torch.Tensor`, *optional*): float32, at least [`scratch_size`] elements.

    Returns:
        `torch.Tensor`: `(num_queries, num_heads, value_dim)`, in the dtype of `query`.

    Raises:
        `ValueError`: for shapes or dtypes that do not go together, or sizes that the kernels do not know.
    """
    check_pool(key_pages, value_pages)
    num_kv_heads, _, page_size, head_dim = key_pages.shape
    num_queries, num_heads, _ = query.shape
    value_dim, max_pages = value_pages.shape[3], page_table.shape[1]
    integers = (torch.int64, torch.int32)
    check_tensor("query", query, (None, None, head_dim), (key_pages.dtype,))
    check_tensor("page_table", page_table, (num_queries, None), integers)
    check_tensor("positions", positions, (num_queries,), integers)
    group = check_group(num_heads, num_kv_heads)
    check(group <= MAX_GROUP, f"{group} query heads share a KV head, but the kernels take at most {MAX_GROUP}.")
    check(1 <= max_queries <= MAX_QUERIES, f"max_queries is {max_queries}, but must be 1 to {MAX_QUERIES}.")
    check(
        sliding_window is None or sliding_window >= 1, f"sliding_window is {sliding_window}, but must be at least 1."
    )
    check(softcap is None or softcap > 0, f"softcap is {softcap}, but must be above 0.")
    check((page_list is None) == (num_selected is None), "page_list and num_selected come together or not at all.")
    family = gpu_family(query.device)
    if family == "turing":
        rows = triton.next_power_of_2(max_queries * group)
        check(
            rows <= 64,
            f"max_queries={max_queries} takes {rows} rows of queries, but 64 fit GPUs without matrix units.",
        )
    check(query_starts is not None or max_queries == 1, f"max_queries is {max_queries}, which asks for query_starts.")
    check(page_list is None or query_starts is None, "query_starts is for dense attention: leave out page_list.")
    max_selected, num_sequences = None, num_queries
    if page_list is not None and num_selected is not None:
        check_tensor("page_list", page_list, (num_queries, num_kv_heads, None), (torch.int32,))
        check_tensor("num_selected", num_selected, (num_queries,), (torch.int32,))
        check(page_list.is_contiguous(), "`page_list` must be contiguous.")
        max_selected = page_list.shape[2]
    if query_starts is not None:
        check_tensor("query_starts", query_starts, (None,), integers)
        num_sequences = query_starts.shape[0] - 1
    if out is None:
        empty = torch.empty if query_starts is None else torch.zeros
        out = empty(num_queries, num_heads, value_dim, dtype=query.dtype, device=query.device)
    check_tensor("out", out, (num_queries, num_heads, value_dim), (query.dtype,))
    if num_queries == 0 or num_sequences == 0:
        return out

    chunk, num_splits = split_sizes(
        num_sequences=num_sequences,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        max_pages=max_pages,
        max_queries=max_queries,
        sliding_window=sliding_window,
        max_selected=max_selected,
    )
    size = scratch_size(num_queries, num_heads, value_dim, num_splits)
    if scratch is None:
        scratch = torch.empty(size, dtype=torch.float32, device=query.device)
    check_tensor("scratch", scratch, (None,), (torch.float32,))
    check(scratch.numel() >= size, f"`scratch` has {scratch.numel()} elements, but {size} are needed.")
    num_partials = num_queries * num_heads * num_splits
    partial, partial_lse = scratch, scratch[num_partials * value_dim :]
    options = launch_options(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=query.dtype,
        num_splits=num_splits,
        value_dim=value_dim,
        sparse=page_list is not None,
        packed=query_starts is not None,
        max_queries=max_queries,
        sliding_window=sliding_window,
        softcap=softcap,
        family=family,
    )
    paged_attention_kernel[(num_sequences * num_kv_heads, num_splits)](
        query,
        key_pages,
        value_pages,
        page_table,
        positions,
        positions if page_list is None else page_list,
        positions if num_selected is None else num_selected,
        positions if query_starts is None else query_starts,
        out,
        partial,
        partial_lse,
        num_kv_heads,
        query.stride(0),
        query.stride(1),
        key_pages.stride(0),
        key_pages.stride(1),
        key_pages.stride(2),
        value_pages.stride(0),
        value_pages.stride(1),
        value_pages.stride(2),
        page_table.stride(0),
        max_selected or 0,
        out.stride(0),
        out.stride(1),
        float(scaling),
        float(softcap or 0.0),
        sliding_window or 0,
        chunk,
        num_splits,
        **options["paged_attention_kernel"],
    )
    if num_splits > 1:
        merge_splits_kernel[(num_sequences * max_queries, num_heads)](
            positions,
            positions if num_selected is None else num_selected,
            positions if query_starts is None else query_starts,
            out,
            partial,
            partial_lse,
            num_heads,
            out.stride(0),
            out.stride(1),
            sliding_window or 0,
            chunk,
            num_splits,
            max_queries,
            **options["merge_splits_kernel"],
        )
    return out
