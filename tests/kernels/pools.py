"""KV pools for the tests of the Triton ops: scattered pages, and NaN wherever no query may look."""

from dataclasses import dataclass

import torch


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Pool:
    """The pages of several sequences, and what the ops take beside the queries."""

    key_pages: torch.Tensor
    value_pages: torch.Tensor
    landmarks: torch.Tensor
    table: torch.Tensor
    positions: torch.Tensor  # of each sequence's last token, which is the query

    def double(self):
        return self.key_pages.double(), self.value_pages.double()


def make_pool(
    lengths, page_size=16, kv_heads=2, head_dim=64, dtype=torch.float32, *,
    value_dim=None, window=None, table_dtype=torch.int64, spare=2, seed=0,
):  # fmt: skip
    """
    `lengths[i]` tokens of sequence `i`; 0 is a row of padding, with position -1. NaN fills the pages of nobody, the
    slots after a sequence's last token and, with a window, the pages that lie before it altogether. The page table points
    at a page of NaN where a sequence has no page.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_size) for length in lengths]
    num_pages = 2 * sum(counts) + 3
    free = torch.randperm(num_pages - 1, generator=generator).tolist()
    shapes = [(kv_heads, num_pages, page_size, head_dim), (kv_heads, num_pages, page_size, value_dim or head_dim)]
    key_pages, value_pages = (torch.full(shape, float("nan"), dtype=dtype) for shape in shapes)
    landmarks = torch.full((kv_heads, num_pages, head_dim), float("nan"), dtype=dtype)
    table = torch.full((len(lengths), max(counts) + spare), num_pages - 1, dtype=table_dtype)
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        oldest = 0 if window is None else max(0, length - window)
        for page in range(count):
            used = min(page_size, length - page * page_size)
            if page * page_size + used <= oldest:
                continue
            physical = free.pop()
            table[i, page] = physical
            for pages in (key_pages, value_pages):
                pages[:, physical, :used] = torch.randn(kv_heads, used, pages.shape[3], generator=generator).to(dtype)
            if used == page_size:
                landmarks[:, physical] = key_pages[:, physical].float().mean(1).to(dtype)
    tensors = key_pages, value_pages, landmarks, table, torch.tensor(lengths) - 1
    return Pool(*(tensor.to(DEVICE) for tensor in tensors))


def make_query(pool, group, num_queries=None, seed=1):
    kv_heads, _, _, head_dim = pool.key_pages.shape
    shape = num_queries or len(pool.positions), kv_heads * group, head_dim
    query = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return query.to(pool.key_pages.dtype).to(DEVICE)


def poison(*shape, dtype=torch.float32):
    """Memory as bad as it can be: NaN, or integers that are no index."""
    value = float("nan") if dtype.is_floating_point else -(2**30)
    return torch.full(shape, value, dtype=dtype, device=DEVICE)


def relative(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)).item()


def assert_close(found, expected):
    """`expected` in float64. fp32: 1e-5 everywhere; lower precision: 1e-2 in relative norm, of each row too."""
    assert not found.isnan().any()
    if found.dtype == torch.float32:
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    else:
        assert relative(found, expected) < 1e-2
        rows = (found.double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1).clamp(min=1e-30)
        assert rows.max() < 2e-2
