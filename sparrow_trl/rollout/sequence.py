"""What the scheduler moves around: prompts, and the completions being sampled for them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from .cache import PageTable


MAX_TOKENS_PER_STEP = 16  # tokens of one sequence in a decode step: more than one after a preemption


@dataclass(eq=False)
class Prompt:
    """
    A distinct prompt of the batch. Its pages hold the keys of all its tokens and are shared by its completions; they
    are there while `table.pages` is filled and `num_cached` equals the prompt's length.
    """

    token_ids: list[int]
    table: PageTable = field(default_factory=PageTable)
    num_cached: int = 0
    first_logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # (vocab_size,) of the first new token
    num_running: int = 0  # completions of this prompt that are running

    @property
    def is_ready(self) -> bool:
        return self.num_cached == len(self.token_ids)

    def forget(self) -> None:
        """After its pages were given back: it has to be computed again."""
        self.num_cached = 0
        self.first_logits = torch.empty(0)


@dataclass(eq=False)
class Sequence:
    """A completion on its way."""

    index: int  # place in the caller's list of prompts
    prompt: Prompt
    max_new_tokens: int
    uniforms: np.ndarray  # (max_new_tokens,) float64 in [0, 1): its own random stream, one number a token
    keep_top: bool = False
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)
    table: PageTable = field(default_factory=PageTable)
    num_cached: int = 0  # tokens whose keys are stored, the prompt's included
    finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids) + len(self.completion_ids)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt.token_ids + self.completion_ids

    def uncached(self, limit: int = MAX_TOKENS_PER_STEP) -> list[int]:
        """The next tokens to feed, at most `limit`: one while decoding, more after a preemption."""
        start = self.num_cached - len(self.prompt.token_ids)
        return self.completion_ids[start : start + limit]

    @property
    def is_behind(self) -> bool:
        """Whether tokens have to be fed again, after a preemption, before the next one can be sampled."""
        return self.num_tokens - self.num_cached > 1

    def num_next(self, steps: int) -> int:
        """Tokens that a burst of `steps` steps feeds: while behind, those to feed again, in one go."""
        if self.is_behind:
            return min(MAX_TOKENS_PER_STEP, self.num_tokens - self.num_cached - 1)
        return min(steps, self.max_new_tokens - len(self.completion_ids))


def random_stream(seed: int, index: int, length: int) -> np.ndarray:
    """`length` float64 numbers in [0, 1) that depend on `(seed, index)` alone."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, index]))).random(length)
