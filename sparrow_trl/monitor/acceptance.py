"""
The acceptance rate of a token: `alpha = sum over v of min(p_dense(v), p_sparse(v))`, exact or bounded.

Both distributions are at the sampling temperature, over the full vocabulary, before any truncation. See arXiv 2606.08446,
and Leviathan et al. 2023 for its meaning in speculative decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch


CHUNK_ELEMENTS = 2**25
"""Logits of one side that are in memory at a time (128 MiB in float32), whatever the number of tokens."""


class Logits(Protocol):
    """Logits of a number of tokens: a tensor `(num_tokens, vocab_size)`, or what makes its rows when they are asked for,
    as [`LazyLogits`]."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> torch.Tensor: ...


class LazyLogits:
    """
    Logits that are computed from hidden states when they are asked for, so that those of all tokens never exist.

    Args:
        hidden_states (`torch.Tensor`): `(num_tokens, hidden_size)`, the input of the output embedding.
        head (`Callable`): makes `(n, vocab_size)` logits of `(n, hidden_size)` hidden states, with all that the model
            does to them (scaling, soft-capping), but for the temperature.
    """

    def __init__(self, hidden_states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]):
        self.hidden_states, self.head = hidden_states, head

    def __len__(self) -> int:
        return len(self.hidden_states)

    def __getitem__(self, rows: slice, /) -> torch.Tensor:
        return self.head(self.hidden_states[rows])


class AcceptanceBounds(NamedTuple):
    """Bounds of the acceptance rate of each token, float32 `(num_tokens,)`: `top_k <= lower <= alpha <= upper`."""

    top_k: torch.Tensor
    """The lower bound from the top-k of both sides: the statistic with which the paper's 0.86 was measured."""
    lower: torch.Tensor
    upper: torch.Tensor
    exact: torch.Tensor | None = None
    """The rate itself, where both sides were there in full."""


def acceptance_rate(
    dense: Logits, sparse: Logits, temperature: float = 1.0, chunk_tokens: int | None = None
) -> torch.Tensor:
    """
    The exact acceptance rate of each token.

    Args:
        dense, sparse (`torch.Tensor` or [`LazyLogits`]):
            Logits of the same tokens, `(num_tokens, vocab_size)` in any floating dtype.
        temperature (`float`, *optional*, defaults to `1.0`): sampling temperature.
        chunk_tokens (`int`, *optional*): tokens computed at a time; by default so many that a chunk of one side has
            `CHUNK_ELEMENTS` logits.

    Returns:
        `torch.Tensor`: `(num_tokens,)` float32 in [0, 1]; exactly 1 where the logits are equal.

    Raises:
        ValueError: where the two differ in shape, or for a temperature that is not above 0.
    """
    _check_temperature(temperature)
    if len(dense) != len(sparse):
        raise ValueError(f"There are dense logits of {len(dense)} tokens and sparse logits of {len(sparse)}.")
    parts = []
    with torch.no_grad():
        for rows in _chunks(dense, chunk_tokens):
            of_dense, of_sparse = dense[rows], sparse[rows]
            if of_dense.shape != of_sparse.shape:
                raise ValueError(f"Dense logits {tuple(of_dense.shape)} and sparse {tuple(of_sparse.shape)} differ.")
            parts.append(_overlap(_probabilities(of_dense, temperature), _probabilities(of_sparse, temperature)))
    return _joined(parts)


def top_k_bounds(
    dense_ids: torch.Tensor,
    dense_logprobs: torch.Tensor,
    sparse_ids: torch.Tensor,
    sparse_logprobs: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Bounds of the acceptance rate from the most likely tokens of each side.

    The lower bound is the sum of `min(p_dense, p_sparse)` over the ids in both sets. To it the upper bound adds what the
    rest could still share: an id in one set alone has at most the smallest probability of the other set there, and ids
    in neither share at most the smaller of the masses outside the sets.

    Args:
        dense_ids, sparse_ids (`torch.Tensor`): `(num_tokens, k)` int64; the k most likely tokens, k may differ.
        dense_logprobs, sparse_logprobs (`torch.Tensor`): their log-probabilities, same shapes.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: lower and upper bound, float32 `(num_tokens,)`.
    """
    dense, sparse = dense_logprobs.float().exp(), sparse_logprobs.float().exp()
    same = dense_ids[:, :, None] == sparse_ids[:, None, :]
    smaller = torch.minimum(dense[:, :, None], sparse[:, None, :])
    lower = (smaller * same).sum((1, 2))
    dense_alone = torch.minimum(dense, sparse.amin(-1, keepdim=True)).masked_fill_(same.any(2), 0.0).sum(-1)
    sparse_alone = torch.minimum(sparse, dense.amin(-1, keepdim=True)).masked_fill_(same.any(1), 0.0).sum(-1)
    outside_dense, outside_sparse = (1 - dense.sum(-1)).clamp_(min=0), (1 - sparse.sum(-1)).clamp_(min=0)
    # What lies outside a set bounds all that is shared there: the other set's own ids, and those in neither
    shared = torch.minimum(outside_sparse + sparse_alone, outside_dense + dense_alone)
    shared = torch.minimum(shared, dense_alone + sparse_alone + torch.minimum(outside_dense, outside_sparse))
    return lower.clamp_(max=1.0), (lower + shared).clamp_(max=1.0)


def acceptance_bounds(
    dense: Logits,
    sparse_ids: torch.Tensor,
    sparse_logprobs: torch.Tensor,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    sparse: Logits | None = None,
) -> AcceptanceBounds:
    """
    Bounds of the acceptance rate from full logits of the dense side and the most likely tokens of the sparse one, such
    as a rollout returns; and the rate itself, given full logits of both sides.

    Args:
        dense (`torch.Tensor` or [`LazyLogits`]): `(num_tokens, vocab_size)` in any floating dtype.
        sparse_ids (`torch.Tensor`): `(num_tokens, k)` int64.
        sparse_logprobs (`torch.Tensor`): `(num_tokens, k)`, their log-probabilities at the sampling temperature.
        temperature (`float`, *optional*, defaults to `1.0`): sampling temperature.
        chunk_tokens (`int`, *optional*): see [`acceptance_rate`].
        sparse (`torch.Tensor` or [`LazyLogits`], *optional*): `(num_tokens, vocab_size)`, of the sparse side.

    Returns:
        [`AcceptanceBounds`]: `top_k` is what [`top_k_bounds`] gives with the k most likely tokens of both sides; `lower`
        sums over all ids of the sparse set, and `upper` adds the smaller of the two masses outside it.
    """
    _check_temperature(temperature)
    if not len(dense) == len(sparse_ids) == len(sparse_logprobs):
        raise ValueError(
            f"There are dense logits of {len(dense)} tokens, but sparse ids of {len(sparse_ids)} and sparse "
            f"log-probabilities of {len(sparse_logprobs)}."
        )
    top_k, lower, upper, exact = [], [], [], []
    with torch.no_grad():
        for rows in _chunks(dense, chunk_tokens):
            scaled = dense[rows].float()
            scaled = scaled if temperature == 1.0 else scaled / temperature
            log_norm = scaled.logsumexp(-1, keepdim=True)
            ids = sparse_ids[rows].to(scaled.device)
            of_sparse = sparse_logprobs[rows].to(scaled.device).float().exp()
            logits = scaled.gather(-1, ids)
            of_dense = (logits - log_norm).exp()
            smaller = torch.minimum(of_dense, of_sparse)
            outside = torch.minimum(1 - of_dense.sum(-1), 1 - of_sparse.sum(-1)).clamp_(min=0)
            kth = scaled.topk(ids.shape[-1], dim=-1, sorted=False).values.amin(-1, keepdim=True)
            top_k.append((smaller * (logits >= kth)).sum(-1))
            lower.append(smaller.sum(-1))
            upper.append(lower[-1] + outside)
            if sparse is not None:
                exact.append(_overlap(scaled.softmax(-1), _probabilities(sparse[rows], temperature)))
    of_top_k, of_lower, of_upper = (_joined(parts).clamp_(0.0, 1.0) for parts in (top_k, lower, upper))
    return AcceptanceBounds(of_top_k, of_lower, of_upper, None if sparse is None else _joined(exact))


def top_logprobs(
    logits: Logits, k: int, temperature: float = 1.0, chunk_tokens: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The k most likely tokens of each row, best first, as a rollout reports them.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: ids `(num_tokens, k)` int64, and log-probabilities float32.
    """
    _check_temperature(temperature)
    ids, logprobs = [], []
    with torch.no_grad():
        for rows in _chunks(logits, chunk_tokens):
            scaled = logits[rows].float() / temperature
            values, places = scaled.topk(min(k, scaled.shape[-1]), dim=-1)
            ids.append(places)
            logprobs.append(values - scaled.logsumexp(-1, keepdim=True))
    if not ids:
        return torch.empty(0, k, dtype=torch.int64), torch.empty(0, k)
    return torch.cat(ids), torch.cat(logprobs)


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0.")


def _chunks(logits: Logits, chunk_tokens: int | None) -> list[slice]:
    if chunk_tokens is None:
        vocab_size = logits[:1].shape[-1] if len(logits) else 1
        chunk_tokens = max(1, CHUNK_ELEMENTS // vocab_size)
    elif chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens} must be at least 1.")
    return [slice(start, start + chunk_tokens) for start in range(0, len(logits), chunk_tokens)]


def _probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """A new float32 tensor."""
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    return scaled.softmax(-1)


def _overlap(dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
    """The sum of the smaller probabilities; overwrites `dense`."""
    # One minus half the L1 distance: the same number, and more of its digits where it is near 1
    return (1 - dense.sub_(sparse).abs_().sum(-1) / 2).clamp_(0.0, 1.0)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if parts else torch.empty(0)
