"""Checks of what a call of the engine is given, before anything is computed."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from transformers import GenerationConfig


def checked_config(config: GenerationConfig | None) -> GenerationConfig:
    """The generation config; plain sampling where there is none."""
    if config is None:
        return GenerationConfig(do_sample=True)
    if not isinstance(config, GenerationConfig):
        raise TypeError(
            f"generation_config is a {type(config).__name__}, not a GenerationConfig; make one with "
            "`GenerationConfig(max_new_tokens=..., do_sample=True, ...)`."
        )
    return config


def checked_tokens(token_ids: Iterable[int], vocab_size: int, what: str) -> list[int]:
    """
    Token ids as a list of plain integers.

    Args:
        what (`str`): what they are, for the message: `"The prompt at index 3"`.

    Raises:
        TypeError: they are text, or not integers.
        ValueError: there is none, or one is outside the vocabulary.
    """
    if isinstance(token_ids, (str, bytes)) or not hasattr(token_ids, "__iter__"):
        raise TypeError(f"{what} is a {type(token_ids).__name__}, not a list of token ids; tokenize it first.")
    token_ids = list(token_ids)
    try:
        checked = list(map(operator.index, token_ids))
    except TypeError:
        wrong = next(token for token in token_ids if not hasattr(token, "__index__"))
        raise TypeError(f"{what} holds {wrong!r}, a {type(wrong).__name__}, where token ids are integers.") from None
    if not checked:
        raise ValueError(f"{what} is empty; it needs at least one token.")
    low, high = min(checked), max(checked)
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{what} holds token id {low if low < 0 else high}, outside the model's vocabulary of {vocab_size}; tokenizer "
            "and model do not belong together."
        )
    return checked


def check_prompts(prompts: SequenceOf[SequenceOf[int]]) -> None:
    """
    Raises:
        TypeError: the prompts are a text or one prompt, instead of a list of prompts.
    """
    if isinstance(prompts, (str, bytes)) or not hasattr(prompts, "__len__"):
        raise TypeError(f"prompts is a {type(prompts).__name__}, not a list of prompts, each a list of token ids.")


def stop_ids(*sources: int | Iterable[int | None] | None) -> list[int]:
    """The union of stop tokens, each source a token id, several, or `None`; in the order they come."""
    union: dict[int, None] = {}
    for source in sources:
        for token_id in [source] if source is None or isinstance(source, int) else source:
            if token_id is not None:
                union[int(token_id)] = None
    return list(union)
