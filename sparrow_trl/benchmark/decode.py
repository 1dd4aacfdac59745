"""
Decode steps side by side, from the same real state.

One prompt of real text is prefilled once. Its keys and values are then copied into pages of each sequence's own, and
into the cache that `generate` would have; so all sequences of the batch have the same past, none shares it, and each
gets another next token. A step does not change the state: every repetition is the same step.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ..rollout.cache import PagedKVCache, PageTable
from ..rollout.isolation import rollout_mode
from ..rollout.runner import ModelRunner
from ..rollout.step import Piece
from ..sparsity import SparsitySchedule
from .checks import Gate, teacher_forced
from .measure import Bandwidth, spread, timed, weight_bytes


PROMPT_TOKENS = 512  # where the pages of the prompt end, and those of the completion begin
PREFILL_CHUNK = 1024
CHECKED_TOKENS = 20  # decoded to check sparse attention: more than a page
CHECKED_ROWS = 4  # sequences of the batch that are compared with float32
CHECKED_CONTEXT = 2048  # longest context of that check


@dataclass
class Past:
    """Tokens, and their keys and values in every layer, in consecutive pages from 0."""

    token_ids: list[int]
    cache: PagedKVCache

    def keys_and_values(self, num_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each layer, `(1, num_kv_heads, num_tokens, head_dim)`."""
        pages = [self.cache.layers[layer][:2] for layer in sorted(self.cache.layers)]
        return [
            (keys.flatten(1, 2)[None, :, :num_tokens], values.flatten(1, 2)[None, :, :num_tokens])
            for keys, values in pages
        ]


def prefill(model: PreTrainedModel, token_ids: list[int], page_size: int) -> Past:
    """Feed a prompt in chunks, with dense attention."""
    num_pages = -(-len(token_ids) // page_size)
    past = Past(token_ids, PagedKVCache(num_pages, page_size))
    table = _consecutive(0, num_pages, num_pages)
    # A dense schedule would store no landmarks, nor would dense layers.
    runner = ModelRunner(model, SparsitySchedule.fixed(0, dense_layers=(), page_size=page_size), past.cache)
    with rollout_mode(model):
        for start in range(0, len(token_ids), PREFILL_CHUNK):
            runner.run([Piece(table, start, token_ids[start : start + PREFILL_CHUNK])], [0], decoding=False)
    return past


def lay_out(past: Past, lengths: list[int], room: int) -> tuple[PagedKVCache, list[PageTable]]:
    """
    Give sequences pages of their own, filled with the first `lengths[i]` tokens of the past, and room for more.

    Returns:
        The pool, and the page table of each sequence.
    """
    page_size = past.cache.page_size
    counts = [-(-(length + room) // page_size) for length in lengths]
    pool = PagedKVCache(sum(counts), page_size)
    tables, first = [], 0
    for count in counts:
        tables.append(_consecutive(first, count, PROMPT_TOKENS // page_size))
        first += count
    for index, (keys, values, landmarks) in past.cache.layers.items():
        layer = pool.layer(index, keys[:, 0].transpose(0, 1), values[:, 0].transpose(0, 1))
        for length, table in zip(lengths, tables, strict=True):
            filled, first = -(-length // page_size), int(table.array[0])
            for target, source in zip(layer, (keys, values, landmarks), strict=True):
                target[:, first : first + filled] = source[:, :filled]
    return pool, tables


def _consecutive(first: int, count: int, prompt_pages: int) -> PageTable:
    table = PageTable()
    for place in range(count):
        table.append(first + place, new_run=place == prompt_pages)
    return table


class GenerateStep:
    """The forward of one token a sequence, with the arguments and the cache that `generate` gives it."""

    def __init__(self, model: PreTrainedModel, past: Past, context: int, batch: int):
        self.model = model
        self.cache = DynamicCache(config=model.config)
        for layer, pair in enumerate(past.keys_and_values(context)):
            self.cache.update(*(tensor.to(model.dtype).expand(batch, -1, -1, -1) for tensor in pair), layer)
        names = inspect.signature(model.prepare_inputs_for_generation).parameters
        self._inputs = {"cache" if "cache" in names else "past_key_values": self.cache, "use_cache": True}
        self._inputs["attention_mask"] = torch.ones(batch, context + 1, dtype=torch.long, device=model.device)
        self._sliding = [(layer, vars(layer).copy()) for layer in self.cache.layers if layer.is_sliding]

    def mode(self) -> AbstractContextManager:
        return torch.no_grad()

    def __call__(self, tokens: list[int]) -> torch.Tensor:
        ids = torch.tensor(tokens, device=self.model.device)[:, None]
        inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=1, **self._inputs)
        return self.model(**inputs, return_dict=True).logits[:, -1].float()

    def rewind(self) -> None:
        """Forget the token of the last step. The cache stays a view of what the step allocated, as between two steps
        of `generate`, so that the next one allocates and frees just as much."""
        for layer in self.cache.layers:
            if not layer.is_sliding:
                layer.keys, layer.values = layer.keys[:, :, :-1], layer.values[:, :, :-1]
        for layer, state in self._sliding:
            vars(layer).update(state)


class EngineStep:
    """A decode step of the rollout engine."""

    def __init__(
        self,
        model: PreTrainedModel,
        schedule: SparsitySchedule,
        pool: PagedKVCache,
        tables: list[PageTable],
        contexts: list[int],
    ):
        self.model, self.tables, self.contexts = model, tables, contexts
        self.runner = ModelRunner(model, schedule, pool)
        self.kv_bytes = 0

    def mode(self) -> AbstractContextManager:
        return rollout_mode(self.model)

    def __call__(self, tokens: list[int]) -> torch.Tensor:
        before = self.runner.kv_bytes_read
        pieces = [
            Piece(table, context, [token])
            for table, context, token in zip(self.tables, self.contexts, tokens, strict=True)
        ]
        logits = self.runner.run(pieces, range(len(pieces)), decoding=True)
        self.kv_bytes = self.runner.kv_bytes_read - before
        return logits

    def rewind(self) -> None:
        """Nothing to do: the next step overwrites the slots that this one filled."""


Step = GenerateStep | EngineStep


def measure_steps(
    model: PreTrainedModel,
    exact_model: PreTrainedModel | None,
    past: Past,
    schedules: dict[str, SparsitySchedule],
    contexts: list[int],
    batch: int,
    repeats: int,
    warmup: int,
    gate: Gate,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """
    Time decode steps of all contenders at all contexts, one after the other in every repetition.

    Args:
        exact_model (`PreTrainedModel`, *optional*): the model in float32, where it is not in float32 itself.
        schedules (`dict[str, SparsitySchedule]`): of our contenders, by name; one of them is called `"dense"`.
        report (`Callable[[str], None]`): told what is going on, and the results once all checks have passed.

    Returns:
        `steps` (one entry a context and contender), `growth` (of a step, from the shortest context to longer ones) and
        `bandwidth`.

    Raises:
        CheckFailedError: where a step computes something wrong.
    """
    device = model.device
    # A second model on the same weights, which stays in the engine's mode while `generate` has the first.
    engine_model = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    tokens = [past.token_ids[(row * 37) % len(past.token_ids)] for row in range(batch)]
    steps: dict[tuple[int, str], Step] = {}
    exact: dict[int, torch.Tensor] = {}
    for context in contexts:
        report(f"copying the keys of {context:,} tokens for {batch} sequences")
        if exact_model is not None:
            exact[context] = _exact_logits(exact_model, past, context, tokens[:CHECKED_ROWS])
        steps[context, "generate"] = GenerateStep(model, past, context, batch)
        pool, tables = lay_out(past, [context] * batch, room=1)
        for name, schedule in schedules.items():
            steps[context, name] = EngineStep(engine_model, schedule, pool, tables, [context] * batch)

    bandwidth = Bandwidth(device)
    seconds: dict[tuple[int, str], list[float]] = {key: [] for key in steps}
    order = list(steps)
    with rollout_mode(engine_model, packed=True):
        for repetition in range(-warmup, repeats):
            report(f"decode steps: {'warm-up' if repetition < 0 else f'repetition {repetition + 1} of {repeats}'}")
            bandwidth.measure()
            results = {key: _run(steps[key], tokens, device) for key in order}
            order.append(order.pop(0))
            if repetition >= 0:
                for key, (elapsed, _) in results.items():
                    seconds[key].append(elapsed)
            if repetition in (-warmup, repeats - 1):
                for context in contexts:
                    found, expected = (results[context, name][1] for name in ("dense", "generate"))
                    _check_step(gate, context, found, expected, exact.get(context))

    copy_speed = bandwidth.summary()["copy"]
    weights = weight_bytes(model, batch)
    rows = []
    for (context, name), step in steps.items():
        # `generate` reads what our dense step reads.
        engine_step = step if isinstance(step, EngineStep) else steps[context, "dense"]
        assert isinstance(engine_step, EngineStep)
        kv_bytes = engine_step.kv_bytes
        floor = None if weights is None else (weights + kv_bytes) / copy_speed
        times = spread(seconds[context, name])
        rows.append(
            {
                "context": context,
                "batch": batch,
                "contender": name,
                **times,
                "tokens_per_second": batch / times["median"],
                "speedup": median(seconds[context, "generate"]) / times["median"],
                "weight_bytes": weights,
                "kv_bytes": kv_bytes,
                "floor_seconds": floor,
                "over_floor": None if floor is None else times["median"] / floor,
            }
        )
    for row in rows:  # all of them are checked
        report(
            f"a step at {row['context']:,} tokens, {row['contender']}: {1e3 * row['median']:,.0f} ms, "
            f"{row['speedup']:.2f}x generate"
        )
    return {"steps": rows, "growth": _growth(rows), "bandwidth": bandwidth.summary()}


def _run(step: Step, tokens: list[int], device: torch.device) -> tuple[float, torch.Tensor]:
    """Seconds and logits of one step."""
    with step.mode():
        result = timed(device, step, tokens)
    step.rewind()
    return result


def _exact_logits(exact_model: PreTrainedModel, past: Past, context: int, tokens: list[int]) -> torch.Tensor:
    step = GenerateStep(exact_model, past, context, len(tokens))
    with step.mode():
        return step(tokens)


def _check_step(
    gate: Gate, context: int, found: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor | None
) -> None:
    if exact is not None:
        found, expected, exact = found[: len(exact)], expected[: len(exact)], exact.log_softmax(-1)
    name = f"dense decode step at {context:,} tokens, against generate"
    gate.compare(name, found.log_softmax(-1), expected.log_softmax(-1), exact)


def _growth(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Time at each context over the time at the shortest."""
    shortest = min(row["context"] for row in rows)
    base = {row["contender"]: row["median"] for row in rows if row["context"] == shortest}
    return [
        {
            "contender": row["contender"],
            "context": row["context"],
            "shortest": shortest,
            "ratio": row["median"] / base[row["contender"]],
        }
        for row in rows
        if row["context"] != shortest
    ]


def check_sparse(
    model: PreTrainedModel,
    exact_model: PreTrainedModel | None,
    past: Past,
    name: str,
    schedule: SparsitySchedule,
    gate: Gate,
) -> None:
    """
    Decode real text with the schedule, and compare with the same tokens in one teacher-forced forward.

    Raises:
        CheckFailedError: where they differ.
    """
    label = f"decoding with {name}, against a teacher-forced forward"
    available = len(past.token_ids) - CHECKED_TOKENS - 1
    context = first_pruned(schedule, min(available, CHECKED_CONTEXT))
    if context is None:
        schedule, label = (
            replace(schedule, budgets=(4,)),
            f"{label} (with 4 pages: {name} leaves nothing out so early)",
        )
        context = first_pruned(schedule, available)
    if context is None:
        raise ValueError(
            f"A text of {len(past.token_ids)} tokens is too short to check sparse attention with pages of "
            f"{schedule.page_size}; use a longer --context."
        )
    lengths = [context, min(context + schedule.page_size // 2 + 1, available)]
    pool, tables = lay_out(past, lengths, room=CHECKED_TOKENS)
    runner = ModelRunner(model, schedule, pool)
    found = []
    with rollout_mode(model, packed=True):
        for place in range(CHECKED_TOKENS):
            pieces = [
                Piece(table, length + place, [past.token_ids[length + place]])
                for table, length in zip(tables, lengths, strict=True)
            ]
            found.append(runner.run(pieces, range(len(pieces)), decoding=True))

    def expected(reference: PreTrainedModel) -> torch.Tensor:
        # The first row belongs to the last token of the prompt, which was not fed here.
        rows = [
            teacher_forced(reference, schedule, past.token_ids[: length + CHECKED_TOKENS + 1], length)[1:]
            for length in lengths
        ]
        return torch.cat(rows).log_softmax(-1)

    decoded = torch.stack(found, dim=1).flatten(0, 1).log_softmax(-1)
    gate.compare(label, decoded, expected(model), None if exact_model is None else expected(exact_model))


def first_pruned(schedule: SparsitySchedule, longest: int) -> int | None:
    """The first full page at which the schedule leaves out a few pages, `None` if that is beyond `longest` tokens."""
    for context in range(0, longest + 1, schedule.page_size):
        candidates = context // schedule.page_size + 1 - schedule.sink_pages - schedule.recent_pages
        if candidates - schedule.budget_at(context) >= 4:
            return context
    return None
