"""Which row of a scored batch a sequence of a rollout has become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class MonitoredSequence:
    """A completion whose most likely tokens the rollout kept."""

    token_ids: list[int]
    prompt_length: int
    top_ids: torch.Tensor
    """(completion tokens, k), int64."""
    top_logprobs: torch.Tensor
    """(completion tokens, k), float32: under the actor."""
    row: int | None = None
    """Of the scored batch."""
    row_prompt_length: int = 0


def match_rows(
    sequences: Sequence[MonitoredSequence], input_ids: torch.Tensor, attention_mask: torch.Tensor, num_tokens: int
) -> list[int]:
    """
    Find the row of each sequence by its tokens, and note it. What came after it in the row (the answer of a tool, another
    turn) does not matter, and a row may hold only the start of it. Sequences without a row keep `row=None`: their
    completion was dropped, or masked because it was truncated.

    Args:
        sequences (`list[MonitoredSequence]`): of this process.
        input_ids, attention_mask (`torch.Tensor`): `(batch, length)`, prompts padded on the left and completions on the
            right.
        num_tokens (`int`): columns at the end that hold the completions.

    Returns:
        `list[int]`: the rows found.
    """
    if not sequences:
        return []
    mask = attention_mask.bool()
    rows = [ids[kept].tolist() for ids, kept in zip(input_ids.cpu(), mask.cpu(), strict=True)]
    prompt_lengths = mask[:, : mask.shape[1] - num_tokens].sum(1).tolist()
    used: set[int] = set()
    for sequence in sequences:
        length, prompt_length = len(sequence.token_ids), sequence.prompt_length
        fitting = [
            row
            for row, ids in enumerate(rows)
            if prompt_lengths[row] <= prompt_length < min(len(ids), length)
            and ids[:length] == sequence.token_ids[: len(ids)]
        ]
        if fitting:
            # Rather a row that holds all of it, as its first turn; of equal rows, each goes to another sequence
            sequence.row = min(
                fitting, key=lambda row: (len(rows[row]) < length, prompt_lengths[row] != prompt_length, row in used)
            )
            sequence.row_prompt_length = prompt_lengths[sequence.row]
            used.add(sequence.row)
    return sorted(used)
