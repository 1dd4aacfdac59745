"""The page choice of teacher-forced attention, as bits, equals the reference's choice at every token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pools import DEVICE
from sparrow_kernels import page_mask, reference


def poisoned(shape, dtype, device):
    """Scratch memory as bad as it can be: NaN, or integers that are no index."""
    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min // 2
    return torch.full(shape, value, dtype=dtype, device=device)


@pytest.fixture(autouse=True, scope="module")
def poisoned_scratch():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_mask, "scratch", poisoned)
        yield


def unpack(words, num_pages):
    """`(..., num_words)` int32 -> `(..., num_pages)` bool."""
    bits = (words[..., None] >> torch.arange(32, device=words.device)) & 1
    return bits.flatten(-2)[..., :num_pages].bool()


def offsets(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(DEVICE)


def expected_choice(query, key, lengths, prompts, budgets, page_size, sink, recent, window):
    """For each sequence `(length, num_kv_heads, num_pages)` bool, from [`reference.select_pages`]."""
    choices, start = [], 0
    for length, prompt in zip(lengths, prompts, strict=True):
        rows = slice(start, start + length)
        start += length
        num_pages = -(-length // page_size)
        padded = torch.nn.functional.pad(key[rows].float(), (0, 0, 0, 0, 0, num_pages * page_size - length))
        landmarks = padded.unflatten(0, (num_pages, page_size)).mean(1).to(key.dtype).float().transpose(0, 1)
        table = torch.arange(num_pages, device=DEVICE).expand(length, -1)
        position = torch.arange(length, device=DEVICE)
        chosen = reference.select_pages(
            query[rows].float(), landmarks, table, position, budgets[rows], page_size, sink, recent
        )
        last = position // page_size
        page = torch.arange(num_pages, device=DEVICE)
        chosen[:prompt] = (page <= last[:prompt, None])[:, None]
        if window is not None:
            chosen &= (page >= (position - window + 1).clamp(min=0)[:, None] // page_size)[:, None]
        choices.append(chosen)
    return choices


def check(query, key, lengths, prompts, budgets, page_size, sink=1, recent=2, window=None, score_bytes=1 << 20):
    cu_seqlens = offsets(lengths)
    mask = page_mask.choose_pages(
        query,
        key,
        cu_seqlens,
        torch.tensor(prompts, dtype=torch.int32, device=DEVICE),
        budgets,
        page_size=page_size,
        sink_pages=sink,
        recent_pages=recent,
        sliding_window=window,
        max_seqlen=max(lengths),
        score_bytes=score_bytes,
    )
    choices = expected_choice(query, key, lengths, prompts, budgets, page_size, sink, recent, window)
    for start, length, choice in zip(cu_seqlens.tolist(), lengths, choices, strict=False):
        found = unpack(mask[start : start + length], mask.shape[-1] * 32)
        assert torch.equal(found[..., : choice.shape[-1]], choice)
        assert not found[..., choice.shape[-1] :].any()
    return mask, choices


def random_inputs(num_tokens, heads, kv_heads, head_dim, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(num_tokens, n, head_dim, generator=generator).to(dtype).to(DEVICE) for n in (heads, kv_heads)
    )


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=3),
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
    st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    st.sampled_from([1, 2, 8]),
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
    query, key = random_inputs(sum(lengths), *heads, 16, seed=seed)
    positions = torch.cat([torch.arange(length) for length in lengths])
    budgets = torch.tensor(bins, dtype=torch.int32)[(positions // 10).clamp(max=len(bins) - 1)].to(DEVICE)
    check(query, key, lengths, prompts, budgets, page_size, sink, recent, window)


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_page_and_budget_boundaries(page_size, dtype):
    """The completion runs over the token where the first page has to be left out, and over the next page's start."""
    budget = 2
    full = page_size * (1 + budget + 2)
    query, key = random_inputs(full + page_size + 3, 4, 2, 64, dtype)
    budgets = torch.full((len(query),), budget, dtype=torch.int32, device=DEVICE)
    _, (choice,) = check(query, key, [len(query)], [full - 1], budgets, page_size)
    assert choice[full - 1].all(-1).tolist() == [False] * 2  # the sixth page is not there yet
    assert choice.sum(-1)[full - 1 : full + 1].tolist() == [[5, 5], [5, 5]]


@pytest.mark.parametrize("budget", [1, 3, 40])
def test_of_equal_scores_the_earlier_page_wins(budget):
    """Small integers: every score is exact, many are equal, and some are zeros of either sign."""
    generator = torch.Generator().manual_seed(budget)
    query = torch.randint(-1, 2, (120, 2, 16), generator=generator).float()
    key = torch.randint(-1, 2, (60, 1, 16), generator=generator).float().repeat_interleave(2, dim=0)
    key[:, :, 2:] *= -0.0
    budgets = torch.full((120,), budget, dtype=torch.int32, device=DEVICE)
    check(query.to(DEVICE), key.to(DEVICE), [120], [90], budgets, page_size=2)


def test_more_pages_than_a_word_has_bits_in_chunks_of_queries():
    query, key = random_inputs(160, 2, 1, 16)
    budgets = (torch.arange(160, dtype=torch.int32, device=DEVICE) % 50).contiguous()
    check(query, key, [3, 150, 7], [3, 120, 7], budgets, page_size=1, score_bytes=1)


@pytest.mark.parametrize("tokens_per_block", [1, 12, 21, 64])
def test_lists_and_readers(tokens_per_block):
    lengths, prompts = [5, 150, 1], [2, 135, 1]
    query, key = random_inputs(sum(lengths), 2, 2, 16)
    budgets = torch.full((sum(lengths),), 9, dtype=torch.int32, device=DEVICE)
    page_size, keys_per_block = 2, 16
    mask, choices = check(query, key, lengths, prompts, budgets, page_size)
    cu_seqlens = offsets(lengths)
    lists = page_mask.list_pages(mask, cu_seqlens, page_size, tokens_per_block)
    readers, num_readers = page_mask.list_readers(
        lists, cu_seqlens, sum(lengths), page_size, keys_per_block, max(lengths)
    )
    for sequence, choice in enumerate(choices):
        start = int(cu_seqlens[sequence])
        first_block = start // tokens_per_block + sequence
        blocks = choice.split(tokens_per_block)
        for i, rows in enumerate(blocks):
            for head in range(2):
                listed = rows[:, head].any(0).nonzero().flatten()
                count = int(lists.num_listed[first_block + i, head])
                assert lists.page_list[first_block + i, head, :count].tolist() == listed.tolist()
                token = start + i * tokens_per_block
                bits = unpack(lists.listed_mask[token : token + len(rows), head], 32 * mask.shape[-1])
                assert torch.equal(bits[:, :count], rows[:, head][:, listed])
                assert not bits[:, count : -(-count // 32) * 32].any()
        for i, first in enumerate(range(0, lengths[sequence], keys_per_block)):
            row = start // keys_per_block + sequence + i
            pages = slice(first // page_size, (first + keys_per_block) // page_size)
            for head in range(2):
                expected = [b for b, rows in enumerate(blocks) if rows[:, head, pages].any()]
                assert readers[row, head, : int(num_readers[row, head])].tolist() == expected
