"""A low-rank update beside a linear layer, which the layer itself knows nothing of."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class LowRankUpdate(nn.Module):
    """
    `scaling * B A x`, the LoRA of one layer. Zero until it is trained, because B starts at zero.

    Args:
        in_features, out_features (`int`): sizes of the layer.
        rank (`int`): rows of A, columns of B.
        scaling (`float`): alpha over rank.
        generator (`torch.Generator`): on the CPU; draws A as PEFT does, uniformly within `1 / sqrt(in_features)`.
        device (`torch.device`): of the layer.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        scaling: float,
        generator: torch.Generator,
        device: torch.device,
    ):
        super().__init__()
        bound = 1.0 / math.sqrt(in_features)
        a = torch.empty(rank, in_features).uniform_(-bound, bound, generator=generator)
        self.A = nn.Parameter(a.to(device))
        self.B = nn.Parameter(torch.zeros(out_features, rank, device=device))
        self.scaling = scaling
        self.suspended = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`(..., in_features)` to `(..., out_features)`, in float32, or in what autocast computes in."""
        if not torch.is_autocast_enabled(inputs.device.type):
            inputs = inputs.to(self.A.dtype)
        return F.linear(F.linear(inputs, self.A) * self.scaling, self.B)  # scaled where it is narrow


class UpdatedForward:
    """
    The `forward` of a linear layer while its update is on.

    It takes the place of the layer's `forward` instead of the layer itself, so that neither the names of the model's
    parameters nor its state dict change.
    """

    def __init__(self, layer: nn.Module, update: LowRankUpdate):
        self.layer, self.update = layer, update
        self.replaced = vars(layer).get("forward")  # what a layer has where somebody else did the same
        self.plain = layer.forward

    def __call__(self, inputs: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        out = self.plain(inputs, *args, **kwargs)
        if self.update.suspended:
            return out
        return out + self.update(inputs).to(out.dtype)
