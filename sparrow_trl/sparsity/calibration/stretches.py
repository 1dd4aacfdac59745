"""
Stretches: short pieces generated with sparse attention from places inside long texts, and scored with dense attention.

They make long contexts cheap. A text is prefilled once, densely; sequences branch off it at places in every bin, share
its pages, and generate a stretch each. All budgets start from the same pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from ...monitor import acceptance_rate
from ...rollout.cache import PageAllocator, PagedKVCache, PageTable
from ...rollout.runner import ModelRunner
from ...rollout.sampler import inverse_cdf
from ...rollout.sequence import random_stream
from ...rollout.step import Piece
from ..schedule import SparsitySchedule


PREFILL_CHUNK = 1024
OWN_PAST_CHUNK = 256  # tokens of a sparse past in one forward
# Time of a token relative to one of a dense prefill, for the progress bar: roughly that of a CPU.
DECODE_WORK, SCORE_WORK, OWN_PAST_WORK = 4.0, 1.5, 1.2
LOGITS_BYTES = {"cpu": 512 << 20}  # sparse logits that wait for the dense ones, and as much again for those
LOGITS_BYTES_ELSEWHERE = 2 << 30


@dataclass(frozen=True)
class Stretch:
    """
    Where tokens are generated.

    Attributes:
        text (`int`): index of the text.
        start (`int`): position of the first querying token: the text is read up to it, and it is the first to be
            decoded.
        length (`int`): tokens to generate.
        stream (`int`): number of its random stream. Stretches of different budgets share them, so that their
            difference is that of the budgets.
    """

    text: int
    start: int
    length: int
    stream: int

    @property
    def stop(self) -> int:
        """One behind the position of the last querying token."""
        return self.start + self.length


@dataclass(eq=False)
class _Branch:
    stretch: Stretch
    sparse: PageTable
    dense: PageTable
    uniforms: np.ndarray
    tokens: list[int]  # the text's last one, then those drawn; the last is not in the pages yet
    logits: list[torch.Tensor] = field(default_factory=list)  # sparse ones that are not scored yet
    alphas: list[float] = field(default_factory=list)

    def is_done(self, stops: set[int]) -> bool:
        drawn = len(self.tokens) - 1
        return drawn == self.stretch.length or (drawn > 0 and self.tokens[-1] in stops)


class StretchSampler:
    """
    Texts in a paged cache, and stretches that branch off them. To be used inside
    [`~sparrow_trl.rollout.isolation.rollout_mode`].

    Args:
        model ([`~transformers.PreTrainedModel`]): the model.
        layout (`SparsitySchedule`): page size, forced pages and dense layers; its budgets are not used.
        texts (`list[list[int]]`): token ids; they are prefilled now.
        branch_pages (`int`): pages for all stretches that are generated at the same time, see [`pages_for`].
        own_past_pages (`int`, *optional*, defaults to `0`): pages for what [`own_past`] makes and is not released yet.
        actor (`Callable`, *optional*): makes a context manager, inside which the sparse actor runs: what it has and the
            dense policy has not, such as an adapter.
        on_work (`Callable`, *optional*): told of work done, about in prefilled tokens' worth (see the weights above).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layout: SparsitySchedule,
        texts: Sequence[Sequence[int]],
        branch_pages: int,
        own_past_pages: int = 0,
        actor: Callable[[], AbstractContextManager] | None = None,
        on_work: Callable[[float], None] | None = None,
    ):
        self.model, self.texts = model, [list(text) for text in texts]
        page_size = layout.page_size
        text_pages = sum(-(-len(text) // page_size) for text in texts)
        self.device = next(model.parameters()).device
        dtype = None
        if torch.is_autocast_enabled(self.device.type):
            dtype = torch.get_autocast_dtype(self.device.type)
        self.cache = PagedKVCache(text_pages + branch_pages + own_past_pages, page_size, dtype)
        self.allocator = PageAllocator(self.cache.num_pages)
        # A dense schedule would store no landmarks.
        self.runner = ModelRunner(model, layout, self.cache)
        self.has_actor, self.actor = actor is not None, actor or nullcontext
        self.on_work = on_work or (lambda work: None)
        self.pasts: list[PageTable] = []
        for text in self.texts:
            table = PageTable()
            self._allocate(table, -(-len(text) // page_size))
            self._feed(text, table, 0, len(text), PREFILL_CHUNK, decoding=False)
            self.pasts.append(table)

    @staticmethod
    def pages_for(stretches: Sequence[Stretch], page_size: int) -> int:
        """Pages for the tokens of these stretches, sparse and dense."""
        return sum(2 * (-(-s.stop // page_size) - s.start // page_size) for s in stretches)

    def own_past(self, text: int, schedule: SparsitySchedule, prompt_length: int, stop: int) -> PageTable:
        """
        The first `stop` tokens of a text once more, as if `prompt_length` of them were a prompt and the rest had been
        decoded with `schedule`: errors of sparse attention then carry over from bin to bin, as in a rollout.

        Returns:
            `PageTable`: to be given back with [`release`].
        """
        page_size, token_ids = self.cache.page_size, self.texts[text][:stop]
        prompt_length = min(prompt_length, len(token_ids))
        shared = 0 if self.has_actor else prompt_length // page_size  # an actor's keys are its own from the start
        table = self._share(self.pasts[text], shared)
        self._allocate(table, -(-len(token_ids) // page_size) - len(table))
        self.runner.schedule = schedule
        with self.actor():
            self._feed(token_ids, table, shared * page_size, prompt_length, PREFILL_CHUNK, decoding=False)
            self._feed(token_ids, table, prompt_length, len(token_ids), OWN_PAST_CHUNK, decoding=True)
        return table

    def release(self, table: PageTable) -> None:
        """Give pages back."""
        while len(table):
            self.allocator.release(table.pop())

    def generate(
        self,
        stretches: Sequence[Stretch],
        schedule: SparsitySchedule,
        seed: int,
        temperature: float = 1.0,
        stop_token_ids: Sequence[int] = (),
        pasts: dict[int, PageTable] | None = None,
    ) -> list[np.ndarray]:
        """
        Generate the stretches with `schedule` and score them densely.

        Args:
            stretches (`list[Stretch]`): all of them run at the same time.
            schedule (`SparsitySchedule`): not dense, and of the layout that was given.
            pasts (`dict[int, PageTable]`, *optional*): of each text what [`own_past`] returned; by default the dense
                past.

        Returns:
            `list[np.ndarray]`: of each stretch the acceptance rates of its tokens, float64, as many as were drawn.
        """
        self.runner.schedule = schedule
        stops = set(stop_token_ids)
        branches = [self._branch(stretch, pasts, seed) for stretch in stretches]
        running = branches
        while running:
            in_block = running
            with self.actor():
                for _ in range(self._rows_at_once() // len(in_block) or 1):
                    self._decode(running, temperature)
                    running = [branch for branch in running if not branch.is_done(stops)]
                    if not running:
                        break
            self._score(in_block, temperature)
        for branch in branches:
            self.release(branch.sparse)
            self.release(branch.dense)
        return [np.array(branch.alphas) for branch in branches]

    def _decode(self, running: list[_Branch], temperature: float) -> None:
        """One sparse step: draw a token for each."""
        pieces = [Piece(b.sparse, b.stretch.start + len(b.tokens) - 1, b.tokens[-1:]) for b in running]
        logits = self.runner.run(pieces, range(len(pieces)), decoding=True)
        scaled = logits if temperature == 1.0 else logits / temperature
        uniforms = torch.tensor([b.uniforms[len(b.tokens) - 1] for b in running], dtype=torch.float64)
        weights = (scaled - scaled.amax(-1, keepdim=True)).exp_()
        drawn = inverse_cdf(weights, uniforms.to(self.device)).tolist()
        for branch, row, token in zip(running, logits, drawn, strict=True):
            branch.logits.append(row)
            branch.tokens.append(token)
        self.on_work(len(pieces) * DECODE_WORK)

    def _score(self, branches: list[_Branch], temperature: float) -> None:
        """Acceptance rates of a block of tokens: a dense forward of what the sparse model was fed, a few at a time."""
        limit, rows = self._rows_at_once(), 0
        group: list[_Branch] = []
        for branch in branches:
            if group and rows + len(branch.logits) > limit:
                self._score_group(group, temperature)
                group, rows = [], 0
            group.append(branch)
            rows += len(branch.logits)
        self._score_group(group, temperature)

    def _score_group(self, group: list[_Branch], temperature: float) -> None:
        pieces = []
        for branch in group:
            scored = len(branch.alphas)
            fed = branch.tokens[scored : scored + len(branch.logits)]
            pieces.append(Piece(branch.dense, branch.stretch.start + scored, fed))
        total = sum(len(piece.token_ids) for piece in pieces)
        dense = self.runner.run(pieces, range(total), decoding=False)
        for branch, rows in zip(group, dense.split([len(piece.token_ids) for piece in pieces]), strict=True):
            branch.alphas.extend(acceptance_rate(rows, torch.stack(branch.logits), temperature).tolist())
            branch.logits.clear()
        self.on_work(total * SCORE_WORK)

    def _rows_at_once(self) -> int:
        """Rows of logits that may be in memory."""
        row = 4 * self.model.get_input_embeddings().num_embeddings
        return max(1, LOGITS_BYTES.get(self.device.type, LOGITS_BYTES_ELSEWHERE) // row)

    def _branch(self, stretch: Stretch, pasts: dict[int, PageTable] | None, seed: int) -> _Branch:
        dense = self.pasts[stretch.text]
        return _Branch(
            stretch,
            self._fork(dense if pasts is None else pasts[stretch.text], stretch),
            self._fork(dense, stretch),
            random_stream(seed, stretch.stream, stretch.length),
            [self.texts[stretch.text][stretch.start]],
        )

    def _fork(self, past: PageTable, stretch: Stretch) -> PageTable:
        """A table that shares the full pages before the stretch, and has room for its tokens."""
        page_size = self.cache.page_size
        shared = stretch.start // page_size
        table = self._share(past, shared)
        self._allocate(table, -(-stretch.stop // page_size) - shared, new_run=True)
        if stretch.start % page_size:
            self.cache.copy_page(int(past.array[shared]), int(table.array[shared]))
        return table

    def _share(self, past: PageTable, count: int) -> PageTable:
        table = PageTable()
        for page in past.array[:count].tolist():
            self.allocator.share(page)
            table.append(page)
        return table

    def _allocate(self, table: PageTable, count: int, new_run: bool = False) -> None:
        for place in range(count):
            after = int(table.array[-1]) if len(table) and not (new_run and place == 0) else None
            table.append(self.allocator.allocate(after), new_run=new_run and place == 0)

    def _feed(self, token_ids, table: PageTable, first: int, stop: int, chunk: int, decoding: bool) -> None:
        for start in range(first, stop, chunk):
            end = min(start + chunk, stop)
            self.runner.run([Piece(table, start, token_ids[start:end])], [0], decoding)
            self.on_work((end - start) * (OWN_PAST_WORK if decoding else 1.0))
