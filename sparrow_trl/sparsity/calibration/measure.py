"""Measure a schedule on stretches of texts, a few texts at a time, and remember what was measured."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import PreTrainedModel

from ...rollout.isolation import rollout_mode
from ...rollout.packing import MOST_ROWS
from ...rollout.support import probe
from ..schedule import SparsitySchedule
from .stretches import Stretch, StretchSampler


STRETCHES_AT_ONCE = {"cpu": MOST_ROWS}  # more than so many rows miss the packed products
STRETCHES_AT_ONCE_ELSEWHERE = 128


def settings_key(settings: dict[str, Any]) -> str:
    """A short hash of settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


class Store:
    """
    Arrays on the disk, under the hash of all settings they depend on, so that an interrupted run goes on where it was.

    Args:
        folder (`Path`, *optional*): where; `None` keeps nothing.
        settings (`dict`): what the results depend on, as JSON holds it.
    """

    def __init__(self, folder: Path | None, settings: dict[str, Any]):
        self.folder = None if folder is None else folder / "partial" / settings_key(settings)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "settings.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")

    def load(self, name: Any) -> list[np.ndarray] | None:
        """What was saved under `name` (anything that JSON holds), or `None`."""
        path = self._path(name)
        if path is None or not path.is_file():
            return None
        with np.load(path) as arrays:
            return np.split(arrays["values"], np.cumsum(arrays["lengths"])[:-1])

    def save(self, name: Any, arrays: Sequence[np.ndarray]) -> None:
        """Save arrays of one dimension; at once or not at all."""
        path = self._path(name)
        if path is None:
            return
        unfinished = path.with_suffix(".tmp")
        with unfinished.open("wb") as file:
            np.savez(file, values=np.concatenate(arrays), lengths=np.array([len(array) for array in arrays]))
        unfinished.replace(path)

    def clear(self) -> None:
        """Remove all that was saved."""
        if self.folder is not None:
            shutil.rmtree(self.folder)

    def _path(self, name: Any) -> Path | None:
        digest = hashlib.sha256(json.dumps(name, sort_keys=True).encode()).hexdigest()[:16]
        return None if self.folder is None else self.folder / f"{digest}.npz"


class Measurer:
    """
    Acceptance rates of schedules on stretches of given texts.

    Args:
        model ([`~transformers.PreTrainedModel`]): the model; it is probed, and refused where the engine would be wrong.
        layout (`SparsitySchedule`): page size, forced pages and dense layers.
        texts (`list[list[int]]`): token ids.
        prompt_lengths (`list[int]`): how many of them are a prompt, which sparse pasts read densely.
        plans (`list[list[Stretch]]`): each lists stretches that may be measured at the same time; memory is planned
            for them.
        seed, temperature, stop_token_ids: of the sampling.
        store (`Store`): where results are kept.
        memory_fraction (`float`, *optional*, defaults to `0.5`): share of the free memory that pages may take.
        actor (`Callable`, *optional*): see [`StretchSampler`].
        on_work (`Callable`, *optional*): see [`StretchSampler`].

    Raises:
        UnsupportedModelError: for models that paged attention would run wrongly.
        ValueError: one text alone does not fit into memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layout: SparsitySchedule,
        texts: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        plans: Sequence[Sequence[Stretch]],
        *,
        seed: int,
        temperature: float,
        stop_token_ids: Sequence[int],
        store: Store,
        memory_fraction: float = 0.5,
        actor: Callable[[], AbstractContextManager] | None = None,
        on_work: Callable[[float], None] | None = None,
    ):
        self.model, self.layout, self.prompt_lengths, self.plans = model, layout, prompt_lengths, plans
        self.seed, self.temperature, self.stop_token_ids = seed, temperature, stop_token_ids
        self.store, self.actor, self.on_work = store, actor, on_work
        token_numel, page_numel, dtype = probe(model)
        self._token_bytes = (token_numel + page_numel / layout.page_size) * dtype.itemsize
        device = next(model.parameters()).device
        free = psutil.virtual_memory().available if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
        self._memory = free * memory_fraction
        self._samplers: dict[tuple[int, ...], StretchSampler] = {}
        ends = [0] * len(texts)
        for stretch in (stretch for plan in plans for stretch in plan):
            ends[stretch.text] = max(ends[stretch.text], stretch.start + 1)
        self.texts = [text[:end] for text, end in zip(texts, ends, strict=True)]  # what follows is not needed
        self._groups = self._make_groups(STRETCHES_AT_ONCE.get(device.type, STRETCHES_AT_ONCE_ELSEWHERE))

    def measure(
        self, schedule: SparsitySchedule, stretches: Sequence[Stretch], own_past: bool = False
    ) -> list[np.ndarray]:
        """
        Acceptance rates of each stretch.

        Args:
            schedule (`SparsitySchedule`): what decodes.
            own_past (`bool`, *optional*, defaults to `False`): whether the text behind the prompt was read with that
                schedule too, as in a rollout, or densely.
        """
        results: dict[Stretch, np.ndarray] = {}
        for texts in self._groups:
            group = [stretch for stretch in stretches if stretch.text in texts]
            if not group:
                continue
            name = [schedule.budgets, own_past, [(s.text, s.start, s.length, s.stream) for s in group]]
            found = self.store.load(name)
            if found is None:
                found = self._generate(schedule, texts, group, own_past)
                self.store.save(name, found)
            results.update(zip(group, found, strict=True))
        return [results[stretch] for stretch in stretches]

    def _make_groups(self, most: int) -> list[tuple[int, ...]]:
        """Texts that are read together: few enough stretches to run at the same time, and pages to fit into memory."""
        used = [text for text, token_ids in enumerate(self.texts) if token_ids]
        per_text = max(Counter(stretch.text for stretch in plan).most_common(1)[0][1] for plan in self.plans if plan)
        longest = max(map(len, self.texts))
        needed = 3 * longest * self._token_bytes
        if needed > self._memory:
            raise ValueError(
                f"Keys and values of a text of {longest:,} tokens take about {needed / 2**30:.1f} GiB, dense, sparse and "
                f"for what is generated, and {self._memory / 2**30:.1f} GiB may be used: lower --max-context."
            )
        size = max(1, min(most // per_text, int(self._memory / needed)))
        return [tuple(used[start : start + size]) for start in range(0, len(used), size)]

    def _generate(
        self, schedule: SparsitySchedule, texts: tuple[int, ...], group: list[Stretch], own_past: bool
    ) -> list[np.ndarray]:
        found: dict[Stretch, np.ndarray] = {}
        with rollout_mode(self.model, packed=True):
            sampler = self._sampler(texts)
            local = {text: place for place, text in enumerate(texts)}
            for members in self._together(group, own_past):
                moved = [replace(stretch, text=local[stretch.text]) for stretch in members]
                pasts = None
                if own_past:
                    [text] = {stretch.text for stretch in members}
                    stop = max(stretch.start for stretch in members) + 1
                    pasts = {local[text]: sampler.own_past(local[text], schedule, self.prompt_lengths[text], stop)}
                rates = sampler.generate(moved, schedule, self.seed, self.temperature, self.stop_token_ids, pasts)
                found.update(zip(members, rates, strict=True))
                for past in (pasts or {}).values():
                    sampler.release(past)
        return [found[stretch] for stretch in group]

    @staticmethod
    def _together(group: list[Stretch], own_past: bool) -> list[list[Stretch]]:
        """Stretches that are generated at the same time; with their own pasts those of a text, to hold one at a time."""
        if not own_past:
            return [group]
        return [[s for s in group if s.text == text] for text in sorted({stretch.text for stretch in group})]

    def _sampler(self, texts: tuple[int, ...]) -> StretchSampler:
        """Its texts are prefilled; kept for the next schedule where memory allows."""
        if texts in self._samplers:
            return self._samplers[texts]
        page_size = self.layout.page_size
        branch_pages = max(
            StretchSampler.pages_for([stretch for stretch in plan if stretch.text in texts], page_size)
            for plan in self.plans
        )
        own_past_pages = max(self._pages_of(text) for text in texts)
        kept = sum(sampler.cache.num_pages for sampler in self._samplers.values())
        wanted = sum(self._pages_of(text) for text in texts) + own_past_pages + branch_pages
        if (kept + wanted) * page_size * self._token_bytes > self._memory:
            self._samplers.clear()
        self._samplers[texts] = StretchSampler(
            self.model,
            self.layout,
            [self.texts[text] for text in texts],
            branch_pages,
            own_past_pages,
            self.actor,
            self.on_work,
        )
        return self._samplers[texts]

    def _pages_of(self, text: int) -> int:
        return -(-len(self.texts[text]) // self.layout.page_size)
