"""
The ops of `reference.py` in PyTorch with the interface of the Triton ops: no shape depends on a value and no value is
looked at, so that a CUDA graph can hold them. The fallback of the decode loop on a device where Triton is missing.

A row with `position < 0` (and `slot < 0`) is padding: it stores nothing, and its output is 0. Slots of a page that were
never written must hold finite numbers, as for `torch_ops.py`.
"""

import torch

from .torch_ops import Workspace, attend_rows, pool_rows


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    landmarks: torch.Tensor | None = None,
) -> None:
    """See [`reference.store_kv`]; a token with `slot < 0` is not stored, and `landmarks=None` skips them."""
    page_size = key_pages.shape[2]
    rows, keys_flat, values_flat = _stand_in(slots >= 0), key_pages.flatten(1, 2), value_pages.flatten(1, 2)
    targets = slots[rows]
    stored = targets >= 0
    targets = targets.clamp(min=0)
    for flat, new in ((keys_flat, key), (values_flat, value)):
        new = new[rows].transpose(0, 1).to(flat.dtype)
        flat.index_copy_(1, targets, torch.where(stored[None, :, None], new, flat.index_select(1, targets)))
    if landmarks is None:
        return
    rows = _stand_in((slots >= 0) & (slots % page_size == page_size - 1))
    pages = slots[rows].clamp(min=0) // page_size
    full = (slots[rows] >= 0) & (slots[rows] % page_size == page_size - 1)
    means = key_pages.index_select(1, pages).float().mean(2).to(landmarks.dtype)
    landmarks.index_copy_(1, pages, torch.where(full[None, :, None], means, landmarks.index_select(1, pages)))


def _stand_in(valid: torch.Tensor) -> torch.Tensor:
    """`(n,)` bool -> `(n,)` int64: each valid row itself, and for the others the first valid one (row 0 if there is
    none), so that they can do again what that one does."""
    index = torch.arange(len(valid), device=valid.device)
    return torch.where(valid, index, valid.long().argmax())


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
    work: Workspace | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    See [`reference.select_pages`]: here the choice comes as a list.

    Args:
        max_selected (`int`): length of the list; no query chooses more pages than that.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `(num_queries, num_kv_heads, max_selected)` int32, columns of the page
        table in ascending order, and `(num_queries,)` int32, how many of them are chosen; those beyond are undefined.
    """
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads, num_pages, _ = landmarks.shape
    width = page_table.shape[1]
    last = (positions // page_size)[:, None]
    page = torch.arange(width, device=query.device)
    forced = ((page < sink_pages) | (page > last - recent_pages)) & (page <= last)
    candidate = (page >= sink_pages) & (page <= last - recent_pages)
    rows = pool_rows(page_table.long(), num_kv_heads, num_pages).flatten()
    gathered = (work or Workspace()).get("landmarks", (rows.numel(), head_dim), landmarks)
    torch.index_select(landmarks.flatten(0, 1), 0, rows, out=gathered)
    mean_query = query.reshape(num_queries * num_kv_heads, -1, head_dim).mean(1, keepdim=True)
    scores = torch.bmm(mean_query, gathered.view(num_queries * num_kv_heads, width, head_dim).mT)
    scores = scores.view(num_queries, num_kv_heads, width).float().masked_fill(~candidate[:, None], float("-inf"))
    order = scores.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(-1, order, page.expand_as(order))
    chosen = forced[:, None] | (candidate[:, None] & (rank < budgets[:, None, None]))
    listed = torch.where(chosen, page, width).sort(dim=-1).values[..., :max_selected]
    return listed.int(), chosen[:, 0].sum(-1, dtype=torch.int32)


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
    work: Workspace | None = None,
) -> torch.Tensor:
    """
    See [`reference.paged_attention`]: over the pages that [`select_pages`] lists, or over all of them.

    Returns:
        `torch.Tensor`: `(num_queries, num_heads, head_dim)`.
    """
    num_kv_heads, num_pages, page_size, _ = key_pages.shape
    width, device = page_table.shape[1], query.device
    oldest = torch.zeros_like(positions)
    if sliding_window is not None:
        oldest = (positions - sliding_window + 1).clamp(min=0)
    if page_list is not None and num_selected is not None:
        logical = page_list.long()
        listed = torch.arange(logical.shape[-1], device=device) < num_selected[:, None, None]
    else:
        spanned = width if sliding_window is None else min(width, (sliding_window + page_size - 2) // page_size + 1)
        logical = ((oldest // page_size)[:, None] + torch.arange(spanned, device=device))[:, None]
        listed = torch.ones_like(logical, dtype=torch.bool)
    tokens = logical[..., None] * page_size + torch.arange(page_size, device=device)
    position, earliest = positions[:, None, None, None], oldest[:, None, None, None]
    hidden = ~listed[..., None] | (tokens > position) | (tokens < earliest)
    hidden = (hidden & (position >= 0)).flatten(2)  # a row of padding sees something: its softmax is a number
    mask = torch.zeros(hidden.shape, dtype=key_pages.dtype, device=device).masked_fill_(hidden, float("-inf"))
    table = page_table.long()[:, None].expand(-1, logical.shape[1], -1)
    pages = table.gather(-1, logical.clamp(min=0, max=width - 1))
    rows = pages + (torch.arange(num_kv_heads, device=device) * num_pages)[:, None]
    out = attend_rows(
        query,
        key_pages,
        value_pages,
        rows.contiguous(),
        mask[:, :, None],
        work or Workspace(),
        scaling=scaling,
        softcap=softcap,
    )
    return torch.where((positions >= 0)[:, None, None], out, 0.0)


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, *, temperature: float = 1.0, top: int = 0
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """
    Log-probabilities of given tokens over the full vocabulary, and the most likely tokens.

    Args:
        logits (`torch.Tensor`): `(num_rows, vocab_size)`.
        tokens (`torch.Tensor`): `(num_rows,)` int64.
        top (`int`, *optional*, defaults to `0`): how many of the most likely tokens to return.

    Returns:
        `(num_rows,)` float32; and ids `(num_rows, top)` int64 with log-probabilities `(num_rows, top)` float32, best
        first, or `None`.
    """
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    log_norm = scaled.logsumexp(-1, keepdim=True)
    logprobs = (scaled.gather(-1, tokens[:, None]) - log_norm)[:, 0]
    if not top:
        return logprobs, None
    values, ids = scaled.topk(min(top, scaled.shape[-1]), dim=-1)
    return logprobs, (ids, values - log_norm)
