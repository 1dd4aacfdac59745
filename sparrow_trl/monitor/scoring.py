"""Hidden states of a model's last layer, and the logits that the model makes of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..attention import TeacherForced
from ..rollout.isolation import rollout_mode
from ..sparsity import SparsitySchedule


class Scorer:
    """
    Runs a causal language model in two parts, so that logits over the vocabulary exist for a few tokens at a time.

    Both are the model's own code: whatever it does to its logits (scaling, soft-capping, a head in float32) is done, and
    its active adapters are.

    Args:
        model ([`~transformers.PreTrainedModel`]): possibly a `PeftModel`, not wrapped for distributed training.

    Raises:
        ValueError: the model has no backbone that its head could do without.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.backbone = self._find_backbone()

    def _find_backbone(self) -> nn.Module:
        """The module whose output the model's forward hands to the head."""
        hidden = torch.zeros(3, self.causal_lm.get_output_embeddings().weight.shape[1])
        hidden = hidden.to(self.causal_lm.device, self.causal_lm.dtype)
        for candidate in (self.causal_lm.base_model, self.causal_lm.get_decoder()):
            self.backbone = candidate
            if candidate is not self.causal_lm and len(self.logits(hidden)) == 3:
                return candidate
        raise ValueError(
            f"{type(self.causal_lm).__name__} does not tell its backbone from its head, which the tail monitor needs. "
            "Set tail_monitor=False."
        )

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """
        The logits of hidden states, without the temperature.

        Args:
            hidden_states (`torch.Tensor`): `(num_tokens, hidden_size)`, the backbone's output.

        Returns:
            `torch.Tensor`: `(num_tokens, vocab_size)`.
        """
        output = _BackboneOutput(last_hidden_state=hidden_states[None])
        token = torch.zeros(1, 1, dtype=torch.long, device=hidden_states.device)
        with torch.no_grad(), _replaced_forward(self.backbone, lambda *args, **kwargs: output):
            return self.causal_lm(input_ids=token, use_cache=False).logits[0]

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
            output = self.backbone(
                input_ids=torch.tensor([list(token_ids)], device=device),
                position_ids=torch.arange(len(token_ids), device=device)[None],
                use_cache=False,
                sparrow=state,
            )
        return output.last_hidden_state[0, prompt_length - 1 : -1]

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

        hook = self.backbone.register_forward_hook(keep)
        try:
            yield captured
        finally:
            hook.remove()


class _BackboneOutput(BaseModelOutputWithPast):
    """Hidden states alone: what else the output of some backbone has (router logits, ...) is `None`."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable) -> Iterator[None]:
    own = vars(module).get("forward")
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own  # type: ignore[method-assign]
