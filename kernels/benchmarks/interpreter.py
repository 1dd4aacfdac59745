"""
Triton's interpreter as an instrument: count what the kernels read, and compute in bfloat16.

Both patch the interpreter of the installed Triton, where `TRITON_INTERPRET=1` was set before it was imported.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def repair_bfloat16() -> None:
    """
    Let the interpreter compute in bfloat16 as a GPU does, which NumPy lacks: Triton 3.9 multiplies matrices of bit patterns
    as integers, and cuts float32 off where a GPU rounds to nearest even.
    """
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "repaired_bfloat16", False):
        return
    dot, cast = builder.create_dot, builder.cast_impl

    def widen(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if handle.get_element_ty() != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self, a, b, d, *args):
        return dot(self, widen(a), widen(b), d, *args)

    def cast_impl(self, source, to_type):
        if source.dtype.scalar != tl.float32 or to_type.scalar != tl.bfloat16:
            return cast(self, source, to_type)
        data = np.ascontiguousarray(source.data)
        bits = data.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = np.where(np.isnan(data), 0x7FC0, rounded)
        return interpreter.TensorHandle(rounded.astype(np.uint16), tl.bfloat16)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    builder.create_fp_trunc = lambda self, source, to_type: self.cast_impl(source, to_type)
    builder.repaired_bfloat16 = True


@contextmanager
def count_bytes(**tensors: torch.Tensor) -> Iterator[Counter]:
    """
    Count the bytes that kernels load while the context is open. Lanes of a load that are masked out don't count, and
    lanes of one load that read the same address count once, as in a memory transaction. Reading the same address in two
    loads counts twice, though a cache may serve the second.

    Args:
        tensors (`torch.Tensor`): CPU tensors to be told apart; what lies in none of them is counted under `"other"`.

    Yields:
        `Counter`: bytes by `(kernel, tensor)`, both names; see also [`by_kernel`].
    """
    counts: Counter = Counter()
    kernel = ["?"]
    spans = {}
    for name, tensor in tensors.items():
        start = tensor.untyped_storage().data_ptr()
        spans[name] = (start, start + tensor.untyped_storage().nbytes())
    load, call = interpreter.InterpreterBuilder.create_masked_load, interpreter.GridExecutor.__call__

    def create_masked_load(self, ptrs, mask, *args, **kwargs):
        addresses = np.unique(ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)])
        if len(addresses):
            name = next((name for name, (a, b) in spans.items() if a <= addresses[0] < b), "other")
            counts[kernel[0], name] += len(addresses) * max(8, ptrs.get_element_ty().primitive_bitwidth) // 8
        return load(self, ptrs, mask, *args, **kwargs)

    def __call__(self, *args, **kwargs):
        kernel[0] = self.fn.__name__
        return call(self, *args, **kwargs)

    interpreter.InterpreterBuilder.create_masked_load = create_masked_load
    interpreter.GridExecutor.__call__ = __call__
    try:
        yield counts
    finally:
        interpreter.InterpreterBuilder.create_masked_load = load
        interpreter.GridExecutor.__call__ = call


def by_kernel(counts: Counter) -> Counter:
    """Bytes by kernel."""
    total: Counter = Counter()
    for (kernel, _), number in counts.items():
        total[kernel] += number
    return total
