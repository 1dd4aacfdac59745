"""Runs the model on packed tokens of several sequences."""

from __future__ import annotations

import inspect
from collections.abc import Sequence as SequenceOf

import torch
from transformers import PreTrainedModel

from sparrow_kernels import torch_ops

from ..sparsity import SparsitySchedule
from .cache import PagedKVCache
from .reads import ReadCounter
from .step import PagedStep, Piece


class ModelRunner:
    """
    One forward at a time, over a paged cache. To be used inside [`~sparrow_trl.rollout.isolation.rollout_mode`].

    Args:
        model ([`~transformers.PreTrainedModel`]): a causal language model, possibly wrapped by PEFT.
        schedule (`SparsitySchedule`): sparsity of decode steps.
        cache (`PagedKVCache`): the pool of pages.
    """

    def __init__(self, model: PreTrainedModel, schedule: SparsitySchedule, cache: PagedKVCache):
        self.model, self.schedule, self.cache = model, schedule, cache
        self.device = next(model.parameters()).device
        self.work = torch_ops.Workspace()
        self.reads = ReadCounter(schedule)
        self.windows: dict[int, int | None] = {}  # sliding window of each layer, as the model passes it
        causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._picks_logits = "logits_to_keep" in inspect.signature(causal_lm.forward).parameters

    def run(self, pieces: SequenceOf[Piece], keep: SequenceOf[int], decoding: bool) -> torch.Tensor:
        """
        Feed tokens, store their keys and values, and return logits.

        Args:
            pieces (`list[Piece]`): tokens to feed.
            keep (`list[int]`): which of the packed tokens to return logits for.
            decoding (`bool`): completion tokens (sparse) or prompt tokens (dense).

        Returns:
            `torch.Tensor`: `(len(keep), vocab_size)` float32.
        """
        step = PagedStep(self.cache, self.schedule, pieces, decoding, self.work, self.device)
        token_ids = [token for piece in pieces for token in piece.token_ids]
        kept = torch.tensor(keep, dtype=torch.long, device=self.device)
        logits = self.model(
            input_ids=torch.tensor([token_ids], device=self.device),
            position_ids=step.positions[None],
            use_cache=False,
            sparrow=step,
            **({"logits_to_keep": kept} if self._picks_logits else {}),
        ).logits[0]
        if not self._picks_logits:
            logits = logits[kept]
        self.windows = step.windows
        if decoding:
            self.reads.schedule = self.schedule  # it may have been replaced
            self.reads.add(step.positions_host, self.cache, self.windows, step.prunes)
        return logits.float()
