"""What a rollout returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class RolloutStats:
    """
    Counts and times of one rollout. Times are wall-clock seconds, sizes bytes.

    Attributes:
        prompt_tokens (`int`): tokens of all prompts, repeated ones counted each time.
        prefill_tokens (`int`): prompt tokens that went through the model; prompts of a group are computed once.
        completion_tokens (`int`): sampled tokens.
        recomputed_tokens (`int`): completion tokens that went through the model again after a preemption.
        decode_steps (`int`): forwards that decoded.
        preemptions (`int`): how often a sequence had to give its pages back.
        seconds, seconds_prefill, seconds_decode, seconds_sampling (`float`): the whole rollout and its phases; what is
            sampled in the bursts of a device counts as decoding.
        pages_peak, pages_total (`int`): KV pages in use at most, and in the pool.
        kv_bytes_read (`int`): bytes of keys, values and landmarks that attention read while decoding.
        kv_bytes_dense (`int`): bytes that dense attention would have read for the same tokens.
    """

    prompt_tokens: int = 0
    prefill_tokens: int = 0
    completion_tokens: int = 0
    recomputed_tokens: int = 0
    decode_steps: int = 0
    preemptions: int = 0
    seconds: float = 0.0
    seconds_prefill: float = 0.0
    seconds_decode: float = 0.0
    seconds_sampling: float = 0.0
    pages_peak: int = 0
    pages_total: int = 0
    kv_bytes_read: int = 0
    kv_bytes_dense: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per second of the whole rollout."""
        return self.completion_tokens / self.seconds if self.seconds else 0.0

    @property
    def kv_share(self) -> float:
        """Bytes read over the bytes that dense attention would have read; 1 where nothing was decoded."""
        return self.kv_bytes_read / self.kv_bytes_dense if self.kv_bytes_dense else 1.0

    def to_dict(self) -> dict[str, float]:
        """All fields and the two ratios."""
        return {**asdict(self), "tokens_per_second": self.tokens_per_second, "kv_share": self.kv_share}


@dataclass
class RolloutOutput:
    """
    Completions in the order of the prompts.

    Attributes:
        completion_ids (`list[list[int]]`): sampled tokens, the stop token included.
        logprobs (`list[list[float]]`): log-probability of each sampled token at the sampling temperature, over the
            full vocabulary, before any truncation (top-k, top-p, ...).
        finish_reasons (`list[str]`): `"stop"` (a stop token) or `"length"`.
        stats (`RolloutStats`): counts and times.
        top_ids, top_logprobs (`list[list[list]]`, *optional*): ids and log-probabilities of the most likely tokens at
            each position, best first; empty for sequences that were not asked for.
    """

    completion_ids: list[list[int]]
    logprobs: list[list[float]]
    finish_reasons: list[str]
    stats: RolloutStats
    top_ids: list[list[list[int]]] | None = None
    top_logprobs: list[list[list[float]]] | None = None
