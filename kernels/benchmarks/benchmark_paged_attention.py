"""
Attention of a decode step over the chosen pages and over all of them, against PyTorch's, on one GPU.

    python kernels/benchmarks/benchmark_paged_attention.py [--batch 32] [--context 32768] [--budget 128]

Prints one JSON object a line; PyTorch attends to a cache that lies in one piece. No speed is printed unless the kernel's
outputs were those of the reference on the device.
"""

import sys

import torch
import torch.nn.functional as F

import timing
from benchmark_select_pages import choose
from sparrow_kernels import reference
from sparrow_kernels.paged_attention import paged_attention


def attend(step, *pages):
    pools = step.key_pages, step.value_pages
    scaling = step.query.shape[-1] ** -0.5
    return paged_attention(step.query, *pools, step.page_table, step.positions, *pages, scaling=scaling)


def error(shape, device) -> float:
    """Largest relative difference from the reference, of dense and of sparse attention, in float32."""
    step = timing.Step.make(shape, 2, 300, torch.float32, device)
    pages = choose(step, 4)
    budgets = torch.full_like(step.positions, 4)
    chosen = reference.select_pages(
        step.query, step.landmarks, step.page_table, step.positions, budgets, **timing.LAYOUT
    )
    arguments = step.query, step.key_pages, step.value_pages, step.page_table, step.positions
    scaling = shape[2] ** -0.5
    return max(
        timing.difference(attend(step), reference.paged_attention(*arguments, scaling=scaling)),
        timing.difference(attend(step, *pages), reference.paged_attention(*arguments, chosen, scaling=scaling)),
    )


def measure(shape, batch, context, budget) -> dict[str, float]:
    step = timing.Step.make(shape, batch, context, torch.bfloat16, "cuda")
    pages = choose(step, budget)
    keys, values = (
        pool.view(len(pool), batch, -1, shape[2]).transpose(0, 1) for pool in (step.key_pages, step.value_pages)
    )
    found = {
        "sparse_ms": timing.milliseconds(lambda: attend(step, *pages), 20),
        "dense_ms": timing.milliseconds(lambda: attend(step), 20),
        "sdpa_ms": timing.milliseconds(
            lambda: F.scaled_dot_product_attention(step.query[:, :, None], keys, values, enable_gqa=True), 20
        ),
    }
    token_bytes = 2 * batch * shape[1] * shape[2] * step.query.element_size()
    kept = pages[0].shape[2] * timing.LAYOUT["page_size"]
    return found | {
        "sparse_gb_per_s": kept * token_bytes / found["sparse_ms"] / 1e6,
        "dense_gb_per_s": context * token_bytes / found["dense_ms"] / 1e6,
    }


if __name__ == "__main__":
    sys.exit(timing.main(__doc__, "paged_attention", error, measure))
