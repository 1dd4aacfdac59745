"""
What the kernels read, counted in Triton's interpreter, against the least that their ops have to read.

    TRITON_INTERPRET=1 python kernels/benchmarks/bytes_read.py

`report.py` runs it in a process of its own: the interpreter and the compiler cannot share one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "torch-ext"), str(Path(__file__).parent)]
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch  # noqa: E402

from interpreter import by_kernel, count_bytes, repair_bfloat16  # noqa: E402
from launches import SHAPES, Shape  # noqa: E402
from sparrow_kernels.page_mask import choose_pages  # noqa: E402
from sparrow_kernels.paged_attention import paged_attention  # noqa: E402
from sparrow_kernels.select_pages import select_pages  # noqa: E402
from sparrow_kernels.store_kv import store_kv  # noqa: E402
from sparrow_kernels.teacher_forced import launch_options, teacher_forced_attention  # noqa: E402
from sparrow_kernels.token_logprobs import token_logprobs  # noqa: E402


PAGE_SIZE, SINK_PAGES, RECENT_PAGES = 16, 1, 2
LENGTHS, BUDGETS = (2003, 4096), (29, 61)  # tokens and scored pages of the sequences of a decode step
PACKED, PROMPTS, BUDGET = (300, 217), (128, 40), 5  # tokens of the packed sequences, of their prompts; scored pages
VOCAB_SIZE, TOP = 49152, 20


@dataclass(frozen=True)
class Reading:
    """Bytes that one call of a kernel read, and the least it has to."""

    op: str
    kernel: str
    shape: str
    read: int
    least: int


def read_by_decoding(shape: Shape) -> list[Reading]:
    """A decode step of two sequences in bfloat16: store, choose, attend to chosen pages and to all."""
    heads, head_dim, width = shape.num_kv_heads, shape.head_dim, 2 * shape.head_dim
    counts = [-(-length // PAGE_SIZE) for length in LENGTHS]
    table = torch.zeros(len(LENGTHS), max(counts), dtype=torch.int64)
    for row, count, free in zip(table, counts, torch.randperm(sum(counts)).split(counts), strict=True):
        row[:count] = free
    key_pages, value_pages = torch.randn(2, heads, sum(counts), PAGE_SIZE, head_dim).bfloat16()
    landmarks = key_pages.float().mean(2).bfloat16()
    positions, budgets = torch.tensor(LENGTHS) - 1, torch.tensor(BUDGETS)
    query = torch.randn(len(LENGTHS), shape.num_heads, head_dim).bfloat16()
    step = bytes_of(query, positions)
    found = []

    new = torch.randn(len(LENGTHS), heads, head_dim).bfloat16()
    slots = table.gather(1, (positions // PAGE_SIZE)[:, None])[:, 0] * PAGE_SIZE + positions % PAGE_SIZE
    filled = int((positions % PAGE_SIZE == PAGE_SIZE - 1).sum())
    with count_bytes() as read:
        store_kv(new, new, slots, key_pages, value_pages, landmarks)
    least = 2 * bytes_of(new) + bytes_of(slots) + filled * heads * (PAGE_SIZE - 1) * width
    found.append(Reading("store_kv", "store_kv_kernel", shape.names, read.total(), least))

    layout = {"page_size": PAGE_SIZE, "sink_pages": SINK_PAGES, "recent_pages": RECENT_PAGES}
    with count_bytes() as read:
        chosen = select_pages(query, landmarks, table, positions, budgets, **layout, max_selected=64)
    candidates = sum(count - SINK_PAGES - RECENT_PAGES for count in counts)
    for kernel, least in (
        ("score_pages_kernel", candidates * (heads * width + 8) + step + bytes_of(budgets)),
        ("select_pages_kernel", candidates * heads * 4 + bytes_of(positions, budgets)),
    ):
        found.append(Reading("select_pages", kernel, shape.names, by_kernel(read)[kernel], least))

    num_chosen = int(chosen[1].sum())
    unfilled = sum(-length % PAGE_SIZE for length in LENGTHS)
    for name, pages, least in (
        ("sparse", chosen, heads * ((num_chosen * PAGE_SIZE - unfilled) * 2 * width + num_chosen * (4 + 8))),
        ("dense", (), heads * sum(LENGTHS) * 2 * width + 8 * sum(counts)),
    ):
        with count_bytes() as read:
            paged_attention(query, key_pages, value_pages, table, positions, *pages, scaling=0.1)
        kernel = "paged_attention_kernel"
        found.append(Reading(f"paged_attention, {name}", kernel, shape.names, by_kernel(read)[kernel], least + step))
    return found


def read_by_teacher_forcing(shape: Shape) -> list[Reading]:
    """
    The forward of two packed sequences in bfloat16. The least is what a block of queries has to read: the pages that any
    of its tokens chose, once.
    """
    num_tokens, (heads, head_dim) = sum(PACKED), (shape.num_kv_heads, shape.head_dim)
    query = torch.randn(num_tokens, shape.num_heads, head_dim).bfloat16()
    key, value = torch.randn(2, num_tokens, heads, head_dim).bfloat16()
    starts = torch.tensor([0, PACKED[0], num_tokens], dtype=torch.int32)
    prompts = torch.tensor(PROMPTS, dtype=torch.int32)
    budgets = torch.full((num_tokens,), BUDGET, dtype=torch.int32)
    layout = {"page_size": PAGE_SIZE, "sink_pages": SINK_PAGES, "recent_pages": RECENT_PAGES}
    mask = choose_pages(
        query, key, starts, prompts, budgets, **layout, sliding_window=None, max_seqlen=max(PACKED)
    )  # fmt: skip
    chosen = ((mask[..., None] >> torch.arange(32)) & 1).bool().flatten(2)  # token, head, page
    options = launch_options(
        num_heads=shape.num_heads, num_kv_heads=heads, head_dim=head_dim, dtype=torch.bfloat16, page_size=PAGE_SIZE
    )["teacher_forced_forward_kernel"]
    tokens = options["BLOCK_M"] // options["GROUP"]
    least = bytes_of(query)
    for start, length in zip(starts.tolist(), PACKED, strict=False):
        for first in range(0, length, tokens):
            end = min(first + tokens, length)
            pages = chosen[start + first : start + end].any(0)
            seen = pages.repeat_interleave(PAGE_SIZE, dim=1)[:, :end]
            least += int(seen.sum()) * 4 * head_dim + int(pages.sum()) * 2 + (end - first) * heads * mask.shape[2] * 4
    kernel = "teacher_forced_forward_kernel"
    with count_bytes() as read:
        teacher_forced_attention(
            query, key, value, starts, prompts, budgets, **layout, scaling=0.1, max_seqlen=max(PACKED)
        )  # fmt: skip
    return [Reading("teacher_forced, forward", kernel, shape.names, by_kernel(read)[kernel], least)]


def read_by_logprobs() -> list[Reading]:
    """Two rows of float32 logits."""
    logits, tokens = torch.randn(2, VOCAB_SIZE), torch.tensor([3, 40000])
    with count_bytes() as read:
        token_logprobs(logits, tokens, top=TOP)
    return [
        Reading("token_logprobs", "both", f"{VOCAB_SIZE:,} tokens", read.total(), bytes_of(logits, tokens)),
    ]


def bytes_of(*tensors: torch.Tensor) -> int:
    """Of all their elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def count_all(shapes: Iterable[Shape]) -> list[Reading]:
    """Every op at the shapes, with two KV heads of each; models whose heads are alike are counted once."""
    repair_bfloat16()
    torch.manual_seed(0)
    found: list[Reading] = []
    alike: dict[tuple[int, int], list[str]] = {}
    for shape in shapes:
        alike.setdefault((shape.num_heads // shape.num_kv_heads, shape.head_dim), []).append(shape.names)
    for (group, head_dim), names in alike.items():
        shape = Shape(", ".join(names), 2 * group, 2, head_dim, VOCAB_SIZE)
        found += [*read_by_decoding(shape), *read_by_teacher_forcing(shape)]
    return found + read_by_logprobs()


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the bytes that the Triton kernels read, as JSON.")
    parser.add_argument("--shape", nargs="+", choices=[shape.names for shape in SHAPES], help="of these models alone")
    args = parser.parse_args()
    shapes = [shape for shape in SHAPES if args.shape is None or shape.names in args.shape]
    json.dump([asdict(reading) for reading in count_all(shapes)], sys.stdout)


if __name__ == "__main__":
    main()
