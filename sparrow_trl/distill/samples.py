"""What the LoRA learns from: sampled tokens with everything before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class Sample:
    """
    Consecutive tokens that the sparse actor sampled, and what it had read before (densely).

    Attributes:
        context_ids (`list[int]`): prompt; in later turns also earlier completions and the results of tools.
        sampled_ids (`list[int]`): the sampled tokens.
        actor_logprobs (`torch.Tensor`): float32, one number per sampled token, when it was sampled.
        advantage (`float`): of the completion.
        teacher_logprobs (`torch.Tensor`, *optional*): of the same tokens under the dense policy.
    """

    context_ids: list[int]
    sampled_ids: list[int]
    actor_logprobs: torch.Tensor
    advantage: float = 0.0
    teacher_logprobs: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.context_ids) + len(self.sampled_ids)


def samples_of(
    prompt_ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    completion_ids: torch.Tensor,
    mask: torch.Tensor,
    advantages: torch.Tensor,
    actor_logprobs: torch.Tensor,
    teacher_logprobs: torch.Tensor | None = None,
) -> list[Sample]:
    """
    The samples of a padded batch of B sequences, for the shapes see [`~sparrow_trl.trl_seams.ScoredRollout`].

    A completion with the results of tools in it is sampled turn by turn, and each turn begins with a dense prefill of
    all before it. So it gives one sample for each run of tokens that count; one without such a token gives none. A
    token without a log-probability of the actor (NaN) does not count.
    """
    samples = []
    for row in range(len(mask)):
        prompt = prompt_ids[row][prompt_mask[row].bool()].tolist()
        completion = completion_ids[row].tolist()
        counts = mask[row].bool() & actor_logprobs[row].isfinite()
        for start, stop in _runs(counts.tolist()):
            samples.append(
                Sample(
                    context_ids=prompt + completion[:start],
                    sampled_ids=completion[start:stop],
                    actor_logprobs=actor_logprobs[row, start:stop].detach().float().cpu(),
                    advantage=float(advantages[row]),
                    teacher_logprobs=None
                    if teacher_logprobs is None
                    else teacher_logprobs[row, start:stop].detach().float().cpu(),
                )
            )
    return samples


def _runs(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Start and stop of each run of true values."""
    runs, start = [], None
    for index, flag in enumerate([*flags, False]):
        if flag and start is None:
            start = index
        elif not flag and start is not None:
            runs.append((start, index))
            start = None
    return runs


def within_tokens(samples: Sequence[Sample], limit: int | None, generator: torch.Generator) -> list[Sample]:
    """The samples in random order, as many as have at most `limit` tokens together, but at least one."""
    order = torch.randperm(len(samples), generator=generator).tolist()
    chosen: list[Sample] = []
    total = 0
    for index in order:
        total += len(samples[index])
        if chosen and limit is not None and total > limit:
            break
        chosen.append(samples[index])
    return chosen


def micro_batches(samples: Sequence[Sample], most_tokens: int) -> list[list[Sample]]:
    """Consecutive samples with at most `most_tokens` tokens together; a longer sample is alone."""
    batches: list[list[Sample]] = []
    total = 0
    for sample in samples:
        total += len(sample)
        if not batches or total > most_tokens:
            batches.append([])
            total = len(sample)
        batches[-1].append(sample)
    return batches
