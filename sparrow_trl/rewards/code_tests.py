"""Tests of a program: what they are, and running them in sandboxes."""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from .code_child import decode, encode
from .sandbox import Limits, Outcome, Sandbox


_CHECK = re.compile(r"\bcheck\b")
_CHILD = Path(__file__).with_name("code_child.py").read_text(encoding="utf-8")


@dataclass(frozen=True)
class StdioTests:
    """Programs that read standard input and print: the texts given, and the texts expected."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class CallTests:
    """A function, or a method of a class `Solution`: lists of arguments, and the value expected of each."""

    fn_name: str
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class AssertTests:
    """
    Python code that raises unless the program is right.

    Args:
        code (`str`): it names the program's functions; if it defines `check(candidate)` and there is an entry point,
            that is called too.
        entry_point (`str`, *optional*): the function under test.
        setup (`str`, *optional*): code that comes first, such as imports.
    """

    code: str
    entry_point: str = ""
    setup: str = ""

    def __len__(self) -> int:
        return 1


Tests = StdioTests | CallTests | AssertTests


@dataclass(frozen=True)
class Verdict:
    """
    Result of running a program's tests.

    Args:
        passed (`int`): tests passed.
        total (`int`): tests there are; those after a failure are not run where all have to pass.
        message (`str`): what went wrong in the first test that failed.
        timeouts (`int`): tests that ended at the limit of time.
    """

    passed: int
    total: int
    message: str = ""
    timeouts: int = 0

    @property
    def ok(self) -> bool:
        """Whether every test passed."""
        return self.passed == self.total


def parse_tests(value: Tests | Mapping[str, Any] | str) -> Tests | None:
    """
    Tests from a column of a dataset: a mapping, or its JSON text.

    `{"inputs": [...], "outputs": [...]}` are texts for standard input and expected output; with `"fn_name"` they are
    arguments and values (the columns `input_output` of TACO and APPS); `{"code": "assert f(2) == 4"}` is Python code,
    with `"entry_point"` and `"setup"` as in `AssertTests`.

    Returns:
        The tests; `None` where there are none.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(value, (StdioTests, CallTests, AssertTests)):
        return value if len(value) else None
    if value is None:
        return None
    if isinstance(value, str):
        if not value.strip():
            return None
        try:
            value = json.loads(value, parse_int=lambda digits: int(Decimal(digits)))  # int() refuses long texts
        except json.JSONDecodeError as error:
            raise ValueError(f"The tests {_short(value)} are not JSON: {error}.") from error
    if not isinstance(value, Mapping):
        raise ValueError(f"The tests are a {type(value).__name__}, not an object; see `parse_tests`.")
    if value.get("code") is not None:
        tests = AssertTests(str(value["code"]), str(value.get("entry_point") or ""), str(value.get("setup") or ""))
        if not tests.code.strip():
            return None  # every program would pass
        if not tests.entry_point and len(_CHECK.findall(tests.code)) == 1 and "def check(" in tests.code:
            raise ValueError("The tests define check(candidate), and nothing calls it; they need an 'entry_point'.")
        return tests
    if value.get("inputs") is None or value.get("outputs") is None:
        raise ValueError(f"The tests have the keys {sorted(value)}; they need 'inputs' and 'outputs', or 'code'.")
    for name in ("inputs", "outputs"):
        if not isinstance(value[name], (list, tuple)):
            raise ValueError(f"The tests have {name} that are a {type(value[name]).__name__}; they must be a list.")
    inputs, outputs = tuple(value["inputs"]), tuple(value["outputs"])
    if len(inputs) != len(outputs):
        raise ValueError(f"The tests have {len(inputs)} inputs and {len(outputs)} outputs; they must be as many.")
    if not inputs:
        return None
    if value.get("fn_name"):
        return CallTests(str(value["fn_name"]), inputs, outputs)
    return StdioTests(tuple(map(_text, inputs)), tuple(map(_text, outputs)))


def run_tests(
    sandbox: Sandbox,
    program: str,
    tests: Tests,
    *,
    limits: Limits | None = None,
    max_tests: int | None = None,
    stop_early: bool = True,
) -> Verdict:
    """
    Run a program's tests, each in a child process of its own or, for calls of a function, all in one.

    Args:
        sandbox (`Sandbox`): where programs run.
        program (`str`): Python source.
        tests (`Tests`): what to run.
        limits (`Limits`, *optional*): for each child process; by default those of the sandbox.
        max_tests (`int`, *optional*): run the first so many only.
        stop_early (`bool`, *optional*, defaults to `True`): whether the first failure ends it.

    Raises:
        SandboxUnavailableError: programs cannot be isolated on this machine.
    """
    if isinstance(tests, AssertTests):
        return _run_asserts(sandbox, program, tests, limits or sandbox.limits)
    total = len(tests) if max_tests is None else min(max_tests, len(tests))
    if isinstance(tests, CallTests):
        return _run_calls(sandbox, program, tests, limits or sandbox.limits, total, stop_early)
    passed, timeouts, message = 0, 0, ""
    for number, (given, expected) in enumerate(zip(tests.inputs[:total], tests.outputs, strict=False)):
        outcome = sandbox.run(program, given, limits)
        if outcome.ok and same_output(outcome.stdout, expected):
            passed += 1
            continue
        timeouts += outcome.status == "time"
        message = message or f"test {number}: {_what_happened(outcome)}"
        if stop_early:
            break
    return Verdict(passed, total, message, timeouts)


def _run_calls(
    sandbox: Sandbox, program: str, tests: CallTests, limits: Limits, total: int, stop_early: bool
) -> Verdict:
    """
    All calls in one process; what it could not answer within its limit of time goes to another one, as long as each
    answers something. So the limit holds for a single call.
    """
    passed, timeouts, message = 0, 0, ""
    number = 0
    while number < total:
        inputs = tests.inputs[number:total]
        calls = "".join(json.dumps([tests.fn_name, encode(_arguments(a)), encode({})]) + "\n" for a in inputs)
        outcome = sandbox.start(program, calls, limits, runner=_CHILD + "\nrun_candidate(usual_imports=True)\n").wait()
        answers = outcome.stdout.split("\n")[1:-1]  # the first line names the functions, the last is not complete
        for answer in answers[: len(inputs)]:
            problem = _judge_call(answer, tests.outputs[number])
            passed += not problem
            message = message or (problem and f"test {number}: {problem}")
            number += 1
            if problem and stop_early:
                return Verdict(passed, total, message, timeouts)
        if number < total and not (outcome.status == "time" and answers):
            timeouts += outcome.status == "time"
            message = message or f"test {number}: {_what_happened(outcome)}"
            number += 1 if outcome.status == "time" and not stop_early else total
    return Verdict(passed, total, message, timeouts)


def _judge_call(answer: str, expected: Any) -> str:
    """What is wrong with a line that a candidate wrote; empty if nothing is."""
    try:
        content = json.loads(answer)
        if "value" not in content:
            return f"{_short(content.get('raised'))}: {_short(content.get('text'))}"
        return "" if _is_expected(decode(content["value"]), expected) else "another value than expected"
    except (ArithmeticError, AttributeError, RecursionError, TypeError, ValueError):  # it wrote that line by itself
        return "not an answer"


def _run_asserts(sandbox: Sandbox, program: str, tests: AssertTests, limits: Limits) -> Verdict:
    call_read, call_write = os.pipe()
    answer_read, answer_write = os.pipe()
    try:
        candidate = sandbox.start(program, call_read, limits, answer_write, _CHILD + "\nrun_candidate()\n")
        os.close(call_read)
        os.close(answer_write)
        call_read = answer_write = -1
        outcomes: list[Outcome] = []
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                outcomes.append(candidate.wait())
            except BaseException as error:
                errors.append(error)

        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        try:
            source = json.dumps({"code": tests.code, "entry_point": tests.entry_point, "setup": tests.setup})
            judge = sandbox.start(source, answer_read, limits, call_write, _CHILD + "\nrun_judge()\n").wait()
        finally:
            candidate.kill()
            waiter.join()
    finally:
        for descriptor in (call_read, call_write, answer_read, answer_write):
            if descriptor >= 0:
                os.close(descriptor)
    if errors:
        raise errors[0]
    timeouts = int("time" in {judge.status, *(outcome.status for outcome in outcomes)})
    try:
        verdict = json.loads(judge.stderr.rstrip().rpartition("\n")[2]) if judge.ok else {}
    except json.JSONDecodeError:
        verdict = {}
    if not verdict:
        return Verdict(0, 1, f"the tests ended with {judge.status!r}: {judge.stderr[-300:]}", timeouts)
    return Verdict(int(verdict["passed"] is True), 1, verdict["message"], timeouts)


def same_output(found: str, expected: str) -> bool:
    """
    Whether two printed texts are the same but for space at the ends of lines and of the text. A number with a decimal
    point is compared to a relative or absolute 1e-6.
    """
    ours, theirs = found.rstrip().splitlines(), expected.rstrip().splitlines()
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _same_line(found: str, expected: str) -> bool:
    if found.rstrip() == expected.rstrip():
        return True
    ours, theirs = found.split(), expected.split()
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def _same_word(found: str, expected: str) -> bool:
    if found == expected:
        return True
    if "." not in expected:
        return False
    try:
        return math.isclose(float(found), float(expected), rel_tol=1e-6, abs_tol=1e-6)
    except ValueError:
        return False


def _is_expected(found: Any, expected: Any) -> bool:
    """Equality of values where JSON knows lists alone; the value may also be wrapped in a list, as in APPS and TACO."""
    wrapped = isinstance(expected, list) and len(expected) == 1
    return _same_value(found, expected) or (wrapped and _same_value(found, expected[0]))


def _same_value(found: Any, expected: Any) -> bool:
    if isinstance(found, range) and isinstance(expected, (tuple, list)):
        found = list(found[: len(expected) + 1])  # it may be too long for `len`
    if isinstance(found, (tuple, list)) and isinstance(expected, (tuple, list)):
        return len(found) == len(expected) and all(map(_same_value, found, expected))
    if isinstance(found, dict) and isinstance(expected, Mapping):
        ours = {str(key): value for key, value in found.items()}
        return ours.keys() == expected.keys() and all(_same_value(ours[key], expected[key]) for key in ours)
    if isinstance(found, bool) is not isinstance(expected, bool):
        return False
    if isinstance(found, float) or isinstance(expected, float):
        numbers = isinstance(found, (int, float)) and isinstance(expected, (int, float))
        return numbers and math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-6)
    return type(found) is type(expected) and found == expected


def _arguments(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _text(value: Any) -> str:
    return (
        value if isinstance(value, str) else "\n".join(map(str, value)) if isinstance(value, Sequence) else str(value)
    )


def _what_happened(outcome: Outcome) -> str:
    if outcome.ok:
        return f"another output than expected, or none: {_short(outcome.stdout)}"
    return f"{outcome.status}, exit status {outcome.returncode}: {outcome.stderr[-300:]}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
