"""The loop of a rollout on a device: bursts of decode steps that the host neither plans nor reads one by one."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from .backend import make_ops
from .buffers import DecodeBuffers
from .device_step import DecodeStep
from .graphs import GraphedStep
from .host_loop import HostLoop
from .reads import leaves_pages_out
from .runner import ModelRunner
from .sampler import Sampler, check_finite
from .sequence import Sequence
from .step import Piece


BURST_STEPS = 8  # decode steps between two looks at the device
COLUMNS = 64  # page tables are this wide, or a multiple: few widths, few variants of a kernel


def num_columns(max_pages: int) -> int:
    """Width of the page tables of sequences of up to `max_pages` pages."""
    return -(-max_pages // COLUMNS) * COLUMNS


@dataclass
class BurstResult:
    """What a burst has sampled, `(num_steps, num_sequences)` each and `(..., top_logprobs)` the last two."""

    tokens: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


class DecodeBurst:
    """
    Decodes several tokens of several sequences without a look at the device in between. On a CUDA device the steps are
    graphs, one for each number of rows (powers of two); on others they run as they are.

    Args:
        runner (`ModelRunner`): the model and its cache.
        sampler (`Sampler`): draws tokens.
        backend (`str`): `"torch"` or `"triton"`.
        max_pages (`int`): pages of a sequence, at most.
        max_rows (`int`): sequences, at most.
        max_steps (`int`): steps, at most.
        top_logprobs (`int`): how many of the most likely tokens to report when asked to.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        backend: str,
        *,
        max_pages: int,
        max_rows: int,
        max_steps: int,
        top_logprobs: int,
    ):
        self.runner, self.sampler, self.backend = runner, sampler, backend
        self.num_columns = num_columns(max_pages)
        self.max_rows, self.max_steps, self.top_logprobs = max_rows, max_steps, top_logprobs
        self._buffers: dict[int, DecodeBuffers] = {}
        self._steps: dict[tuple[int, bool, bool], GraphedStep] = {}
        is_cuda = runner.device.type == "cuda"
        self._memory_pool = torch.cuda.graph_pool_handle() if is_cuda else None

    def _bucket(self, num_sequences: int) -> int:
        """Rows for so many sequences: the next power of two."""
        return min(1 << (num_sequences - 1).bit_length(), self.max_rows)

    def _step(self, num_rows: int, prunes: bool, with_top: bool) -> GraphedStep:
        key = (num_rows, prunes, with_top)
        if key not in self._steps:
            runner = self.runner
            step = DecodeStep(
                runner.model,
                runner.cache,
                runner.schedule,
                self.sampler,
                make_ops(self.backend),
                self._buffers[num_rows],
                prunes=prunes,
                top_logprobs=self.top_logprobs if with_top else 0,
            )
            records = not any(made.has_failed for made in self._steps.values())  # nor would this one
            self._steps[key] = GraphedStep(step, runner.device, self._memory_pool, records)
        return self._steps[key]

    def __call__(self, sequences: SequenceOf[Sequence], num_steps: int, prunes: bool) -> BurstResult:
        """
        Decode.

        Args:
            sequences (`list[Sequence]`): each with one token to feed and pages for what it may feed.
            num_steps (`int`): steps, for each sequence until it finishes.
            prunes (`bool`): whether one of their queries may have more pages than it keeps.

        Returns:
            `BurstResult`: of all steps; what a sequence has after its last token has no meaning.
        """
        count = len(sequences)
        num_rows = self._bucket(count)
        if num_rows not in self._buffers:
            self._buffers[num_rows] = DecodeBuffers(
                num_rows, self.num_columns, self.max_steps, self.top_logprobs, self.runner.device
            )
        buffers = self._buffers[num_rows]
        with_top = bool(self.top_logprobs) and any(sequence.keep_top for sequence in sequences)
        buffers.load(sequences)
        step = self._step(num_rows, prunes, with_top)
        for _ in range(num_steps):
            step()
        results = (buffers.tokens, buffers.logprobs, buffers.top_ids, buffers.top_logprobs)
        return BurstResult(*(tensor[:num_steps, :count].cpu().numpy() for tensor in results))


class DeviceLoop(HostLoop):
    """
    The loop whose decode steps stay on the device. The host plans a burst ahead: pages for all its steps, the random
    numbers, the end of each sequence; sequences enter and leave between bursts. What is sampled is what [`HostLoop`]
    samples.

    Args:
        backend (`str`): `"torch"` or `"triton"`.
        others: see [`HostLoop`].
    """

    def __init__(self, *args, backend: str, **options):
        super().__init__(*args, **options)
        vocab_size = self.runner.model.config.get_text_config().vocab_size
        self.top_logprobs = min(self.top_logprobs, vocab_size)
        sequences = list(self.scheduler.waiting)
        pages = [self.scheduler.pages_for(len(s.prompt.token_ids) + s.max_new_tokens) for s in sequences]
        self.burst = DecodeBurst(
            self.runner,
            self.sampler,
            backend,
            max_pages=max(pages),
            max_rows=min(self.scheduler.max_num_seqs, len(sequences)),
            max_steps=BURST_STEPS,
            top_logprobs=self.top_logprobs,
        )

    def _decode(self) -> None:
        """A burst of the sequences that have caught up; one step of those that have not."""
        clock = time.perf_counter()
        steps = self.scheduler.reserve(self.burst.max_steps)
        behind = [sequence for sequence in self.scheduler.running if sequence.is_behind]
        ready = [sequence for sequence in self.scheduler.running if not sequence.is_behind]
        if behind:
            self._feed([Piece(s.table, s.num_cached, s.uncached(s.num_next(steps))) for s in behind], behind)
        if ready:
            self._run_burst(ready, steps)
        self.stats.seconds_decode += time.perf_counter() - clock

    def _run_burst(self, sequences: list[Sequence], steps: int) -> None:
        planned = [sequence.num_next(steps) for sequence in sequences]
        positions = [np.arange(s.num_cached, s.num_cached + n) for s, n in zip(sequences, planned, strict=True)]
        prunes = leaves_pages_out(self.runner.schedule, np.concatenate(positions))
        result = self.burst(sequences, max(planned), prunes)
        stopped = np.isin(result.tokens, self.sampler.stop_token_ids)
        fed = []
        for column, (sequence, most) in enumerate(zip(sequences, planned, strict=True)):
            stops = np.flatnonzero(stopped[:most, column])
            count = int(stops[0]) + 1 if len(stops) else most
            fed.append(positions[column][:count])
            logprobs = result.logprobs[:count, column].tolist()
            check_finite(logprobs, [sequence] * count)
            if sequence.keep_top and self.top_logprobs:
                sequence.top_ids.extend(result.top_ids[:count, column].tolist())
                sequence.top_logprobs.extend(result.top_logprobs[:count, column].tolist())
            sequence.num_cached += count
            self._accept(sequence, result.tokens[:count, column].tolist(), logprobs)
        self.stats.decode_steps += max(planned)
        runner = self.runner
        runner.reads.add(np.concatenate(fed), runner.schedule, runner.cache, runner.windows, prunes)
