"""The acceptance rates of a sequence that a rollout sampled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from ..sparsity import SparsitySchedule
from .acceptance import AcceptanceBounds, LazyLogits, acceptance_bounds, top_logprobs
from .scoring import Scorer
from .sequences import MonitoredSequence


FLOOR_TOKENS = 256
"""Tokens of a completion at which the noise floor is taken."""


class RateMeter:
    """
    Compares the sparse actor and the dense policy on sequences of the actor.

    Args:
        model ([`~transformers.PreTrainedModel`]): the policy, possibly a `PeftModel`.
        top_k (`int`): tokens that the bounds know of each distribution.
        temperature (`float`): sampling temperature.
    """

    def __init__(self, model: PreTrainedModel, top_k: int, temperature: float):
        self.scorer, self.top_k, self.temperature = Scorer(model), top_k, temperature

    def dense(self, sequence: MonitoredSequence, row: torch.Tensor | None, schedule: SparsitySchedule) -> torch.Tensor:
        """
        Hidden states of the policy, `(completion tokens, hidden_size)`.

        Args:
            sequence ([`MonitoredSequence`]): which tokens.
            row (`torch.Tensor`, *optional*): `(num_tokens, hidden_size)` of all completion tokens of its row, from a pass
                that was made anyway; without it one is made.
            schedule (`SparsitySchedule`): its pages, all of which are read.
        """
        if row is not None:
            offset = sequence.prompt_length - sequence.row_prompt_length
            return row[offset : offset + len(sequence.top_ids)]
        dense = replace(schedule, budgets=())
        return self.scorer.hidden_states(dense, sequence.token_ids, sequence.prompt_length)

    def rates(
        self,
        sequence: MonitoredSequence,
        dense: torch.Tensor,
        mask: torch.Tensor,
        schedule: SparsitySchedule,
        *,
        exact: bool = False,
        by_pass: bool = False,
        sparse_mode: Callable[[], AbstractContextManager] = nullcontext,
    ) -> tuple[torch.Tensor, AcceptanceBounds]:
        """
        The rates of the tokens that count.

        Args:
            sequence ([`MonitoredSequence`]): with its row.
            dense (`torch.Tensor`): what [`dense`] gives.
            mask (`torch.Tensor`): `(num_tokens,)` bool, of its row: the completion tokens that count.
            schedule (`SparsitySchedule`): of the sparse side, where that takes a pass.
            exact (`bool`): whether to compute the rate itself too, which takes a pass.
            by_pass (`bool`): whether to take the sparse side of the bounds from the pass, not from the rollout.
            sparse_mode (`Callable`): makes a context in which the model is the actor.

        Returns:
            `tuple[torch.Tensor, AcceptanceBounds]`: positions of the querying tokens and their rates, on the CPU.
        """
        offset = sequence.prompt_length - sequence.row_prompt_length
        tokens = min(len(dense), len(sequence.top_ids), mask.shape[0] - offset)
        ids, logprobs, sparse = sequence.top_ids, sequence.top_logprobs, None
        if exact or by_pass:
            with sparse_mode():
                hidden_states = self.scorer.hidden_states(schedule, sequence.token_ids, sequence.prompt_length)
            sparse = self._logits(hidden_states[:tokens], sparse_mode)
            if by_pass:
                ids, logprobs = top_logprobs(sparse, self.top_k, self.temperature)
        bounds = acceptance_bounds(
            self._logits(dense[:tokens]), ids[:tokens], logprobs[:tokens], self.temperature, sparse=sparse
        )
        kept = mask[offset : offset + tokens].cpu()
        # A token is sampled by the query one position before it
        positions = sequence.prompt_length - 1 + torch.arange(tokens)[kept]
        return positions, _picked(bounds, kept)

    def floor(
        self, sequence: MonitoredSequence, dense: torch.Tensor, schedule: SparsitySchedule
    ) -> tuple[torch.Tensor, AcceptanceBounds]:
        """The policy against itself by the rollout's attention with all pages, on some tokens; as [`rates`] returns."""
        other = self.dense(sequence, None, schedule)
        places = torch.linspace(0, len(dense) - 1, min(len(dense), FLOOR_TOKENS)).long().unique()
        second = self._logits(other[places])
        bounds = acceptance_bounds(
            self._logits(dense[places]),
            *top_logprobs(second, self.top_k, self.temperature),
            self.temperature,
            sparse=second,
        )
        positions = sequence.prompt_length - 1 + places
        return positions, _picked(bounds, torch.ones(len(places), dtype=torch.bool))

    def _logits(
        self, hidden_states: torch.Tensor, mode: Callable[[], AbstractContextManager] = nullcontext
    ) -> LazyLogits:
        def head(rows: torch.Tensor) -> torch.Tensor:
            with mode():
                return self.scorer.logits(rows)

        return LazyLogits(hidden_states, head)


def _picked(bounds: AcceptanceBounds, kept: torch.Tensor) -> AcceptanceBounds:
    exact = None if bounds.exact is None else bounds.exact.cpu()[kept]
    return AcceptanceBounds(bounds.top_k.cpu()[kept], bounds.lower.cpu()[kept], bounds.upper.cpu()[kept], exact)
