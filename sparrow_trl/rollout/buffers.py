"""The tensors of a decode step on the device: what the host fills before a burst and reads after it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from .sequence import Sequence


class DecodeBuffers:
    """
    Tensors with fixed addresses, as a CUDA graph wants them. A row is a sequence; a row whose position is negative is
    padding, or has finished.

    Args:
        num_rows (`int`): sequences at most.
        num_columns (`int`): pages of a sequence at most.
        num_steps (`int`): steps of a burst at most.
        top_logprobs (`int`): how many of the most likely tokens are reported.
        device (`torch.device`): the model's.
    """

    def __init__(self, num_rows: int, num_columns: int, num_steps: int, top_logprobs: int, device: torch.device):
        self.device = device
        self._staged: dict[str, torch.Tensor] = {}
        self.token_ids = self._input("token_ids", (num_rows,), torch.int64)  # to feed
        self.positions = self._input("positions", (num_rows,), torch.int64)  # theirs
        self.last_positions = self._input("last_positions", (num_rows,), torch.int64)  # of the last token to feed
        self.page_table = self._input("page_table", (num_rows, num_columns), torch.int32)
        self.uniforms = self._input("uniforms", (num_steps, num_rows), torch.float64)
        self.step = self._input("step", (1,), torch.int64)  # of the burst
        self.tokens = torch.zeros(num_steps, num_rows, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(num_steps, num_rows, dtype=torch.float32, device=device)
        shape = (num_steps, num_rows, top_logprobs)
        self.top_ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self.top_logprobs = torch.zeros(shape, dtype=torch.float32, device=device)

    def _input(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # Pinned, so that the copy to the device does not wait.
        self._staged[name] = torch.zeros(shape, dtype=dtype, pin_memory=self.device.type == "cuda")
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def load(self, sequences: SequenceOf[Sequence]) -> None:
        """
        Fill the rows for a burst. Must not be called before the results of the last one were read.

        Args:
            sequences (`list[Sequence]`): each with one token to feed, and pages for all tokens of the burst.
        """
        count = len(sequences)
        staged: dict[str, np.ndarray] = {name: tensor.numpy() for name, tensor in self._staged.items()}
        staged["positions"][count:] = -1
        staged["token_ids"][:count] = [sequence.completion_ids[-1] for sequence in sequences]
        staged["positions"][:count] = [sequence.num_cached for sequence in sequences]
        staged["last_positions"][:count] = [
            len(sequence.prompt.token_ids) + sequence.max_new_tokens - 2 for sequence in sequences
        ]
        for row, sequence in enumerate(sequences):
            staged["page_table"][row, : len(sequence.table)] = sequence.table.array
            start = len(sequence.completion_ids)
            numbers = sequence.uniforms[start : start + len(staged["uniforms"])]
            staged["uniforms"][: len(numbers), row] = numbers
        for name, tensor in self._staged.items():
            getattr(self, name).copy_(tensor, non_blocking=True)

    def advance(
        self,
        tokens: torch.Tensor,
        logprobs: torch.Tensor,
        top: tuple[torch.Tensor, torch.Tensor] | None,
        stop_ids: torch.Tensor,
    ) -> None:
        """
        Record what a step has sampled and make it the next step's input, on the device.

        Args:
            tokens (`torch.Tensor`): `(num_rows,)` int64.
            logprobs (`torch.Tensor`): `(num_rows,)` float32.
            top (`tuple[torch.Tensor, torch.Tensor]`, *optional*): `(num_rows, top_logprobs)` each.
            stop_ids (`torch.Tensor`): `(num_stops,)` int64, tokens that finish a row.
        """
        self.tokens.index_copy_(0, self.step, tokens[None])
        self.logprobs.index_copy_(0, self.step, logprobs[None])
        if top is not None:
            self.top_ids.index_copy_(0, self.step, top[0][None])
            self.top_logprobs.index_copy_(0, self.step, top[1][None])
        finished = (tokens[:, None] == stop_ids).any(-1) | (self.positions >= self.last_positions)
        self.positions.copy_(torch.where(finished | (self.positions < 0), -1, self.positions + 1))
        self.token_ids.copy_(tokens)
        self.step.add_(1)
