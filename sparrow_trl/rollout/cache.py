"""The paged KV cache: who owns which page, and the tensors behind the pages."""

from __future__ import annotations

import numpy as np
import torch


class PageAllocator:
    """
    Hands out pages and counts their owners. Pages are placed so that a sequence's next page tends to follow its last
    one: dense attention reads a contiguous run without a copy.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.owners = np.zeros(num_pages, dtype=np.int32)
        self.num_free = num_pages
        self.peak = 0

    def allocate(self, after: int | None = None) -> int:
        """One free page, the one following `after` if that is free. The caller has checked `num_free`."""
        page = None if after is None else after + 1
        if page is None or page >= self.num_pages or self.owners[page]:
            page = self._widest_gap()
        self.owners[page] = 1
        self.num_free -= 1
        self.peak = max(self.peak, self.num_pages - self.num_free)
        return page

    def _widest_gap(self) -> int:
        """A page in the widest run of free pages: its middle, so that the run's left neighbour can go on growing."""
        edges = np.diff(np.concatenate(([1], self.owners != 0, [1])).astype(np.int8))
        starts, ends = np.flatnonzero(edges == -1), np.flatnonzero(edges == 1)
        widest = int(np.argmax(ends - starts))
        start, end = int(starts[widest]), int(ends[widest])
        return start if start == 0 else start + (end - start) // 2

    def share(self, page: int) -> None:
        """Add an owner."""
        self.owners[page] += 1

    def release(self, page: int) -> None:
        """Remove an owner; a page without owners is free."""
        self.owners[page] -= 1
        if self.owners[page] == 0:
            self.num_free += 1


class PageTable:
    """The pages of one sequence in order, and the contiguous runs they form."""

    def __init__(self):
        self._array = np.zeros(16, dtype=np.int64)
        self._length = 0
        self.runs: list[list[int]] = []  # [first page, number of pages]

    def __len__(self) -> int:
        return self._length

    @property
    def array(self) -> np.ndarray:
        """`(len(self),)` int64, the pages."""
        return self._array[: self._length]

    def append(self, page: int, new_run: bool = False) -> None:
        """Add a page; `new_run` keeps it apart from the run before it (where the pages shared by a group end)."""
        if self._length == len(self._array):
            self._array = np.concatenate([self._array, np.zeros_like(self._array)])
        self._array[self._length] = page
        self._length += 1
        if self.runs and not new_run and sum(self.runs[-1]) == page:
            self.runs[-1][1] += 1
        else:
            self.runs.append([page, 1])

    def pop(self) -> int:
        """Remove the last page and return it."""
        self.runs[-1][1] -= 1
        if self.runs[-1][1] == 0:
            self.runs.pop()
        self._length -= 1
        return int(self._array[self._length])

    def token_runs(self, num_tokens: int, page_size: int) -> list[tuple[int, int]]:
        """`(first page, tokens)` of each run, the first `num_tokens` tokens only."""
        result = []
        for first_page, count in self.runs:
            tokens = min(num_tokens, count * page_size)
            if tokens <= 0:
                break
            result.append((first_page, tokens))
            num_tokens -= tokens
        return result


class PagedKVCache:
    """
    Keys, values and landmarks of every layer, in pages of `page_size` tokens. A layer's tensors are made when it first
    stores something, in the shape of what it stores, so that layers may differ.

    Args:
        num_pages (`int`): pages in the pool, the same for every layer.
        page_size (`int`): tokens in a page.
        dtype (`torch.dtype`, *optional*): dtype of the pool; by default that of the first keys.
    """

    def __init__(self, num_pages: int, page_size: int, dtype: torch.dtype | None = None):
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor):
        """
        `(key_pages, value_pages, landmarks)` of a layer.

        Args:
            key, value (`torch.Tensor`): `(num_tokens, num_kv_heads, head_dim)`, what is about to be stored.
        """
        if index not in self.layers:
            dtype = self.dtype or key.dtype
            shape = (key.shape[1], self.num_pages, self.page_size)
            # Zero-filled: slots never written are masked, and must be finite for that.
            self.layers[index] = (
                torch.zeros(*shape, key.shape[2], dtype=dtype, device=key.device),
                torch.zeros(*shape, value.shape[2], dtype=dtype, device=key.device),
                torch.zeros(key.shape[1], self.num_pages, key.shape[2], dtype=dtype, device=key.device),
            )
        return self.layers[index]

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page in every layer (copy on write)."""
        for key_pages, value_pages, landmarks in self.layers.values():
            key_pages[:, target] = key_pages[:, source]
            value_pages[:, target] = value_pages[:, source]
            landmarks[:, target] = landmarks[:, source]

    @property
    def numel(self) -> tuple[int, int]:
        """Numbers that one token, and one page (its landmarks), take over all layers that have stored something."""
        tokens = sum(tensor[:, 0, 0].numel() for layer in self.layers.values() for tensor in layer[:2])
        return tokens, sum(landmarks[:, 0].numel() for _, _, landmarks in self.layers.values())
