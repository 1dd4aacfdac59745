"""Where stretches go: evenly over the positions of each bin, and over the texts."""

from __future__ import annotations

from collections.abc import Sequence

from .stretches import Stretch


def bins_within(max_context: int, bin_tokens: int) -> int:
    """Bins of which positions below `max_context` cover at least a half; the others are too short to be measured."""
    return (max_context + bin_tokens // 2) // bin_tokens


def place_stretches(
    lengths: Sequence[int],
    prompt_lengths: Sequence[int],
    bins: Sequence[int],
    *,
    bin_tokens: int,
    max_context: int,
    per_bin: int,
    length: int,
    first_stream: int = 0,
) -> dict[int, list[Stretch]]:
    """
    Place `per_bin` stretches of `length` tokens in each bin, each whole inside it. Texts take turns.

    Args:
        lengths, prompt_lengths (`list[int]`): tokens of each text, and how many of them are its prompt. No stretch
            starts before the prompt's last token, nor behind the text.
        bins (`list[int]`): bins to fill.
        max_context (`int`): no position reaches it.
        first_stream (`int`, *optional*, defaults to `0`): number of the first random stream.

    Returns:
        `dict[int, list[Stretch]]`: of each bin; fewer, or none, where no text reaches.
    """
    placed: dict[int, list[Stretch]] = {}
    for index in bins:
        low = max(index * bin_tokens, min(prompt_lengths) - 1)
        span = min((index + 1) * bin_tokens, max_context) - length - low
        placed[index] = []
        if span < 0:
            continue
        for slot in range(per_bin):
            start = low + (slot * span // (per_bin - 1) if per_bin > 1 else span // 2)
            fitting = [text for text in range(len(lengths)) if prompt_lengths[text] - 1 <= start < lengths[text]]
            if fitting:
                stream = first_stream + index * per_bin + slot
                placed[index].append(Stretch(fitting[slot % len(fitting)], start, length, stream))
    return placed
