"""
The launches of every Triton op at the shapes of real models, compiled for GPUs that need not be there.

The ops are called as the engine calls them, on tensors of PyTorch's `meta` device, which have shapes and no memory. Triton
believes in a GPU of the target's kind and compiles each launch, with the options and the alignment that it has, instead
of running it. So what is compiled is what would be launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction, KernelInterface


@dataclass(frozen=True)
class Target:
    """A GPU to compile for: its family in launch options, and the largest shared memory of a program there."""

    name: str
    target: GPUTarget
    family: str
    shared_bytes: int
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)


TARGETS = (
    Target("sm_75", GPUTarget("cuda", 75, 32), "turing", 64 << 10, (torch.float16,)),  # no bfloat16
    Target("sm_80", GPUTarget("cuda", 80, 32), "ampere", 163 << 10),
    Target("sm_86", GPUTarget("cuda", 86, 32), "ampere", 99 << 10),
    Target("sm_90", GPUTarget("cuda", 90, 32), "hopper", 227 << 10),
    Target("sm_100", GPUTarget("cuda", 100, 32), "blackwell", 227 << 10),
    Target("sm_120", GPUTarget("cuda", 120, 32), "ampere", 99 << 10),
    Target("gfx942", GPUTarget("hip", "gfx942", 64), "cdna", 64 << 10),
)


@dataclass(frozen=True)
class Shape:
    """The attention of models, and their vocabulary; what follows that is for the sample."""

    names: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    page_size: int = 16
    dtype: torch.dtype | None = None
    options: tuple[tuple[str, Any], ...] = ()  # sliding_window, softcap


SHAPES = (
    Shape("Qwen3-1.7B", 16, 8, 128, 151936),
    Shape("Qwen3-4B, Qwen3-8B", 32, 8, 128, 151936),
    Shape("Qwen3-14B", 40, 8, 128, 151936),
    Shape("Llama-3.1-8B", 32, 8, 128, 128256),
    Shape("SmolLM2-135M", 9, 3, 64, 49152),
    Shape("SmolLM2-1.7B", 32, 32, 64, 49152),
)


class _AbsentDriver:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, device: int, target: GPUTarget):
        self.device, self.target = device, target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@contextmanager
def compiled_launches(target: Target) -> Iterator[list[Any]]:
    """
    Inside the context, launches of Triton kernels are compiled for `target` and not run.

    Yields:
        `list[triton.compiler.CompiledKernel]`: the kernels, in the order of their launches.
    """
    kernels: list[Any] = []
    launch, previous = KernelInterface.__getitem__, driver._active

    def compile_only(function: JITFunction, grid: Any) -> Callable[..., None]:
        def compiled(*args: Any, **kwargs: Any) -> None:
            kernels.append(function.run(*args, grid=grid, warmup=True, **kwargs))

        return compiled

    KernelInterface.__getitem__ = compile_only
    # A device of its own for each target: Triton keeps compiled kernels by device.
    driver.set_active(_AbsentDriver(TARGETS.index(target), target.target))
    try:
        with import_module("sparrow_kernels.launch").assume_family(target.family):
            yield kernels
    finally:
        KernelInterface.__getitem__ = launch
        driver._active = previous


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


CONTEXT, BATCH = 32768, 32
SELECTED = 256  # pages: the largest budget of the schedules for 32K tokens, with the sink and recent pages
PACKED, SEQUENCES = 8192, 4  # tokens of a teacher-forced forward


def store_kv(shape: Shape, dtype: torch.dtype) -> None:
    """A decode step and a chunk of a prompt."""
    op = import_module("sparrow_kernels.store_kv")

    pool = _pool(shape, dtype)
    for num_tokens in (BATCH, 1024):
        new = meta(num_tokens, shape.num_kv_heads, shape.head_dim, dtype=dtype)
        op.store_kv(new, new, meta(num_tokens, dtype=torch.int64), *pool)


def select_pages(shape: Shape, dtype: torch.dtype) -> None:
    """A decode step."""
    op = import_module("sparrow_kernels.select_pages")

    key_pages, _, landmarks = _pool(shape, dtype)
    op.select_pages(
        meta(BATCH, shape.num_heads, shape.head_dim, dtype=dtype),
        landmarks,
        *_steps(shape),
        meta(BATCH, dtype=torch.int64),
        page_size=shape.page_size,
        sink_pages=1,
        recent_pages=2,
        max_selected=SELECTED,
    )


def paged_attention(shape: Shape, dtype: torch.dtype) -> None:
    """A decode step over chosen pages, over all pages, over a window, and of 16 tokens a sequence or what fits on Turing."""
    op = import_module("sparrow_kernels.paged_attention")

    key_pages, value_pages, _ = _pool(shape, dtype)
    query = meta(BATCH, shape.num_heads, shape.head_dim, dtype=dtype)
    page_list = meta(BATCH, shape.num_kv_heads, SELECTED, dtype=torch.int32)
    chosen = (page_list, meta(BATCH, dtype=torch.int32))
    turing = import_module("sparrow_kernels.launch").gpu_family(query.device) == "turing"
    max_queries = min(16, 64 // triton.next_power_of_2(shape.num_heads // shape.num_kv_heads)) if turing else 16
    for arguments, options in (
        (chosen, {}),
        ((), {}),
        ((), {"sliding_window": 4096}),
        ((), {"query_starts": meta(3, dtype=torch.int32), "max_queries": max_queries}),
    ):
        options = {**dict(shape.options), **options}
        op.paged_attention(query, key_pages, value_pages, *_steps(shape), *arguments, scaling=0.1, **options)


def teacher_forced(shape: Shape, dtype: torch.dtype) -> None:
    """Forward and backward, sparse and dense."""
    op = import_module("sparrow_kernels.teacher_forced")

    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    tensors = [meta(PACKED, count, shape.head_dim, dtype=dtype).requires_grad_() for count in heads]
    integers = {"dtype": torch.int32}
    for budgets in (meta(PACKED, **integers), None):
        out = op.teacher_forced_attention(
            *tensors,
            meta(SEQUENCES + 1, **integers),
            meta(SEQUENCES, **integers),
            budgets,
            page_size=shape.page_size,
            sink_pages=1,
            recent_pages=2,
            scaling=0.1,
            max_seqlen=PACKED // SEQUENCES,
            **dict(shape.options),
        )
        out.sum().backward()


def token_logprobs(shape: Shape, dtype: torch.dtype) -> None:
    """The sampled tokens of a decode step, and the 20 most likely ones."""
    op = import_module("sparrow_kernels.token_logprobs")

    logits = meta(BATCH, shape.vocab_size, dtype=torch.float32)
    for top in (0, 20):
        op.token_logprobs(logits, meta(BATCH, dtype=torch.int64), temperature=1.0, top=top)


OPS = (store_kv, select_pages, paged_attention, teacher_forced, token_logprobs)


def _pool(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Key pages, value pages and landmarks of one layer."""
    num_pages = BATCH * CONTEXT // shape.page_size
    pages = meta(shape.num_kv_heads, num_pages, shape.page_size, shape.head_dim, dtype=dtype)
    return pages, pages, meta(shape.num_kv_heads, num_pages, shape.head_dim, dtype=dtype)


def _steps(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Page table and positions of a decode step."""
    return meta(BATCH, CONTEXT // shape.page_size, dtype=torch.int64), meta(BATCH, dtype=torch.int64)


HEAD_DIMS, PAGE_SIZES = (64, 80, 96, 128, 256), (16, 32, 64)
SAMPLE_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
SAMPLE_OPTIONS = ((), (("sliding_window", 512),), (("softcap", 50.0),))


def sample_cases() -> Iterator[tuple[Callable[[Shape, torch.dtype], None], Target, Shape]]:
    """
    What a test compiles, on changing GPUs: with each op every head dim, page size, dtype and option at least once, and one
    op at the shapes of a model for each GPU.
    """
    for i, target in enumerate(TARGETS):
        yield OPS[i % len(OPS)], target, replace(SHAPES[i % len(SHAPES)], dtype=target.dtypes[0])
    for i, head_dim in enumerate(HEAD_DIMS):
        for k, op in enumerate((store_kv, select_pages, paged_attention, teacher_forced)):
            target = TARGETS[(2 * i + k) % len(TARGETS)]
            page_size, options = PAGE_SIZES[(i + k) % 3], SAMPLE_OPTIONS[(2 * i + k) % 3]
            dtype = torch.float16 if target.name == "sm_75" else SAMPLE_DTYPES[(i + k + i // 3) % 3]
            group = (1, 5, 2, 7, 4)[(i + k) % 5]
            names = f"head dim {head_dim}, pages of {page_size}, groups of {group}, {dtype}, {dict(options)}"
            yield op, target, Shape(names, 2 * group, 2, head_dim, 1000, page_size, dtype, options)
