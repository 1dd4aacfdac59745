"""Real text to prompt with: the topics of Python's `help()`, about 130,000 tokens of English that every Python has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def token_stream(tokenizer: PreTrainedTokenizerBase, path: Path | None = None) -> list[int]:
    """
    All tokens of the text in `path`, or of the topics.

    Raises:
        `ValueError`: there is no such file, or this Python comes without the topics.
    """
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--text {path} cannot be read: {error}.") from error
    else:
        try:
            from pydoc_data.topics import topics
        except ImportError as error:
            raise ValueError(
                "This Python has no pydoc_data.topics to prompt with; give a text with --text."
            ) from error
        text = "\n\n".join(topics[name] for name in sorted(topics))
    # In parts, because tokenizers warn about texts that are longer than the model's context.
    return [
        token
        for part in text.split("\n\n")
        for token in tokenizer(part + "\n\n", add_special_tokens=False)["input_ids"]
    ]


def cut(stream: list[int], count: int, length: int) -> list[list[int]]:
    """
    `count` neighbouring pieces of `length` tokens.

    Raises:
        `ValueError`: the text is too short.
    """
    if count * length > len(stream):
        raise ValueError(
            f"The text has {len(stream)} tokens, and {count} times {length} are wanted; give a longer one with --text."
        )
    return [stream[index * length : (index + 1) * length] for index in range(count)]
