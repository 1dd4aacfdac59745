"""One forward of the engine, seen from the attention layers: where keys go, and what queries attend to."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from sparrow_kernels import torch_ops

from ..sparsity import SparsitySchedule
from .cache import PagedKVCache, PageTable
from .reads import budgets_of, leaves_pages_out, selects_pages


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one sequence that a step feeds to the model."""

    table: PageTable  # has pages for all of them
    first: int  # position of the first one
    token_ids: list[int]

    @property
    def stop(self) -> int:
        return self.first + len(self.token_ids)


class PagedStep:
    """
    The attention state of one step (see [`~sparrow_trl.attention.AttentionState`]): new tokens of several sequences,
    packed one after the other. What the layers share (masks, page indices) is worked out once, when it is first needed.

    Args:
        cache (`PagedKVCache`): where keys and values go.
        schedule (`SparsitySchedule`): how many pages a decoding query keeps.
        pieces (`list[Piece]`): the tokens, in the order they are packed.
        decoding (`bool`): whether these are completion tokens (sparse by the schedule) or prompts (dense).
        work (`torch_ops.Workspace`): scratch memory.
        device (`torch.device`): the model's device.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        schedule: SparsitySchedule,
        pieces: SequenceOf[Piece],
        decoding: bool,
        work: torch_ops.Workspace,
        device: torch.device,
    ):
        self.cache, self.schedule, self.pieces, self.decoding = cache, schedule, pieces, decoding
        self.work, self.device = work, device
        page_size = cache.page_size
        positions, slots, full_pages = [], [], []
        for piece in pieces:
            span = np.arange(piece.first, piece.stop)
            pages = piece.table.array[span // page_size]
            offsets = span % page_size
            positions.append(span)
            slots.append(pages * page_size + offsets)
            full_pages.append(pages[offsets == page_size - 1])
        self.positions_host = np.concatenate(positions)
        self.positions = torch.from_numpy(self.positions_host).to(device)
        self.slots = torch.from_numpy(np.concatenate(slots)).to(device)
        full = np.concatenate(full_pages)
        self.full_pages = torch.from_numpy(full).to(device) if len(full) else None
        self.single = all(len(piece.token_ids) == 1 for piece in pieces)
        self._plans: dict = {}
        self.windows: dict[int, int | None] = {}
        self.prunes = decoding and leaves_pages_out(schedule, self.positions_host)

    def attend(self, layer, query, key, value, *, scaling, sliding_window, softcap):
        self.windows[layer] = sliding_window
        key_pages, value_pages, landmarks = self.cache.layer(layer, key, value)
        selects = selects_pages(self.schedule, layer, sliding_window)
        torch_ops.store_kv(
            key, value, self.slots, self.full_pages, key_pages, value_pages, landmarks if selects else None
        )
        query = query.to(key_pages.dtype)
        if selects and self.prunes:
            out = self._sparse(query, key_pages, value_pages, landmarks, scaling, softcap)
        else:
            out = self._exact(query, key_pages, value_pages, scaling, sliding_window, softcap)
        return out.to(value.dtype)

    def _plan(self, *key, make):
        """What `make` returns, made once a step and key."""
        if key not in self._plans:
            self._plans[key] = make()
        return self._plans[key]

    def page_table(self) -> torch.Tensor:
        """`(num_tokens, max_pages)` int64, the pages of each token's sequence."""

        def make():
            width = max(len(piece.table) for piece in self.pieces)
            table = np.zeros((len(self.positions_host), width), dtype=np.int64)
            row = 0
            for piece in self.pieces:
                count = len(piece.token_ids)
                table[row : row + count, : len(piece.table)] = piece.table.array
                row += count
            return torch.from_numpy(table).to(self.device)

        return self._plan("page_table", make=make)

    def _sparse(self, query, key_pages, value_pages, landmarks, scaling, softcap):
        plan = self._plan(
            "sparse",
            key_pages.shape[0],
            key_pages.dtype,
            make=lambda: torch_ops.plan_sparse(
                self.page_table(),
                self.positions,
                torch.from_numpy(budgets_of(self.schedule, self.positions_host)).to(self.device),
                page_size=self.cache.page_size,
                sink_pages=self.schedule.sink_pages,
                recent_pages=self.schedule.recent_pages,
                num_kv_heads=key_pages.shape[0],
                num_pages=key_pages.shape[1],
                dtype=key_pages.dtype,
            ),
        )
        rows = torch_ops.select_rows(query, landmarks, plan, self.work)
        return torch_ops.attend_rows(
            query, key_pages, value_pages, rows, plan.token_mask, self.work, scaling=scaling, softcap=softcap
        )

    def _exact(self, query, key_pages, value_pages, scaling, sliding_window, softcap):
        if not (self.decoding and self.single):
            return self._exact_pieces(query, key_pages, value_pages, scaling, sliding_window, softcap)
        whole = sliding_window is None or sliding_window > int(self.positions_host.max())
        if whole and softcap is None and query.device.type == "cpu":
            segments = self._plan("segments", make=self._make_segments)
            return torch_ops.attend_segments(query, key_pages, value_pages, segments, scaling=scaling)
        rows, mask = self._plan(
            "window",
            sliding_window,
            key_pages.shape[0],
            key_pages.dtype,
            make=lambda: torch_ops.plan_window(
                self.page_table(),
                self.positions,
                sliding_window,
                page_size=self.cache.page_size,
                num_kv_heads=key_pages.shape[0],
                num_pages=key_pages.shape[1],
                dtype=key_pages.dtype,
            ),
        )
        return torch_ops.attend_rows(
            query, key_pages, value_pages, rows, mask, self.work, scaling=scaling, softcap=softcap
        )

    def _make_segments(self) -> list[torch_ops.Segment]:
        page_size = self.cache.page_size
        return torch_ops.plan_segments([piece.table.token_runs(piece.stop, page_size) for piece in self.pieces])

    def _exact_pieces(self, query, key_pages, value_pages, scaling, sliding_window, softcap):
        """Dense attention, one sequence at a time: prompts, and several new tokens of a sequence at once."""
        outputs, start = [], 0
        for index, piece in enumerate(self.pieces):
            count = len(piece.token_ids)
            runs, pages, mask = self._plan(
                "piece", index, sliding_window, make=lambda piece=piece: self._plan_piece(piece, sliding_window)
            )
            keys = torch_ops.gather_run(key_pages, runs, pages, self.work, "keys")
            values = torch_ops.gather_run(value_pages, runs, pages, self.work, "values")
            out = torch_ops.masked_attention(
                query[start : start + count].transpose(0, 1)[None],
                keys[None],
                values[None],
                mask,
                scaling=scaling,
                softcap=softcap,
                is_causal=mask is None,
            )
            outputs.append(out[0].transpose(0, 1))
            start += count
        return torch.cat(outputs)

    def _plan_piece(self, piece: Piece, sliding_window: int | None):
        page_size = self.cache.page_size
        runs = piece.table.token_runs(piece.stop, page_size)
        num_pages = -(-piece.stop // page_size)
        pages = torch.from_numpy(piece.table.array[:num_pages]).to(self.device)
        mask = torch_ops.causal_mask(piece.first, len(piece.token_ids), piece.stop, sliding_window, self.device)
        return runs, pages, mask
