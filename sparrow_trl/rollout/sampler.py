"""Sampling: transformers' logits processors, then one number of each sequence's own random stream."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import torch
from transformers import GenerationConfig
from transformers.generation import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from sparrow_kernels import static_ops

from ..validation import number
from .sequence import Sequence


# Options of `GenerationConfig` that change what is generated and have no meaning here, with the values that are off.
UNSUPPORTED = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "guidance_scale": (None, 1, 1.0),
    "penalty_alpha": (None,),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "forced_bos_token_id": (None,),
    "encoder_repetition_penalty": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "token_healing": (None, False),
    "watermarking_config": (None,),
    "top_h": (None,),
    "stop_strings": (None,),
    "max_time": (None,),
    "cache_implementation": (None,),
}

# Options of `GenerationConfig` that are numbers where they are on.
NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "min_length",
    "min_new_tokens",
    "max_new_tokens",
)

BLOCK = 256  # tokens of the vocabulary that `inverse_cdf` sums at once


class Sampler:
    """
    Draws tokens from logits the way `generate` does, except that what a sequence draws depends on nothing but its own
    logits and its own random stream.

    Args:
        config (`GenerationConfig`): sampling options. An option left at `None` is off: the defaults that `generate`
            would take from elsewhere (`top_k=50`, the model's `generation_config.json`) do not apply.
        stop_token_ids (`list[int]`): tokens that end a completion.

    Raises:
        ValueError: for options that the engine does not know, by name.
        TypeError: an option that is a number is given as something else.
    """

    def __init__(self, config: GenerationConfig, stop_token_ids: list[int]):
        for name in NUMBERS:
            number(name, getattr(config, name), or_none=True)
        for name, off in UNSUPPORTED.items():
            value = getattr(config, name, None)
            if value not in off:
                raise ValueError(
                    f"`{name}={value!r}` of the generation config is not supported by sparse rollouts; leave it at "
                    f"{off[-1]!r} (see `generation_kwargs`), or set `sparse_schedule=None` to generate with transformers."
                )
        self.do_sample = bool(config.do_sample)
        self.temperature = 1.0 if config.temperature is None or not self.do_sample else float(config.temperature)
        for name in ("top_p", "typical_p"):
            value = getattr(config, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name}={value} is not in (0, 1]; 1.0 turns it off.")
        if config.repetition_penalty is not None and not config.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty={config.repetition_penalty} must be above 0; 1.0 turns it off.")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(
                f"temperature={config.temperature} must be above 0 and finite; for greedy decoding set do_sample=False."
            )
        self.config = config
        self.stop_token_ids = stop_token_ids
        self.uses_history = self._looks_at_history()
        self._warpers = self._make_warpers()
        self._suppressors: dict[torch.device, SuppressTokensLogitsProcessor] = {}

    def _looks_at_history(self) -> bool:
        config = self.config
        return (
            config.repetition_penalty not in (None, 1.0)
            or bool(config.no_repeat_ngram_size)
            or bool(config.min_length)
            or bool(config.min_new_tokens)
            or config.sequence_bias is not None
            or config.bad_words_ids is not None
            or config.forced_eos_token_id is not None
            or config.exponential_decay_length_penalty is not None
            or config.begin_suppress_tokens is not None
        )

    def _make_processors(self, sequence: Sequence, device: torch.device) -> LogitsProcessorList:
        """Processors that look at the tokens so far, in the order of `generate`; they are made for one sequence."""
        config, processors = self.config, LogitsProcessorList()
        prompt_length = len(sequence.prompt.token_ids)
        if config.sequence_bias is not None:
            processors.append(SequenceBiasLogitsProcessor(sequence_bias=config.sequence_bias))
        if config.repetition_penalty not in (None, 1.0):
            processors.append(RepetitionPenaltyLogitsProcessor(penalty=config.repetition_penalty))
        if config.no_repeat_ngram_size:
            processors.append(NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
        if config.bad_words_ids is not None:
            processors.append(NoBadWordsLogitsProcessor(config.bad_words_ids, self.stop_token_ids or None))
        if config.min_length and self.stop_token_ids:
            processors.append(MinLengthLogitsProcessor(config.min_length, self.stop_token_ids, device=device))
        if config.min_new_tokens and self.stop_token_ids:
            processors.append(
                MinNewTokensLengthLogitsProcessor(
                    prompt_length, config.min_new_tokens, self.stop_token_ids, device=device
                )
            )
        if config.forced_eos_token_id is not None:
            processors.append(
                ForcedEOSTokenLogitsProcessor(
                    prompt_length + sequence.max_new_tokens, config.forced_eos_token_id, device=device
                )
            )
        if config.exponential_decay_length_penalty is not None:
            processors.append(
                ExponentialDecayLengthPenalty(
                    config.exponential_decay_length_penalty, self.stop_token_ids, prompt_length
                )
            )
        if config.begin_suppress_tokens is not None:
            processors.append(
                SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, prompt_length, device=device)
            )
        return processors

    def _make_warpers(self) -> LogitsProcessorList:
        """Processors that look at the scores alone, after the temperature; they take all sequences at once."""
        config, warpers = self.config, LogitsProcessorList()
        if not self.do_sample:
            return warpers
        if config.top_k:
            warpers.append(TopKLogitsWarper(top_k=config.top_k))
        if config.top_p is not None and config.top_p < 1.0:
            warpers.append(TopPLogitsWarper(top_p=config.top_p))
        if config.min_p is not None:
            warpers.append(MinPLogitsWarper(min_p=config.min_p))
        if config.typical_p is not None and config.typical_p < 1.0:
            warpers.append(TypicalLogitsWarper(mass=config.typical_p))
        if config.epsilon_cutoff is not None and 0.0 < config.epsilon_cutoff < 1.0:
            warpers.append(EpsilonLogitsWarper(epsilon=config.epsilon_cutoff))
        if config.eta_cutoff is not None and 0.0 < config.eta_cutoff < 1.0:
            warpers.append(EtaLogitsWarper(epsilon=config.eta_cutoff, device="cpu"))
        return warpers

    def _process(self, logits: torch.Tensor, sequences: SequenceOf[Sequence]) -> torch.Tensor:
        config, scores = self.config, logits
        if self.uses_history:
            rows = []
            for row, sequence in zip(logits, sequences, strict=True):
                token_ids = torch.tensor([sequence.token_ids], device=logits.device)
                rows.append(self._make_processors(sequence, logits.device)(token_ids, row[None].clone())[0])
            scores = torch.stack(rows)
        if config.remove_invalid_values:
            scores = InfNanRemoveLogitsProcessor()(None, scores)
        if config.suppress_tokens is not None:
            scores = self._suppressor(logits.device)(None, scores)
        if self.temperature != 1.0:
            scores = scores / self.temperature
        return self._warpers(None, scores)

    def _suppressor(self, device: torch.device) -> SuppressTokensLogitsProcessor:
        """Made once a device: a CUDA graph cannot hold the copy of the ids."""
        if self._suppressors.get(device) is None:
            self._suppressors[device] = SuppressTokensLogitsProcessor(self.config.suppress_tokens, device=device)
        return self._suppressors[device]

    def draw(
        self,
        logits: torch.Tensor,
        uniforms: torch.Tensor,
        top_logprobs: int = 0,
        sequences: SequenceOf[Sequence] = (),
        token_logprobs: Callable = static_ops.token_logprobs,
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """
        Draw the next token of each row, without a look at any value.

        Args:
            logits (`torch.Tensor`): `(num_rows, vocab_size)` float32, as the model gives them.
            uniforms (`torch.Tensor`): `(num_rows,)` float64 in [0, 1), the next number of each random stream.
            top_logprobs (`int`): how many of the most likely tokens to report.
            sequences (`list[Sequence]`): those of the rows; not used without `uses_history`.
            token_logprobs (`Callable`): the op of that name.

        Returns:
            Tokens `(num_rows,)` int64; their log-probabilities `(num_rows,)` float32 at the sampling temperature over the
            full vocabulary, before any processor but the temperature, not finite where the logits are not numbers;
            and ids and log-probabilities `(num_rows, top_logprobs)` of the most likely tokens, or `None`.
        """
        scaled = logits if self.temperature == 1.0 else logits / self.temperature
        processed = self.uses_history or self.config.remove_invalid_values or self.config.suppress_tokens is not None
        scores = self._process(logits, sequences) if processed or len(self._warpers) else scaled
        if self.do_sample:
            probabilities = (scores - scores.amax(-1, keepdim=True)).exp_()
            tokens = inverse_cdf(probabilities, uniforms)
        else:
            tokens = scores.argmax(-1)
        logprobs, top = token_logprobs(scaled, tokens, temperature=1.0, top=top_logprobs)
        return tokens, logprobs, top

    def __call__(
        self, logits: torch.Tensor, sequences: SequenceOf[Sequence], top_logprobs: int = 0
    ) -> tuple[list[int], list[float], dict[int, tuple[list[int], list[float]]]]:
        """
        Draw the next token of each sequence.

        Args:
            logits (`torch.Tensor`): `(num_sequences, vocab_size)` float32, as the model gives them.
            top_logprobs (`int`): how many of the most likely tokens to report for sequences with `keep_top`.

        Returns:
            Tokens and log-probabilities as [`draw`] gives them; and, by row, ids and log-probabilities of the most likely
            tokens of the sequences with `keep_top`. Those of others are not looked for.

        Raises:
            FloatingPointError: where logits are not numbers.
        """
        uniforms = [sequence.uniforms[len(sequence.completion_ids)] for sequence in sequences]
        numbers = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
        tokens, logprobs, _ = self.draw(logits, numbers, sequences=sequences)
        found = logprobs.tolist()
        check_finite(found, sequences)
        asking = [row for row, sequence in enumerate(sequences) if sequence.keep_top] if top_logprobs else []
        top: dict[int, tuple[list[int], list[float]]] = {}
        if asking:
            rows = torch.tensor(asking, device=logits.device)
            _, best = static_ops.token_logprobs(
                logits[rows], tokens[rows], temperature=self.temperature, top=top_logprobs
            )
            assert best is not None
            top = dict(zip(asking, zip(best[0].tolist(), best[1].tolist(), strict=True), strict=True))
        return tokens.tolist(), found, top


def check_finite(logprobs: SequenceOf[float], sequences: SequenceOf[Sequence]) -> None:
    """Refuse log-probabilities that are not finite: those of a drawn token are, unless the logits are not numbers."""
    broken = [sequence.index for value, sequence in zip(logprobs, sequences, strict=True) if not math.isfinite(value)]
    if broken:
        raise FloatingPointError(
            f"The model's logits are not finite for the prompts at {broken[:8]}; the weights have probably diverged, or "
            "their dtype overflows."
        )


def inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """
    Draw an index from each row of unnormalised probabilities: the first whose cumulative weight exceeds
    `uniform * total`. Summed in blocks, in float64, so that a row is read once.

    Args:
        weights (`torch.Tensor`): `(num_rows, num_columns)`, not negative; every row has a positive entry.
        uniforms (`torch.Tensor`): `(num_rows,)` float64 in [0, 1).

    Returns:
        `torch.Tensor`: `(num_rows,)` int64; a column of positive weight.
    """
    num_rows, num_columns = weights.shape
    padding = -num_columns % BLOCK
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
    blocks = weights.view(num_rows, -1, BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniforms[:, None] * sums[:, -1:]
    block = (sums <= target).sum(-1, keepdim=True).clamp_(max=sums.shape[1] - 1)
    before = sums.gather(1, (block - 1).clamp(min=0)).masked_fill(block == 0, 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0].double()
    offset = (inside.cumsum(-1) <= target - before).sum(-1)
    columns = torch.arange(BLOCK, device=weights.device)
    last_positive = torch.where(inside > 0, columns, -1).amax(-1)
    column = block[:, 0] * BLOCK + torch.minimum(offset, last_positive)
    return column.clamp_(min=0, max=num_columns - 1)  # weights that are not numbers still give an index
