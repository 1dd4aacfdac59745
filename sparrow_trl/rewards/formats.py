"""Rewards for form: reasoning that is closed, an answer in a box, a length within bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .text import THINK_CLOSE, THINK_OPEN, Completion, completion_text, final_text, last_boxed, opens_thinking


class ThinkFormatReward:
    """
    Reward function: 1 where a completion reasons first, closes its reasoning once and then says something, else 0.

    TRL's `think_format_reward` wants the completion to start with `<think>`, and so never pays where the chat template
    has written that into the prompt already; this one takes both.

    Args:
        thinking_opened (`bool`, *optional*):
            Whether prompts end with `<think>` (see `prefills_thinking`). By default either form counts: texts as
            prompts are looked at, and where prompts are messages a completion may start with `<think>` or not.
    """

    __name__ = "think_format_reward"

    def __init__(self, thinking_opened: bool | None = None):
        self.thinking_opened = thinking_opened

    def __call__(
        self, prompts: Sequence[Completion] | None = None, completions: Sequence[Completion] = (), **kwargs: Any
    ) -> list[float | None]:
        """Rewards of completions."""
        given = prompts if prompts is not None else [""] * len(completions)
        return [
            float(self._is_well_formed(completion_text(completion), prompt))
            for prompt, completion in zip(given, completions, strict=True)
        ]

    def _is_well_formed(self, text: str, prompt: Completion) -> bool:
        starts = text.lstrip().startswith(THINK_OPEN)
        opened = self.thinking_opened
        if opened is None:
            opened = opens_thinking(prompt) or (not starts and not isinstance(prompt, str))
        if opened == starts:  # never opened, or twice
            return False
        reasoning, closed, answer = text.partition(THINK_CLOSE)
        reasoning = reasoning.strip().removeprefix(THINK_OPEN)
        tags = THINK_OPEN in reasoning or THINK_OPEN in answer or THINK_CLOSE in answer
        return bool(closed and reasoning.strip() and answer.strip()) and not tags


think_format_reward = ThinkFormatReward()
"""`ThinkFormatReward` with its defaults, for `reward_funcs=think_format_reward`."""


def boxed_format_reward(
    prompts: Sequence[Completion] | None = None, completions: Sequence[Completion] = (), **kwargs: Any
) -> list[float | None]:
    r"""Reward function: 1 where there is a `\boxed{}` that is not empty after the reasoning, else 0."""
    given = prompts if prompts is not None else [""] * len(completions)
    rewards: list[float | None] = []
    for prompt, completion in zip(given, completions, strict=True):
        text = final_text(completion_text(completion), opens_thinking(prompt))
        rewards.append(float(bool(text and last_boxed(text))))
    return rewards


def overlong_reward(max_completion_length: int, soft_tokens: int) -> Callable[..., list[float]]:
    """
    TRL's soft penalty for long completions (DAPO, equation 13), with its arguments checked.

    It is 0 up to `max_completion_length - soft_tokens` tokens, falls linearly to -1 at `max_completion_length`, and
    stays there.

    Args:
        max_completion_length (`int`): as in the trainer's config.
        soft_tokens (`int`): length of the slope, in tokens.

    Raises:
        ValueError: the slope is not within the length.
    """
    from trl.rewards import get_soft_overlong_punishment

    if not 0 < soft_tokens <= max_completion_length:
        raise ValueError(
            f"soft_tokens={soft_tokens} must be above 0 and at most max_completion_length={max_completion_length}."
        )
    return get_soft_overlong_punishment(max_completion_length, soft_tokens)
