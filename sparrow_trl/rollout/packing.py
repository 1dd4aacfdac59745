"""Linear layers with their weights packed for the few rows of a decode step (CPU only)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from ..low_rank import UpdatedForward


MOST_ROWS = 64  # tokens of a step; with more of them (prefill) the ordinary product is as fast
PACKED_DTYPES = (torch.float32, torch.bfloat16)


@contextmanager
def packed_linears(model: torch.nn.Module, dtype: torch.dtype | None) -> Iterator[int]:
    """
    Inside the context, the model's `nn.Linear` layers multiply few rows at a time by a packed copy of their weight, and
    layers that are fed the same tensor (queries, keys and values; gate and up) do so in one product.

    PyTorch hands a weight to oneDNN as it lies in memory, and oneDNN brings it into its own blocked layout at every
    product. For the few rows of a decode step that costs more than the product itself, so it is done once a rollout. The
    copies take as much memory as the weights do in `dtype`, and go when the context ends.

    Which layers share their input is seen in the first call of each of them, which is an ordinary product; weights are
    packed in the next one of few rows. Should layers be fed different tensors later, each call computes the product of all
    that shared one, and gives out the part that was asked for.

    Where low-rank updates are on beside layers, one more product gives `A x` of all that share the input, and their B's
    lie beside the weights: `[W B] [x, A x]`. They are not merged: `W + B A` is computed nowhere.

    Args:
        model (`torch.nn.Module`): the model; its layers get their own `forward` back, also on an exception.
        dtype (`torch.dtype`, *optional*): what autocast computes in, where it is on.

    Yields:
        `int`: how many layers are packed; 0 where oneDNN is missing, or the model is not on a CPU.
    """
    layers = []
    if torch.backends.mkldnn.is_available():
        layers = [
            module
            for module in model.modules()
            if type(module) is torch.nn.Linear
            and module.weight.device.type == "cpu"
            and (dtype or module.weight.dtype) in PACKED_DTYPES
            and module.weight.dtype is not torch.float64  # which autocast leaves alone
            and is_plain(module)
        ]
    before = [vars(layer).get("forward") for layer in layers]
    groups = _Groups()
    forwards = [_PackedForward(layer, dtype or layer.weight.dtype, groups) for layer in layers]
    try:
        for layer, packed in zip(layers, forwards, strict=True):
            layer.forward = packed  # type: ignore[method-assign,assignment]
        yield len(layers)
    finally:
        groups.clear()
        for packed in forwards:
            packed.group = None
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


class _PackedForward:
    """The `forward` of a linear layer while it is packed."""

    def __init__(self, layer: torch.nn.Linear, dtype: torch.dtype, groups: _Groups):
        self.layer, self.dtype, self.groups = layer, dtype, groups
        self.unpacked = layer.forward
        self.update = self.unpacked.update if isinstance(self.unpacked, UpdatedForward) else None
        self.group: _Group | None = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        few = rows.numel() <= MOST_ROWS * rows.shape[-1]
        if self.group is None:
            self.group = self.groups.join(self, rows)
            # Autocast would keep the weight that it casts, which may be needed this once
            casts = torch.is_autocast_enabled("cpu")
            with torch.autocast("cpu", self.dtype, cache_enabled=False) if few and casts else nullcontext():
                return self.unpacked(rows)
        if not few or (self.update is not None and self.update.suspended):
            return self.unpacked(rows)
        return self.group.product(self, rows)


class _Groups:
    """Finds the layers that are fed the same tensor."""

    def __init__(self) -> None:
        self._by_input: dict[int, tuple[weakref.ref[torch.Tensor], _Group]] = {}

    def join(self, forward: _PackedForward, rows: torch.Tensor) -> _Group:
        """The group of a layer whose first input is `rows`."""
        alive, group = self._by_input.get(id(rows), (None, None))
        known = alive is not None and alive() is rows  # or another tensor had the same id
        if group is None or not known or group.is_packed or _version(rows) is None:
            group = _Group(forward.dtype)
            self._by_input[id(rows)] = weakref.ref(rows), group
        group.members.append(forward)
        return group

    def clear(self) -> None:
        """Forget the groups. They hold layers that hold them, and would stay until the next garbage collection."""
        self._by_input.clear()


class _Group:
    """Layers that share their input. The first to be called computes for all; the others find their part."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.members: list[_PackedForward] = []
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self.a: torch.Tensor | None = None
        self.sizes: list[int] = []
        self._input: torch.Tensor | None = None
        self._version: int | None = None
        self._outputs: dict[_PackedForward, torch.Tensor] = {}  # what nobody has asked for yet

    @property
    def is_packed(self) -> bool:
        return self.weight is not None

    def product(self, member: _PackedForward, rows: torch.Tensor) -> torch.Tensor:
        """What `member` makes of `rows`, `(..., in_features)`."""
        if not self._is_current(rows) or member not in self._outputs:
            self._outputs = dict(zip(self.members, self._products(rows), strict=True))
            self._input, self._version = rows, _version(rows)
        output = self._outputs.pop(member)
        if not self._outputs:
            self._input = None
        return output

    def _is_current(self, rows: torch.Tensor) -> bool:
        """Whether the outputs at hand are those of `rows`, which nothing has changed since."""
        return rows is self._input and self._version is not None and _version(rows) == self._version

    def _products(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of each member, `(..., in_features)` to `(..., out_features)`."""
        weight = self._pack() if self.weight is None else self.weight
        inputs = rows.to(self.dtype).reshape(-1, rows.shape[-1])
        if self.a is not None:
            inputs = torch.cat([inputs, self._narrow(inputs, self.a)], 1)
        out = _multiply(inputs, weight, self.bias).view(*rows.shape[:-1], sum(self.sizes))
        return out.split(self.sizes, -1)

    def _narrow(self, inputs: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """`A x` of all updates. For a product so small oneDNN takes longer than BLAS, which is slow in bfloat16."""
        return torch.mm(inputs, a) if self.dtype is torch.float32 else _multiply(inputs, a, None)

    def _pack(self) -> torch.Tensor:
        layers = [member.layer for member in self.members]
        weights = [layer.weight.detach().to(self.dtype) for layer in layers]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)  # the head is large, and alone
        self.sizes = [layer.out_features for layer in layers]
        if any(layer.bias is not None for layer in layers):
            biases = [weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
            self.bias = torch.cat([bias.detach().to(self.dtype) for bias in biases])
        updates = [member.update for member in self.members]
        if any(updates):
            a = torch.cat([update.A.detach() for update in updates if update]).to(self.dtype)
            scaled = [
                update.B.detach() * update.scaling if update else weight.new_zeros(size, 0)
                for update, size in zip(updates, self.sizes, strict=True)
            ]
            # A number that is not finite in one update spreads to all layers of the group
            weight = torch.cat([weight, torch.block_diag(*scaled).to(self.dtype)], 1)
            self.a = a.T.contiguous() if self.dtype is torch.float32 else _reorder(a)
        self.weight = _reorder(weight)
        return self.weight


def _version(tensor: torch.Tensor) -> int | None:
    """Counts operations in place, but for those on `.data`; `None` in inference mode, where PyTorch does not count."""
    return None if tensor.is_inference() else tensor._version


def _reorder(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)


def _multiply(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
