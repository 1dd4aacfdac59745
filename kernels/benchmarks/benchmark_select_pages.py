"""
Scoring the pages of a decode step and choosing the best ones, against PyTorch operations, on one GPU.

    python kernels/benchmarks/benchmark_select_pages.py [--batch 32] [--context 32768] [--budget 128]

Prints one JSON object a line. No speed is printed unless the chosen pages were those of the reference on the device.
"""

import sys

import torch

import timing
from sparrow_kernels import reference
from sparrow_kernels.select_pages import select_pages


def choose(step, budget):
    layout = timing.LAYOUT
    return select_pages(
        step.query,
        step.landmarks,
        step.page_table,
        step.positions,
        torch.full_like(step.positions, budget),
        max_selected=budget + layout["sink_pages"] + layout["recent_pages"],
        **layout,
    )


def in_torch(step, budget):
    """The same from a product with all landmarks of each sequence and `topk`; ties and order are left to chance."""
    batch, num_heads, head_dim = step.query.shape
    num_kv_heads, (sink, recent) = len(step.landmarks), (timing.LAYOUT["sink_pages"], timing.LAYOUT["recent_pages"])
    mean_query = step.query.view(batch, num_kv_heads, -1, head_dim).mean(2)
    candidates = step.landmarks[:, step.page_table[:, sink:-recent]]
    scores = torch.einsum("bhd,hbpd->bhp", mean_query, candidates)
    return scores.topk(budget, dim=-1).indices + sink


def error(shape, device) -> float:
    """Part of the chosen pages that the reference did not choose, in float32."""
    step = timing.Step.make(shape, 2, 300, torch.float32, device)
    pages, counts = choose(step, 4)
    wanted = reference.select_pages(
        step.query,
        step.landmarks,
        step.page_table,
        step.positions,
        torch.full_like(step.positions, 4),
        **timing.LAYOUT,
    )
    if counts.tolist() != wanted.sum(-1)[:, 0].tolist():
        return 1.0
    found = torch.zeros_like(wanted).scatter_(2, pages.long(), torch.ones_like(pages, dtype=torch.bool))
    return (found != wanted).float().mean().item()


def measure(shape, batch, context, budget) -> dict[str, float]:
    step = timing.Step.make(shape, batch, context, torch.bfloat16, "cuda")
    taken = timing.milliseconds(lambda: choose(step, budget), 20)
    read = (step.page_table.shape[1] - 3) * batch * step.landmarks[:, 0].numel() * step.landmarks.element_size()
    return {
        "triton_ms": taken,
        "torch_ms": timing.milliseconds(lambda: in_torch(step, budget), 20),
        "gb_per_s": read / taken / 1e6,
    }


if __name__ == "__main__":
    sys.exit(timing.main(__doc__, "select_pages", error, measure))
