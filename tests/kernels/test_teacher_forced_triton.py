"""Teacher-forced attention in Triton equals the reference: values and gradients, of packed sequences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import benchmark_teacher_forced
from pools import DEVICE, DTYPES, relative
from sparrow_kernels import page_mask, reference, teacher_forced
from sparrow_kernels.launch import assume_family
from test_page_mask import expected_choice, offsets, poisoned


@pytest.fixture(autouse=True, scope="module")
def poisoned_scratch():
    with pytest.MonkeyPatch.context() as patch:
        for module in (page_mask, teacher_forced):
            patch.setattr(module, "scratch", poisoned)
        yield


def inputs(num_tokens, heads, kv_heads, head_dim, dtype=torch.float32, seed=0):
    """Views of tensors with the heads first, as models give them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(n, num_tokens, head_dim, generator=generator) for n in (heads, kv_heads, kv_heads))
    return tuple(tensor.to(dtype).to(DEVICE).transpose(0, 1).requires_grad_() for tensor in tensors)


def layout(page_size=4, sink=1, recent=2, **options):
    return {"page_size": page_size, "sink_pages": sink, "recent_pages": recent, "scaling": 0.3, **options}


def run(tensors, lengths, prompts, budgets, **options):
    return teacher_forced.teacher_forced_attention(
        *tensors,
        offsets(lengths),
        torch.tensor(prompts, dtype=torch.int32, device=DEVICE),
        budgets,
        max_seqlen=max(lengths),
        **options,
    )


def attend_chosen(query, key, value, choice, *, page_size, scaling, sliding_window=None, softcap=None, **_):
    """Attention of one sequence in its own precision, over the pages of `choice`, or all of them."""
    index = torch.arange(len(query), device=query.device)
    seen = (index <= index[:, None])[:, None]
    if choice is not None:
        seen = seen & choice.repeat_interleave(page_size, dim=-1)[..., : len(query)]
    if sliding_window is not None:
        seen = seen & (index > index[:, None] - sliding_window)[:, None]
    group = query.shape[1] // key.shape[1]
    seen = seen.expand(-1, key.shape[1], -1).repeat_interleave(group, dim=1)
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->qhk", query, key) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("qhk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value)


def check(tensors, lengths, prompts, budgets, **options):
    """fp32 against the reference in fp32, other dtypes against fp64 with the pages that the reference chooses. `budgets`
    are None, a number, or one for each token."""
    if isinstance(budgets, int):
        budgets = torch.full((sum(lengths),), budgets, dtype=torch.int32)
    budgets = None if budgets is None else budgets.to(DEVICE)
    low = tensors[0].dtype != torch.float32
    out = run(tensors, lengths, prompts, budgets, **options)
    copies = tuple((t.detach().double() if low else t.detach().clone()).requires_grad_() for t in tensors)
    choices = [None] * len(lengths)
    if budgets is not None and low:
        sizes = options["page_size"], options["sink_pages"], options["recent_pages"]
        choices = expected_choice(tensors[0].detach(), tensors[1].detach(), lengths, prompts, budgets, *sizes, None)
    parts, start = [], 0
    for length, prompt, choice in zip(lengths, prompts, choices, strict=True):
        rows = slice(start, start + length)
        sequence = tuple(tensor[rows] for tensor in copies)
        start += length
        if length == 0:
            continue
        if low:
            parts.append(attend_chosen(*sequence, choice, **options))
        else:
            own = None if budgets is None else budgets[rows]
            parts.append(reference.teacher_forced_attention(*sequence, prompt, own, **options))
    expected = torch.cat(parts)
    tolerance = 1e-2 if low else 1e-5
    assert out.dtype == tensors[0].dtype
    assert relative(out, expected) < tolerance
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype).to(DEVICE)
    found = torch.autograd.grad(out, tensors, direction)
    for gradient, wanted in zip(
        found, torch.autograd.grad(expected, copies, direction.to(expected.dtype)), strict=True
    ):
        assert gradient.dtype == tensors[0].dtype
        # What should cancel to zero (the slope of a softmax over one token) is left with rounding errors.
        difference = (gradient.double() - wanted.double()).norm()
        assert difference <= tolerance * wanted.double().norm() + 1e-6 * direction.double().norm()
    return out


LENGTHS, PROMPTS = [37, 1, 64, 0, 19], [20, 1, 40, 0, 3]


@pytest.mark.parametrize("budgets", [None, 0, 2, "rising", 2**30])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 9}, {"softcap": 1.5}], ids=["plain", "window", "softcap"])
def test_packed_sequences(budgets, options):
    if budgets == "rising":
        budgets = torch.cat([torch.arange(length, dtype=torch.int32) // 8 for length in LENGTHS])
    check(inputs(sum(LENGTHS), 4, 2, 16), LENGTHS, PROMPTS, budgets, **layout(**options))


@pytest.mark.parametrize("group", range(1, 9))
def test_groups(group):
    check(inputs(45, 2 * group, 2, 64, torch.float16), [40, 5], [25, 2], 1, **layout())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(head_dim, dtype):
    check(inputs(45, 3, 1, head_dim, dtype), [40, 5], [25, 2], 1, **layout())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_dense(dtype):
    check(inputs(45, 3, 1, 80, dtype), [40, 5], [25, 2], None, **layout(sliding_window=30))


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_page_sizes(page_size):
    """The completion starts right where a page has to be left out, and crosses into the next page."""
    length = 6 * page_size + 2
    check(inputs(length, 4, 2, 64, torch.bfloat16), [length], [5 * page_size - 1], 2, **layout(page_size))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["turing", "ampere", "hopper", "blackwell", "cdna"])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_launch_options_of_every_gpu(family, head_dim):
    with assume_family(family):
        check(inputs(70, 5, 1, head_dim, torch.float16), [62, 8], [50, 3], 3, **layout())


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=3),
    st.one_of(st.none(), st.lists(st.integers(0, 5), min_size=1, max_size=4)),
    st.sampled_from([(1, 1), (6, 2), (5, 1)]),
    st.sampled_from([1, 4, 16]),
    st.integers(0, 2),
    st.integers(1, 3),
    st.sampled_from([None, 1, 9]),
    st.integers(0, 99),
)
def test_property(sequences, bins, heads, page_size, sink, recent, window, seed):
    lengths = [length for length, _ in sequences]
    if sum(lengths) == 0:
        lengths[0] = 1
    prompts = [min(length, prompt) for length, (_, prompt) in zip(lengths, sequences, strict=True)]
    budgets = None
    if bins is not None:
        positions = torch.cat([torch.arange(length) for length in lengths])
        budgets = torch.tensor(bins, dtype=torch.int32)[(positions // 10).clamp(max=len(bins) - 1)]
    options = layout(page_size, sink, recent, sliding_window=window)
    check(inputs(sum(lengths), *heads, 16, seed=seed), lengths, prompts, budgets, **options)


def test_what_a_sequence_holds_does_not_reach_the_next():
    tensors = inputs(60, 2, 1, 16)
    budgets = torch.ones(60, dtype=torch.int32, device=DEVICE)
    clean = run(tensors, [29, 31], [20, 20], budgets, **layout())
    broken = tuple(tensor.detach().clone() for tensor in tensors)
    for tensor in broken:
        tensor[29:] = float("nan")
    assert torch.equal(run(broken, [29, 31], [20, 20], budgets, **layout())[:29], clean[:29])
    for tensor, original in zip(broken, tensors, strict=True):
        tensor[:29], tensor[29:] = float("nan"), original.detach()[29:]
    assert torch.equal(run(broken, [29, 31], [20, 20], budgets, **layout())[29:], clean[29:])


def test_left_out_pages_get_no_gradient():
    query, key, value = inputs(64, 2, 1, 16)
    budgets = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    out = run((query, key, value), [64], [60], budgets, **layout(8))
    for gradient in torch.autograd.grad(out[60:].sum(), (key, value)):  # pages 1 to 5 are neither sink nor recent
        assert gradient[8:48].abs().max() == 0
        assert gradient[:8].abs().min() > 0
        assert gradient[48:60].abs().min() > 0


def test_the_longest_sequence_may_be_announced_longer_than_it_is():
    tensors, budgets = inputs(40, 2, 1, 16), torch.ones(40, dtype=torch.int32, device=DEVICE)
    out, longer = (
        teacher_forced.teacher_forced_attention(
            *tensors, offsets([33, 7]), torch.tensor([9, 3], dtype=torch.int32, device=DEVICE), budgets,
            max_seqlen=most, **layout(1),
        )
        for most in (33, 100)
    )  # fmt: skip
    assert torch.equal(out, longer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 24}, "page_size is 24"),
        ({"recent_pages": 0}, "recent_pages is 0"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"head_dim": 260}, "head dim of `query` is 260"),
        ({"heads": 34}, "34 query heads share a KV head"),
        ({"dtype": torch.float64}, "`query` is float64"),
    ],
)
def test_refusals(change, message):
    shape = {"heads": 2, "head_dim": 16, "dtype": torch.float32}
    shape |= {name: change.pop(name) for name in shape.keys() & change.keys()}
    tensors = inputs(8, shape["heads"], 1, shape["head_dim"], shape["dtype"])
    with pytest.raises(ValueError, match=message):
        run(tensors, [8], [2], None, **(layout() | change))


def test_the_gate_of_the_benchmark():
    assert benchmark_teacher_forced.error(benchmark_teacher_forced.SHAPES["smollm2-135m"], DEVICE) < 1e-5
