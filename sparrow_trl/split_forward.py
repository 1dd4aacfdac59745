"""A forward in two parts, so that logits over the whole vocabulary are held for a few tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast


class SplitForward:
    """
    The forward of a causal language model, up to the head and from there.

    Both parts run the model's own code, so that what a model does to its logits (soft-capping, scaling) and the
    adapters it has are in them.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): the model.

    Raises:
        ValueError: its head cannot be run without its body.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.body = self._find_body()

    def hidden(self, **inputs) -> torch.Tensor:
        """The head's inputs, `(batch, num_tokens, hidden_size)`, of the model called with `inputs`."""
        captured = []

        def capture(hidden: torch.Tensor) -> torch.Tensor:
            captured.append(hidden)
            return hidden[..., :1]

        with _replaced_forward(self.causal_lm.get_output_embeddings(), capture):
            self.model(**inputs, use_cache=False)
        return captured[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`(num_tokens, vocab_size)` float32 logits of `(num_tokens, hidden_size)`."""

        def body(*args, **kwargs) -> BaseModelOutputWithPast:
            return _BodyOutput(last_hidden_state=hidden[None])

        token = torch.zeros(1, 1, dtype=torch.long, device=hidden.device)
        with _replaced_forward(self.body, body):
            return self.causal_lm(input_ids=token, use_cache=False).logits[0].float()

    def _find_body(self) -> nn.Module:
        """The module whose output the model's forward hands to the head: for most, `model.base_model`."""
        width = self.causal_lm.get_output_embeddings().weight.shape[1]
        for body in (self.causal_lm.base_model, self.causal_lm.get_decoder()):
            self.body = body
            called: list[int] = []

            def head(hidden: torch.Tensor, called: list = called) -> torch.Tensor:
                called.append(hidden.shape[1])
                return hidden[..., :1]

            with torch.no_grad(), _replaced_forward(self.causal_lm.get_output_embeddings(), head):
                self.logits(torch.zeros(3, width, device=self.causal_lm.device, dtype=self.causal_lm.dtype))
            if called == [3]:
                return body
        raise ValueError(
            f"The head of {type(self.causal_lm).__name__} cannot be run without its body, which the tail monitor and "
            "distill_sparse need. Set tail_monitor=False and distill_sparse=False."
        )


class _BodyOutput(BaseModelOutputWithPast):
    """A body's output with nothing but hidden states: what else a model asks for (router logits, ...) is `None`."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable) -> Iterator[None]:
    previous = vars(module).get("forward")
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        if previous is None:
            del module.forward
        else:
            module.forward = previous  # type: ignore[method-assign]
