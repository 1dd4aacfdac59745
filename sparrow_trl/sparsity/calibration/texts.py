"""What is calibrated on: long texts, or prompts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...benchmark.text import token_stream


DEFAULT_NAME = "topics of Python's help()"
ROW_FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
MOST_ROWS = 20_000  # of a dataset, at most


@dataclass(frozen=True)
class Source:
    """
    Token ids to start from.

    Attributes:
        name (`str`): where they come from.
        kind (`str`): `"text"`: `rows` is one long stream, windows of which are used; `"prompt"`: they are prompts,
            which the model completes itself.
        rows (`list[list[int]]`): token ids.
    """

    name: str
    kind: str
    rows: list[list[int]]

    @property
    def tokens(self) -> int:
        """All tokens."""
        return sum(map(len, self.rows))

    def fingerprint(self) -> str:
        """A hash of the token ids."""
        digest = hashlib.sha256(self.kind.encode())
        for row in self.rows:
            digest.update(np.array([len(row), *row], dtype=np.int64).tobytes())
        return digest.hexdigest()[:16]

    def windows(self, count: int, length: int, seed: int) -> list[list[int]]:
        """
        `count` windows of `length` tokens of a text, at random places, without overlap.

        Raises:
            ValueError: the text is too short.
        """
        [stream] = self.rows
        if count * length > len(stream):
            raise ValueError(
                f"The text ({self.name}) has {len(stream):,} tokens, and {count} windows of {length:,} are wanted: give "
                "more text with --dataset, or lower --texts or --max-context."
            )
        room = len(stream) - count * length
        gaps = np.sort(np.random.default_rng(seed).integers(0, room + 1, count))
        return [stream[gap + i * length : gap + (i + 1) * length] for i, gap in enumerate(gaps.tolist())]


def load_source(dataset: Any, tokenizer: PreTrainedTokenizerBase, split: str = "train") -> Source:
    """
    Texts or prompts as token ids.

    Args:
        dataset: `None` for the topics of Python's `help()`; a file of text; a file of rows (JSON, JSON lines, Parquet,
            CSV), a folder or the Hub name of a dataset with a column `prompt` (a string or messages) or `text`; a
            `datasets.Dataset` or any list of such rows, or of strings, which are prompts.
        split (`str`, *optional*, defaults to `"train"`): of a dataset that has several.

    Raises:
        ValueError: there are no prompts and no text in it.
        FileNotFoundError: there is no such file.
    """
    if isinstance(dataset, Source):
        return dataset
    if dataset is None:
        return Source(DEFAULT_NAME, "text", [token_stream(tokenizer)])
    name = dataset if isinstance(dataset, (str, os.PathLike)) else type(dataset).__name__
    name = os.fspath(name)
    rows = dataset
    if isinstance(dataset, (str, os.PathLike)):
        path = Path(dataset)
        if path.is_file() and path.suffix not in ROW_FILES:
            return _text_source(name, tokenizer, [_read(path)])
        rows = _load_rows(name, path, split)
    return _from_rows(name, rows, tokenizer)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        known = ", ".join(ROW_FILES)
        raise ValueError(f"{path} is neither UTF-8 text nor a file of rows ({known}): {error}.") from error


def _load_rows(name: str, path: Path, split: str) -> Any:
    import datasets

    if path.is_file():
        if not path.stat().st_size:
            raise ValueError(f"The file {name!r} is empty.")
        try:
            return datasets.load_dataset(ROW_FILES[path.suffix], data_files=str(path), split="train")
        except (datasets.exceptions.DatasetGenerationError, ValueError) as error:  # which, depends on the release
            raise ValueError(f"{name!r} is no file of rows: {error.__cause__ or error}") from error
    if path.is_dir() and ((path / "state.json").is_file() or (path / "dataset_dict.json").is_file()):
        loaded = datasets.load_from_disk(str(path))
    elif not path.exists() and (path.is_absolute() or name.startswith(".") or path.suffix):
        raise FileNotFoundError(f"There is no file or folder {name!r}.")
    else:
        loaded = datasets.load_dataset(name)
    if isinstance(loaded, Mapping):
        if split not in loaded:
            raise ValueError(f"The dataset {name!r} has no split {split!r}; it has {', '.join(loaded)}.")
        loaded = loaded[split]
    return loaded


def _from_rows(name: str, rows: Iterable[Any], tokenizer: PreTrainedTokenizerBase) -> Source:
    found = []
    for row in rows:
        found.append({"prompt": row} if isinstance(row, str) else row)
        if len(found) == MOST_ROWS:
            break
    if not found:
        raise ValueError(f"The dataset {name!r} has no rows.")
    first = found[0]
    if not isinstance(first, Mapping) or not {"prompt", "text"} & set(first):
        columns = ", ".join(first) if isinstance(first, Mapping) else type(first).__name__
        raise ValueError(
            f"The dataset {name!r} has neither a column 'prompt' nor a column 'text'; it has {columns}. Rename one."
        )
    column = "prompt" if "prompt" in first else "text"
    kinds = (str, list, tuple) if column == "prompt" else (str,)
    for number, row in enumerate(found):
        value = row.get(column) if isinstance(row, Mapping) else row
        if value is not None and not isinstance(value, kinds):
            wanted = "a string or messages" if column == "prompt" else "a string"
            raise ValueError(
                f"The {column} in row {number} of the dataset {name!r} is a {type(value).__name__}, not {wanted}."
            )
    found = [row for row in found if row.get(column)]
    if column == "prompt":
        prompts = [prompt_ids(row["prompt"], tokenizer) for row in found]
        prompts = [prompt for prompt in prompts if prompt]
        if not prompts:
            raise ValueError(f"All prompts of the dataset {name!r} are empty.")
        return Source(name, "prompt", prompts)
    return _text_source(name, tokenizer, [row["text"] for row in found])


def _text_source(name: str, tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Source:
    # In parts, because tokenizers warn about texts that are longer than the model's context.
    stream = [
        token
        for text in texts
        for part in text.split("\n\n")
        if part.strip()
        for token in tokenizer(part + "\n\n", add_special_tokens=False)["input_ids"]
    ]
    if not stream:
        raise ValueError(f"The text of {name!r} is empty.")
    return Source(name, "text", [stream])


def prompt_ids(prompt: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a prompt: a string, or messages, which go through the chat template."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    return list(
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
    )
