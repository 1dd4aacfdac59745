"""Continuous batching: which sequences run, which wait, and whose pages go when they run out."""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque

from .cache import PageAllocator, PagedKVCache
from .sequence import Prompt, Sequence
from .step import Piece


class Scheduler:
    """
    Sequences are served in one fixed order, completions of a prompt next to each other. A finished sequence leaves at
    once; waiting ones enter while there are pages; when pages run out, prompts that nobody runs are dropped first, then
    the youngest sequence is preempted: it keeps its tokens and their keys are recomputed later.

    Args:
        cache (`PagedKVCache`): the pool.
        allocator (`PageAllocator`): who owns its pages.
        sequences (`list[Sequence]`): all sequences, in the order in which they are served.
        max_num_seqs (`int`): sequences that run at the same time, at most.
    """

    def __init__(self, cache: PagedKVCache, allocator: PageAllocator, sequences: list[Sequence], max_num_seqs: int):
        self.cache, self.allocator, self.max_num_seqs = cache, allocator, max_num_seqs
        self.order = {sequence: place for place, sequence in enumerate(sequences)}
        self.waiting = deque(sequences)
        self.running: list[Sequence] = []
        self.unfinished = Counter(sequence.prompt for sequence in sequences)
        self.preemptions = 0

    @property
    def is_done(self) -> bool:
        return not self.waiting and not self.running

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.cache.page_size)

    def admit(self) -> list[Sequence]:
        """
        Let waiting sequences run while there is room. Pages for prompts that are not in the cache are allocated here;
        the caller computes them before the next decode step.
        """
        admitted = []
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            prompt = sequence.prompt
            # Its own pages: the tokens it has and the next one, beyond the full pages of the prompt.
            own = self.pages_for(sequence.num_tokens + 1) - len(prompt.token_ids) // self.cache.page_size
            needed = own + (0 if len(prompt.table) else self.pages_for(len(prompt.token_ids)))
            headroom = len(self.running)  # each running sequence may want a page soon
            if not self._make_room(needed + headroom, keep=prompt):
                if self.running:
                    break
                self._make_room(needed, keep=prompt)
            self.waiting.popleft()
            if not len(prompt.table):
                self._allocate(prompt.table, self.pages_for(len(prompt.token_ids)))
            prompt.num_running += 1
            insort(self.running, sequence, key=self.order.__getitem__)
            admitted.append(sequence)
        return admitted

    def _allocate(self, table, count: int, new_run: bool = False) -> None:
        for _ in range(count):
            table.append(self.allocator.allocate(int(table.array[-1]) if len(table) else None), new_run)
            new_run = False

    def _make_room(self, num_pages: int, keep: Prompt | None = None) -> bool:
        """Free pages of prompts that nobody runs until `num_pages` are free; whether that succeeded."""
        for prompt in self.unfinished:
            if self.allocator.num_free >= num_pages:
                break
            if prompt is not keep and prompt.num_running == 0 and len(prompt.table):
                self._release(prompt.table)
                prompt.forget()
        return self.allocator.num_free >= num_pages

    def _release(self, table) -> None:
        while len(table):
            self.allocator.release(table.pop())

    def fork(self, sequence: Sequence) -> None:
        """Let a sequence share the pages of its prompt, which are in the cache."""
        prompt = sequence.prompt
        for page in prompt.table.array.tolist():
            self.allocator.share(page)
            sequence.table.append(page)
        sequence.num_cached = len(prompt.token_ids)

    def decode_pieces(self) -> list[Piece]:
        """
        The next tokens of every running sequence, with pages to store them in. Sequences may be preempted to find
        those pages.
        """
        pieces: list[Piece] = []
        place = 0
        while place < len(self.running):
            sequence = self.running[place]
            tokens = sequence.uncached()
            if not self._reserve(sequence, len(tokens)):
                break
            pieces.append(Piece(sequence.table, sequence.num_cached, tokens))
            place += 1
        return pieces

    def reserve(self, most_steps: int) -> int:
        """
        Pages for several decode steps at once: for the next tokens of every running sequence, and of those that are
        catching up for the tokens to feed again. Where pages are short it is fewer steps, and with a single one
        sequences may be preempted.

        Returns:
            `int`: how many steps there are pages for, at most `most_steps`.
        """
        steps = most_steps
        while steps > 1 and not self._make_room(sum(self._pages_wanted(s, s.num_next(steps)) for s in self.running)):
            steps //= 2
        place = 0
        while place < len(self.running):
            sequence = self.running[place]
            if not self._reserve(sequence, sequence.num_next(steps)):
                break
            place += 1
        return steps

    def _reserve(self, sequence: Sequence, num_new: int) -> bool:
        """Pages for the next `num_new` tokens; the youngest are preempted to find them. Whether it still runs."""
        needed = self._pages_wanted(sequence, num_new)
        while needed > self.allocator.num_free and not self._make_room(needed):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        self._extend(sequence, num_new)
        return True

    def _must_copy(self, sequence: Sequence) -> bool:
        """Whether the next token goes into a page that others use too."""
        place = sequence.num_cached // self.cache.page_size
        return place < len(sequence.table) and self.allocator.owners[sequence.table.array[place]] > 1

    def _pages_wanted(self, sequence: Sequence, num_new: int) -> int:
        missing = self.pages_for(sequence.num_cached + num_new) - len(sequence.table)
        return missing + self._must_copy(sequence)

    def _extend(self, sequence: Sequence, num_new: int) -> None:
        table = sequence.table
        if self._must_copy(sequence):  # only ever the last page: the prompt's partly filled one
            shared = table.pop()
            self._allocate(table, 1, new_run=True)
            self.cache.copy_page(shared, int(table.array[-1]))
            self.allocator.release(shared)
        missing = self.pages_for(sequence.num_cached + num_new) - len(table)
        is_first_own = len(table) * self.cache.page_size == len(sequence.prompt.token_ids)
        self._allocate(table, missing, new_run=is_first_own)

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._leave(sequence)
        sequence.num_cached = 0
        self.waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence.table)
        sequence.prompt.num_running -= 1

    def finish(self, sequence: Sequence) -> None:
        """Take a finished sequence out; its pages are free, and its prompt's too if it was the last to use them."""
        self._leave(sequence)
        prompt = sequence.prompt
        self.unfinished[prompt] -= 1
        if self.unfinished[prompt] == 0:
            self._release(prompt.table)
            prompt.forget()
