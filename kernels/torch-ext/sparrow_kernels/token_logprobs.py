"""
Log-probabilities of sampled tokens and of the most likely ones, from one reading of the logits.

The vocabulary of a row is split over programs, each of which keeps its part in registers: maximum, sum of exponentials
and most likely tokens. A second launch merges the parts.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from .checks import DTYPES, check, check_tensor
from .launch import scratch


MAX_TOP = 64


@triton.jit
def _ordered(values):
    """Integers in the order of float32 values; 0.0 and -0.0 are equal."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unordered(keys):
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def token_logprobs_split_kernel(
    logits_ptr,
    highest_ptr,
    total_ptr,
    keys_ptr,
    ids_ptr,
    logits_stride,
    vocab_size,
    temperature,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
):
    """Of one part of one row."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    part = row * tl.num_programs(1) + split
    columns = split * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab_size
    logits = tl.load(logits_ptr + row * logits_stride + columns, mask=inside, other=float("-inf"))
    scaled = logits.to(tl.float32) / temperature
    highest = tl.max(scaled, axis=0)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    tl.store(highest_ptr + part, highest)
    tl.store(total_ptr + part, tl.sum(tl.exp(scaled - finite), axis=0))
    if TOP > 0:
        keys = tl.where(inside, _ordered(scaled), -2147483648)
        slots = tl.arange(0, BLOCK_TOP)
        top_keys = tl.full((BLOCK_TOP,), -2147483648, tl.int32)
        top_ids = tl.zeros((BLOCK_TOP,), tl.int32)
        for i in range(TOP):
            key, place = tl.max(keys, axis=0, return_indices=True, return_indices_tie_break_left=True)
            top_keys = tl.where(slots == i, key, top_keys)
            top_ids = tl.where(slots == i, split * BLOCK + place, top_ids)
            keys = tl.where(columns == split * BLOCK + place, -2147483648, keys)
        tl.store(keys_ptr + part * TOP + slots, top_keys, mask=slots < TOP)
        tl.store(ids_ptr + part * TOP + slots, top_ids, mask=slots < TOP)


@triton.jit
def token_logprobs_merge_kernel(
    logits_ptr,
    tokens_ptr,
    highest_ptr,
    total_ptr,
    keys_ptr,
    ids_ptr,
    logprobs_ptr,
    top_ids_ptr,
    top_logprobs_ptr,
    logits_stride,
    vocab_size,
    temperature,
    num_splits,
    TOP: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_CANDIDATES: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
):
    """Of one row. Candidates lie in the order of their values within a part, and of their ids between parts."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, BLOCK_SPLITS)
    highest = tl.load(highest_ptr + row * num_splits + splits, mask=splits < num_splits, other=float("-inf"))
    total = tl.load(total_ptr + row * num_splits + splits, mask=splits < num_splits, other=0.0)
    top = tl.max(highest, axis=0)
    finite = tl.where(top == float("-inf"), 0.0, top)
    log_norm = top + tl.log(tl.sum(total * tl.exp(highest - finite), axis=0))
    token = tl.load(tokens_ptr + row)
    known = (token >= 0) & (token < vocab_size)
    logit = tl.load(logits_ptr + row * logits_stride + token, mask=known, other=float("nan"))
    tl.store(logprobs_ptr + row, logit.to(tl.float32) / temperature - log_norm)
    if TOP > 0:
        candidates = tl.arange(0, BLOCK_CANDIDATES)
        inside = candidates < num_splits * TOP
        keys = tl.load(keys_ptr + row * num_splits * TOP + candidates, mask=inside, other=-2147483648)
        slots = tl.arange(0, BLOCK_TOP)
        top_keys = tl.full((BLOCK_TOP,), -2147483648, tl.int32)
        places = tl.zeros((BLOCK_TOP,), tl.int32)
        for i in range(TOP):
            key, place = tl.max(keys, axis=0, return_indices=True, return_indices_tie_break_left=True)
            top_keys = tl.where(slots == i, key, top_keys)
            places = tl.where(slots == i, place, places)
            keys = tl.where(candidates == place, -2147483648, keys)
        ids = tl.load(ids_ptr + row * num_splits * TOP + places, mask=slots < TOP, other=0)
        tl.store(top_ids_ptr + row * TOP + slots, ids.to(tl.int64), mask=slots < TOP)
        tl.store(top_logprobs_ptr + row * TOP + slots, _unordered(top_keys) - log_norm, mask=slots < TOP)


def launch_options(*, vocab_size: int, top: int) -> dict[str, dict[str, Any]]:
    """Keyword arguments of each kernel of the op, by kernel name, as they are launched for these shapes."""
    block = 4096
    num_splits = triton.cdiv(vocab_size, block)
    block_top = triton.next_power_of_2(max(1, top))
    return {
        "token_logprobs_split_kernel": {"TOP": top, "BLOCK": block, "BLOCK_TOP": block_top, "num_warps": 8},
        "token_logprobs_merge_kernel": {
            "TOP": top,
            "BLOCK_SPLITS": triton.next_power_of_2(num_splits),
            "BLOCK_CANDIDATES": triton.next_power_of_2(num_splits * max(1, top)),
            "BLOCK_TOP": block_top,
            "num_warps": 4,
        },
    }


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, *, temperature: float = 1.0, top: int = 0
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """
    Log-probabilities at a temperature, over the full vocabulary, in float32. Of equal logits the lower id comes first.

    Args:
        logits (`torch.Tensor`): `(num_rows, vocab_size)` in float16, bfloat16 or float32.
        tokens (`torch.Tensor`): `(num_rows,)` int64 or int32.
        temperature (`float`): what the logits are divided by; above 0.
        top (`int`): how many of the most likely tokens to return, at most 64; fewer where the vocabulary is smaller.

    Returns:
        `(num_rows,)` float32, NaN for a token outside the vocabulary and for a row whose log-sum-exp is not finite; and
        ids `(num_rows, top)` int64 with log-probabilities `(num_rows, top)` float32, best first, or `None` for `top=0`.

    Raises:
        `ValueError`: for shapes, dtypes or numbers that are not as above.
    """
    check_tensor("logits", logits, (None, None), DTYPES)
    num_rows, vocab_size = logits.shape
    check_tensor("tokens", tokens, (num_rows,), (torch.int64, torch.int32))
    check(temperature > 0, f"temperature is {temperature}, but must be above 0.")
    check(0 <= top <= MAX_TOP, f"top is {top}, but must be from 0 to {MAX_TOP}.")
    check(vocab_size > 0, "`logits` has no columns.")
    top = min(top, vocab_size)
    options = launch_options(vocab_size=vocab_size, top=top)
    num_splits = triton.cdiv(vocab_size, options["token_logprobs_split_kernel"]["BLOCK"])
    device = logits.device
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=device)
    top_ids = torch.empty(num_rows, top, dtype=torch.int64, device=device)
    top_logprobs = torch.empty(num_rows, top, dtype=torch.float32, device=device)
    if num_rows > 0:
        highest, total = scratch((2, num_rows, num_splits), torch.float32, device)
        keys, ids = scratch((2, num_rows, num_splits, top), torch.int32, device)
        token_logprobs_split_kernel[(num_rows, num_splits)](
            logits,
            highest,
            total,
            keys,
            ids,
            logits.stride(0),
            vocab_size,
            temperature,
            **options["token_logprobs_split_kernel"],
        )
        token_logprobs_merge_kernel[(num_rows,)](
            logits,
            tokens,
            highest,
            total,
            keys,
            ids,
            logprobs,
            top_ids,
            top_logprobs,
            logits.stride(0),
            vocab_size,
            temperature,
            num_splits,
            **options["token_logprobs_merge_kernel"],
        )
    return logprobs, (top_ids, top_logprobs) if top else None
