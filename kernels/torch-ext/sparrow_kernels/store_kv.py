"""Store the keys and values of new tokens in their pages, and the landmarks of pages that fill up, in one launch."""

import torch
import triton
import triton.language as tl

from .checks import DTYPES, check_pool, check_tensor


@triton.jit
def store_kv_kernel(
    key_ptr,
    value_ptr,
    slots_ptr,
    key_pages_ptr,
    value_pages_ptr,
    landmarks_ptr,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    key_pages_stride_head,
    key_pages_stride_page,
    key_pages_stride_slot,
    value_pages_stride_head,
    value_pages_stride_page,
    value_pages_stride_slot,
    landmarks_stride_head,
    landmarks_stride_page,
    HAS_LANDMARKS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One token and one KV head. The program of the last slot of a page also writes the page's landmark."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    page = slot // PAGE_SIZE
    offset = slot % PAGE_SIZE
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_DV)

    key = tl.load(key_ptr + token * key_stride_token + head * key_stride_head + dims, mask=dims < HEAD_DIM)
    value = tl.load(
        value_ptr + token * value_stride_token + head * value_stride_head + value_dims, mask=value_dims < VALUE_DIM
    )
    key_page = key_pages_ptr + head * key_pages_stride_head + page * key_pages_stride_page
    value_page = value_pages_ptr + head * value_pages_stride_head + page * value_pages_stride_page
    key = key.to(key_pages_ptr.dtype.element_ty)
    value = value.to(value_pages_ptr.dtype.element_ty)
    tl.store(key_page + offset * key_pages_stride_slot + dims, key, mask=dims < HEAD_DIM)
    tl.store(value_page + offset * value_pages_stride_slot + value_dims, value, mask=value_dims < VALUE_DIM)

    if HAS_LANDMARKS:  # noqa: SIM102 (one is known when compiling)
        if offset == PAGE_SIZE - 1:
            # Keys of this launch come from its input, since other programs are writing them to the page just now.
            offsets = tl.arange(0, PAGE_SIZE)
            source = token - (PAGE_SIZE - 1) + offsets
            source_slot = tl.load(slots_ptr + source, mask=source >= 0, other=-1).to(tl.int64)
            is_new = source_slot == page * PAGE_SIZE + offsets
            in_head = (dims < HEAD_DIM)[None, :]
            new = tl.load(
                key_ptr + source[:, None] * key_stride_token + head * key_stride_head + dims[None, :],
                mask=is_new[:, None] & in_head,
                other=0.0,
            )
            old = tl.load(
                key_page + offsets[:, None] * key_pages_stride_slot + dims[None, :],
                mask=(is_new == 0)[:, None] & in_head,
                other=0.0,
            )
            # In the precision of the page, which is what attention will read.
            new = new.to(key_pages_ptr.dtype.element_ty).to(tl.float32)
            mean = tl.sum(new + old.to(tl.float32), axis=0) / PAGE_SIZE
            landmark = landmarks_ptr + head * landmarks_stride_head + page * landmarks_stride_page
            tl.store(landmark + dims, mean.to(landmarks_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def launch_options(
    *, head_dim: int, value_dim: int, page_size: int, dtype: torch.dtype, has_landmarks: bool = True
) -> dict[str, dict]:
    """Keyword arguments of each kernel of the op, by kernel name, as they are launched for these shapes."""
    return {
        "store_kv_kernel": {
            "HAS_LANDMARKS": has_landmarks,
            "PAGE_SIZE": page_size,
            "HEAD_DIM": head_dim,
            "VALUE_DIM": value_dim,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "BLOCK_DV": triton.next_power_of_2(value_dim),
            "num_warps": 4 if page_size * head_dim * dtype.itemsize > 16384 else 2,
        }
    }


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    landmarks: torch.Tensor | None,
) -> None:
    """
    See [`reference.store_kv`]. Of the tokens of one page in the same call, consecutive ones have consecutive slots, and
    no slot comes twice.

    Args:
        key (`torch.Tensor`): `(num_tokens, num_kv_heads, head_dim)`, any strides but 1 in the last dimension.
        value (`torch.Tensor`): `(num_tokens, num_kv_heads, value_dim)`.
        slots (`torch.Tensor`): `(num_tokens,)` int64 or int32; a token with a slot below 0 is stored nowhere.
        key_pages, value_pages (`torch.Tensor`): written in place, in float16, bfloat16 or float32.
        landmarks (`torch.Tensor`, *optional*): written in place; `None` for layers that never select pages.

    Raises:
        `ValueError`: for shapes or dtypes that do not go together.
    """
    check_pool(key_pages, value_pages)
    num_kv_heads, num_pages, page_size, head_dim = key_pages.shape
    num_tokens, value_dim = key.shape[0], value_pages.shape[3]
    check_tensor("key", key, (None, num_kv_heads, head_dim), DTYPES)
    check_tensor("value", value, (num_tokens, num_kv_heads, value_dim), DTYPES)
    check_tensor("slots", slots, (num_tokens,), (torch.int64, torch.int32))
    if landmarks is not None:
        check_tensor("landmarks", landmarks, (num_kv_heads, num_pages, head_dim), DTYPES)
    if num_tokens == 0:
        return
    options = launch_options(
        head_dim=head_dim,
        value_dim=value_dim,
        page_size=page_size,
        dtype=key_pages.dtype,
        has_landmarks=landmarks is not None,
    )
    store_kv_kernel[(num_tokens, num_kv_heads)](
        key,
        value,
        slots,
        key_pages,
        value_pages,
        landmarks if landmarks is not None else key_pages,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        key_pages.stride(0),
        key_pages.stride(1),
        key_pages.stride(2),
        value_pages.stride(0),
        value_pages.stride(1),
        value_pages.stride(2),
        landmarks.stride(0) if landmarks is not None else 0,
        landmarks.stride(1) if landmarks is not None else 0,
        **options["store_kv_kernel"],
    )
