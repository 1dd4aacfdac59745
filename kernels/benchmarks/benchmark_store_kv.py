"""
Storing the keys and values of one decode step, with the landmarks of the pages that fill up, on one GPU.

    python kernels/benchmarks/benchmark_store_kv.py [--batch 32]

Prints one JSON object a line: one in sixteen sequences fills its page, as in the mean step. No speed is printed unless the
pages were right on the device.
"""

import sys

import torch

import timing
from sparrow_kernels import reference
from sparrow_kernels.store_kv import store_kv


def new_tokens(step, offsets):
    """Keys, values and slots of one new token a sequence, at these offsets of its last page."""
    key, value = (torch.randn_like(step.query[:, : step.key_pages.shape[0]]) for _ in range(2))
    return key, value, step.page_table[:, -1] * timing.LAYOUT["page_size"] + offsets


def error(shape, device) -> float:
    """Largest relative difference of a pool from the reference's, in float32."""
    step = timing.Step.make(shape, 3, 40, torch.float32, device)
    new = new_tokens(step, torch.tensor([7, 15, 0], device=device))
    pools = [step.key_pages, step.value_pages, step.landmarks]
    expected = [pool.clone() for pool in pools]
    reference.store_kv(*new, *expected)
    store_kv(*new, *pools)
    return max(timing.difference(*pair) for pair in zip(pools, expected, strict=True))


def measure(shape, batch, context, budget) -> dict[str, float]:
    step = timing.Step.make(shape, batch, context, torch.bfloat16, "cuda")
    new = new_tokens(step, torch.arange(batch, device="cuda") % timing.LAYOUT["page_size"])
    taken = timing.milliseconds(lambda: store_kv(*new, step.key_pages, step.value_pages, step.landmarks), 20)
    return {"triton_ms": taken}


if __name__ == "__main__":
    sys.exit(timing.main(__doc__, "store_kv", error, measure))
