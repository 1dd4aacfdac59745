"""Linear layers with their weights packed for the few rows of a decode step (CPU only)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


MOST_ROWS = 64  # tokens of a step; with more of them (prefill) the ordinary product is as fast
PACKED_DTYPES = (torch.float32, torch.bfloat16)


@contextmanager
def packed_linears(model: torch.nn.Module, dtype: torch.dtype | None) -> Iterator[int]:
    """
    Inside the context, the model's `nn.Linear` layers multiply few rows at a time by a packed copy of their weight.

    PyTorch hands a weight to oneDNN as it lies in memory, and oneDNN brings it into its own blocked layout at every
    product. For the few rows of a decode step that costs more than the product itself, so it is done once a rollout. The
    copies take as much memory as the weights do in `dtype`, and go when the context ends.

    Args:
        model (`torch.nn.Module`): the model; its layers get their own `forward` back, also on an exception.
        dtype (`torch.dtype`, *optional*): what autocast computes in, where it is on.

    Yields:
        `int`: how many layers were packed; 0 where oneDNN is missing, or the model is not on a CPU.
    """
    layers = []
    if torch.backends.mkldnn.is_available():
        layers = [
            module
            for module in model.modules()
            if type(module) is torch.nn.Linear
            and module.weight.device.type == "cpu"
            and (dtype or module.weight.dtype) in PACKED_DTYPES
            and "forward" not in vars(module)  # somebody else's, for example a head cast to float32
        ]
    try:
        for layer in layers:
            layer.forward = _PackedForward(layer, dtype or layer.weight.dtype)  # type: ignore[method-assign,assignment]
        yield len(layers)
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


class _PackedForward:
    """The `forward` of a linear layer while it is packed."""

    def __init__(self, layer: torch.nn.Linear, dtype: torch.dtype):
        self.layer, self.dtype = layer, dtype
        with torch.no_grad():
            self.weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().to(dtype), None)
            self.bias = None if layer.bias is None else layer.bias.detach().to(dtype)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.numel() > MOST_ROWS * rows.shape[-1]:
            return torch.nn.Linear.forward(self.layer, rows)
        return torch.ops.mkldnn._linear_pointwise(rows.to(self.dtype), self.weight, self.bias, "none", [], "")
