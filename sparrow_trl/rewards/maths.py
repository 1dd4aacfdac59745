"""Rewards for mathematics: is the final answer the reference answer?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .shared import made_once
from .text import Completion, completion_text, final_text, last_boxed, opens_thinking
from .verifier import Comparison, MathVerifier


MOST_CHARACTERS = 4000
"""Of a boxed answer, and of the end of a text without a box, in which an answer is looked for."""


def extract_answer(completion: Completion, thinking_opened: bool = False) -> tuple[str, bool] | None:
    r"""
    The final answer of a completion.

    Args:
        completion (`str` or `list[dict]`): text, or messages.
        thinking_opened (`bool`, *optional*, defaults to `False`): whether the prompt opened the reasoning already.

    Returns:
        `tuple[str, bool]`: what stands in the last `\boxed{}` after the reasoning and `True`; without a box the text after
        the reasoning and `False`; `None` where the reasoning does not end, or nothing follows it.
    """
    text = final_text(completion_text(completion), thinking_opened)
    if text is None or not text.strip():
        return None
    boxed = last_boxed(text)
    while boxed is not None and (inner := last_boxed(boxed)) is not None:
        boxed = inner
    if boxed is None:
        return text[-MOST_CHARACTERS:], False
    return (boxed, True) if 0 < len(boxed) <= MOST_CHARACTERS else None


def grade_answers(
    completions: Sequence[Completion],
    solutions: Sequence[str],
    *,
    thinking_opened: Sequence[bool] | bool = False,
    require_boxed: bool = False,
    verifier: MathVerifier | None = None,
) -> list[Comparison]:
    """
    Compare the final answers of completions with reference answers.

    Args:
        completions (`list`): texts or messages.
        solutions (`list[str]`): reference answers; `None` is one that cannot be read.
        thinking_opened (`bool` or `list[bool]`, *optional*): whether the prompts opened the reasoning already.
        require_boxed (`bool`, *optional*, defaults to `False`): whether an answer without a box is wrong.
        verifier (`MathVerifier`, *optional*): by default one that the process shares.

    Returns:
        `list[Comparison]`: in the same order.
    """
    opened = [thinking_opened] * len(completions) if isinstance(thinking_opened, bool) else thinking_opened
    verifier = verifier or shared_verifier()
    pairs: list[tuple[str, str, bool]] = []
    for completion, solution, is_open in zip(completions, solutions, opened, strict=True):
        answer = extract_answer(completion, is_open)
        if answer is None or (require_boxed and not answer[1]):
            answer = ("", True)  # wrong, unless the reference cannot be read
        is_missing = solution is None or solution != solution  # NaN, as tables write it
        pairs.append(("" if is_missing else str(solution), *answer))
    unique = list(dict.fromkeys(pairs))
    compared = dict(zip(unique, verifier.compare_all(unique), strict=True))
    return [compared[pair] for pair in pairs]


class MathsReward:
    r"""
    Reward function for `GRPOTrainer`: 1 where the final answer equals the reference, 0 where it does not, and `None` (not
    counted) where the reference cannot be read.

    The last `\boxed{}` after the reasoning counts, and without one what math-verify finds there. A completion whose
    reasoning never ends gets 0. Comparisons run in processes of their own, within a limit of time; those that reach it
    get 0 and are counted in `verifier.timeouts` and the metric `maths_timeouts`.

    Args:
        solution_column (`str`, *optional*, defaults to `"solution"`):
            Column of the dataset with the reference answers.
        thinking_opened (`bool`, *optional*):
            Whether prompts end with `<think>`, as chat templates of reasoning models may have it (see
            `prefills_thinking`). By default that is seen from prompts that are texts.
        require_boxed (`bool`, *optional*, defaults to `False`): whether an answer without a box gets 0.
        timeout (`float`, *optional*, defaults to `5.0`): seconds for one comparison.
        workers (`int`, *optional*): worker processes; by default one a core, and no more than 8.
    """

    __name__ = "maths_reward"

    def __init__(
        self,
        solution_column: str = "solution",
        thinking_opened: bool | None = None,
        require_boxed: bool = False,
        timeout: float = 5.0,
        workers: int | None = None,
    ):
        self.solution_column, self.thinking_opened, self.require_boxed = (
            solution_column,
            thinking_opened,
            require_boxed,
        )
        self.verifier = MathVerifier(timeout, workers)

    def __call__(
        self,
        prompts: Sequence[Completion] | None = None,
        completions: Sequence[Completion] = (),
        log_extra: Callable[[str, list], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """
        Rewards of completions.

        Raises:
            KeyError: the dataset has no column with the reference answers.
        """
        if self.solution_column not in columns:
            raise KeyError(
                f"maths_reward needs the column {self.solution_column!r} of reference answers, and the dataset has "
                f"{sorted(name for name in columns if name != 'trainer_state')}. Rename one of them, or set "
                "MathsReward(solution_column=...)."
            )
        opened: bool | list[bool]
        if self.thinking_opened is None:
            opened = [opens_thinking(prompt) for prompt in prompts] if prompts else False
        else:
            opened = self.thinking_opened
        solutions = columns[self.solution_column]
        results = grade_answers(
            completions, solutions, thinking_opened=opened, require_boxed=self.require_boxed, verifier=self.verifier
        )
        if log_extra is not None:
            log_extra("maths_comparison", [f"{result.status} {result.detail}".strip() for result in results])
        if log_metric is not None:
            log_metric("maths_timeouts", float(sum(result.detail == "timeout" for result in results)))
        return [None if result.status == "unreadable" else float(result.status == "right") for result in results]


@made_once
def shared_verifier() -> MathVerifier:
    """The verifier that a process shares, made on first use."""
    return MathVerifier()


@made_once
def _default_reward() -> MathsReward:
    reward = MathsReward()
    reward.verifier = shared_verifier()
    return reward


def maths_reward(
    prompts: Sequence[Completion] | None = None, completions: Sequence[Completion] = (), **kwargs: Any
) -> list[float | None]:
    r"""
    `MathsReward` with its defaults, for `reward_funcs=maths_reward`.

    Example:

    ```python
    >>> maths_reward(completions=[r"\boxed{\frac{1}{2}}", r"\boxed{2}"], solution=["0.5", "0.5"])
    [1.0, 0.0]
    ```
    """
    return _default_reward()(prompts=prompts, completions=completions, **kwargs)
