"""
The ops of `reference.py`, fast, on PyTorch alone: the CPU path, and the fallback where no kernel is built.

Two things make them fast. What does not depend on the layer (masks, page indices, contiguous runs of pages) is worked
out once a step, in a *plan*, and shared by all layers; and nothing large is allocated per layer: gathered pages go
into a [`Workspace`] that stays in the processor's cache.

Slots of a page that were never written must hold finite numbers (pools are zero-filled): they are masked, but a NaN
times a zero weight is a NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F


# Gathered keys of one slice of queries: on a CPU they should stay in its cache, on a GPU launches should be few.
GATHER_BYTES = {"cpu": 4 << 20}
GATHER_BYTES_ELSEWHERE = 64 << 20


@dataclass
class Workspace:
    """Scratch tensors that are reused from call to call. What a scratch tensor holds when handed out is undefined."""

    tensors: dict = field(default_factory=dict)

    def get(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """An uninitialised tensor of `shape` with the dtype and device of `like`."""
        size = 1
        for length in shape:
            size *= length
        key = (name, like.dtype, like.device)
        buffer = self.tensors.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self.tensors[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return buffer[:size].view(shape)


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    full_pages: torch.Tensor | None,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    landmarks: torch.Tensor | None,
) -> None:
    """
    See [`reference.store_kv`]. `full_pages` `(num_full,)` int64 names the pages whose last slot is among `slots`, which
    the caller knows without a look at the device; `landmarks=None` skips them (layers that never select pages).
    """
    key_pages.flatten(1, 2).index_copy_(1, slots, key.transpose(0, 1).to(key_pages.dtype))
    value_pages.flatten(1, 2).index_copy_(1, slots, value.transpose(0, 1).to(value_pages.dtype))
    if landmarks is not None and full_pages is not None:
        means = key_pages.index_select(1, full_pages).float().mean(2)
        landmarks.index_copy_(1, full_pages, means.to(landmarks.dtype))


@dataclass
class SparsePlan:
    """What sparse attention of a step needs and no layer changes; made by [`plan_sparse`]."""

    num_scored: int  # scored pages per query, at most
    prunes: bool  # whether any query leaves a page out
    uniform: bool  # whether all queries keep `num_scored` scored pages, so that their order says nothing
    candidate_rows: torch.Tensor  # (num_queries, num_kv_heads, max_candidates) row of each candidate in the pool
    forced_rows: torch.Tensor  # (num_queries, num_kv_heads, sink_pages + recent_pages)
    candidate_mask: torch.Tensor | None  # (num_queries, 1, max_candidates) bool, true where there is no candidate
    token_mask: torch.Tensor  # (num_queries, 1, 1, tokens) additive, over scored then forced pages


def pool_rows(pages: torch.Tensor, num_kv_heads: int, num_pages: int) -> torch.Tensor:
    """Physical pages `(num_queries, n)` -> their rows `(num_queries, num_kv_heads, n)` in a pool flattened to
    `(num_kv_heads * num_pages, ...)`."""
    heads = torch.arange(num_kv_heads, device=pages.device) * num_pages
    return pages[:, None, :] + heads[None, :, None]


def plan_sparse(
    page_table: torch.Tensor,
    positions: torch.Tensor,
    budgets: torch.Tensor,
    *,
    page_size: int,
    sink_pages: int,
    recent_pages: int,
    num_kv_heads: int,
    num_pages: int,
    dtype: torch.dtype,
) -> SparsePlan:
    """
    Plan the sparse attention of one step.

    Args:
        page_table, positions, budgets (`torch.Tensor`): as in [`reference.select_pages`].
        num_pages (`int`): pages in the pool.
        dtype (`torch.dtype`): dtype of the pool, for the additive mask.
    """
    device = page_table.device
    last = positions // page_size
    candidates = (last + 1 - sink_pages - recent_pages).clamp_(min=0)
    scored = torch.minimum(budgets, candidates)
    num_scored, least_scored, max_candidates, pruned = torch.stack(
        [scored.max(), scored.min(), candidates.max(), (candidates - scored).max()]
    ).tolist()

    candidate_pages = page_table[:, sink_pages : sink_pages + max_candidates]
    beyond = torch.arange(max_candidates, device=device) >= candidates[:, None]
    candidate_mask = beyond[:, None] if bool(beyond.any()) else None

    sink = torch.arange(sink_pages, device=device).expand(len(last), -1)
    recent = last[:, None] - torch.arange(recent_pages - 1, -1, -1, device=device)
    forced = torch.cat([sink, recent], dim=1)
    duplicate = torch.cat([sink > last[:, None], recent < sink_pages], dim=1)
    forced_pages = page_table.gather(1, forced.clamp(min=0, max=page_table.shape[1] - 1).masked_fill(duplicate, 0))

    offsets = torch.arange(page_size, device=device)
    forced_tokens = forced[:, :, None] * page_size + offsets
    forced_hidden = duplicate[:, :, None] | (forced_tokens > positions[:, None, None])
    unscored = torch.arange(num_scored, device=device) >= scored[:, None]
    hidden = torch.cat([unscored.repeat_interleave(page_size, dim=1), forced_hidden.flatten(1)], dim=1)
    token_mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    return SparsePlan(
        num_scored=num_scored,
        prunes=pruned > 0,
        uniform=least_scored == num_scored,
        candidate_rows=pool_rows(candidate_pages, num_kv_heads, num_pages),
        forced_rows=pool_rows(forced_pages, num_kv_heads, num_pages),
        candidate_mask=candidate_mask,
        token_mask=token_mask[:, None, None],
    )


def plan_window(
    page_table: torch.Tensor,
    positions: torch.Tensor,
    sliding_window: int | None,
    *,
    page_size: int,
    num_kv_heads: int,
    num_pages: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Plan exact attention over the last `sliding_window` tokens (all of them where it is `None`), for [`attend_rows`].

    Returns:
        Rows `(num_queries, num_kv_heads, n)` and additive mask `(num_queries, 1, 1, n * page_size)`.
    """
    device = page_table.device
    oldest = torch.zeros_like(positions) if sliding_window is None else (positions - sliding_window + 1).clamp(min=0)
    first, last = oldest // page_size, positions // page_size
    pages = first[:, None] + torch.arange(int((last - first).max()) + 1, device=device)
    tokens = pages[:, :, None] * page_size + torch.arange(page_size, device=device)
    hidden = (tokens > positions[:, None, None]) | (tokens < oldest[:, None, None])
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    physical = page_table.gather(1, pages.clamp(max=page_table.shape[1] - 1))
    return pool_rows(physical, num_kv_heads, num_pages), mask.flatten(1)[:, None, None]


def select_rows(query: torch.Tensor, landmarks: torch.Tensor, plan: SparsePlan, work: Workspace) -> torch.Tensor:
    """
    See [`reference.select_pages`]: here the choice comes as rows of the flattened pool, `(num_queries, num_kv_heads,
    num_scored + sink_pages + recent_pages)`, scored pages first (best first where
    queries keep unequal numbers). Of equal scores any may win.
    """
    if plan.num_scored == 0:
        return plan.forced_rows
    num_queries, num_kv_heads, max_candidates = plan.candidate_rows.shape
    if not plan.prunes:
        return torch.cat([plan.candidate_rows, plan.forced_rows], dim=-1)
    head_dim = query.shape[-1]
    mean_query = query.reshape(num_queries * num_kv_heads, -1, head_dim).mean(1, keepdim=True)
    rows = plan.candidate_rows.reshape(-1)
    candidates = work.get("landmarks", (rows.numel(), head_dim), landmarks)
    torch.index_select(landmarks.flatten(0, 1), 0, rows, out=candidates)
    scores = torch.bmm(mean_query, candidates.view(num_queries * num_kv_heads, max_candidates, head_dim).mT)
    scores = scores.view(num_queries, num_kv_heads, max_candidates)
    if plan.candidate_mask is not None:
        scores.masked_fill_(plan.candidate_mask, float("-inf"))
    best = scores.float().topk(plan.num_scored, dim=-1, sorted=not plan.uniform).indices
    return torch.cat([plan.candidate_rows.gather(-1, best), plan.forced_rows], dim=-1)


def attend_rows(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    rows: torch.Tensor,
    token_mask: torch.Tensor,
    work: Workspace,
    *,
    scaling: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """
    Attention of each query over the pages at `rows` of the flattened pool.

    Args:
        query (`torch.Tensor`): `(num_queries, num_heads, head_dim)`, in the dtype of the pool.
        rows (`torch.Tensor`): `(num_queries, num_kv_heads, n)` int64.
        token_mask (`torch.Tensor`): `(num_queries, 1, 1, n * page_size)` additive.

    Returns:
        `torch.Tensor`: `(num_queries, num_heads, head_dim)`.
    """
    num_queries, num_kv_heads, chosen = rows.shape
    page_size, head_dim = key_pages.shape[2:]
    group = query.shape[1] // num_kv_heads
    grouped = _pad_odd(query.view(num_queries, num_kv_heads, group, head_dim))
    keys_flat = key_pages.view(-1, page_size * head_dim)
    values_flat = value_pages.view(-1, page_size * value_pages.shape[-1])
    per_query = num_kv_heads * chosen * page_size * head_dim * query.element_size()
    step = max(1, GATHER_BYTES.get(query.device.type, GATHER_BYTES_ELSEWHERE) // per_query)
    outputs = []
    for start in range(0, num_queries, step):
        index = rows[start : start + step]
        count = index.shape[0]
        flat = index.reshape(-1)
        keys = work.get("keys", (flat.numel(), keys_flat.shape[1]), keys_flat)
        values = work.get("values", (flat.numel(), values_flat.shape[1]), values_flat)
        torch.index_select(keys_flat, 0, flat, out=keys)
        torch.index_select(values_flat, 0, flat, out=values)
        outputs.append(
            masked_attention(
                grouped[start : start + step],
                keys.view(count, num_kv_heads, chosen * page_size, head_dim),
                values.view(count, num_kv_heads, chosen * page_size, value_pages.shape[-1]),
                token_mask[start : start + step],
                scaling=scaling,
                softcap=softcap,
            )
        )
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out[:, :, :group].reshape(num_queries, -1, value_pages.shape[-1])


def _pad_odd(query: torch.Tensor) -> torch.Tensor:
    """`(..., num_rows, head_dim)` with a row of zeros more where there is an odd number: the product kernels of a CPU are
    a fifth slower for three rows than for four, and in bfloat16 three times slower for one than for two."""
    num_rows = query.shape[-2]
    if query.device.type != "cpu" or num_rows % 2 == 0 or (num_rows == 1 and query.dtype == torch.float32):
        return query
    return F.pad(query, (0, 0, 0, 1))


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """
    `scaled_dot_product_attention` that also knows soft-capping.

    Args:
        query (`torch.Tensor`): `(batch, num_heads, queries, head_dim)`.
        key, value (`torch.Tensor`): `(batch, num_kv_heads, tokens, head_dim)`.
        mask (`torch.Tensor`, *optional*): broadcastable to `(batch, num_heads, queries, tokens)`; bool (true is seen) or
            additive.
    """
    gqa = query.shape[1] != key.shape[1]
    if softcap is None:
        if gqa and mask is not None and query.device.type == "cuda":
            # No fused kernel of a GPU takes a mask and grouped heads: the other one makes the scores in float32
            group = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
            gqa = False
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, is_causal=is_causal, enable_gqa=gqa
        )
    if gqa:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    scores = softcap * torch.tanh(query.float() @ key.float().mT * (scaling / softcap))
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return (scores.softmax(-1) @ value.float()).to(query.dtype)


PARTS = 3  # of a segment at most: two halves, and the odd token that is left over
SPLIT_TOKENS = 512  # shorter segments are not split


@dataclass(frozen=True)
class Segment:
    """A contiguous run of physical pages that the queries `first_query .. last_query - 1` all attend to."""

    level: int  # how many segments of the same queries come before it
    first_query: int
    last_query: int
    first_page: int
    num_tokens: int

    def cuts(self) -> list[tuple[int, int, int]]:
        """`(first token, tokens in a part, number of equal parts)`, together at most `PARTS` parts."""
        if self.num_tokens < SPLIT_TOKENS:
            return [(0, self.num_tokens, 1)]
        half, odd = divmod(self.num_tokens, 2)
        return [(0, half, 2)] + [(2 * half, 1, 1)] * odd


def plan_segments(runs: Sequence[Sequence[tuple[int, int]]]) -> list[Segment]:
    """
    Cut dense attention of a step into segments. `runs[i]` lists `(first_page, num_tokens)` of the contiguous runs of
    query `i`'s sequence, in order, the last one cut at its own position. A run that neighbouring queries share (the
    prompt of a group) becomes one segment, so that its keys are read once for all of them.
    """
    segments = []
    depth = max(len(run) for run in runs)
    for level in range(depth):
        open_run, first = None, 0
        for i in range(len(runs) + 1):
            run = runs[i][level] if i < len(runs) and level < len(runs[i]) else None
            if run != open_run:
                if open_run is not None:
                    segments.append(Segment(level, first, i, *open_run))
                open_run, first = run, i
    return segments


def attend_segments(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    segments: Sequence[Segment],
    *,
    scaling: float,
) -> torch.Tensor:
    """
    Dense attention of one query a sequence, over runs of pages, without a copy of any key: each segment gives a partial
    result with its log-sum-exp, and those of a query are merged in float32. CPU only.

    Args:
        query (`torch.Tensor`): `(num_queries, num_heads, head_dim)`, in the dtype of the pool.

    Returns:
        `torch.Tensor`: `(num_queries, num_heads, head_dim)`.
    """
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads, _, page_size, _ = key_pages.shape
    group, value_dim = num_heads // num_kv_heads, value_pages.shape[-1]
    grouped = query.view(num_queries, num_kv_heads, group, head_dim)
    keys_flat, values_flat = key_pages.flatten(1, 2), value_pages.flatten(1, 2)
    num_parts = PARTS * (1 + max(segment.level for segment in segments))
    parts_out = torch.zeros(num_parts, num_queries, num_kv_heads, group, value_dim, device=query.device)
    parts_lse = torch.full((num_parts, num_queries, num_kv_heads, group, 1), float("-inf"), device=query.device)
    for segment in segments:
        count = segment.last_query - segment.first_query
        queries = grouped[segment.first_query : segment.last_query].transpose(0, 1)
        queries = _pad_odd(queries.reshape(1, num_kv_heads, count * group, head_dim))
        start = segment.first_page * page_size
        part = segment.level * PARTS
        for begin, length, parts in segment.cuts():
            # Equal parts of a run lie side by side in the batch dimension, so that few heads keep all threads busy.
            cut = slice(start + begin, start + begin + parts * length)
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                queries.expand(parts, -1, -1, -1),
                keys_flat[:, cut].unflatten(1, (parts, length)).transpose(0, 1),
                values_flat[:, cut].unflatten(1, (parts, length)).transpose(0, 1),
                scale=scaling,
            )
            target = (slice(part, part + parts), slice(segment.first_query, segment.last_query))
            out, lse = out[:, :, : count * group], lse[:, :, : count * group]
            parts_out[target] = out.reshape(parts, num_kv_heads, count, group, value_dim).transpose(1, 2)
            parts_lse[target] = lse.reshape(parts, num_kv_heads, count, group, 1).transpose(1, 2)
            part += parts
    if num_parts == 1:
        merged = parts_out[0]
    else:
        merged = (parts_out * parts_lse.softmax(0)).sum(0)
    return merged.to(query.dtype).view(num_queries, num_heads, value_dim)


def gather_run(
    pages: torch.Tensor, runs: Sequence[tuple[int, int]], list_of_pages: torch.Tensor, work: Workspace, name: str
) -> torch.Tensor:
    """The keys (or values) of one sequence as `(num_kv_heads, tokens, head_dim)`: a view where its pages lie in one
    run, a gather into the workspace elsewhere."""
    if len(runs) == 1:
        first_page, num_tokens = runs[0]
        return pages[:, first_page:].flatten(1, 2)[:, :num_tokens]
    num_kv_heads, _, page_size, head_dim = pages.shape
    num_tokens = sum(tokens for _, tokens in runs)
    rows = pool_rows(list_of_pages[None], num_kv_heads, pages.shape[1]).reshape(-1)
    out = work.get(name, (rows.numel(), page_size * head_dim), pages)
    torch.index_select(pages.view(-1, page_size * head_dim), 0, rows, out=out)
    return out.view(num_kv_heads, -1, head_dim)[:, :num_tokens]


def causal_mask(
    first: int, num_queries: int, num_tokens: int, sliding_window: int | None, device: torch.device
) -> torch.Tensor | None:
    """Bool `(num_queries, num_tokens)`, true where the query at position `first + i` sees token `j`; `None` where the
    plain causal mask of a whole sequence says the same."""
    if first == 0 and num_queries == num_tokens and (sliding_window is None or sliding_window >= num_tokens):
        return None
    positions = torch.arange(first, first + num_queries, device=device)[:, None]
    tokens = torch.arange(num_tokens, device=device)
    seen = tokens <= positions
    if sliding_window is not None:
        seen &= tokens > positions - sliding_window
    return seen


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
    chunk: int = 256,
) -> torch.Tensor:
    """See [`reference.teacher_forced_attention`]; masks are made for `chunk` queries at a time."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    keys, values = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
    landmarks = key.new_empty(0)
    if budgets is not None:
        full = num_tokens // page_size
        landmarks = key.detach()[: full * page_size].unflatten(0, (full, page_size)).float().mean(1)
        landmarks = landmarks.to(key.dtype).transpose(0, 1)
    outputs = []
    for start in range(0, num_tokens, chunk):
        stop = min(start + chunk, num_tokens)
        mask = causal_mask(start, stop - start, stop, sliding_window, query.device)
        if budgets is not None and stop > prompt_length:
            if mask is None:
                mask = causal_mask(start, stop - start, stop, 1 << 62, query.device)
            if mask is None:
                mask = torch.ones(stop, stop, dtype=torch.bool, device=query.device).tril()
            chosen = _choose_pages(
                query[start:stop].detach(), landmarks, start, budgets[start:stop], page_size, sink_pages, recent_pages
            )
            chosen |= (torch.arange(start, stop, device=query.device) < prompt_length)[:, None]
            tokens = chosen.repeat_interleave(page_size, dim=-1)[..., :stop]
            mask = (mask & tokens).repeat_interleave(num_heads // num_kv_heads, dim=0)
        out = masked_attention(
            query[start:stop].transpose(0, 1)[None],
            keys[:, :, :stop],
            values[:, :, :stop],
            mask,
            scaling=scaling,
            softcap=softcap,
            is_causal=mask is None,
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _choose_pages(
    query: torch.Tensor,
    landmarks: torch.Tensor,
    first: int,
    budgets: torch.Tensor,
    page_size: int,
    sink_pages: int,
    recent_pages: int,
) -> torch.Tensor:
    """Bool `(num_kv_heads, num_queries, pages)`, the pages that the queries from position `first` on attend to."""
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads, full, _ = landmarks.shape
    device = query.device
    last = torch.arange(first, first + num_queries, device=device)[:, None] // page_size
    page = torch.arange(int(last[-1]) + 1, device=device)
    forced = (page < sink_pages) | (page > last - recent_pages)
    candidate = (page >= sink_pages) & (page <= last - recent_pages)
    chosen = forced.expand(num_kv_heads, -1, -1).clone()
    most = min(int(budgets.max()), int(candidate.sum(1).max()))
    if most > 0:
        mean_query = query.view(num_queries, num_kv_heads, -1, head_dim).mean(2).transpose(0, 1)
        scores = mean_query @ landmarks.mT
        scores = F.pad(scores, (0, max(0, len(page) - full)))[..., : len(page)]
        scores = scores.masked_fill(~candidate, float("-inf"))
        best = scores.topk(most, dim=-1, sorted=True)
        keep = (torch.arange(most, device=device) < budgets[:, None]) & (best.values > float("-inf"))
        chosen |= torch.zeros_like(chosen).scatter_(-1, best.indices, keep)
    return chosen
