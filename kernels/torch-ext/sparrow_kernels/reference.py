"""The meaning of every op: slow, obvious PyTorch that the fast paths are tested against.

Shapes shared by all ops
------------------------
- `key_pages`, `value_pages`: `(num_kv_heads, num_pages, page_size, head_dim)`, the pool of KV pages of one layer.
- `landmarks`: `(num_kv_heads, num_pages, head_dim)`, the mean key of each full page.
- `page_table`: `(num_queries, max_pages)` int64; row `i` lists the physical pages of query `i`'s sequence in order.
- `positions`: `(num_queries,)` int64; the 0-based position of each query token in its sequence. Its own key is already
  stored, so it attends to keys `0..position`.

The method (pages, landmarks, sink and recent pages, one choice of pages per sequence and KV head) is that of Sparrow
(arXiv 2606.08446), which builds on Quest (arXiv 2406.10774).
"""

import torch


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    """In float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    landmarks: torch.Tensor,
) -> None:
    """
    Write the keys and values of new tokens into their pages, in place. A page whose last slot is written gets its
    landmark: the mean of its keys, accumulated in float32 at least.

    Args:
        key, value (`torch.Tensor`): `(num_tokens, num_kv_heads, head_dim)`, keys after the rotary embedding.
        slots (`torch.Tensor`): `(num_tokens,)` int64, `page * page_size + offset` of each token.
        key_pages, value_pages, landmarks (`torch.Tensor`): see the module docstring; written in place.
    """
    page_size = key_pages.shape[2]
    for token, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, page_size)
        key_pages[:, page, offset] = key[token]
        value_pages[:, page, offset] = value[token]
    for slot in slots.tolist():
        page, offset = divmod(slot, page_size)
        if offset == page_size - 1:
            landmarks[:, page] = _widen(key_pages[:, page]).mean(1).to(landmarks.dtype)


def select_pages(
    query: torch.Tensor,
    landmarks: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    budgets: torch.Tensor,
    page_size: int,
    sink_pages: int,
    recent_pages: int,
) -> torch.Tensor:
    """
    Choose the pages each query attends to: the first `sink_pages`, the last `recent_pages` (the one being filled
    included) and, of the others, the `budget` with the largest `mean of the group's queries . landmark`. Of equal
    scores the earlier page wins. With no more pages than that, all are chosen.

    Args:
        query (`torch.Tensor`): `(num_queries, num_heads, head_dim)`.
        budgets (`torch.Tensor`): `(num_queries,)` int64, scored pages that each query keeps.

    Returns:
        `torch.Tensor`: `(num_queries, num_kv_heads, max_pages)` bool, true where a page of the table is attended to.
    """
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads = landmarks.shape[0]
    mean_query = query.view(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim).mean(2)
    chosen = torch.zeros(num_queries, num_kv_heads, page_table.shape[1], dtype=torch.bool, device=query.device)
    for i in range(num_queries):
        num_pages = int(positions[i]) // page_size + 1
        first, last = min(sink_pages, num_pages), max(min(sink_pages, num_pages), num_pages - recent_pages)
        chosen[i, :, :first] = True
        chosen[i, :, last:num_pages] = True
        candidates = landmarks[:, page_table[i, first:last]]
        scores = (mean_query[i, :, None] * candidates).sum(-1)
        order = scores.argsort(dim=-1, descending=True, stable=True)[:, : int(budgets[i])]
        for head in range(num_kv_heads):
            chosen[i, head, first + order[head]] = True
    return chosen


def paged_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    chosen: torch.Tensor | None = None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """
    Attention of each query over the chosen pages of its sequence, or over all of them.

    Args:
        query (`torch.Tensor`): `(num_queries, num_heads, head_dim)`; `num_heads` is a multiple of `num_kv_heads`.
        chosen (`torch.Tensor`, *optional*): result of [`select_pages`]; `None` attends to every page.
        scaling (`float`): factor on the scores.
        sliding_window (`int`, *optional*): keys further back than `position - sliding_window + 1` are not seen.
        softcap (`float`, *optional*): scores become `softcap * tanh(score / softcap)`.

    Returns:
        `torch.Tensor`: `(num_queries, num_heads, head_dim)`, in the dtype of `query`.
    """
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads, _, page_size, _ = key_pages.shape
    group = num_heads // num_kv_heads
    out = torch.empty(num_queries, num_heads, value_pages.shape[-1], dtype=query.dtype, device=query.device)
    for i in range(num_queries):
        position = int(positions[i])
        num_pages = position // page_size + 1
        keys = key_pages[:, page_table[i, :num_pages]].flatten(1, 2)[:, : position + 1]
        values = value_pages[:, page_table[i, :num_pages]].flatten(1, 2)[:, : position + 1]
        seen = torch.ones(num_kv_heads, position + 1, dtype=torch.bool, device=query.device)
        if chosen is not None:
            seen = chosen[i].repeat_interleave(page_size, dim=-1)[:, : position + 1].clone()
        if sliding_window is not None:
            seen[:, : max(0, position + 1 - sliding_window)] = False
        for head in range(num_heads):
            kv_head = head // group
            visible = seen[kv_head]
            scores = (_widen(query[i, head]) * _widen(keys[kv_head][visible])).sum(-1) * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[i, head] = (scores.softmax(-1)[:, None] * _widen(values[kv_head][visible])).sum(0).to(query.dtype)
    return out


def teacher_forced_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    prompt_length: int,
    budgets: torch.Tensor | None,
    *,
    page_size: int,
    sink_pages: int,
    recent_pages: int,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """
    What decoding the sequence token by token would have computed, for all its tokens at once and differentiable. The
    first `prompt_length` tokens attend densely, as in prefill; the page choice itself carries no gradient.

    Args:
        query (`torch.Tensor`): `(num_tokens, num_heads, head_dim)`, one sequence.
        key, value (`torch.Tensor`): `(num_tokens, num_kv_heads, head_dim)`.
        budgets (`torch.Tensor`, *optional*): `(num_tokens,)` int64, scored pages at each position; `None` is dense.

    Returns:
        `torch.Tensor`: `(num_tokens, num_heads, head_dim)`.
    """
    num_tokens, num_heads, _ = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    index = torch.arange(num_tokens, device=query.device)
    seen = (index[None, :] <= index[:, None]).expand(num_kv_heads, -1, -1).clone()
    if sliding_window is not None:
        seen &= index[None, :] > index[:, None] - sliding_window
    if budgets is not None:
        num_pages = -(-num_tokens // page_size)
        padding = num_pages * page_size - num_tokens
        pages = torch.nn.functional.pad(key.detach(), (0, 0, 0, 0, 0, padding)).unflatten(0, (num_pages, page_size))
        landmarks = _widen(pages).mean(1).to(key.dtype).transpose(0, 1)
        identity = torch.arange(num_pages, device=query.device).expand(num_tokens, -1)
        chosen = select_pages(query.detach(), landmarks, identity, index, budgets, page_size, sink_pages, recent_pages)
        chosen[:prompt_length] = True
        seen &= chosen.repeat_interleave(page_size, dim=-1)[..., :num_tokens].transpose(0, 1)
    outputs = []
    for head in range(num_heads):
        scores = _widen(query[:, head]) @ _widen(key[:, head // group]).T * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~seen[head // group], float("-inf")).softmax(-1)
        outputs.append((weights @ _widen(value[:, head // group])).to(query.dtype))
    return torch.stack(outputs, dim=1)
