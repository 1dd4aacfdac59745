"""
Teacher-forced sparse attention, forward and backward: what decoding packed sequences token by token would have computed.

A program works on a block of consecutive tokens with all query heads of one KV head, so that keys are read once for the
group that shares them. With a page choice it visits only pages that some token of its block chose (see `page_mask`).
Scores stay in registers: no memory grows with the square of the length but bits and lists of pages.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from .checks import DTYPES, MAX_GROUP, MAX_HEAD_DIM, check, check_group, check_head_dim, check_tensor
from .launch import gpu_family, scratch
from .page_mask import PageLists, choose_pages, count_blocks, list_pages, list_readers, locate


LOG2_E = tl.constexpr(1.4426950408889634)
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64)
KERNELS = (
    "teacher_forced_forward_kernel",
    "teacher_forced_backward_query_kernel",
    "teacher_forced_backward_key_kernel",
)
# Rows, keys, warps and stages of each kernel, up to a head dim of 128 and beyond. By compiling: no spilled registers.
TILES = {
    "ampere": (((64, 32, 4, 2), (64, 32, 4, 2), (32, 64, 8, 2)), ((64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 2))),
    "hopper": (((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2)), ((64, 32, 8, 2), (64, 32, 8, 2), (32, 32, 8, 2))),
    "blackwell": (((64, 64, 4, 2), (64, 64, 4, 2), (32, 64, 8, 2)), ((64, 32, 8, 2), (64, 32, 8, 2), (32, 32, 8, 2))),
    "cdna": (((64, 64, 4, 2), (64, 64, 4, 2), (32, 64, 4, 2)), ((64, 32, 4, 2), (64, 32, 4, 2), (32, 16, 4, 2))),
}
# Of the last kernel up to a head dim of 128, where heads of a group are no power of two: their rows take more registers.
UNEVEN_TILES = {"hopper": (32, 64, 8, 2), "cdna": (32, 32, 4, 2)}


@triton.jit
def _capped(scores, scaling, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scaled and soft-capped scores. tanh(x) = 2 sigmoid(2x) - 1."""
    scores = scores * scaling
    if HAS_SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(scores * (2.0 / softcap)) - 1.0)
    return scores


@triton.jit
def _columns(
    i, page_list_row, num_listed, first_column,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """Positions of the keys of block `i`: of the listed pages one after the other, or of consecutive tokens."""
    offsets = tl.arange(0, BLOCK_N)
    if SPARSE:
        offsets += i * BLOCK_N
        entries = offsets // PAGE_SIZE
        pages = tl.load(page_list_row + entries, mask=entries < num_listed, other=0).to(tl.int32)
        return pages * PAGE_SIZE + offsets % PAGE_SIZE
    else:
        return first_column + i * BLOCK_N + offsets


@triton.jit
def _seen(
    i, columns, positions, mask_rows, here, sliding_window,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, SPARSE: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Which of the columns of block `i` each row attends to; `mask_rows` point at the rows' bits over blocks."""
    seen = columns[None, :] <= positions[:, None]
    if HAS_WINDOW:
        seen = seen & (columns[None, :] > positions[:, None] - sliding_window)
    if SPARSE:
        words = tl.load(mask_rows + i * BLOCK_N // PAGE_SIZE // 32, mask=here, other=0)
        bit = (i * BLOCK_N + tl.arange(0, BLOCK_N)) // PAGE_SIZE % 32
        seen = seen & (((words[:, None] >> bit[None, :]) & 1) != 0)
    return seen


@triton.jit(do_not_specialize=["num_sequences", "num_words", "sliding_window"])
def teacher_forced_forward_kernel(
    query, key, value, out, lse,
    page_list, num_listed, listed_mask, cu_seqlens, num_sequences, num_words,
    query_stride_token, query_stride_head, key_stride_token, key_stride_head, value_stride_token, value_stride_head,
    scaling, softcap, sliding_window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPARSE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Output and log2-sum-exp2 of the scores, of one block of queries."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # those with the most keys first
    head = tl.program_id(1).to(tl.int64)
    num_kv_heads = tl.num_programs(1)
    _, start, length, first = locate(block, cu_seqlens, num_sequences, TOKENS)
    if first >= length:
        return
    row = tl.arange(0, BLOCK_M)
    here = (row // GROUP < TOKENS) & (first + row // GROUP < length)
    positions = tl.where(here, first + row // GROUP, -1)
    tokens = start + first + row // GROUP
    heads = head * GROUP + row % GROUP
    last = tl.minimum(first + TOKENS, length) - 1
    dims = tl.arange(0, BLOCK_DIM)
    inside = dims < HEAD_DIM
    queries = tl.load(
        query + (tokens * query_stride_token + heads * query_stride_head)[:, None] + dims[None, :],
        mask=here[:, None] & inside[None, :],
        other=0.0,
    )
    block_row = block.to(tl.int64) * num_kv_heads + head
    page_list_row = page_list + block_row * (num_words * 32)
    mask_rows = listed_mask + (tokens * num_kv_heads + head) * num_words
    first_column = 0
    if SPARSE:
        listed = tl.load(num_listed + block_row)
        num_steps = tl.cdiv(listed * PAGE_SIZE, BLOCK_N)
    else:
        listed = 0
        if HAS_WINDOW:
            first_column = tl.maximum(first - sliding_window + 1, 0) // BLOCK_N * BLOCK_N
        num_steps = tl.cdiv(last + 1 - first_column, BLOCK_N)

    highest = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    result = tl.zeros((BLOCK_M, BLOCK_DIM), tl.float32)
    for i in range(num_steps):
        columns = _columns(i, page_list_row, listed, first_column, PAGE_SIZE, BLOCK_N, SPARSE)
        at = (start + columns)[:, None]
        load_mask = (columns <= last)[:, None] & inside[None, :]
        keys = tl.load(key + at * key_stride_token + head * key_stride_head + dims[None, :], mask=load_mask, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        scores = _capped(scores, scaling, softcap, HAS_SOFTCAP) * LOG2_E
        seen = _seen(i, columns, positions, mask_rows, here, sliding_window, PAGE_SIZE, BLOCK_N, SPARSE, HAS_WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        values = tl.load(
            value + at * value_stride_token + head * value_stride_head + dims[None, :], mask=load_mask, other=0.0
        )
        result = tl.dot(weights.to(values.dtype), values, result * shrink[:, None], input_precision="ieee")
        highest = higher

    total = tl.where(here, total, 1.0)
    rows = tokens * (num_kv_heads * GROUP) + heads
    tl.store(
        out + rows[:, None] * HEAD_DIM + dims[None, :],
        (result / total[:, None]).to(out.dtype.element_ty),
        mask=here[:, None] & inside[None, :],
    )
    tl.store(lse + rows, highest + tl.log2(total), mask=here)


@triton.jit(do_not_specialize=["num_sequences", "num_words", "sliding_window"])
def teacher_forced_backward_query_kernel(
    query, key, value, out, lse, grad_out, grad_query, delta,
    page_list, num_listed, listed_mask, cu_seqlens, num_sequences, num_words,
    query_stride_token, query_stride_head, key_stride_token, key_stride_head, value_stride_token, value_stride_head,
    scaling, softcap, sliding_window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPARSE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Gradient of one block of queries, and `out . grad_out` of each row, which the other kernel takes."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    num_kv_heads = tl.num_programs(1)
    _, start, length, first = locate(block, cu_seqlens, num_sequences, TOKENS)
    if first >= length:
        return
    row = tl.arange(0, BLOCK_M)
    here = (row // GROUP < TOKENS) & (first + row // GROUP < length)
    positions = tl.where(here, first + row // GROUP, -1)
    tokens = start + first + row // GROUP
    heads = head * GROUP + row % GROUP
    last = tl.minimum(first + TOKENS, length) - 1
    dims = tl.arange(0, BLOCK_DIM)
    inside = dims < HEAD_DIM
    row_mask = here[:, None] & inside[None, :]
    queries = tl.load(
        query + (tokens * query_stride_token + heads * query_stride_head)[:, None] + dims[None, :],
        mask=row_mask,
        other=0.0,
    )
    rows = tokens * (num_kv_heads * GROUP) + heads
    row_offsets = rows[:, None] * HEAD_DIM + dims[None, :]
    grads = tl.load(grad_out + row_offsets, mask=row_mask, other=0.0)
    outs = tl.load(out + row_offsets, mask=row_mask, other=0.0)
    deltas = tl.sum(outs.to(tl.float32) * grads.to(tl.float32), axis=1)
    tl.store(delta + rows, deltas, mask=here)
    lses = tl.load(lse + rows, mask=here, other=0.0)
    block_row = block.to(tl.int64) * num_kv_heads + head
    page_list_row = page_list + block_row * (num_words * 32)
    mask_rows = listed_mask + (tokens * num_kv_heads + head) * num_words
    first_column = 0
    if SPARSE:
        listed = tl.load(num_listed + block_row)
        num_steps = tl.cdiv(listed * PAGE_SIZE, BLOCK_N)
    else:
        listed = 0
        if HAS_WINDOW:
            first_column = tl.maximum(first - sliding_window + 1, 0) // BLOCK_N * BLOCK_N
        num_steps = tl.cdiv(last + 1 - first_column, BLOCK_N)

    result = tl.zeros((BLOCK_M, BLOCK_DIM), tl.float32)
    for i in range(num_steps):
        columns = _columns(i, page_list_row, listed, first_column, PAGE_SIZE, BLOCK_N, SPARSE)
        at = (start + columns)[:, None]
        load_mask = (columns <= last)[:, None] & inside[None, :]
        keys = tl.load(key + at * key_stride_token + head * key_stride_head + dims[None, :], mask=load_mask, other=0.0)
        values = tl.load(
            value + at * value_stride_token + head * value_stride_head + dims[None, :], mask=load_mask, other=0.0
        )
        scores = _capped(tl.dot(queries, tl.trans(keys), input_precision="ieee"), scaling, softcap, HAS_SOFTCAP)
        seen = _seen(i, columns, positions, mask_rows, here, sliding_window, PAGE_SIZE, BLOCK_N, SPARSE, HAS_WINDOW)
        weights = tl.where(seen, tl.exp2(scores * LOG2_E - lses[:, None]), 0.0)
        slopes = weights * (tl.dot(grads, tl.trans(values), input_precision="ieee") - deltas[:, None])
        if HAS_SOFTCAP:
            slopes = slopes * (1.0 - (scores / softcap) * (scores / softcap))
        result = tl.dot(slopes.to(keys.dtype), keys, result, input_precision="ieee")

    tl.store(grad_query + row_offsets, (result * scaling).to(grad_query.dtype.element_ty), mask=row_mask)


@triton.jit(do_not_specialize=["num_sequences", "num_words", "max_blocks", "sliding_window"])
def teacher_forced_backward_key_kernel(
    query, key, value, lse, delta, grad_out, grad_key, grad_value,
    reader_list, num_readers, page_mask, cu_seqlens, num_sequences, num_words, max_blocks,
    query_stride_token, query_stride_head, key_stride_token, key_stride_head, value_stride_token, value_stride_head,
    scaling, softcap, sliding_window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPARSE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of keys and values, from the blocks of queries that read it."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    num_kv_heads = tl.num_programs(1)
    _, start, length, first = locate(block, cu_seqlens, num_sequences, BLOCK_N)
    if first >= length:
        return
    columns = first + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_DIM)
    inside = dims < HEAD_DIM
    at = (start + columns)[:, None]
    column_mask = (columns < length)[:, None] & inside[None, :]
    keys = tl.load(key + at * key_stride_token + head * key_stride_head + dims[None, :], mask=column_mask, other=0.0)
    values = tl.load(
        value + at * value_stride_token + head * value_stride_head + dims[None, :], mask=column_mask, other=0.0
    )
    block_row = block.to(tl.int64) * num_kv_heads + head
    reader_list_row = reader_list + block_row * max_blocks
    first_reader = first // TOKENS
    if SPARSE:
        num_steps = tl.load(num_readers + block_row)
    else:
        last_position = length - 1
        if HAS_WINDOW:
            last_position = tl.minimum(last_position, first + BLOCK_N - 1 + sliding_window - 1)
        num_steps = last_position // TOKENS + 1 - first_reader

    row = tl.arange(0, BLOCK_M)
    key_result = tl.zeros((BLOCK_N, BLOCK_DIM), tl.float32)
    value_result = tl.zeros((BLOCK_N, BLOCK_DIM), tl.float32)
    for i in range(num_steps):
        reader = tl.load(reader_list_row + i) if SPARSE else first_reader + i
        position = reader * TOKENS + row // GROUP
        here = (row // GROUP < TOKENS) & (position < length)
        tokens = start + position
        heads = head * GROUP + row % GROUP
        row_mask = here[:, None] & inside[None, :]
        queries = tl.load(
            query + (tokens * query_stride_token + heads * query_stride_head)[:, None] + dims[None, :],
            mask=row_mask,
            other=0.0,
        )
        rows = tokens * (num_kv_heads * GROUP) + heads
        lses = tl.load(lse + rows, mask=here, other=0.0)
        deltas = tl.load(delta + rows, mask=here, other=0.0)
        grads = tl.load(grad_out + rows[:, None] * HEAD_DIM + dims[None, :], mask=row_mask, other=0.0)
        mask_rows = page_mask + (tokens * num_kv_heads + head) * num_words
        seen = _seen(
            first // BLOCK_N, columns, tl.where(here, position, -1), mask_rows, here, sliding_window,
            PAGE_SIZE, BLOCK_N, SPARSE, HAS_WINDOW,
        )  # fmt: skip
        scores = _capped(tl.dot(keys, tl.trans(queries), input_precision="ieee"), scaling, softcap, HAS_SOFTCAP)
        weights = tl.where(tl.trans(seen), tl.exp2(scores * LOG2_E - lses[None, :]), 0.0)
        value_result = tl.dot(weights.to(grads.dtype), grads, value_result, input_precision="ieee")
        slopes = weights * (tl.dot(values, tl.trans(grads), input_precision="ieee") - deltas[None, :])
        if HAS_SOFTCAP:
            slopes = slopes * (1.0 - (scores / softcap) * (scores / softcap))
        key_result = tl.dot(slopes.to(queries.dtype), queries, key_result, input_precision="ieee")

    offsets = (at * num_kv_heads + head) * HEAD_DIM + dims[None, :]
    tl.store(grad_key + offsets, (key_result * scaling).to(grad_key.dtype.element_ty), mask=column_mask)
    tl.store(grad_value + offsets, value_result.to(grad_value.dtype.element_ty), mask=column_mask)


def launch_options(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    page_size: int = 16,
    sparse: bool = True,
    has_window: bool = False,
    has_softcap: bool = False,
    family: str = "ampere",
) -> dict[str, dict[str, Any]]:
    """Keyword arguments of each kernel of the op, by kernel name, as they are launched for these shapes."""
    group = num_heads // num_kv_heads
    block_dim = max(16, triton.next_power_of_2(head_dim))
    if family == "turing" or dtype == torch.float32:  # no matrix units: both factors of a product lie in registers
        tiles = dict.fromkeys(KERNELS, (16, 16, 8, 1))
    else:
        tiles = dict(zip(KERNELS, TILES[family][block_dim > 128], strict=True))
        if group & (group - 1) and block_dim <= 128:
            tiles[KERNELS[-1]] = UNEVEN_TILES.get(family, tiles[KERNELS[-1]])
    options = {}
    for kernel, (rows, keys, num_warps, num_stages) in tiles.items():
        options[kernel] = {
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "BLOCK_DIM": block_dim,
            "PAGE_SIZE": page_size,
            "BLOCK_M": max(rows, triton.next_power_of_2(group)),
            "BLOCK_N": min(keys, 32 * page_size),  # the pages of a block of keys have their bits in one word
            "SPARSE": sparse,
            "HAS_WINDOW": has_window,
            "HAS_SOFTCAP": has_softcap,
            "num_warps": num_warps,
            "num_stages": num_stages,
        }
    return options


class _TeacherForcedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, cu_seqlens, prompt_lengths, budgets, options):
        mask = None
        if budgets is not None:
            mask = choose_pages(
                query,
                key,
                cu_seqlens,
                prompt_lengths,
                budgets,
                page_size=options["page_size"],
                sink_pages=options["sink_pages"],
                recent_pages=options["recent_pages"],
                sliding_window=options["sliding_window"],
                max_seqlen=options["max_seqlen"],
            )
        launch = _launch_options(query, key, mask, options)["teacher_forced_forward_kernel"]
        num_tokens, num_heads, head_dim = query.shape
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=query.device)
        lists = _lists(mask, cu_seqlens, launch)
        tokens_per_block = launch["BLOCK_M"] // launch["GROUP"]
        grid = (count_blocks(num_tokens, len(cu_seqlens) - 1, tokens_per_block), key.shape[1])
        teacher_forced_forward_kernel[grid](
            query, key, value, out, lse,
            *_list_arguments(lists, cu_seqlens, mask),
            *_strides(query, key, value), *_scalars(options),
            **launch,
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, out, lse, cu_seqlens, mask)
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        query, key, value, out, lse, cu_seqlens, mask = ctx.saved_tensors
        options, grad_out = ctx.options, grad_out.contiguous()
        num_tokens, num_kv_heads = key.shape[:2]
        num_sequences = len(cu_seqlens) - 1
        launches = _launch_options(query, key, mask, options)
        grad_query, grad_key, grad_value = (
            torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (query, key, value)
        )
        delta = scratch(tuple(lse.shape), torch.float32, lse.device)

        launch = launches["teacher_forced_backward_query_kernel"]
        lists = _lists(mask, cu_seqlens, launch)
        tokens_per_block = launch["BLOCK_M"] // launch["GROUP"]
        grid = (count_blocks(num_tokens, num_sequences, tokens_per_block), num_kv_heads)
        teacher_forced_backward_query_kernel[grid](
            query, key, value, out, lse, grad_out, grad_query, delta,
            *_list_arguments(lists, cu_seqlens, mask),
            *_strides(query, key, value), *_scalars(options),
            **launch,
        )  # fmt: skip

        launch = launches["teacher_forced_backward_key_kernel"]
        reader_list = num_readers = delta  # not read without a page choice
        max_blocks = 1
        if mask is not None and lists is not None:  # they come together
            if lists.tokens_per_block != launch["BLOCK_M"] // launch["GROUP"]:
                lists = list_pages(mask, cu_seqlens, launch["PAGE_SIZE"], launch["BLOCK_M"] // launch["GROUP"])
            reader_list, num_readers = list_readers(
                lists, cu_seqlens, num_tokens, options["page_size"], launch["BLOCK_N"], options["max_seqlen"]
            )
            max_blocks = reader_list.shape[-1]
        grid = (count_blocks(num_tokens, num_sequences, launch["BLOCK_N"]), num_kv_heads)
        teacher_forced_backward_key_kernel[grid](
            query, key, value, lse, delta, grad_out, grad_key, grad_value,
            reader_list, num_readers, delta if mask is None else mask,
            cu_seqlens, num_sequences, 1 if mask is None else mask.shape[-1], max_blocks,
            *_strides(query, key, value), *_scalars(options),
            **launch,
        )  # fmt: skip
        return grad_query, grad_key, grad_value, None, None, None, None


def _launch_options(query, key, mask, options) -> dict[str, dict[str, Any]]:
    return launch_options(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[2],
        dtype=query.dtype,
        page_size=options["page_size"],
        sparse=mask is not None,
        has_window=options["sliding_window"] is not None,
        has_softcap=options["softcap"] is not None,
        family=gpu_family(query.device),
    )


def _lists(mask: torch.Tensor | None, cu_seqlens: torch.Tensor, launch: dict[str, Any]) -> PageLists | None:
    if mask is None:
        return None
    return list_pages(mask, cu_seqlens, launch["PAGE_SIZE"], launch["BLOCK_M"] // launch["GROUP"])


def _list_arguments(lists: PageLists | None, cu_seqlens: torch.Tensor, mask: torch.Tensor | None) -> tuple:
    """Arguments from `page_list` to `num_words`; without a page choice the kernels don't read the lists."""
    num_sequences = len(cu_seqlens) - 1
    if lists is None or mask is None:
        return cu_seqlens, cu_seqlens, cu_seqlens, cu_seqlens, num_sequences, 1
    return lists.page_list, lists.num_listed, lists.listed_mask, cu_seqlens, num_sequences, mask.shape[-1]


def _strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:2])


def _scalars(options: dict[str, Any]) -> tuple[float, float, int]:
    return float(options["scaling"]), float(options["softcap"] or 1.0), options["sliding_window"] or 0


def why_unsupported(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, page_size: int) -> str | None:
    """What keeps [`teacher_forced_attention`] from taking these tensors; `None` where it takes them."""
    head_dim, group = query.shape[-1], query.shape[1] // key.shape[1]
    if query.dtype not in DTYPES:
        return f"the kernels do not know {str(query.dtype).removeprefix('torch.')}"
    if value.shape[-1] != head_dim:
        return f"keys have the head dim {head_dim} and values {value.shape[-1]}"
    if head_dim % 8 or not 16 <= head_dim <= MAX_HEAD_DIM:
        return f"the head dim {head_dim} is not a multiple of 8 from 16 to {MAX_HEAD_DIM}"
    if group > MAX_GROUP:
        return f"{group} query heads share a KV head, more than {MAX_GROUP}"
    if page_size not in PAGE_SIZES:
        return f"the kernels do not know page_size={page_size}, but {PAGE_SIZES}"
    return None


def teacher_forced_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    prompt_lengths: torch.Tensor,
    budgets: torch.Tensor | None,
    *,
    page_size: int,
    sink_pages: int,
    recent_pages: int,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    max_seqlen: int,
) -> torch.Tensor:
    """
    See [`reference.teacher_forced_attention`]; here of several sequences that lie one after the other. Differentiable
    once; the page choice carries no gradient. Pages are chosen as [`select_pages`] does: scores in float32, landmarks in
    the dtype of the keys.

    Args:
        query (`torch.Tensor`): `(num_tokens, num_heads, head_dim)` in float16, bfloat16 or float32.
        key, value (`torch.Tensor`): `(num_tokens, num_kv_heads, head_dim)`.
        cu_seqlens (`torch.Tensor`): `(num_sequences + 1,)` int32, from 0 to `num_tokens`, where the sequences begin.
        prompt_lengths (`torch.Tensor`): `(num_sequences,)` int32, tokens of each sequence that attend densely.
        budgets (`torch.Tensor`, *optional*): `(num_tokens,)` int32, scored pages of each token; `None` is dense.
        page_size (`int`): a power of two up to 64.
        max_seqlen (`int`): tokens of the longest sequence; the device is not asked.

    Returns:
        `torch.Tensor`: `(num_tokens, num_heads, head_dim)`.

    Raises:
        `ValueError`: for shapes or dtypes that do not go together, or sizes that the kernels do not know.
    """
    query, key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value))
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, num_sequences = key.shape[1], len(cu_seqlens) - 1
    check_tensor("query", query, (None, None, None), DTYPES)
    check_tensor("key", key, (num_tokens, None, head_dim), (query.dtype,))
    check_tensor("value", value, (num_tokens, num_kv_heads, head_dim), (query.dtype,))
    check_tensor("cu_seqlens", cu_seqlens, (None,), (torch.int32,))
    check_tensor("prompt_lengths", prompt_lengths, (num_sequences,), (torch.int32,))
    if budgets is not None:
        check_tensor("budgets", budgets, (num_tokens,), (torch.int32,))
    check_head_dim("query", head_dim)
    group = check_group(num_heads, num_kv_heads)
    check(group <= MAX_GROUP, f"{group} query heads share a KV head, but the kernels take at most {MAX_GROUP}.")
    check(page_size in PAGE_SIZES, f"page_size is {page_size}, but the kernels know {PAGE_SIZES}.")
    check(sink_pages >= 0, f"sink_pages is {sink_pages}, but must be at least 0.")
    check(
        recent_pages >= 1, f"recent_pages is {recent_pages}, but must be at least 1: a page being filled has no score."
    )
    check(max_seqlen >= 1, f"max_seqlen is {max_seqlen}, but must be at least 1.")
    if sliding_window is not None:
        check(
            sliding_window >= 1, f"sliding_window is {sliding_window}, but must be at least 1, or None for no window."
        )
    if num_tokens == 0:
        return torch.zeros_like(query)
    options = {
        "page_size": page_size,
        "sink_pages": sink_pages,
        "recent_pages": recent_pages,
        "scaling": scaling,
        "sliding_window": sliding_window,
        "softcap": softcap,
        "max_seqlen": max_seqlen,
    }
    return _TeacherForcedAttention.apply(query, key, value, cu_seqlens, prompt_lengths, budgets, options)
