"""Teacher-forced attention equals the reference: values, and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow_kernels import reference, torch_ops


def inputs(num_tokens, num_heads, num_kv_heads, head_dim, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(num_tokens, heads, head_dim, generator=generator).to(dtype).requires_grad_()
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )


def layout(page_size=8, sink=1, recent=2, **options):
    return {"page_size": page_size, "sink_pages": sink, "recent_pages": recent, "scaling": 0.3, **options}


def check(tensors, prompt_length, budgets, chunk=256, **options):
    """Values and gradients, in fp32."""
    copies = tuple(tensor.detach().clone().requires_grad_() for tensor in tensors)
    out = torch_ops.teacher_forced_attention(*tensors, prompt_length, budgets, chunk=chunk, **options)
    expected = reference.teacher_forced_attention(*copies, prompt_length, budgets, **options)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(out, tensors, direction)
    for gradient, wanted in zip(found, torch.autograd.grad(expected, copies, direction), strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("budget", [None, "rising", 0, 2, 2**30])
@pytest.mark.parametrize("prompt_length", [1, 15, 16, 17, 40, 91])
def test_over_prompts_and_budgets(prompt_length, budget, softcap):
    budgets = None
    if budget is not None:
        budgets = torch.arange(91) // 30 if budget == "rising" else torch.full((91,), budget)
    for chunk in (16, 33, 256):
        check(inputs(91, 4, 2, 8), prompt_length, budgets, chunk, **layout(softcap=softcap))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", range(1, 9))
def test_over_heads(group, head_dim):
    check(inputs(40, group, 1, head_dim), 12, torch.ones(40, dtype=torch.int64), **layout(page_size=4))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.sampled_from([1, 4, 16]),
    st.integers(0, 2),
    st.integers(1, 3),
    st.sampled_from([None, 1, 9]),
    st.integers(1, 80),
    st.integers(0, 99),
)
def test_property(num_tokens, prompt_length, bins, page_size, sink, recent, window, chunk, seed):
    budgets = torch.tensor(bins)[(torch.arange(num_tokens) // 20).clamp(max=len(bins) - 1)]
    options = layout(page_size, sink, recent, sliding_window=window)
    check(inputs(num_tokens, 6, 2, 5, seed=seed), min(prompt_length, num_tokens), budgets, chunk, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_low_precision(dtype):
    """Dense, so that no choice of pages depends on the precision; the choice itself is compared in fp32."""
    tensors = inputs(120, 4, 2, 64, dtype)
    out = torch_ops.teacher_forced_attention(*tensors, 120, None, **layout(sliding_window=50))
    expected = reference.teacher_forced_attention(
        *(tensor.double() for tensor in tensors), 120, None, **layout(sliding_window=50)
    )
    assert ((out.double() - expected).norm() / expected.norm()).item() < 1e-2


def test_choice_of_pages_carries_no_gradient_and_left_out_pages_get_none():
    query, key, value = inputs(64, 2, 1, 8)
    out = torch_ops.teacher_forced_attention(
        query, key, value, 60, torch.zeros(64, dtype=torch.int64), **layout(page_size=8)
    )
    gradients = torch.autograd.grad(out[60:].sum(), (key, value))
    for gradient in gradients:  # pages 1 to 5 are neither sink nor recent
        assert gradient[8:48].abs().max() == 0
        assert gradient[:8].abs().min() > 0
        assert gradient[48:60].abs().min() > 0
