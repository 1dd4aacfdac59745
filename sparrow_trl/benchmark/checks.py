"""
The red gate of the benchmarks: no speed is printed of a computation that came out wrong.

In float32 two correct computations differ by rounding only, and the limit is absolute. In half precision their rounding
is as large as what a small mistake changes, so both sides are compared with the same computation in float32, from the
same weights, keys and values. Two correct ones lie about equally far from it (over several queries; for a single one
chance decides), so ours may lie up to twice as far.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..attention import TeacherForced
from ..rollout.isolation import rollout_mode
from ..sparsity import SparsitySchedule


FLOAT32_LIMIT = 1e-3  # largest difference of a log-probability
HALF_LIMIT = 2.0  # distance from float32, over that of the other side


@dataclass(frozen=True)
class Check:
    """One comparison: `value` must not be above `limit`."""

    name: str
    measure: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        """Also false where the value is not a number."""
        return self.value <= self.limit

    def __str__(self) -> str:
        return f"{self.name}: {self.measure} {self.value:.3g}, limit {self.limit:g}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


class CheckFailedError(Exception):
    """A result is wrong; the message says which, and by how much."""


class Gate:
    """Collects checks, and raises at the first that fails."""

    def __init__(self) -> None:
        self.checks: list[Check] = []

    def compare(
        self, name: str, found: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor | None = None
    ) -> None:
        """
        Check log-probabilities of ours against those of the other side.

        Args:
            found, expected (`torch.Tensor`): log-probabilities of the same shape.
            exact (`torch.Tensor`, *optional*): the same in float32; without, `found` and `expected` are in float32.

        Raises:
            CheckFailedError: where they are too far apart.
        """
        if exact is None:
            value = (found.double() - expected.double()).abs().max().item()
            self.add(Check(name, "largest difference of log-probabilities", value, FLOAT32_LIMIT))
        else:
            ours, theirs = ((side.double() - exact.double()).norm().item() for side in (found, expected))
            value = ours / theirs if theirs > 0 else (0.0 if ours == 0 else float("inf"))
            self.add(Check(name, "distance from float32, over the other side's", value, HALF_LIMIT))

    def equal(self, name: str, found: list[int], expected: list[int]) -> None:
        """Check counts, which have to be equal."""
        different = sum(a != b for a, b in zip(found, expected, strict=True))
        self.add(Check(name, "entries that differ", float(different), 0.0))

    def add(self, check: Check) -> None:
        """Keep a check that passed."""
        if not check.passed:
            raise CheckFailedError(str(check))
        self.checks.append(check)


def teacher_forced(
    model: PreTrainedModel, schedule: SparsitySchedule, token_ids: list[int], prompt_length: int
) -> torch.Tensor:
    """
    Logits from which decoding would have drawn the tokens after the prompt, in one forward: the model's own where the
    schedule is dense, else with sparse attention by the schedule.

    Returns:
        `torch.Tensor`: `(len(token_ids) - prompt_length, vocab_size)` float32.
    """
    ids = torch.tensor([token_ids], device=next(model.parameters()).device)
    if schedule.is_dense:
        with rollout_mode(model, attention=None):
            logits = model(input_ids=ids, use_cache=False).logits
    else:
        state = TeacherForced(schedule, [len(token_ids)], [prompt_length])
        positions = torch.arange(len(token_ids), device=ids.device)[None]
        with rollout_mode(model):
            logits = model(input_ids=ids, position_ids=positions, use_cache=False, sparrow=state).logits
    return logits[0, prompt_length - 1 : -1].float()


def token_logprobs(logits: torch.Tensor, token_ids: list[int]) -> torch.Tensor:
    """Log-probability of each token under the logits at its place."""
    tokens = torch.tensor(token_ids, device=logits.device)
    return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
