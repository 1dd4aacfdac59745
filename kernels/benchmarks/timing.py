"""What the benchmarks of single ops share: shapes, a pool of pages, the clock, and the lines that are printed."""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch


SHAPES = {"qwen3-1.7b": (16, 8, 128), "qwen3-8b": (32, 8, 128), "smollm2-135m": (9, 3, 64)}
LAYOUT = {"page_size": 16, "sink_pages": 1, "recent_pages": 2}


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Median of `repeats` runs on the current GPU."""
    times = []
    for i in range(repeats + 3):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(stop))
    return statistics.median(times)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative norm of the difference; NaN where something is none."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@dataclass
class Step:
    """A decode step of sequences of equal length, their pages in random order."""

    query: torch.Tensor
    key_pages: torch.Tensor
    value_pages: torch.Tensor
    landmarks: torch.Tensor
    page_table: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def make(cls, shape: tuple[int, int, int], batch: int, context: int, dtype: torch.dtype, device: str) -> "Step":
        num_heads, num_kv_heads, head_dim = shape
        max_pages = -(-context // LAYOUT["page_size"])
        generator = torch.Generator(device).manual_seed(0)
        normal = {"generator": generator, "device": device, "dtype": dtype}
        key_pages, value_pages = (
            torch.randn(num_kv_heads, batch * max_pages, LAYOUT["page_size"], head_dim, **normal) for _ in range(2)
        )
        return cls(
            query=torch.randn(batch, num_heads, head_dim, **normal),
            key_pages=key_pages,
            value_pages=value_pages,
            landmarks=key_pages.mean(2, dtype=torch.float32).to(dtype),
            page_table=torch.randperm(batch * max_pages, generator=generator, device=device).view(batch, max_pages),
            positions=torch.full((batch,), context - 1, device=device),
        )


def main(doc: str, op: str, error: Callable[..., float], measure: Callable[..., dict[str, float]]) -> int:
    """
    The command of a benchmark: one JSON object for each shape. `error(shape, device)` is compared with 1e-5 in float32
    first, and what is wrong is not timed; `measure(shape, batch, context, budget)` gives its times.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32, help="sequences of the step")
    parser.add_argument("--context", type=int, default=32768, help="tokens of each")
    parser.add_argument("--budget", type=int, default=128, help="scored pages that each query keeps")
    arguments = vars(parser.parse_args())
    if not torch.cuda.is_available():
        print("This benchmark needs a GPU.", file=sys.stderr)
        return 1
    for row in rows(op, error, measure, arguments):
        print(json.dumps(row), flush=True)
        if not row["right"]:
            return 1
    return 0


def rows(op: str, error: Callable, measure: Callable, arguments: dict[str, int]) -> Iterator[dict]:
    for name, shape in SHAPES.items():
        found = error(shape, "cuda")
        row = {"op": op, "shape": name, **arguments, "error": found, "right": found < 1e-5}
        row |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        if row["right"]:
            row |= measure(shape, **arguments)
        yield row
