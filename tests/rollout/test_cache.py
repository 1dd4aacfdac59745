"""Page allocator and page table against models of them that are too simple to be wrong."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sparrow_trl.rollout.cache import PageAllocator, PagedKVCache, PageTable


class AllocatorMachine(RuleBasedStateMachine):
    """Every page has as many owners as were given it and not taken back."""

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages):
        self.allocator = PageAllocator(num_pages)
        self.owners = [0] * num_pages
        self.peak = 0

    @precondition(lambda self: 0 in self.owners)
    @rule(data=st.data())
    def allocate(self, data):
        after = data.draw(st.none() | st.integers(0, len(self.owners) - 1))
        free = {page for page, count in enumerate(self.owners) if count == 0}
        page = self.allocator.allocate(after)
        assert type(page) is int and page in free
        if after is not None and after + 1 in free:
            assert page == after + 1
        self.owners[page] = 1
        self.peak = max(self.peak, len(self.owners) - self.owners.count(0))

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data())
    def share(self, data):
        page = data.draw(st.sampled_from([page for page, count in enumerate(self.owners) if count]))
        self.allocator.share(page)
        self.owners[page] += 1

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data())
    def release(self, data):
        page = data.draw(st.sampled_from([page for page, count in enumerate(self.owners) if count]))
        self.allocator.release(page)
        self.owners[page] -= 1

    @invariant()
    def counts(self):
        assert self.allocator.owners.tolist() == self.owners
        assert self.allocator.num_free == self.owners.count(0)
        assert self.allocator.peak == self.peak


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
TestAllocator = AllocatorMachine.TestCase


def test_growing_sequences_get_contiguous_pages():
    """Two sequences that grow by turns each find the page after their last one free."""
    allocator = PageAllocator(32)
    tables = [[allocator.allocate()], [allocator.allocate()]]
    for _ in range(9):
        for table in tables:
            table.append(allocator.allocate(table[-1]))
    assert all(table == list(range(table[0], table[0] + 10)) for table in tables)


class TableMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.table, self.pages, self.breaks = PageTable(), [], set()

    @rule(page=st.integers(0, 9), new_run=st.booleans())
    def append(self, page, new_run):
        self.add(page, new_run)

    @precondition(lambda self: self.pages)
    @rule(count=st.integers(1, 20), new_run=st.booleans())
    def append_following(self, count, new_run):
        for _ in range(count):
            self.add(self.pages[-1] + 1, new_run)
            new_run = False

    def add(self, page, new_run):
        self.table.append(page, new_run)
        self.breaks.discard(len(self.pages))
        if new_run or not self.pages or page != self.pages[-1] + 1:
            self.breaks.add(len(self.pages))
        self.pages.append(page)

    @precondition(lambda self: self.pages)
    @rule()
    def pop(self):
        assert self.table.pop() == self.pages.pop()

    @invariant()
    def pages_and_runs(self):
        assert len(self.table) == len(self.pages)
        assert self.table.array.tolist() == self.pages
        starts = sorted(place for place in self.breaks if place < len(self.pages))
        ends = [*starts[1:], len(self.pages)]
        expected = [[self.pages[a], b - a] for a, b in zip(starts, ends, strict=bool(starts))]
        assert self.table.runs == expected

    @precondition(lambda self: self.pages)
    @rule(data=st.data(), page_size=st.sampled_from([1, 4]))
    def token_runs(self, data, page_size):
        num_tokens = data.draw(st.integers(1, len(self.pages) * page_size))
        slots = [page * page_size + offset for page in self.pages for offset in range(page_size)][:num_tokens]
        found = [
            first * page_size + token
            for first, tokens in self.table.token_runs(num_tokens, page_size)
            for token in range(tokens)
        ]
        assert found == slots


TableMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
TestTable = TableMachine.TestCase


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_popping_all_pages_leaves_an_empty_table(pages):
    table = PageTable()
    for page in pages:
        table.append(page)
    assert [table.pop() for _ in pages] == pages[::-1]
    assert len(table) == 0 and table.runs == [] and table.array.tolist() == []


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_cache_makes_each_layer_in_the_shape_of_its_keys(dtype):
    cache = PagedKVCache(6, 4, dtype)
    shapes = {0: (2, 8, 8), 3: (1, 5, 7)}  # layer -> KV heads, width of keys, width of values
    per_token = per_page = 0
    for layer, (heads, key_dim, value_dim) in shapes.items():
        key, value = torch.zeros(3, heads, key_dim), torch.zeros(3, heads, value_dim)
        pages = cache.layer(layer, key, value)
        assert [tuple(tensor.shape) for tensor in pages] == [
            (heads, 6, 4, key_dim),
            (heads, 6, 4, value_dim),
            (heads, 6, key_dim),
        ]
        assert all(tensor.dtype == (dtype or torch.float32) and not tensor.any() for tensor in pages)
        assert cache.layer(layer, key, value)[0] is pages[0]
        per_token += heads * (key_dim + value_dim)
        per_page += heads * key_dim
    assert cache.numel == (per_token, per_page)


def test_copy_page_copies_every_layer_and_nothing_else():
    cache = PagedKVCache(4, 2)
    for layer in range(2):
        for tensor in cache.layer(layer, torch.zeros(1, 2, 3), torch.zeros(1, 2, 5)):
            tensor.normal_()
    before = {layer: [tensor.clone() for tensor in tensors] for layer, tensors in cache.layers.items()}
    cache.copy_page(1, 3)
    for layer, tensors in cache.layers.items():
        for tensor, old in zip(tensors, before[layer], strict=True):
            assert torch.equal(tensor[:, 3], old[:, 1])
            assert torch.equal(tensor[:, :3], old[:, :3])
