"""Linear layers with a copy of their weights in the dtype that a rollout computes in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers.pytorch_utils import Conv1D

from .packing import is_plain


def _to_copy(
    model: torch.nn.Module, dtype: torch.dtype | None
) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    """`(layer, name, parameter)` of what autocast would cast at every product."""
    if dtype is None:
        return
    for module in model.modules():
        # Somebody else's forward, for example a head kept in float32, may want the weight as it is.
        if isinstance(module, (torch.nn.Linear, Conv1D)) and is_plain(module):
            for name in ("weight", "bias"):
                parameter = module._parameters.get(name)
                if parameter is not None and parameter.dtype == torch.float32:
                    yield module, name, parameter


def copied_bytes(model: torch.nn.Module, dtype: torch.dtype | None) -> int:
    """Memory that [`rollout_weights`] takes."""
    parameters = {id(parameter): parameter for _, _, parameter in _to_copy(model, dtype)}
    return sum(parameter.numel() for parameter in parameters.values()) * (dtype.itemsize if dtype else 0)


@contextmanager
def rollout_weights(model: torch.nn.Module, dtype: torch.dtype | None) -> Iterator[int]:
    """
    Inside the context, linear layers (LoRA's too) have float32 weights replaced by copies in `dtype`, so that a decode
    step under autocast casts none of them. On leaving it, also by an exception, the layers hold their own parameters
    again, the same objects, and the copies are free. Embeddings and norms, which autocast does not cast, stay.

    Args:
        model (`torch.nn.Module`): the model, possibly wrapped by PEFT.
        dtype (`torch.dtype`, *optional*): what autocast computes in; `None` where it is off, and nothing is copied.

    Yields:
        `int`: how many parameters were copied; a shared one counts once.
    """
    copies: dict[int, torch.nn.Parameter] = {}
    replaced = []
    try:
        for module, name, parameter in _to_copy(model, dtype):
            if id(parameter) not in copies:
                copies[id(parameter)] = torch.nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
            replaced.append((module, name, parameter))
        for module, name, parameter in replaced:
            module._parameters[name] = copies[id(parameter)]
        yield len(copies)
    finally:
        for module, name, parameter in replaced:
            module._parameters[name] = parameter
