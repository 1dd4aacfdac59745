"""The loop of a rollout: admit, prefill, decode, sample. Here every step is planned and read on the host."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf

import torch
from tqdm.auto import tqdm

from .output import RolloutStats
from .runner import ModelRunner
from .sampler import Sampler
from .scheduler import Scheduler
from .sequence import Sequence
from .step import Piece


class HostLoop:
    """
    One rollout, from the first prompt to the last completion. Right for a CPU: a step is planned with numpy for exactly
    the sequences that run, and its tokens are looked at before the next one.

    Args:
        runner (`ModelRunner`): runs the model.
        scheduler (`Scheduler`): holds the sequences.
        sampler (`Sampler`): draws tokens.
        stats (`RolloutStats`): counts and times, added to.
        prefill_chunk_size (`int`): prompt tokens in one forward, at most.
        top_logprobs (`int`): how many of the most likely tokens to keep for the sequences that ask for them.
        bar (`tqdm`): progress, one step a finished sequence.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        sampler: Sampler,
        stats: RolloutStats,
        *,
        prefill_chunk_size: int,
        top_logprobs: int,
        bar: tqdm,
    ):
        self.runner, self.scheduler, self.sampler, self.stats = runner, scheduler, sampler, stats
        self.prefill_chunk_size, self.top_logprobs, self.bar = prefill_chunk_size, top_logprobs, bar
        self._stops = frozenset(sampler.stop_token_ids)

    def run(self) -> None:
        """Until every sequence has finished."""
        while not self.scheduler.is_done:
            admitted = self.scheduler.admit()
            if admitted:
                clock = time.perf_counter()
                self._prefill(admitted)
                self.stats.seconds_prefill += time.perf_counter() - clock
                fresh = [sequence for sequence in admitted if not sequence.completion_ids]
                if fresh:
                    self._sample(torch.stack([sequence.prompt.first_logits for sequence in fresh]), fresh)
            else:
                self._decode()

    def _prefill(self, admitted: list[Sequence]) -> None:
        """Compute the prompts that are not in the cache, several to a forward or one over several, and fork them."""
        queue = list(dict.fromkeys(s.prompt for s in admitted if not s.prompt.is_ready))
        while queue:
            pieces, ends, room = [], [], self.prefill_chunk_size
            for prompt in queue:
                if room == 0:
                    break
                token_ids = prompt.token_ids[prompt.num_cached : prompt.num_cached + room]
                pieces.append(Piece(prompt.table, prompt.num_cached, token_ids))
                room -= len(token_ids)
                prompt.num_cached += len(token_ids)
                if prompt.is_ready:
                    ends.append((prompt, self.prefill_chunk_size - room - 1))
            logits = self.runner.run(pieces, [place for _, place in ends] or [0], decoding=False)
            for (prompt, _), row in zip(ends, logits, strict=False):
                prompt.first_logits = row
            self.stats.prefill_tokens += self.prefill_chunk_size - room
            queue = [prompt for prompt in queue if not prompt.is_ready]
        for sequence in admitted:
            self.scheduler.fork(sequence)

    def _decode(self) -> None:
        """One step of every running sequence; a token for those that are not catching up."""
        clock = time.perf_counter()
        pieces = self.scheduler.decode_pieces()
        logits, decoded = self._feed(pieces, self.scheduler.running)
        self.stats.seconds_decode += time.perf_counter() - clock
        if decoded:
            self._sample(logits, decoded)

    def _feed(self, pieces: SequenceOf[Piece], sequences: SequenceOf[Sequence]) -> tuple[torch.Tensor, list[Sequence]]:
        """One forward over a piece of each sequence: logits, and the sequences whose next token they give."""
        keep, decoded, end = [], [], -1
        for piece, sequence in zip(pieces, sequences, strict=True):
            end += len(piece.token_ids)
            sequence.num_cached = piece.stop
            if piece.stop == sequence.num_tokens:
                keep.append(end)
                decoded.append(sequence)
            self.stats.recomputed_tokens += len(piece.token_ids) - (piece.stop == sequence.num_tokens)
        self.stats.decode_steps += 1
        return self.runner.run(pieces, keep or [0], decoding=True), decoded

    def _sample(self, logits: torch.Tensor, sequences: SequenceOf[Sequence]) -> None:
        clock = time.perf_counter()
        tokens, logprobs, top = self.sampler(logits, sequences, self.top_logprobs)
        for i, sequence in enumerate(sequences):
            self._accept(sequence, tokens[i : i + 1], logprobs[i : i + 1])
            if i in top:
                sequence.top_ids.append(top[i][0])
                sequence.top_logprobs.append(top[i][1])
        self.stats.seconds_sampling += time.perf_counter() - clock

    def _accept(self, sequence: Sequence, tokens: list[int], logprobs: list[float]) -> None:
        """Append sampled tokens; the last of them may finish the sequence."""
        sequence.completion_ids.extend(tokens)
        sequence.logprobs.extend(logprobs)
        self.stats.completion_tokens += len(tokens)
        if tokens[-1] in self._stops:
            sequence.finish_reason = "stop"
        elif len(sequence.completion_ids) >= sequence.max_new_tokens:
            sequence.finish_reason = "length"
        if sequence.finish_reason is not None:
            self.scheduler.finish(sequence)
            self.bar.update()
