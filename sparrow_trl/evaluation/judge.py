"""Judging completions of a benchmark: by the reference answer, or by the tests of a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..rewards.code import extract_code, run_programs
from ..rewards.maths import extract_answer, grade_answers
from ..rewards.maths_worker import plain
from ..rewards.sandbox import Limits, Sandbox
from .benchmarks import Benchmark
from .problems import Problem


@dataclass(frozen=True)
class Judgement:
    """
    Args:
        right (`bool`, *optional*): `None` where the reference could not be read.
        exact (`bool`, *optional*): for maths, whether the answer is the reference as a text, but for fonts and space: a
            second opinion that uses nothing of what computes rewards.
        detail (`str`): what happened.
        timed_out (`bool`): whether the judgement ran into its limit of time.
    """

    right: bool | None
    exact: bool | None = None
    detail: str = ""
    timed_out: bool = False


def judge(
    benchmark: Benchmark,
    problems: Sequence[Problem],
    texts: Sequence[str],
    thinking_opened: Sequence[bool] | bool = False,
) -> list[Judgement]:
    """
    Judge completions.

    Args:
        benchmark (`Benchmark`): what they answer.
        problems (`list[Problem]`): the problem of each completion.
        texts (`list[str]`): completions.
        thinking_opened (`bool` or `list[bool]`, *optional*): whether the prompts opened the reasoning already.
    """
    opened = [thinking_opened] * len(texts) if isinstance(thinking_opened, bool) else list(thinking_opened)
    if benchmark.is_code:
        return _judge_code(benchmark, problems, texts, opened)
    answers = [problem.answer or "" for problem in problems]
    compared = grade_answers(texts, answers, thinking_opened=opened)
    judgements = []
    for text, answer, is_open, result in zip(texts, answers, opened, compared, strict=True):
        right = None if result.status == "unreadable" else result.status == "right"
        found = extract_answer(text, is_open)
        exact = found is not None and found[1] and plain(found[0]) == plain(answer)
        said = f"{result.status} {result.detail}".strip()
        judgements.append(Judgement(right, exact, said, "timeout" in (result.status, result.detail)))
    return judgements


def _judge_code(
    benchmark: Benchmark, problems: Sequence[Problem], texts: Sequence[str], opened: Sequence[bool]
) -> list[Judgement]:
    programs = []
    for problem, text, is_open in zip(problems, texts, opened, strict=True):
        code = extract_code(text, is_open)
        programs.append(None if code is None else f"{problem.preamble}\n{code}" if problem.preamble else code)
    sandbox = _sandbox(tuple(sorted(benchmark.limits.items())), benchmark.packages)
    verdicts = run_programs(programs, [problem.tests for problem in problems], sandbox=sandbox)
    return [
        Judgement(None, None, "no tests") if v is None else Judgement(v.ok, None, v.message, v.timeouts > 0)
        for v in verdicts
    ]


@lru_cache(maxsize=4)
def _sandbox(limits: tuple[tuple[str, float], ...], packages: bool) -> Sandbox:
    paths = []
    if packages:
        import numpy

        paths.append(str(numpy.__path__[0]).rpartition("/")[0])
    return Sandbox(Limits(**dict(limits)), import_paths=paths)  # type: ignore[arg-type]
