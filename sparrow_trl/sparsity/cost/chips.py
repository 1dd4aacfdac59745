"""Chips: peak arithmetic, memory bandwidth and memory, from their data sheets or measured here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Chip:
    """
    What the cost model knows of a chip.

    Attributes:
        name (`str`): as it is shown.
        flops (`float`): peak FLOP/s of dense 16-bit matrix products, without structured sparsity.
        bandwidth (`float`): memory bandwidth, bytes/s.
        memory (`float`, *optional*): memory, bytes.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float | None = None

    @property
    def intensity(self) -> float:
        """FLOPs that the chip could do while it moves one byte: the price `I` of a byte in FLOPs."""
        return self.flops / self.bandwidth


CHIPS = {
    "h200": Chip("H200 SXM", 989.4e12, 4.8e12, 141e9),
    "h100": Chip("H100 SXM", 989.4e12, 3.35e12, 80e9),
    "a100": Chip("A100 SXM 80 GB", 312e12, 2.039e12, 80e9),
    "l4": Chip("L4", 121e12, 300e9, 24e9),
    "t4": Chip("T4", 65e12, 320e9, 16e9),
    "rtx4090": Chip("RTX 4090", 165.2e12, 1.008e12, 24e9),
    "mi300x": Chip("MI300X", 1307.4e12, 5.3e12, 192e9),
}
"""From the makers' data sheets: bfloat16 on tensor cores with float32 accumulation (T4: float16), no sparsity."""


def measure_chip(dtype: torch.dtype, device: torch.device, repeats: int = 5) -> Chip:
    """
    Measure this machine: the fastest of a few square matrix products, and the median copy of a large tensor in the
    convention of `sparrow bench rollout` (bytes copied per second, each counted once).

    Args:
        dtype (`torch.dtype`): dtype of the products.
        device (`torch.device`): where.
        repeats (`int`, *optional*, defaults to `5`): products and copies.
    """
    import psutil
    import torch

    from ...benchmark.measure import Bandwidth, timed
    from ...environment import hardware

    size = 8192 if device.type == "cuda" else 1536
    left, right = (torch.rand(size, size, dtype=dtype, device=device) for _ in range(2))
    left @ right
    seconds = min(timed(device, torch.matmul, left, right)[0] for _ in range(repeats))
    bandwidth = Bandwidth(device)
    bandwidth.measure()  # the first one also touches the memory
    bandwidth.copies.clear()
    for _ in range(repeats):
        bandwidth.measure()
    found = hardware()
    if device.type == "cuda":
        name, memory = found["gpus"][0]["name"], torch.cuda.get_device_properties(device).total_memory
    else:
        name, memory = f"{found['cpu']}, {found['threads']} threads", psutil.virtual_memory().total
    return Chip(f"{name} (measured)", 2 * size**3 / seconds, bandwidth.summary()["copy"], memory)
