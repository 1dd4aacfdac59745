"""`store_kv` in Triton equals the reference op."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import benchmark_store_kv
from pools import DEVICE, DTYPES, poison
from sparrow_kernels import reference
from sparrow_kernels.store_kv import store_kv


FAST = settings(max_examples=20, deadline=None, derandomize=True)


def runs_of_slots(runs, page_size):
    """Slots of sequences, each `(first offset, tokens)`, whose pages are scattered: consecutive within a page."""
    pages = iter(torch.randperm(64, generator=torch.Generator().manual_seed(0)).tolist())
    slots = []
    for offset, tokens in runs:
        page = next(pages)
        for _ in range(tokens):
            slots.append(page * page_size + offset)
            offset += 1
            if offset == page_size:
                page, offset = next(pages), 0
    return slots


def check(slots, page_size, kv_heads=2, head_dim=64, value_dim=None, dtype=torch.float32, slot_dtype=torch.int64):
    generator = torch.Generator().manual_seed(1)
    value_dim = value_dim or head_dim
    pools = [torch.randn(kv_heads, 64, page_size, dim, generator=generator) for dim in (head_dim, value_dim)]
    pools = [pool.to(dtype).to(DEVICE) for pool in pools] + [poison(kv_heads, 64, head_dim, dtype=dtype)]
    expected = [pool.clone() for pool in pools]
    # Slices of a fused projection: neither contiguous nor of one stride.
    fused = torch.randn(len(slots), 3 * kv_heads, max(head_dim, value_dim), generator=generator).to(dtype).to(DEVICE)
    key, value = fused[:, kv_heads : 2 * kv_heads, :head_dim], fused[:, 2 * kv_heads :, :value_dim]
    stored = [i for i, slot in enumerate(slots) if slot >= 0]
    slots = torch.tensor(slots, dtype=slot_dtype, device=DEVICE)

    store_kv(key, value, slots, *pools)
    reference.store_kv(key[stored], value[stored], slots[stored], *expected)

    assert torch.equal(pools[0], expected[0])
    assert torch.equal(pools[1], expected[1])
    tolerance = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-6, "rtol": 1e-2}
    torch.testing.assert_close(pools[2], expected[2], equal_nan=True, **tolerance)
    return pools[2]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_decode_and_prefill_in_one_launch(page_size, head_dim, dtype):
    last = page_size - 1
    runs = [(last, 1), (0, 1), (last - 1, 1), (0, 2 * page_size + 3), (5, page_size), (last, 2)]
    landmarks = check(runs_of_slots(runs, page_size), page_size, head_dim=head_dim, dtype=dtype)
    full = [(offset + tokens) // page_size for offset, tokens in runs]
    assert (~landmarks[0].isnan().any(1)).sum() == sum(full)


def test_padding_stores_nothing():
    check([-1, 3, -1, 15, -1], 16)
    check([-1], 16)


@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_other_value_dim_and_heads(kv_heads):
    check(runs_of_slots([(0, 40)], 16), 16, kv_heads=kv_heads, head_dim=64, value_dim=128, slot_dtype=torch.int32)


@FAST
@given(st.lists(st.tuples(st.integers(0, 15), st.integers(1, 50)), min_size=1, max_size=4), st.sampled_from([16, 24]))
def test_property(runs, head_dim):
    check(runs_of_slots(runs, 16), 16, kv_heads=1, head_dim=head_dim)


def test_the_landmark_is_of_what_the_page_holds():
    """Keys in float32 stored in a bfloat16 pool: the landmark is the mean of the rounded ones."""
    key = torch.randn(16, 1, 16, device=DEVICE)
    pools = [torch.zeros(1, 2, 16, 16, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    landmarks = torch.zeros(1, 2, 16, device=DEVICE)
    store_kv(key, key, torch.arange(16, 32, device=DEVICE), *pools, landmarks)
    assert torch.equal(pools[0][0, 1], key[:, 0].bfloat16())
    torch.testing.assert_close(landmarks[0, 1], pools[0][0, 1].float().mean(0))


def test_without_landmarks_and_without_tokens():
    pools = [torch.zeros(2, 4, 16, 64, device=DEVICE) for _ in range(2)]
    key = torch.randn(16, 2, 64, device=DEVICE)
    store_kv(key, key, torch.arange(16, device=DEVICE), *pools, None)
    assert torch.equal(pools[0][:, 0], key.transpose(0, 1))
    store_kv(key[:0], key[:0], torch.arange(0, device=DEVICE), *pools, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": torch.arange(3)}, r"`slots` has shape \(3,\)"),
        ({"slots": torch.zeros(4)}, "`slots` is float32"),
        ({"key": torch.zeros(4, 1, 64)}, r"`key` has shape \(4, 1, 64\)"),
        ({"value": torch.zeros(4, 2, 64, dtype=torch.int32)}, "`value` is int32"),
        ({"key_pages": torch.zeros(2, 4, 8, 64), "value_pages": torch.zeros(2, 4, 8, 64)}, "page_size is 8"),
        ({"landmarks": torch.zeros(2, 3, 64)}, r"`landmarks` has shape"),
        ({"key": torch.zeros(4, 64, 2).transpose(1, 2)}, "stride 2 in its last dimension"),
    ],
)
def test_errors_name_the_argument(change, message):
    arguments = {
        "key": torch.zeros(4, 2, 64),
        "value": torch.zeros(4, 2, 64),
        "slots": torch.arange(4),
        "key_pages": torch.zeros(2, 4, 16, 64),
        "value_pages": torch.zeros(2, 4, 16, 64),
        "landmarks": torch.zeros(2, 4, 64),
    }
    with pytest.raises(ValueError, match=message):
        store_kv(**arguments | change)


@pytest.mark.parametrize("shape", [(9, 3, 64), (16, 8, 128)], ids=str)
def test_the_gate_of_the_benchmark(shape):
    assert benchmark_store_kv.error(shape, DEVICE) < 1e-5
