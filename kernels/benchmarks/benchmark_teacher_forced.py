"""
Teacher-forced sparse attention against PyTorch's dense attention, forward and backward, on one GPU.

    python kernels/benchmarks/benchmark_teacher_forced.py [--length 32768] [--budget 128]

Prints one JSON object a line. No speed is printed unless the kernel's values and gradients were right on the device.
"""

import argparse
import json
import sys

import torch
import torch.nn.functional as F

from sparrow_kernels import reference
from sparrow_kernels.teacher_forced import teacher_forced_attention
from timing import LAYOUT, SHAPES, milliseconds


def inputs(num_tokens, num_heads, num_kv_heads, head_dim, dtype, device):
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(num_tokens, heads, head_dim, generator=generator).to(device, dtype).requires_grad_()
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )


def attend(tensors, prompt_length, budget):
    """One sequence with one budget at every position; `None` is dense."""
    query = tensors[0]
    integers = {"dtype": torch.int32, "device": query.device}
    budgets = None if budget is None else torch.full((len(query),), budget, **integers)
    return teacher_forced_attention(
        *tensors,
        torch.tensor([0, len(query)], **integers),
        torch.tensor([prompt_length], **integers),
        budgets,
        scaling=query.shape[-1] ** -0.5,
        max_seqlen=len(query),
        **LAYOUT,
    )


def error(shape, device) -> float:
    """Largest relative difference from the reference in float32, of the output and the gradients."""
    tensors = inputs(150, *shape, torch.float32, device)
    budgets = torch.full((150,), 2, device=device)
    expected = reference.teacher_forced_attention(*tensors, 120, budgets, scaling=shape[2] ** -0.5, **LAYOUT)
    out = attend(tensors, 120, 2)
    direction = torch.randn_like(out)
    pairs = [(out, expected)]
    pairs += zip(
        torch.autograd.grad(out, tensors, direction), torch.autograd.grad(expected, tensors, direction), strict=True
    )
    return max(((found - wanted).norm() / wanted.norm()).item() for found, wanted in pairs)


def measure(shape, length, budget, device, repeats=5) -> dict[str, float]:
    """Milliseconds of a forward, and of a forward with its backward."""
    tensors = inputs(length, *shape, torch.bfloat16, device)
    prompt_length = min(512, length // 4)
    direction = torch.randn_like(tensors[0])
    heads_first = [tensor.transpose(0, 1)[None] for tensor in tensors]
    calls = {
        "sparse": lambda: attend(tensors, prompt_length, budget),
        "dense": lambda: attend(tensors, prompt_length, None),
        "sdpa": lambda: F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)[0].transpose(
            0, 1
        ),
    }
    found = {}
    for name, call in calls.items():
        with torch.no_grad():
            found[f"{name}_forward_ms"] = milliseconds(call, repeats)
        found[f"{name}_ms"] = milliseconds(lambda call=call: torch.autograd.grad(call(), tensors, direction), repeats)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=32768, help="tokens of the sequence")
    parser.add_argument("--budget", type=int, default=128, help="scored pages that each token keeps")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a GPU.", file=sys.stderr)
        return 1
    for name, shape in SHAPES.items():
        row = {"op": "teacher_forced", "shape": name, "length": arguments.length, "budget": arguments.budget}
        row |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "error": error(shape, "cuda")}
        if row["error"] < 1e-5:
            row |= measure(shape, arguments.length, arguments.budget, "cuda")
        print(json.dumps(row), flush=True)
        if row["error"] >= 1e-5:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
