"""Leave the model as it was found."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..attention import ATTENTION_NAME
from .packing import packed_linears
from .weights import rollout_weights


_guard = threading.Lock()
_locks: weakref.WeakKeyDictionary[torch.nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


def model_lock(model: PreTrainedModel) -> threading.RLock:
    """The lock of a model, the same whether or not PEFT wraps it."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with _guard:
        return _locks.setdefault(base, threading.RLock())


def on_device_of(model: torch.nn.Module) -> AbstractContextManager:
    """The model's GPU is the current one inside, which is where kernels are launched."""
    device = next(model.parameters()).device
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


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
    with model_lock(model):
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
            with on_device_of(model), torch.no_grad(), copies(model, dtype) if packed else nullcontext():
                yield
        finally:
            for config, implementation in implementations:
                config._attn_implementation = implementation
            for parameter in frozen:
                parameter.requires_grad_(False)
            for module, flag in training:
                module.training = flag


@contextmanager
def teacher_forced_mode(model: PreTrainedModel, gradients: bool) -> Iterator[None]:
    """
    Evaluation mode and the attention implementation `"sparrow"` for forwards over whole sequences. With `gradients`
    they are recorded, but not with respect to the model's parameters: those are frozen meanwhile. Afterwards all flags
    are what they were.

    Gradient checkpointing stays on where the model has it on: its layers checkpoint in training mode alone, so their
    own flag is set, while the modules in them (dropout, for one) are in evaluation mode.
    """
    with rollout_mode(model):
        checkpointing = [
            module
            for module in model.modules()
            if isinstance(module, GradientCheckpointingLayer) and getattr(module, "gradient_checkpointing", False)
        ]
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        hook = None
        try:
            if gradients:
                for parameter in trainable:
                    parameter.requires_grad_(False)
                for module in checkpointing:
                    module.training = True
                if checkpointing:
                    # Reentrant checkpointing passes gradients on only from inputs that require them
                    hook = model.get_input_embeddings().register_forward_hook(_require_grad)
            with torch.set_grad_enabled(gradients):
                yield
        finally:
            if hook is not None:
                hook.remove()
            for parameter in trainable:
                parameter.requires_grad_(True)


def _require_grad(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
    output.requires_grad_(True)
