"""
Stretches: short pieces generated with sparse attention from places inside long texts, and scored with dense attention.

They make long contexts cheap. A text is prefilled once, densely; sequences branch off it at places in every bin, share
its pages, and generate a stretch each. All budgets start from the same pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from ...rollout.cache import PageAllocator, PagedKVCache, PageTable
from ...rollout.runner import ModelRunner
from ...rollout.sampler import inverse_cdf
from ...rollout.sequence import random_stream
from ...rollout.step import Piece
from ..schedule import SparsitySchedule


PREFILL_CHUNK = 1024
OWN_PAST_CHUNK = 256  # tokens of a sparse past in one forward
LOGITS_BYTES = {"cpu": 512 << 20}  # sparse logits that wait for the dense ones, and as much for those
LOGITS_BYTES_ELSEWHERE = 2 << 30


@dataclass(frozen=True)
class Stretch:
    """
    Where tokens are generated.

    Attributes:
        text (`int`): index of the text.
        first (`int`): position of the first generated token: the text is read up to there.
        length (`int`): tokens to generate.
        stream (`int`): number of its random stream. Stretches of different budgets share them, so that their
            difference is that of the budgets.
    """

    text: int
    first: int
    length: int
    stream: int


@dataclass
class _Branch:
    stretch: Stretch
    sparse: PageTable
    dense: PageTable
    uniforms: np.ndarray
    last_token: int
    alphas: list[float] = field(default_factory=list)
    is_done: bool = False


class StretchSampler:
    """
    Texts in a paged cache, and stretches that branch off them. To be used inside
    [`~sparrow_trl.rollout.isolation.rollout_mode`].

    Args:
        model ([`~transformers.PreTrainedModel`]): the model.
        layout (`SparsitySchedule`): page size, forced pages and dense layers; its budgets are not used.
        texts (`list[list[int]]`): token ids; they are prefilled now.
        branch_pages (`int`): pages for all stretches that are generated at the same time, see [`pages_for`].
        on_tokens (`Callable`, *optional*): told how many tokens went through the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layout: SparsitySchedule,
        texts: Sequence[Sequence[int]],
        branch_pages: int,
        on_tokens: Callable[[int], None] | None = None,
    ):
        self.model, self.layout, self.texts = model, layout, [list(text) for text in texts]
        page_size = layout.page_size
        text_pages = sum(-(-len(text) // page_size) for text in texts)
        self.cache = PagedKVCache(2 * text_pages + branch_pages, page_size)
        self.allocator = PageAllocator(self.cache.num_pages)
        self.runner = ModelRunner(model, layout, self.cache)
        self.device = self.runner.device
        self.on_tokens = on_tokens or (lambda count: None)
        self.pasts = [self._allocate(PageTable(), -(-len(text) // page_size)) for text in self.texts]
        for text, table in zip(self.texts, self.pasts, strict=True):
            self._feed(text, table, 0, len(text), PREFILL_CHUNK, decoding=False)

    @staticmethod
    def pages_for(stretches: Sequence[Stretch], page_size: int) -> int:
        """Pages that hold the tokens of these stretches, sparse and dense."""
        return sum(
            2 * (-(-(stretch.first + stretch.length) // page_size) - (stretch.first - 1) // page_size)
            for stretch in stretches
        )

    def _allocate(self, table: PageTable, count: int) -> PageTable:
        for _ in range(count):
            table.append(self.allocator.allocate(int(table.array[-1]) if len(table) else None))
        return table

    def _release(self, table: PageTable) -> None:
        while len(table):
            self.allocator.release(table.pop())

    def _feed(self, text, table, first: int, stop: int, chunk: int, decoding: bool) -> None:
        for start in range(first, stop, chunk):
            end = min(start + chunk, stop)
            self.runner.run([Piece(table, start, text[start:end])], [0], decoding)
            self.on_tokens(end - start)

    def own_pasts(self, schedule: SparsitySchedule, prompt_lengths: Sequence[int]) -> list[PageTable]:
        """
        The texts once more, as if their first `prompt_lengths[i]` tokens were a prompt and the rest had been decoded
        with `schedule`: errors of sparse attention then carry over from bin to bin, as in a rollout.
        """
        self.runner.schedule = schedule
        page_size = self.cache.page_size
        tables = []
        for text, prompt_length, past in zip(self.texts, prompt_lengths, self.pasts, strict=True):
            table = PageTable()
            shared = min(prompt_length, len(text)) // page_size
            for page in past.array[:shared].tolist():
                self.allocator.share(page)
                table.append(page)
            self._allocate(table, len(past) - shared)
            self._feed(text, table, shared * page_size, prompt_length, PREFILL_CHUNK, decoding=False)
            self._feed(text, table, prompt_length, len(text), OWN_PAST_CHUNK, decoding=True)
            tables.append(table)
        return tables

    def generate(
        self,
        stretches: Sequence[Stretch],
        schedule: SparsitySchedule,
        seed: int,
        temperature: float,
        stop_token_ids: Sequence[int] = (),
        pasts: Sequence[PageTable] | None = None,
    ) -> list[np.ndarray]:
        """
        Generate the stretches with `schedule` and score them densely.

        Args:
            stretches (`list[Stretch]`): all of them run at the same time.
            pasts (`list[PageTable]`, *optional*): what [`own_pasts`] returned; by default the dense past.

        Returns:
            `list[np.ndarray]`: of each stretch the acceptance rates of its tokens, float64, as many as were generated.
        """
        self.runner.schedule = schedule
        branches = [self._branch(stretch, self.pasts if pasts is None else pasts, seed) for stretch in stretches]
        stops = set(stop_token_ids)
        block = self._block(len(branches))
        fed: dict[int, list[int]] = {}
        running = branches
        done = 0
        while running:
            fed = {id(branch): [] for branch in running}
            started = {id(branch): branch.stretch.first - 1 + len(branch.alphas) for branch in running}
            sparse_logits: dict[int, list[torch.Tensor]] = {id(branch): [] for branch in running}
            in_block = running
            for _ in range(block):
                if not running:
                    break
                pieces = []
                for branch in running:
                    tokens = fed[id(branch)]
                    tokens.append(branch.last_token)
                    pieces.append(Piece(branch.sparse, started[id(branch)] + len(tokens) - 1, [branch.last_token]))
                logits = self.runner.run(pieces, range(len(pieces)), decoding=True)
                if temperature != 1.0:
                    logits = logits / temperature
                uniforms = torch.tensor(
                    [b.uniforms[started[id(b)] + len(fed[id(b)]) - b.stretch.first] for b in running],
                    dtype=torch.float64,
                    device=self.device,
                )
                weights = (logits - logits.amax(-1, keepdim=True)).exp_()
                drawn = inverse_cdf(weights, uniforms).tolist()
                for branch, row, token in zip(running, logits, drawn, strict=True):
                    sparse_logits[id(branch)].append(row)
                    branch.last_token = token
                    count = started[id(branch)] + len(fed[id(branch)]) - branch.stretch.first + 1
                    branch.is_done = token in stops or count >= branch.stretch.length
                running = [branch for branch in running if not branch.is_done]
                self.on_tokens(len(pieces))
            self._score(in_block, fed, started, sparse_logits, temperature)
            done += block
        for branch in branches:
            self._release(branch.sparse)
            self._release(branch.dense)
        return [np.array(branch.alphas) for branch in branches]

    def _block(self, num_branches: int) -> int:
        """Tokens that are generated before they are scored."""
        limit = LOGITS_BYTES.get(self.device.type, LOGITS_BYTES_ELSEWHERE)
        row = 4 * self.model.get_input_embeddings().num_embeddings
        return max(1, limit // (row * num_branches))

    def _branch(self, stretch: Stretch, pasts: Sequence[PageTable], seed: int) -> _Branch:
        fed = stretch.first - 1  # the text's last token is the first to be decoded
        return _Branch(
            stretch,
            self._fork(pasts[stretch.text], fed, stretch.length),
            self._fork(self.pasts[stretch.text], fed, stretch.length),
            random_stream(seed, stretch.stream, stretch.length),
            self.texts[stretch.text][fed],
        )

    def _fork(self, past: PageTable, position: int, length: int) -> PageTable:
        """A table that shares the full pages before `position`, and has room for `length` tokens from there on."""
        page_size = self.cache.page_size
        table = PageTable()
        shared = position // page_size
        for page in past.array[:shared].tolist():
            self.allocator.share(page)
            table.append(page)
        own = -(-(position + length) // page_size) - shared
        for place in range(own):
            table.append(self.allocator.allocate(int(table.array[-1]) if place else None), new_run=place == 0)
        if position % page_size:
            self.cache.copy_page(int(past.array[shared]), int(table.array[shared]))
        return table

    def _score(self, branches, fed, started, sparse_logits, temperature: float) -> None:
        """Acceptance rates of a block of tokens: a dense forward of what the sparse model was fed, chunk by chunk."""
        rows = max(1, self._block(1))
        group: list[_Branch] = []
        for branch in branches:
            group.append(branch)
            if branch is branches[-1] or sum(len(fed[id(b)]) for b in [*group, branch]) > rows:
                pieces = [Piece(b.dense, started[id(b)], fed[id(b)]) for b in group]
                total = sum(len(piece.token_ids) for piece in pieces)
                dense = self.runner.run(pieces, range(total), decoding=False)
                start = 0
                for b in group:
                    mine = dense[start : start + len(fed[id(b)])] / temperature
                    start += len(fed[id(b)])
                    sparse = torch.stack(sparse_logits.pop(id(b)))
                    b.alphas.extend(torch.minimum(mine.softmax(-1), sparse.softmax(-1)).sum(-1).tolist())
                self.on_tokens(total)
                group = []
