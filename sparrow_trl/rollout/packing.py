"""Linear layers with their weights packed for the few rows of a decode step (CPU only)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..low_rank import LowRankUpdate, UpdatedForward


MOST_ROWS = 64  # tokens of a step; with more of them (prefill) the ordinary product is as fast
PACKED_DTYPES = (torch.float32, torch.bfloat16)


@contextmanager
def packed_linears(model: torch.nn.Module, dtype: torch.dtype | None) -> Iterator[int]:
    """
    Inside the context, the model's `nn.Linear` layers multiply few rows at a time by a packed copy of their weight.

    PyTorch hands a weight to oneDNN as it lies in memory, and oneDNN brings it into its own blocked layout at every
    product. For the few rows of a decode step that costs more than the product itself, so it is done once a rollout. The
    copies take as much memory as the weights do in `dtype`, and go when the context ends.

    Where a low-rank update is on beside a layer, its A is packed below the layer's weight: one product gives both
    `W x` and `A x`, and one more adds B's. It is not merged: `W + B A` is computed nowhere.

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
            and is_plain(module)
        ]
    before = [vars(layer).get("forward") for layer in layers]
    try:
        for layer in layers:
            layer.forward = _packed(layer, dtype or layer.weight.dtype)  # type: ignore[method-assign,assignment]
        yield len(layers)
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                vars(layer).pop("forward", None)
            else:
                layer.forward = forward  # type: ignore[method-assign,assignment]


def is_plain(layer: torch.nn.Module) -> bool:
    """Whether a layer multiplies by its weight as its class says, a low-rank update beside it or not."""
    forward = vars(layer).get("forward")
    if isinstance(forward, UpdatedForward):
        return forward.replaced is None
    return forward is None  # or it is somebody else's, for example a head cast to float32


def _packed(layer: torch.nn.Linear, dtype: torch.dtype) -> _PackedForward:
    forward = vars(layer).get("forward")
    if isinstance(forward, UpdatedForward):
        return _PackedUpdatedForward(layer, dtype, forward)
    return _PackedForward(layer, dtype)


def _reorder(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)


class _PackedForward:
    """The `forward` of a linear layer while it is packed."""

    def __init__(self, layer: torch.nn.Linear, dtype: torch.dtype):
        self.layer, self.dtype = layer, dtype
        self.bias: torch.Tensor | None
        with torch.no_grad():
            self.weight = _reorder(layer.weight.detach().to(dtype))
            self.bias = None if layer.bias is None else layer.bias.detach().to(dtype)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.numel() > MOST_ROWS * rows.shape[-1]:
            return torch.nn.Linear.forward(self.layer, rows)
        return torch.ops.mkldnn._linear_pointwise(rows.to(self.dtype), self.weight, self.bias, "none", [], "")


class _PackedUpdatedForward(_PackedForward):
    """The same with a low-rank update on."""

    def __init__(self, layer: torch.nn.Linear, dtype: torch.dtype, forward: UpdatedForward):
        self.layer, self.dtype, self.unpacked = layer, dtype, forward
        update: LowRankUpdate = forward.update
        with torch.no_grad():
            self.weight = _reorder(
                torch.cat([layer.weight.detach(), update.A.detach().to(layer.weight.dtype)]).to(dtype)
            )
            self.bias = None
            if layer.bias is not None:
                self.bias = torch.cat([layer.bias.detach(), layer.bias.new_zeros(len(update.A))]).to(dtype)
            self.b = (update.B.detach().T * update.scaling).to(dtype).contiguous()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.numel() > MOST_ROWS * rows.shape[-1]:
            return self.unpacked(rows)
        both = torch.ops.mkldnn._linear_pointwise(
            rows.to(self.dtype).flatten(0, -2), self.weight, self.bias, "none", [], ""
        )
        size = self.b.shape[1]
        return torch.addmm(both[:, :size], both[:, size:], self.b).view(*rows.shape[:-1], size)
