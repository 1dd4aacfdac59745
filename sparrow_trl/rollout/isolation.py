"""Leave the model as it was found."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from transformers import PretrainedConfig, PreTrainedModel

from ..attention import ATTENTION_NAME
from .packing import packed_linears
from .weights import rollout_weights


_guard = threading.Lock()
_locks: weakref.WeakKeyDictionary[torch.nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


def _lock_of(model: PreTrainedModel) -> threading.RLock:
    """The lock of a model, the same whether or not PEFT wraps it."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with _guard:
        return _locks.setdefault(base, threading.RLock())


@contextmanager
def rollout_mode(
    model: PreTrainedModel, attention: str | None = ATTENTION_NAME, packed: bool = False
) -> Iterator[None]:
    """
    Evaluation mode, no gradients and the attention implementation `attention` (`None` leaves the model's own) inside
    the context. On leaving it, also by an exception, training flags, attention implementations and `requires_grad`
    are what they were; weights, dtypes and adapters are never touched. With `packed`, which pays where many tokens are
    decoded, linear layers multiply by copies of their weights meanwhile: packed ones on a CPU (see
    [`~sparrow_trl.rollout.packing.packed_linears`]), on other devices ones in the dtype of autocast (see
    [`~sparrow_trl.rollout.weights.rollout_weights`]).

    One thread at a time is in this mode with a model; others wait.

    Under autocast, frozen weights are marked as trainable meanwhile: autocast keeps the cast copy of a weight from one
    forward to the next only if it requires a gradient, and would cast the base of a LoRA policy anew at every token.
    """
    with _lock_of(model):
        training = [(module, module.training) for module in model.modules()]
        configs = {
            id(module.config): module.config
            for module in model.modules()
            if isinstance(getattr(module, "config", None), PretrainedConfig)
        }
        implementations = [(config, config._attn_implementation) for config in configs.values()]
        device_type = next(model.parameters()).device.type
        frozen, dtype = [], None
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point() and p.is_leaf]
        try:
            model.eval()
            for parameter in frozen:
                parameter.requires_grad_(True)
            if attention is not None:
                for config in configs.values():
                    config._attn_implementation = attention
            copies = packed_linears if device_type == "cpu" else rollout_weights
            with torch.no_grad(), copies(model, dtype) if packed else nullcontext():
                yield
        finally:
            for config, implementation in implementations:
                config._attn_implementation = implementation
            for parameter in frozen:
                parameter.requires_grad_(False)
            for module, flag in training:
                module.training = flag
