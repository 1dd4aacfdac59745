"""The texts that stretches branch off: windows of real text, or prompts with the model's own dense completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import GenerationConfig, PreTrainedModel

from ...rollout import RolloutEngine
from ..schedule import SparsitySchedule
from .measure import Store
from .options import MeasureOptions
from .texts import Source


TEXT_WAY = "stretches generated from places inside windows of real text"
PROMPT_WAY = "stretches generated from places inside the model's own dense completions of prompts"


@dataclass(frozen=True)
class Bases:
    """
    Texts, and how they came about.

    Attributes:
        texts (`list[list[int]]`): token ids.
        prompt_lengths (`list[int]`): how many of them count as the prompt.
        way (`str`): in words, for the provenance.
    """

    texts: list[list[int]]
    prompt_lengths: list[int]
    way: str


def longest_context(model: PreTrainedModel, options: MeasureOptions) -> int:
    """
    Positions to look at.

    Raises:
        ValueError: `max_context` is beyond the model's positions, or is needed.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if options.max_context is None:
        if limit is None:
            raise ValueError("The model's configuration names no longest context: give one with --max-context.")
        return limit
    if limit is not None and options.max_context > limit:
        raise ValueError(
            f"--max-context {options.max_context} is beyond the model's {limit} positions (max_position_embeddings)."
        )
    return options.max_context


def make_bases(
    model: PreTrainedModel,
    source: Source,
    options: MeasureOptions,
    max_context: int,
    stop_token_ids: Sequence[int],
    store: Store,
) -> Bases:
    """
    Texts of up to `max_context` tokens.

    Raises:
        ValueError: there is too little text, or every prompt is too long.
    """
    if source.kind == "text":
        texts = source.windows(options.texts, max_context, options.seed)
        return Bases(texts, [min(options.prompt_length, max_context - 1)] * len(texts), TEXT_WAY)
    fitting = [prompt for prompt in source.rows if len(prompt) < max_context]
    if not fitting:
        shortest = min(map(len, source.rows))
        raise ValueError(
            f"The prompts of {source.name!r} have {shortest:,} tokens or more, which leaves no room for a completion "
            f"within --max-context {max_context}."
        )
    order = np.random.default_rng(options.seed).permutation(len(fitting)).tolist()
    prompts = [fitting[index] for index in order[: options.texts]]
    name = ["completions", max_context, [len(prompt) for prompt in prompts]]
    found = store.load(name)
    if found is None:
        engine = RolloutEngine(
            model,
            SparsitySchedule.dense(),
            stop_token_ids=stop_token_ids,
            memory_fraction=options.memory_fraction,
            check_support=False,
        )
        output = engine.generate(
            prompts,
            GenerationConfig(do_sample=True, temperature=options.temperature),
            seed=options.seed,
            max_new_tokens=[max_context - len(prompt) for prompt in prompts],
        )
        found = [np.array(completion) for completion in output.completion_ids]
        store.save(name, found)
    texts = []
    for prompt, completion in zip(prompts, found, strict=True):
        tokens = completion.tolist()
        if tokens and tokens[-1] in set(stop_token_ids):
            del tokens[-1]  # nothing is sampled behind it
        texts.append(prompt + tokens)
    return Bases(texts, [len(prompt) for prompt in prompts], PROMPT_WAY)
