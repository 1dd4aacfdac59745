"""Hidden states behind sampled tokens, and the logits that the model makes of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..attention import TeacherForced
from ..rollout.isolation import rollout_mode
from ..sparsity import SparsitySchedule
from ..split_forward import SplitForward


class Scorer(SplitForward):
    """
    [`SplitForward`] for sequences whose tokens were sampled: the hidden states behind each of them, from a forward of its
    own or from one that is made anyway. Nothing is differentiated.
    """

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden)

    def hidden_states(self, schedule: SparsitySchedule, token_ids: Sequence[int], prompt_length: int) -> torch.Tensor:
        """
        From what decoding would have sampled each token of a completion, in one forward (teacher-forced).

        Args:
            schedule (`SparsitySchedule`): which pages the completion reads; its prompt is dense.
            token_ids (`list[int]`): prompt and completion.
            prompt_length (`int`): how many of them are the prompt.

        Returns:
            `torch.Tensor`: `(len(token_ids) - prompt_length, hidden_size)`.
        """
        device = next(self.model.parameters()).device
        state = TeacherForced(schedule, [len(token_ids)], [prompt_length])
        with rollout_mode(self.model):
            hidden = self.hidden(
                input_ids=torch.tensor([list(token_ids)], device=device),
                position_ids=torch.arange(len(token_ids), device=device)[None],
                sparrow=state,
            )
        return hidden[0, prompt_length - 1 : -1]

    @contextmanager
    def capture(self, rows: Collection[int], num_tokens: int) -> Iterator[dict[int, torch.Tensor]]:
        """
        Keep what forwards inside the context compute anyway.

        Args:
            rows (`Collection[int]`): of the batch that goes through the model, at once or in chunks of rows.
            num_tokens (`int`): tokens at the end of each row whose distributions are wanted.

        Yields:
            `dict[int, torch.Tensor]`: hidden states `(num_tokens, hidden_size)` by row, filled by the forwards. A row
            stays out where the model is compiled, because a compiled model does not call hooks.
        """
        captured: dict[int, torch.Tensor] = {}
        seen = 0

        def keep(module: nn.Module, args: tuple, output: BaseModelOutputWithPast) -> None:
            nonlocal seen
            hidden = output[0].detach()
            for row in rows:
                if seen <= row < seen + len(hidden):
                    captured[row] = hidden[row - seen, -num_tokens - 1 : -1].clone()
            seen += len(hidden)

        hook = self.body.register_forward_hook(keep)
        try:
            yield captured
        finally:
            hook.remove()
