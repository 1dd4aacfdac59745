"""The one place that decides what computes the attention of decode steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec

import torch
from transformers.utils import logging

from sparrow_kernels import static_ops, torch_ops


logger = logging.get_logger(__name__)

BACKENDS = ("auto", "host", "torch", "triton")
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-2}  # relative norm, of the trial


@dataclass(frozen=True)
class DeviceOps:
    """Operations that look at no value and have no shape that depends on one; their interface is that of `static_ops`."""

    store_kv: Callable
    select_pages: Callable
    paged_attention: Callable
    token_logprobs: Callable


@dataclass(frozen=True)
class KVShape:
    """What the KV cache of a model looks like: all that the choice of a backend depends on."""

    num_heads: int  # of the queries
    layers: frozenset[tuple[int, int, int]]  # (num_kv_heads, head_dim, value_dim) of its attention layers
    page_size: int
    max_pages: int  # of a sequence
    dtype: torch.dtype


def make_ops(backend: str) -> DeviceOps:
    """The operations of `"torch"` or `"triton"`, with scratch memory of their own."""
    if backend == "triton":
        names = ("store_kv", "select_pages", "paged_attention")
        store_kv, select_pages, paged_attention = (
            getattr(import_module(f"sparrow_kernels.{name}"), name) for name in names
        )
        return DeviceOps(store_kv, select_pages, paged_attention, _token_logprobs())
    work = torch_ops.Workspace()
    return DeviceOps(
        static_ops.store_kv,
        partial(static_ops.select_pages, work=work),
        partial(static_ops.paged_attention, work=work),
        static_ops.token_logprobs,
    )


def _token_logprobs() -> Callable:
    if find_spec("sparrow_kernels.token_logprobs") is None:
        return static_ops.token_logprobs
    return import_module("sparrow_kernels.token_logprobs").token_logprobs


def choose_backend(requested: str, device: torch.device, shape: KVShape) -> str:
    """
    What decodes: `"triton"` (kernels) or `"torch"` (PyTorch operations), both in bursts of steps that stay on the device,
    or `"host"` (PyTorch operations, each step planned on the host).

    Args:
        requested (`str`): one of these, or `"auto"`: `"host"` where there is no CUDA device, else `"triton"` if its
            kernels run here, else `"torch"` with one warning.
        device (`torch.device`): the model's.
        shape (`KVShape`): of its KV cache.

    Raises:
        ValueError: where `"triton"` is asked for and does not run.
    """
    if requested in ("host", "torch"):
        return requested
    if requested == "auto" and device.type != "cuda":
        return "host"
    reason = why_not_triton(device, shape)
    if reason is None:
        return "triton"
    if requested == "triton":
        raise ValueError(f"decode_backend='triton' does not run here: {reason}. Leave it at 'auto'.")
    logger.warning_once(f"Rollouts use PyTorch operations instead of Triton kernels, which is slower: {reason}.")
    return "torch"


@lru_cache
def why_not_triton(device: torch.device, shape: KVShape) -> str | None:
    """What keeps the Triton kernels from running, found out by a trial of each; `None` where they run."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton has no kernels for the device type '{device.type}'"
    if shape.dtype not in TOLERANCE:
        return f"the kernels do not know {str(shape.dtype).removeprefix('torch.')}"
    try:
        ops = make_ops("triton")
        for layer in sorted(shape.layers):
            _try_kernels(ops, device, shape, *layer)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # no compiler, an unknown chip, an unsupported shape, a wrong result
        lines = str(error).strip().splitlines()
        return f"a trial failed with {type(error).__name__}: {lines[0].rstrip('.') if lines else 'no message'}"
    return None


def _try_kernels(
    ops: DeviceOps, device: torch.device, shape: KVShape, num_kv_heads: int, head_dim: int, value_dim: int
) -> None:
    """Run every kernel once and compare with PyTorch, on four pages."""
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(device, shape.dtype)

    page_size, pages = shape.page_size, 4
    key_pages, value_pages = (
        draw(num_kv_heads, pages, page_size, head_dim),
        draw(num_kv_heads, pages, page_size, value_dim),
    )
    landmarks, key, value = (
        draw(num_kv_heads, pages, head_dim),
        draw(1, num_kv_heads, head_dim),
        draw(1, num_kv_heads, value_dim),
    )
    query = draw(1, shape.num_heads, head_dim)
    table = torch.zeros(1, max(shape.max_pages, pages), dtype=torch.int32, device=device)
    table[0, :pages] = torch.tensor([2, 0, 3, 1])
    positions = torch.tensor([pages * page_size - 1], device=device)
    slots = torch.tensor([2 * page_size - 1], device=device)  # the last one of page 1
    budgets = torch.tensor([1], device=device)
    results = []
    for candidate in (ops, make_ops("torch")):
        pool = [tensor.clone() for tensor in (key_pages, value_pages, landmarks)]
        candidate.store_kv(key, value, slots, *pool)
        chosen = candidate.select_pages(
            query,
            pool[2],
            table,
            positions,
            budgets,
            page_size=page_size,
            sink_pages=1,
            recent_pages=1,
            max_selected=3,
        )
        attention = partial(candidate.paged_attention, query, pool[0], pool[1], table, positions)
        outputs = attention(*chosen, scaling=head_dim**-0.5), attention(scaling=head_dim**-0.5)
        logprobs, _ = candidate.token_logprobs(query[:, 0].float(), slots % head_dim, temperature=1.0)
        results.append([*pool, chosen[0], *outputs, logprobs])
    for found, expected in zip(*results, strict=True):
        difference = (found.float() - expected.float()).norm() / expected.float().norm()
        if not difference <= TOLERANCE[shape.dtype]:
            raise ArithmeticError(
                f"a kernel's result differs from PyTorch's by {difference.item():.2g} (relative norm)"
            )
