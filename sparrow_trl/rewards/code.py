"""Rewards for code: does the program pass its tests?"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..environment import usable_cores
from .code_tests import Tests, Verdict, parse_tests, run_tests
from .sandbox import Limits, Sandbox
from .shared import made_once
from .text import Completion, completion_text, final_text, last_code_block, opens_thinking


TestsLike = Tests | Mapping[str, Any] | str | None


def extract_code(completion: Completion, thinking_opened: bool = False) -> str | None:
    """
    The program of a completion: its last fenced block of Python after the reasoning.

    Args:
        completion (`str` or `list[dict]`): text, or messages.
        thinking_opened (`bool`, *optional*, defaults to `False`): whether the prompt opened the reasoning already.

    Returns:
        `str`: Python source; `None` where there is no such block, or the reasoning does not end.
    """
    text = final_text(completion_text(completion), thinking_opened)
    return None if text is None else last_code_block(text)


def run_programs(
    programs: Sequence[str | None],
    tests: Sequence[Tests | None],
    *,
    sandbox: Sandbox | None = None,
    limits: Limits | None = None,
    workers: int | None = None,
    max_tests: int | None = None,
    stop_early: bool = True,
) -> list[Verdict | None]:
    """
    Run programs against their tests, in parallel. Equal programs with equal tests run once.

    Args:
        programs (`list[str | None]`): Python sources; `None` is a program that fails.
        tests (`list[Tests | None]`): the tests of each; `None` where there are none.
        sandbox (`Sandbox`, *optional*): by default one that the process shares.
        limits (`Limits`, *optional*): for each child process; by default those of the sandbox.
        workers (`int`, *optional*): programs at a time; by default one a core, and no more than 16.
        max_tests (`int`, *optional*): run the first so many tests of each only.
        stop_early (`bool`, *optional*, defaults to `True`): whether the first failure ends the tests of a program.

    Returns:
        `list[Verdict | None]`: in the same order; `None` where there are no tests.

    Raises:
        SandboxUnavailableError: programs cannot be isolated on this machine. Nothing has run then.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers} must be at least 1.")
    if max_tests is not None and max_tests < 1:
        raise ValueError(f"max_tests={max_tests} must be at least 1.")
    sandbox = sandbox or shared_sandbox()
    keys = [(program, pickle.dumps(test)) for program, test in zip(programs, tests, strict=True)]
    jobs = {
        key: (program, test)
        for key, program, test in zip(keys, programs, tests, strict=True)
        if program is not None and test is not None
    }

    def run(job: tuple[str, Tests]) -> Verdict:
        return run_tests(sandbox, *job, limits=limits, max_tests=max_tests, stop_early=stop_early)

    verdicts: dict[Any, Verdict] = {}
    if jobs:
        sandbox.isolation  # noqa: B018 - refuses before any thread starts
        with ThreadPoolExecutor(min(len(jobs), workers or min(16, usable_cores()))) as pool:
            verdicts = dict(zip(jobs, pool.map(run, jobs.values()), strict=True))
    results: list[Verdict | None] = []
    for key, program, test in zip(keys, programs, tests, strict=True):
        if test is None:
            results.append(None)
        elif program is None:
            results.append(Verdict(0, len(test) if max_tests is None else min(max_tests, len(test)), "no program"))
        else:
            results.append(verdicts[key])
    return results


class CodeReward:
    """
    Reward function for `GRPOTrainer`: 1 where the program passes all its tests, else 0, and `None` (not counted) where
    there are no tests.

    The program is the last fenced block of Python after the reasoning. It runs in sandboxed child processes, several at a
    time: see `Sandbox`. Nothing that it does makes a test pass but right answers, since neither the tests nor the
    expected answers are in its process. Tests that ended at the limit of time are counted in the metric
    `code_timeouts`.

    Args:
        tests_column (`str`, *optional*, defaults to `"tests"`): column of the dataset with the tests: see `parse_tests`.
        limits (`Limits`, *optional*): what a program may use in each test.
        partial (`bool`, *optional*, defaults to `False`): whether the reward is the share of tests passed.
        max_tests (`int`, *optional*): run the first so many tests of a problem only.
        workers (`int`, *optional*): programs at a time; by default one a core, and no more than 16.
        isolation (`str`, *optional*, defaults to `"auto"`): see `Sandbox`.
        thinking_opened (`bool`, *optional*): whether prompts end with `<think>`; by default seen from text prompts.
        import_paths (`Sequence[str]`, *optional*): folders of packages that programs may import.
    """

    __name__ = "code_reward"

    def __init__(
        self,
        tests_column: str = "tests",
        limits: Limits | None = None,
        partial: bool = False,
        max_tests: int | None = None,
        workers: int | None = None,
        isolation: str = "auto",
        thinking_opened: bool | None = None,
        import_paths: Sequence[str] = (),
    ):
        for name, value in (("max_tests", max_tests), ("workers", workers)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        self.tests_column, self.partial, self.max_tests, self.workers = tests_column, partial, max_tests, workers
        self.thinking_opened = thinking_opened
        self.sandbox = Sandbox(limits, isolation, import_paths)

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
            KeyError: the dataset has no column with the tests.
            ValueError: tests that cannot be read.
            SandboxUnavailableError: programs cannot be isolated on this machine.
        """
        if self.tests_column not in columns:
            raise KeyError(
                f"code_reward needs the column {self.tests_column!r} of tests, and the dataset has "
                f"{sorted(name for name in columns if name != 'trainer_state')}. Rename one of them, or set "
                "CodeReward(tests_column=...)."
            )
        given = prompts if prompts is not None else [""] * len(completions)
        programs = []
        for prompt, completion in zip(given, completions, strict=True):
            opened = opens_thinking(prompt) if self.thinking_opened is None else self.thinking_opened
            programs.append(extract_code(completion, opened))
        verdicts = run_programs(
            programs,
            [_parse(value) for value in columns[self.tests_column]],
            sandbox=self.sandbox,
            workers=self.workers,
            max_tests=self.max_tests,
            stop_early=not self.partial,
        )
        if log_extra is not None:
            log_extra("code_tests", [_said(verdict) for verdict in verdicts])
        if log_metric is not None:
            log_metric("code_timeouts", float(sum(verdict.timeouts for verdict in verdicts if verdict)))
        return [
            None if verdict is None else verdict.passed / verdict.total if self.partial else float(verdict.ok)
            for verdict in verdicts
        ]


def _parse(value: TestsLike) -> Tests | None:
    return None if value is None else parse_tests(value)


def _said(verdict: Verdict | None) -> str:
    if verdict is None:
        return "no tests"
    return f"{verdict.passed} of {verdict.total} passed. {verdict.message}".strip()


@made_once
def shared_sandbox() -> Sandbox:
    """The sandbox that a process shares, made on first use."""
    return Sandbox()


@made_once
def _default_reward() -> CodeReward:
    reward = CodeReward()
    reward.sandbox = shared_sandbox()
    return reward


def code_reward(
    prompts: Sequence[Completion] | None = None, completions: Sequence[Completion] = (), **kwargs: Any
) -> list[float | None]:
    """
    `CodeReward` with its defaults, for `reward_funcs=code_reward`.

    Example:

    ```python
    >>> program = "```python\\nprint(int(input()) * 2)\\n```"
    >>> code_reward(completions=[program], tests=['{"inputs": ["4"], "outputs": ["8"]}'])
    [1.0]
    ```
    """
    return _default_reward()(prompts=prompts, completions=completions, **kwargs)
