"""One decode step on the device: nothing in it looks at a value, so that a CUDA graph can hold it."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..sparsity import SparsitySchedule
from .backend import DeviceOps
from .buffers import DecodeBuffers
from .cache import PagedKVCache
from .reads import selects_pages
from .sampler import Sampler


class DeviceAttention:
    """
    The attention state of a decode step (see [`~sparrow_trl.attention.AttentionState`]) over [`DecodeBuffers`].

    Args:
        cache (`PagedKVCache`): where keys and values go. Every layer has stored something before.
        schedule (`SparsitySchedule`): how many pages a query keeps.
        ops (`DeviceOps`): the operations.
        buffers (`DecodeBuffers`): positions and page tables.
        prunes (`bool`): whether a query may have more pages than it keeps.
    """

    def __init__(
        self, cache: PagedKVCache, schedule: SparsitySchedule, ops: DeviceOps, buffers: DecodeBuffers, prunes: bool
    ):
        self.cache, self.schedule, self.ops, self.prunes = cache, schedule, ops, prunes
        self.page_table, self.positions = buffers.page_table, buffers.positions
        page_size, width = cache.page_size, self.page_table.shape[1]
        if prunes:
            most = max(schedule.budgets) + schedule.sink_pages + schedule.recent_pages
            self.max_selected = min(most, width)
            self.budgets = schedule.budgets_at(self.positions)
        column = (self.positions // page_size).clamp(min=0)
        page = self.page_table.gather(1, column[:, None])[:, 0].long()
        self.slots = torch.where(self.positions < 0, -1, page * page_size + self.positions % page_size)

    def attend(self, layer, query, key, value, *, scaling, sliding_window, softcap):
        key_pages, value_pages, landmarks = self.cache.layer(layer, key, value)
        selects = selects_pages(self.schedule, layer, sliding_window)
        self.ops.store_kv(key, value, self.slots, key_pages, value_pages, landmarks if selects else None)
        query = query.to(key_pages.dtype)
        page_list = num_selected = None
        if selects and self.prunes:
            page_list, num_selected = self.ops.select_pages(
                query,
                landmarks,
                self.page_table,
                self.positions,
                self.budgets,
                page_size=self.cache.page_size,
                sink_pages=self.schedule.sink_pages,
                recent_pages=self.schedule.recent_pages,
                max_selected=self.max_selected,
            )
        out = self.ops.paged_attention(
            query,
            key_pages,
            value_pages,
            self.page_table,
            self.positions,
            page_list,
            num_selected,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
        )
        return out.to(value.dtype)


class DecodeStep:
    """
    Feeds one token of every row, samples the next one and moves the rows on. Call it as often as there are steps.

    Args:
        model ([`~transformers.PreTrainedModel`]): the model, in rollout mode.
        cache (`PagedKVCache`): where keys and values go.
        schedule (`SparsitySchedule`): sparsity.
        sampler (`Sampler`): draws tokens; one that looks at no history.
        ops (`DeviceOps`): the operations, with scratch memory of this step's own: a graph keeps its address.
        buffers (`DecodeBuffers`): input and output.
        prunes (`bool`): whether a query may have more pages than it keeps.
        top_logprobs (`int`): how many of the most likely tokens to report.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedKVCache,
        schedule: SparsitySchedule,
        sampler: Sampler,
        ops: DeviceOps,
        buffers: DecodeBuffers,
        *,
        prunes: bool,
        top_logprobs: int,
    ):
        self.model, self.cache, self.schedule, self.sampler = model, cache, schedule, sampler
        self.ops, self.buffers, self.prunes, self.top_logprobs = ops, buffers, prunes, top_logprobs
        self.stop_ids = torch.tensor(sampler.stop_token_ids, dtype=torch.int64, device=buffers.device)

    def __call__(self) -> None:
        buffers = self.buffers
        logits = self.model(
            input_ids=buffers.token_ids[None],
            position_ids=buffers.positions.clamp(min=0)[None],
            use_cache=False,
            sparrow=DeviceAttention(self.cache, self.schedule, self.ops, buffers, self.prunes),
        ).logits[0]
        uniforms = buffers.uniforms.index_select(0, buffers.step)[0]
        tokens, logprobs, top = self.sampler.draw(
            logits.float(), uniforms, self.top_logprobs, token_logprobs=self.ops.token_logprobs
        )
        buffers.advance(tokens, logprobs, top, self.stop_ids)
