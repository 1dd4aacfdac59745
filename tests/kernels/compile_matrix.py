"""
Compile a sample of what the ops launch, for GPUs that need not be there, and say as JSON what the machine code is like.
Run by test_compiles.py in a process of its own: the interpreter and the compiler cannot share one.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from compile_kernels import TARGETS, compile_launch, inspect, record_launches
from sparrow_kernels.paged_attention import paged_attention
from sparrow_kernels.select_pages import select_pages
from sparrow_kernels.store_kv import store_kv


MODELS = {  # query heads, KV heads, head dim
    "Qwen3-1.7B": (16, 8, 128),
    "Qwen3-4B, Qwen3-8B, Llama-3.1-8B": (32, 8, 128),
    "Qwen3-14B": (40, 8, 128),
    "SmolLM2-135M": (9, 3, 64),
}


def launches(
    heads, kv_heads, head_dim, dtype, capability, *, page_size=16, batch=32, max_pages=2048, kinds, **options
):
    """What a step over `batch` sequences launches, `kinds` among `"store"`, `"select"`, `"sparse"`, `"dense"`,
    `"packed"`."""

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    query, table = empty(batch, heads, head_dim), empty(batch, max_pages, dtype=torch.int64)
    key = empty(batch, kv_heads, head_dim)
    pool, landmarks = empty(kv_heads, 70000, page_size, head_dim), empty(kv_heads, 70000, head_dim)
    positions = empty(batch, dtype=torch.int64)
    attention = {"scaling": 0.1, **options}
    with record_launches(capability) as found:
        if "store" in kinds:
            store_kv(key, key, positions, pool, pool, landmarks)
        if "select" in kinds:
            spans = {"page_size": page_size, "sink_pages": 1, "recent_pages": 2, "max_selected": 256}
            select_pages(query, landmarks, table, positions, positions, **spans)
        if "sparse" in kinds:
            pages = empty(batch, kv_heads, 256, dtype=torch.int32), empty(batch, dtype=torch.int32)
            paged_attention(query, pool, pool, table, positions, *pages, **attention)
        if "dense" in kinds:
            paged_attention(query, pool, pool, table, positions, **attention)
        if "packed" in kinds:
            starts = empty(batch // 4 + 1, dtype=torch.int32)
            paged_attention(query, pool, pool, table, positions, query_starts=starts, max_queries=4, **attention)
    return found


def compile_all(cases):
    def one(case):
        label, target, launch = case
        machine = inspect(compile_launch(launch, TARGETS[target]))
        return {
            "case": label, "target": target, "kernel": launch.name, "registers": machine.registers,
            "spills": machine.spills, "shared": machine.shared, "loads": machine.global_loads,
        }  # fmt: skip

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, cases))


def model_cases(target, dtype):
    everything = ("store", "select", "sparse", "dense")
    capability = int(target.removeprefix("sm_")) if target.startswith("sm_") else None
    for name, shape in MODELS.items():
        for launch in launches(*shape, dtype, capability, kinds=everything):
            yield name, target, launch


def sample_cases():
    """Every head dim, page size, dtype and option at least once, on changing targets."""
    targets = ["sm_90", "gfx942", "sm_80", "sm_100", "sm_75"]
    dtypes = [torch.bfloat16, torch.float32, torch.float16]
    number = 0
    for head_dim in (64, 80, 96, 128, 256):
        for page_size in (16, 32, 64):
            target = targets[number % len(targets)]
            dtype = torch.float16 if target == "sm_75" else dtypes[number % 3]
            options = [{}, {"sliding_window": 512}, {"softcap": 50.0}][(number // 2) % 3]
            number += 1
            group = 1 + number % 8
            capability = int(target[3:]) if target.startswith("sm_") else None
            for launch in launches(
                2 * group, 2, head_dim, dtype, capability, page_size=page_size, max_pages=600,
                kinds=("store", "select", "sparse", "dense", "packed"), **options,
            ):  # fmt: skip
                yield f"head dim {head_dim}, page size {page_size}, {dtype}, group {group}, {options}", target, launch


if __name__ == "__main__":
    name = sys.argv[1]
    if name == "sample":
        cases = sample_cases()
    else:
        target, dtype = name.split(":")
        cases = model_cases(target, getattr(torch, dtype))
    json.dump(compile_all(list(cases)), sys.stdout)
