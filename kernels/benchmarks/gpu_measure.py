"""One measurement of `gpu_check.py`, in a process of its own. Results are written as soon as they are there."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton


WRONG = 3  # exit status


@dataclass
class Sizes:
    """What is measured."""

    num_heads: int = 16  # Qwen3-1.7B
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    context: int = 32768
    batch: int = 32
    page_size: int = 16
    schedule: str = "qwen3-1.7b@0.86"
    copied_bytes: int = 4 << 30
    decode_tokens: int = 192
    gap_context: int = 2048
    other_context: int = 8192  # against continuous batching
    other_tokens: tuple[int, int] = (8, 72)
    end_batch: int = 64
    end_prompt: int = 512
    end_tokens: int = 8192


TINY = Sizes(
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    dtype=torch.float32,
    context=160,
    batch=2,
    schedule="fixed:2",
    copied_bytes=1 << 20,
    decode_tokens=6,
    gap_context=48,
    other_context=24,
    other_tokens=(2, 6),
    end_batch=2,
    end_prompt=16,
    end_tokens=8,
)


class Results:
    """Measured values by the name of the measure, in a file that is up to date at any time."""

    def __init__(self, path: Path):
        self.path = path
        self.values: dict[str, dict[str, Any]] = {}

    def add(self, name: str, value: float, note: str = "", **detail: Any) -> None:
        self.values[name] = {"value": value, "note": note, "detail": detail}
        self.path.write_text(json.dumps(self.values, indent=1), encoding="utf-8")


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """Median time of a call: on a GPU inside of a CUDA graph, as the engine replays it."""
    if device.type == "cuda":
        call()  # compiles
        try:
            return triton.testing.do_bench_cudagraph(call, rep=100, return_mode="median") / 1e3
        except RuntimeError:  # not capturable
            return triton.testing.do_bench(call, warmup=50, rep=200, return_mode="median") / 1e3
    times = []
    for _ in range(3):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def copy_bandwidth(num_bytes: int, device: torch.device) -> float:
    """Bytes per second that a large copy moves, those it reads and those it writes."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(lambda: target.copy_(source), device)


def check(name: str, found: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    """No speed is reported of what is computed wrongly."""
    difference = ((found.double() - expected.double()).norm() / expected.double().norm()).item()
    if not difference <= limit:
        print(f"{name} is wrong: relative norm {difference:.3g} from float64, limit {limit:g}", file=sys.stderr)
        raise SystemExit(WRONG)


def attention(sizes: Sizes, device: torch.device, results: Results, seconds: float) -> None:
    """Dense and sparse attention of one layer and decode step, pages in random order."""
    from sparrow_kernels.paged_attention import paged_attention
    from sparrow_kernels.select_pages import select_pages
    from sparrow_trl.sparsity import SparsitySchedule

    torch.manual_seed(0)
    max_pages = sizes.context // sizes.page_size
    num_pages = sizes.batch * max_pages
    shape = (sizes.num_kv_heads, num_pages, sizes.page_size, sizes.head_dim)
    key_pages, value_pages = (torch.randn(shape, device=device, dtype=sizes.dtype) for _ in range(2))
    landmarks = key_pages.float().mean(2).to(sizes.dtype)
    page_table = torch.randperm(num_pages, device=device).view(sizes.batch, max_pages)
    positions = torch.full((sizes.batch,), sizes.context - 1, device=device)
    query = torch.randn(sizes.batch, sizes.num_heads, sizes.head_dim, device=device, dtype=sizes.dtype)
    scaling = sizes.head_dim**-0.5
    schedule = SparsitySchedule.resolve(sizes.schedule)
    budget = min(schedule.budget_at(sizes.context - 1), max_pages - schedule.sink_pages - schedule.recent_pages)
    kept = budget + schedule.sink_pages + schedule.recent_pages
    budgets = torch.full((sizes.batch,), budget, device=device)
    element = key_pages.element_size()
    per_page = sizes.batch * sizes.num_kv_heads * sizes.head_dim * element

    def exact(pages: torch.Tensor) -> torch.Tensor:
        """Attention of the first query over `pages` `(num_kv_heads, n)` of the pool, in float64."""
        group = sizes.num_heads // sizes.num_kv_heads
        heads = torch.arange(sizes.num_kv_heads, device=device)[:, None]
        keys, values = (pool[heads, pages].flatten(1, 2).double() for pool in (key_pages, value_pages))
        scores = query[0].view(sizes.num_kv_heads, group, -1).double() @ keys.mT * scaling
        return (scores.softmax(-1) @ values).flatten(0, 1)

    def dense() -> torch.Tensor:
        return paged_attention(query, key_pages, value_pages, page_table, positions, scaling=scaling)

    def sparse() -> torch.Tensor:
        chosen = select_pages(
            query,
            landmarks,
            page_table,
            positions,
            budgets,
            page_size=sizes.page_size,
            sink_pages=schedule.sink_pages,
            recent_pages=schedule.recent_pages,
            max_selected=kept,
        )
        return paged_attention(query, key_pages, value_pages, page_table, positions, *chosen, scaling=scaling)

    limit = 1e-2 if sizes.dtype != torch.float32 else 1e-5
    check("dense attention", dense()[0], exact(page_table[0].expand(sizes.num_kv_heads, -1)), limit)
    group_query = query[0].view(sizes.num_kv_heads, -1, sizes.head_dim).double().mean(1)
    scores = (landmarks[:, page_table[0]].double() @ group_query[:, :, None])[..., 0]
    forced = torch.zeros(max_pages, dtype=torch.bool, device=device)
    forced[: schedule.sink_pages] = forced[max_pages - schedule.recent_pages :] = True
    best = scores.masked_fill(forced, float("inf")).topk(kept, dim=-1).indices
    check("sparse attention", sparse()[0], exact(page_table[0][best]), limit)

    bandwidth = copy_bandwidth(sizes.copied_bytes, device)
    setting = f"batch {sizes.batch}, context {sizes.context:,}, {sizes.num_heads}/{sizes.num_kv_heads} heads"
    for name, call, read in (
        ("dense paged attention, part of the copy bandwidth", dense, 2 * max_pages * sizes.page_size * per_page),
        (
            "sparse attention with scoring and selection, part of the copy bandwidth",
            sparse,
            (max_pages - schedule.sink_pages - schedule.recent_pages + 2 * kept * sizes.page_size) * per_page,
        ),
    ):
        taken = seconds_of(call, device)
        note = f"{1e6 * taken:.0f} us for {read / 1e6:,.0f} MB; copies move {bandwidth / 1e9:,.0f} GB/s ({setting})"
        results.add(name, read / taken / bandwidth, note, seconds=taken, bytes=read, copy_bandwidth=bandwidth)


def make_model(sizes: Sizes, device: torch.device, tiny: bool) -> Any:
    """A Qwen3-1.7B with random weights."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 256}
    large = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "vocab_size": 151936}
    config = Qwen3Config(
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        eos_token_id=None,
        **(small if tiny else large),
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=sizes.dtype, attn_implementation="sdpa")
    return model.eval()


def make_engine(model: Any, schedule: Any) -> Any:
    from sparrow_trl.rollout import RolloutEngine

    engine = RolloutEngine(model, schedule, memory_fraction=0.95, prefill_chunk_size=8192, progress_bar=False)
    engine.stop_token_ids = []
    return engine


def rollout(engine: Any, prompts: list[list[int]], num_tokens: int) -> Any:
    from transformers import GenerationConfig

    config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, max_new_tokens=num_tokens)
    return engine.generate(prompts, config, seed=0)


def draw_prompts(batch: int, length: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (batch, length), generator=generator).tolist()


def schedules(sizes: Sizes) -> dict[str, Any]:
    from sparrow_trl.sparsity import SparsitySchedule

    return {"dense": SparsitySchedule.dense(), "sparse": SparsitySchedule.resolve(sizes.schedule)}


def decode_step(sizes: Sizes, device: torch.device, results: Results, seconds: float) -> None:
    """Decode steps of whole rollouts from distinct prompts, the time of recording the graphs included."""
    model = make_model(sizes, device, sizes is TINY)
    config = model.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    batch = sizes.batch
    if device.type == "cuda":
        fits = 0.9 * torch.cuda.mem_get_info(device)[0] / (per_token * sizes.context * 1.04)
        batch = max(1, min(batch, int(fits)))
    prompts = draw_prompts(batch, sizes.context - sizes.decode_tokens, config.vocab_size)
    steps: dict[str, float] = {}
    for name, schedule in schedules(sizes).items():
        engine = make_engine(model, schedule)
        rollout(engine, prompts[:1], 4)  # compiles
        stats = rollout(engine, prompts, sizes.decode_tokens).stats
        steps[name] = (stats.seconds_decode + stats.seconds_sampling) / max(1, stats.decode_steps)
    note = (
        f"{1e3 * steps['sparse']:.2f} against {1e3 * steps['dense']:.2f} ms, batch {batch}, context {sizes.context:,}"
    )
    results.add("decode step, sparse against dense", steps["dense"] / steps["sparse"], note, **steps)


def launch_gaps(sizes: Sizes, device: torch.device, results: Results, seconds: float) -> None:
    """Time in which no kernel runs, in the second half of a rollout: of its decode steps."""
    from torch.profiler import ProfilerActivity, profile

    model = make_model(sizes, device, sizes is TINY)
    engine = make_engine(model, schedules(sizes)["sparse"])
    prompts = draw_prompts(sizes.batch, sizes.gap_context, model.config.vocab_size)
    rollout(engine, prompts, sizes.decode_tokens)  # compiles
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as profiler:
        rollout(engine, prompts, sizes.decode_tokens)
        if device.type == "cuda":
            torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if device.type != "cuda" or event.device_type == torch.autograd.DeviceType.CUDA
    )
    gap, window = gaps(spans[len(spans) // 2 :])
    note = f"batch {sizes.batch}, context {sizes.gap_context:,}, {len(spans) // 2:,} kernels"
    results.add("launch gaps, part of a decode step", gap / window, note, kernels=len(spans))


def gaps(spans: list[tuple[float, float]]) -> tuple[float, float]:
    """Time covered by no span, and from the first one's start to the last one's end. `spans` are sorted."""
    uncovered, reached = 0.0, spans[0][0]
    for start, end in spans:
        uncovered += max(0.0, start - reached)
        reached = max(reached, end)
    return uncovered, reached - spans[0][0]


def batching_seconds(model: Any, prompts: list[list[int]], num_tokens: int, limit: float) -> float:
    """Seconds that transformers' continuous batching takes, as TRL runs it."""
    from sparrow_trl.benchmark.ragged import continuous_batching

    started = time.perf_counter()
    found = continuous_batching(model, prompts, [num_tokens] * len(prompts), limit)
    if found != [num_tokens] * len(prompts):
        raise RuntimeError(f"continuous batching gave completions of {sorted(set(found))} tokens, not {num_tokens}")
    return time.perf_counter() - started


def against_batching(sizes: Sizes, device: torch.device, results: Results, seconds: float) -> None:
    """Dense decode steps: the difference of two rollouts that differ in their length alone."""
    model = make_model(sizes, device, sizes is TINY)
    prompts = draw_prompts(sizes.batch, sizes.other_context, model.config.vocab_size)
    few, many = sizes.other_tokens
    engine = make_engine(model, schedules(sizes)["dense"])
    rollout(engine, prompts[:2], few)
    ours = {number: rollout(engine, prompts, number).stats.seconds for number in sizes.other_tokens}
    batching_seconds(model, prompts[:2], few, seconds)
    theirs = {number: batching_seconds(model, prompts, number, seconds) for number in sizes.other_tokens}
    steps = [(times[many] - times[few]) / (many - few) for times in (ours, theirs)]
    if min(steps) <= 0:
        print("The rollouts are too short to tell the time of a step.", file=sys.stderr)
        return
    note = (
        f"{1e3 * steps[0]:.2f} against {1e3 * steps[1]:.2f} ms, batch {sizes.batch}, context {sizes.other_context:,}"
    )
    results.add("dense decode step, against continuous batching", steps[1] / steps[0], note, ours=ours, theirs=theirs)


def end_to_end(sizes: Sizes, device: torch.device, results: Results, seconds: float) -> None:
    """
    Whole sparse rollouts of equal lengths, less a short one of the same prompts, so that what a contender does when it
    starts does not count. Each gets as many new tokens as fit into its share of the time by its speed over the first ones;
    with fewer tokens it is faster than with all.
    """
    deadline = time.perf_counter() + seconds
    model = make_model(sizes, device, sizes is TINY)
    prompts = draw_prompts(sizes.end_batch, sizes.end_prompt, model.config.vocab_size)
    engine = make_engine(model, schedules(sizes)["sparse"])
    few = max(2, sizes.end_tokens // 128)

    def ours(batch: list[list[int]], num_tokens: int) -> float:
        return rollout(engine, batch, num_tokens).stats.seconds

    def theirs(batch: list[list[int]], num_tokens: int) -> float:
        return batching_seconds(model, batch, num_tokens, seconds)

    speeds, lengths = [], []
    for contender, share in ((ours, 0.45), (theirs, 0.7)):
        contender(prompts[:2], few)  # compiles
        short = contender(prompts, few)
        affordable = few * share * (deadline - time.perf_counter()) / short
        lengths.append(min(sizes.end_tokens, max(2 * few, int(affordable))))
        speeds.append((lengths[-1] - few) * sizes.end_batch / (contender(prompts, lengths[-1]) - short))
    if min(speeds) <= 0:
        print("The rollouts are too short to tell their speed.", file=sys.stderr)
        return
    note = (
        f"{speeds[0]:,.0f} against {speeds[1]:,.0f} tokens/s, batch {sizes.end_batch}, {lengths[0]:,} and {lengths[1]:,} "
        f"new tokens of {sizes.end_tokens:,}"
    )
    results.add("end to end, against continuous batching", speeds[0] / speeds[1], note, tokens_per_second=speeds)


MEASUREMENTS = {
    "attention": attention,
    "launch gaps": launch_gaps,
    "decode step": decode_step,
    "continuous batching": against_batching,
    "end to end": end_to_end,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=MEASUREMENTS)
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=100.0)
    args = parser.parse_args()
    with torch.no_grad():
        sizes = TINY if args.tiny else Sizes()
        MEASUREMENTS[args.name](sizes, torch.device(args.device), Results(args.file), args.seconds)


if __name__ == "__main__":
    main()
