"""
Which pages every token of packed sequences attends to, as bits: the page choice of teacher-forced attention.

Packed sequences lie one after the other; `cu_seqlens` `(num_sequences + 1,)` holds where each begins. Work is cut into
blocks that never cross a sequence. Block numbers leave gaps, so that neither their count nor their place needs a look
at the device: sequence `s` owns the numbers from `cu_seqlens[s] // size + s` on, of [`count_blocks`] in total.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .launch import scratch


SCORE_BYTES = 256 << 20  # of scores that exist at the same time
SCORE_TOKENS, SCORE_PAGES, SCORE_DIMS = 64, 64, 32  # tile of the product of queries and landmarks


def count_blocks(num_tokens: int, num_sequences: int, size: int) -> int:
    """How many numbers blocks of `size` tokens take."""
    return num_tokens // size + num_sequences


@triton.jit
def locate(block, cu_seqlens, num_sequences, SIZE: tl.constexpr):
    """Of a block: its sequence, where that begins, its length, and the position of the block's first token in it; the
    position is not below the length where the number is of no block."""
    sequence = 0
    beyond = num_sequences
    while beyond - sequence > 1:
        middle = (sequence + beyond) // 2
        if tl.load(cu_seqlens + middle) // SIZE + middle <= block:
            sequence = middle
        else:
            beyond = middle
    start = tl.load(cu_seqlens + sequence)
    length = tl.load(cu_seqlens + sequence + 1) - start
    first = (block - start // SIZE - sequence) * SIZE
    return sequence, start.to(tl.int64), length, first


@triton.jit(do_not_specialize=["num_sequences"])
def page_mask_landmarks_kernel(
    key,
    landmarks,
    cu_seqlens,
    num_sequences,
    key_stride_token,
    key_stride_head,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Mean key of each full page: accumulated in float32, rounded to the dtype of the keys."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    _, start, length, first = locate(block, cu_seqlens, num_sequences, PAGE_SIZE)
    if first + PAGE_SIZE > length:
        return
    rows = start + first + tl.arange(0, PAGE_SIZE)
    dims = tl.arange(0, BLOCK_DIM)
    inside = dims < HEAD_DIM
    keys = tl.load(
        key + rows[:, None] * key_stride_token + head.to(tl.int64) * key_stride_head + dims[None, :],
        mask=inside[None, :],
        other=0.0,
    )
    mean = tl.sum(keys.to(tl.float32), axis=0) / PAGE_SIZE
    row = block.to(tl.int64) * tl.num_programs(1) + head
    tl.store(landmarks + row * HEAD_DIM + dims, mean.to(landmarks.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_sequences", "first_block", "num_words"])
def page_mask_scores_kernel(
    query,
    landmarks,
    scores,
    cu_seqlens,
    prompt_lengths,
    num_sequences,
    first_block,
    num_words,
    query_stride_token,
    query_stride_head,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """`mean of the group's queries . landmark` in float32, of each token of a completion and each page before it."""
    head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    local_block = tl.program_id(2)
    sequence, start, length, first = locate(first_block + local_block, cu_seqlens, num_sequences, BLOCK_TOKENS)
    last = tl.minimum(first + BLOCK_TOKENS, length) - 1
    first_page = tl.program_id(0) * BLOCK_PAGES
    if first >= length:
        return
    if (first_page > last // PAGE_SIZE) | (last < tl.load(prompt_lengths + sequence)):
        return
    tokens = tl.arange(0, BLOCK_TOKENS)
    pages = first_page + tl.arange(0, BLOCK_PAGES)
    page_rows = (start // PAGE_SIZE + sequence + pages) * num_kv_heads + head
    full = pages < length // PAGE_SIZE
    query_rows = query + (start + first + tokens)[:, None] * query_stride_token
    query_rows += (head * GROUP).to(tl.int64) * query_stride_head
    total = tl.zeros((BLOCK_TOKENS, BLOCK_PAGES), dtype=tl.float32)
    for first_dim in range(0, HEAD_DIM, BLOCK_DIM):
        dims = first_dim + tl.arange(0, BLOCK_DIM)
        here = ((first + tokens) < length)[:, None] & (dims < HEAD_DIM)[None, :]
        mean = tl.zeros((BLOCK_TOKENS, BLOCK_DIM), dtype=tl.float32)
        for member in tl.static_range(GROUP):
            values = tl.load(query_rows + member * query_stride_head + dims[None, :], mask=here, other=0.0)
            mean += values.to(tl.float32)
        landmark = tl.load(
            landmarks + page_rows[:, None] * HEAD_DIM + dims[None, :],
            mask=full[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        landmark = tl.trans(landmark.to(tl.float32))
        total = tl.dot(mean / GROUP, landmark, total, input_precision="ieee")
    rows = (local_block * BLOCK_TOKENS + tokens).to(tl.int64) * num_kv_heads + head
    tl.store(scores + rows[:, None] * (num_words * 32) + pages[None, :], total, mask=(pages < num_words * 32)[None, :])


@triton.jit(do_not_specialize=["num_sequences", "first_block", "num_words", "sliding_window"])
def page_mask_select_kernel(
    scores,
    mask,
    cu_seqlens,
    prompt_lengths,
    budgets,
    num_sequences,
    first_block,
    num_words,
    sliding_window,
    PAGE_SIZE: tl.constexpr,
    SINK_PAGES: tl.constexpr,
    RECENT_PAGES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """The bits of one token and KV head. The budget-th largest score is found bit by bit; of its equals the earlier pages
    win."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    sequence, start, length, first = locate(first_block + row // BLOCK_TOKENS, cu_seqlens, num_sequences, BLOCK_TOKENS)
    position = first + row % BLOCK_TOKENS
    if position >= length:
        return
    pages = tl.arange(0, BLOCK_WORDS * 32)
    last = position // PAGE_SIZE
    chosen = pages <= last
    budget = tl.maximum(tl.load(budgets + start + position), 0)
    if (position >= tl.load(prompt_lengths + sequence)) & (last + 1 - SINK_PAGES - RECENT_PAGES > budget):
        candidate = (pages >= SINK_PAGES) & (pages <= last - RECENT_PAGES)
        score_row = (row.to(tl.int64) * num_kv_heads + head) * (num_words * 32)
        score = tl.load(scores + score_row + pages, mask=pages < (last // 32 + 1) * 32, other=0.0)
        score = tl.where(score == 0.0, 0.0, score)  # -0.0 equals 0.0
        bits = score.to(tl.int32, bitcast=True)
        ordered = tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)
        ordered = tl.where(candidate, ordered, 0)
        threshold = tl.full((), 0, tl.uint32)
        bit = tl.full((), 1 << 31, tl.uint32)
        num_kept = last + 1  # pages whose score is at least the threshold
        while (bit != 0) & (num_kept != budget):
            higher = threshold | bit
            count = tl.sum((ordered >= higher).to(tl.int32), axis=0)
            if count >= budget:
                threshold = higher
                num_kept = count
            bit = bit >> 1
        above = ordered > threshold
        equal = (ordered == threshold).to(tl.int32)
        left = budget - tl.sum(above.to(tl.int32), axis=0)
        best = above | ((equal != 0) & (tl.cumsum(equal, axis=0) <= left))
        chosen = chosen & ((candidate == 0) | best)
    chosen = chosen & (pages >= tl.maximum(position - sliding_window + 1, 0) // PAGE_SIZE)
    words_bits = tl.reshape(chosen.to(tl.int32), (BLOCK_WORDS, 32)) << tl.arange(0, 32)[None, :]
    words = tl.arange(0, BLOCK_WORDS)
    mask_row = ((start + position) * num_kv_heads + head) * num_words
    tl.store(mask + mask_row + words, tl.sum(words_bits, axis=1), mask=words < num_words)


@triton.jit(do_not_specialize=["num_sequences", "num_words"])
def page_mask_lists_kernel(
    mask,
    page_list,
    num_listed,
    listed_mask,
    union_mask,
    cu_seqlens,
    num_sequences,
    num_words,
    PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """The pages that any token of a block chose, and each token's bits over that list."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    _, start, length, first = locate(block, cu_seqlens, num_sequences, TOKENS)
    if first >= length:
        return
    tokens = tl.arange(0, BLOCK_TOKENS)
    here = (tokens < TOKENS) & (first + tokens < length)
    rows = ((start + first + tokens) * num_kv_heads + head) * num_words
    block_row = block.to(tl.int64) * num_kv_heads + head
    bit = tl.arange(0, 32)
    last = tl.minimum(first + TOKENS, length) - 1
    count = 0
    filled = 0  # bits in `pending`; below 32
    word_out = 0
    pending = tl.zeros((BLOCK_TOKENS,), dtype=tl.uint64)
    for word in range(last // PAGE_SIZE // 32 + 1):
        words = tl.load(mask + rows + word, mask=here, other=0)
        bits = (words[:, None] >> bit[None, :]) & 1
        union = tl.max(bits, axis=0)
        before = tl.cumsum(union, axis=0) - union
        tl.store(
            page_list + block_row * (num_words * 32) + count + before,
            (word * 32 + bit).to(page_list.dtype.element_ty),
            mask=union != 0,
        )
        tl.store(union_mask + block_row * num_words + word, tl.sum(union << bit, axis=0))
        pending |= tl.sum(bits.to(tl.uint64) << (filled + before).to(tl.uint64)[None, :], axis=1)
        added = tl.sum(union, axis=0)
        count += added
        filled += added
        if filled >= 32:
            tl.store(listed_mask + rows + word_out, pending.to(tl.uint32).to(tl.int32, bitcast=True), mask=here)
            pending = pending >> 32
            filled -= 32
            word_out += 1
    if filled > 0:
        tl.store(listed_mask + rows + word_out, pending.to(tl.uint32).to(tl.int32, bitcast=True), mask=here)
    tl.store(num_listed + block_row, count)


@triton.jit(do_not_specialize=["num_sequences", "num_words", "max_blocks"])
def page_mask_readers_kernel(
    union_mask,
    reader_list,
    num_readers,
    cu_seqlens,
    num_sequences,
    num_words,
    max_blocks,
    PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_READERS: tl.constexpr,
):
    """The blocks of queries in which any token chose any page of a block of keys; counted from the sequence's first."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    sequence, start, length, first = locate(block, cu_seqlens, num_sequences, BLOCK_KEYS)
    if first >= length:
        return
    WANTED: tl.constexpr = (1 << max(1, BLOCK_KEYS // PAGE_SIZE)) - 1
    word = first // PAGE_SIZE // 32
    shift = first // PAGE_SIZE % 32
    first_query_block = start // TOKENS + sequence
    block_row = block.to(tl.int64) * num_kv_heads + head
    count = 0
    for base in range(first // TOKENS, tl.cdiv(length, TOKENS), BLOCK_READERS):
        readers = base + tl.arange(0, BLOCK_READERS)
        words = tl.load(
            union_mask + ((first_query_block + readers) * num_kv_heads + head) * num_words + word,
            mask=readers < tl.cdiv(length, TOKENS),
            other=0,
        )
        reads = (((words >> shift) & WANTED) != 0).to(tl.int32)
        before = tl.cumsum(reads, axis=0) - reads
        tl.store(reader_list + block_row * max_blocks + count + before, readers, mask=reads != 0)
        count += tl.sum(reads, axis=0)
    tl.store(num_readers + block_row, count)


def choose_pages(
    query: torch.Tensor,
    key: torch.Tensor,
    cu_seqlens: torch.Tensor,
    prompt_lengths: torch.Tensor,
    budgets: torch.Tensor,
    *,
    page_size: int,
    sink_pages: int,
    recent_pages: int,
    sliding_window: int | None,
    max_seqlen: int,
    score_bytes: int = SCORE_BYTES,
) -> torch.Tensor:
    """
    The pages that decoding would have chosen at each token ([`reference.select_pages`], with scores in float32), all
    pages for prompts. Pages beyond the sliding window are left out.

    Args:
        score_bytes (`int`): memory for scores; queries are worked off in chunks that fit.

    Returns:
        `torch.Tensor`: `(num_tokens, num_kv_heads, num_words)` int32; bit `page % 32` of word `page // 32`.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, num_sequences = key.shape[1], len(prompt_lengths)
    num_pages = triton.cdiv(max_seqlen, page_size)
    num_words = triton.cdiv(num_pages, 32)  # rows of scores are padded to it, so that they are aligned
    device = query.device
    num_rows = count_blocks(num_tokens, num_sequences, page_size)
    landmarks = scratch((num_rows, num_kv_heads, head_dim), key.dtype, device)
    page_mask_landmarks_kernel[(num_rows, num_kv_heads)](
        key,
        landmarks,
        cu_seqlens,
        num_sequences,
        key.stride(0),
        key.stride(1),
        PAGE_SIZE=page_size,
        HEAD_DIM=head_dim,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        num_warps=2,
    )
    mask = scratch((num_tokens, num_kv_heads, num_words), torch.int32, device)
    group = num_heads // num_kv_heads
    block_pages = SCORE_PAGES // 2 if group & (group - 1) else SCORE_PAGES  # by compiling: no spilled registers
    num_blocks = count_blocks(num_tokens, num_sequences, SCORE_TOKENS)
    row_bytes = 4 * num_kv_heads * num_words * 32
    chunk = max(1, min(num_blocks, score_bytes // (SCORE_TOKENS * row_bytes), 65535))
    scores = scratch((chunk * SCORE_TOKENS, num_kv_heads, num_words * 32), torch.float32, device)
    for first_block in range(0, num_blocks, chunk):
        blocks = min(chunk, num_blocks - first_block)
        page_mask_scores_kernel[(triton.cdiv(num_pages, block_pages), num_kv_heads, blocks)](
            query,
            landmarks,
            scores,
            cu_seqlens,
            prompt_lengths,
            num_sequences,
            first_block,
            num_words,
            query.stride(0),
            query.stride(1),
            PAGE_SIZE=page_size,
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_TOKENS=SCORE_TOKENS,
            BLOCK_PAGES=block_pages,
            BLOCK_DIM=SCORE_DIMS,
            num_warps=8,
            num_stages=1,
        )
        block_words = triton.next_power_of_2(num_words)
        page_mask_select_kernel[(blocks * SCORE_TOKENS, num_kv_heads)](
            scores,
            mask,
            cu_seqlens,
            prompt_lengths,
            budgets,
            num_sequences,
            first_block,
            num_words,
            2**30 if sliding_window is None else sliding_window,
            PAGE_SIZE=page_size,
            SINK_PAGES=sink_pages,
            RECENT_PAGES=recent_pages,
            BLOCK_TOKENS=SCORE_TOKENS,
            BLOCK_WORDS=block_words,
            num_warps=max(1, min(8, block_words // 16)),
        )
    return mask


@dataclass
class PageLists:
    """What each block of `tokens_per_block` queries reads, made by [`list_pages`]. Rows are block numbers."""

    tokens_per_block: int
    page_list: (
        torch.Tensor
    )  # (num_blocks, num_kv_heads, num_words * 32) int16 or int32, ascending pages of the sequence
    num_listed: torch.Tensor  # (num_blocks, num_kv_heads) int32
    listed_mask: (
        torch.Tensor
    )  # (num_tokens, num_kv_heads, num_words) int32, bit i: the token attends to the i-th listed
    union_mask: torch.Tensor  # (num_blocks, num_kv_heads, num_words) int32, bit p: page p is listed


def list_pages(mask: torch.Tensor, cu_seqlens: torch.Tensor, page_size: int, tokens_per_block: int) -> PageLists:
    """List the pages that any query of a block attends to; `mask` is a result of [`choose_pages`]."""
    num_tokens, num_kv_heads, num_words = mask.shape
    num_sequences = len(cu_seqlens) - 1
    num_blocks = count_blocks(num_tokens, num_sequences, tokens_per_block)
    index_dtype = torch.int16 if num_words * 32 <= 2**15 else torch.int32
    lists = PageLists(
        tokens_per_block,
        scratch((num_blocks, num_kv_heads, num_words * 32), index_dtype, mask.device),
        scratch((num_blocks, num_kv_heads), torch.int32, mask.device),
        scratch(tuple(mask.shape), torch.int32, mask.device),
        scratch((num_blocks, num_kv_heads, num_words), torch.int32, mask.device),
    )
    page_mask_lists_kernel[(num_blocks, num_kv_heads)](
        mask,
        lists.page_list,
        lists.num_listed,
        lists.listed_mask,
        lists.union_mask,
        cu_seqlens,
        num_sequences,
        num_words,
        PAGE_SIZE=page_size,
        TOKENS=tokens_per_block,
        BLOCK_TOKENS=triton.next_power_of_2(tokens_per_block),
        num_warps=1,
    )
    return lists


def list_readers(
    lists: PageLists, cu_seqlens: torch.Tensor, num_tokens: int, page_size: int, keys_per_block: int, max_seqlen: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    List the blocks of queries that read any page of a block of keys.

    Returns:
        `(num_key_blocks, num_kv_heads, max_blocks)` int32, ascending numbers of query blocks within the sequence, and how
        many they are, `(num_key_blocks, num_kv_heads)` int32.
    """
    num_kv_heads, num_words = lists.union_mask.shape[1:]
    num_sequences = len(cu_seqlens) - 1
    num_blocks = count_blocks(num_tokens, num_sequences, keys_per_block)
    max_blocks = triton.cdiv(max_seqlen, lists.tokens_per_block)
    reader_list = scratch((num_blocks, num_kv_heads, max_blocks), torch.int32, cu_seqlens.device)
    num_readers = scratch((num_blocks, num_kv_heads), torch.int32, cu_seqlens.device)
    page_mask_readers_kernel[(num_blocks, num_kv_heads)](
        lists.union_mask,
        reader_list,
        num_readers,
        cu_seqlens,
        num_sequences,
        num_words,
        max_blocks,
        PAGE_SIZE=page_size,
        TOKENS=lists.tokens_per_block,
        BLOCK_KEYS=keys_per_block,
        BLOCK_READERS=128,
        num_warps=1,
    )
    return reader_list, num_readers
