"""Checks of what the Triton ops are given: shapes, dtypes and sizes, on the host and without a look at the device."""

import torch


DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PAGE_SIZES = (16, 32, 64)
MAX_HEAD_DIM = 256
MAX_GROUP = 16


def check(condition: bool, message: str) -> None:
    """Raises a `ValueError` with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def check_tensor(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], dtypes: tuple) -> None:
    """`None` in `shape` stands for any length. The last dimension must be contiguous."""
    same = tensor.dim() == len(shape) and all(
        want in (None, have) for want, have in zip(shape, tensor.shape, strict=False)
    )
    wanted = "(" + ", ".join("any" if length is None else str(length) for length in shape) + ")"
    check(same, f"`{name}` has shape {tuple(tensor.shape)}, but the other arguments ask for {wanted}.")
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    check(tensor.dtype in dtypes, f"`{name}` is {str(tensor.dtype).removeprefix('torch.')}, but must be {names}.")
    contiguous = tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
    check(
        contiguous, f"`{name}` has stride {tensor.stride(-1)} in its last dimension, but must have 1: `.contiguous()`."
    )


def check_pool(key_pages: torch.Tensor, value_pages: torch.Tensor) -> None:
    """Key and value pages of one layer, with a page size and a head dim that the kernels know."""
    check_tensor("key_pages", key_pages, (None, None, None, None), DTYPES)
    check_tensor("value_pages", value_pages, (*key_pages.shape[:3], None), (key_pages.dtype,))
    check_page_size(key_pages.shape[2])
    for name, pages in (("key_pages", key_pages), ("value_pages", value_pages)):
        check_head_dim(name, pages.shape[3])


def check_page_size(page_size: int) -> None:
    """A page size that the kernels know."""
    check(page_size in PAGE_SIZES, f"page_size is {page_size}, but the kernels know {PAGE_SIZES}.")


def check_head_dim(name: str, head_dim: int) -> None:
    """A head dim that the kernels know."""
    known = head_dim % 8 == 0 and 16 <= head_dim <= MAX_HEAD_DIM
    check(known, f"The head dim of `{name}` is {head_dim}, but must be a multiple of 8 from 16 to {MAX_HEAD_DIM}.")


def check_group(num_heads: int, num_kv_heads: int) -> int:
    """Query heads that share a KV head."""
    divides = num_heads % num_kv_heads == 0
    check(divides, f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads.")
    return num_heads // num_kv_heads
