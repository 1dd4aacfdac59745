"""
The process that compares answers with math-verify. It reads a JSON line `{"gold", "answer", "boxed"}` and writes two:
whether the gold answer can be read, and whether the answer equals it. Its parent bounds the time, and ends it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import sys
from functools import lru_cache
from typing import Any


_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"\\[,;:!> ]|\\q?quad\b|~|\s+")
_CHOICE = re.compile(r"\(?([A-Za-z])\)?\.?")
_MIXED = re.compile(r"(?<![\w.}])(-?)(\d+)\s*(?:\\ |\\,|~)?\s*\\[dt]?frac\s*\{?(\d+)\}?\s*\{?(\d+)\}?(?![\w{])")
_UNIT_TAIL = re.compile(
    r"(?<=[\d})])\s*(?:\\[,;: ]|~)*\s*\\(?:text|mathrm|textrm|mbox)\s*\{\s*[^{}\d]*\}(?:\^\{?\d\}?)?\s*$"
)
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3})((?:(?:,|\{,\}|\\,|\\!,)\d{3})+)(?![\d,])")

_BARE_FRACTION = re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)(?!\d)")
_SCIENTIFIC = re.compile(r"(-?\d+(?:\.\d+)?)[eE]([+-]?\d+)")


def plain(text: str) -> str:
    """An answer without what carries no meaning: dollars, fonts, space, a final period; in lower case."""
    text = _TEXT.sub(r"\1", text.strip().strip("$"))
    text = _SPACES.sub("", text.replace("\\left", "").replace("\\right", ""))
    text = text.rstrip(".").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return text.lower()


def tidy(text: str) -> str:
    """LaTeX in the form that math-verify reads as meant: mixed numbers, thousands, units after a number."""
    text = text.strip().strip("$").strip().rstrip(".")
    text = _UNIT_TAIL.sub("", text)
    text = text.replace("^{\\circ}", "").replace("^\\circ", "").replace("\\degree", "").replace("°", "")
    text = _THOUSANDS.sub(lambda match: match[1] + re.sub(r"\D", "", match[2]), text)
    text = _BARE_FRACTION.sub(r"\\frac{\1}{\2}", text)
    if scientific := _SCIENTIFIC.fullmatch(text):
        text = f"{scientific[1]} \\times 10^{{{int(scientific[2])}}}"
    return _MIXED.sub(lambda match: f"{match[1]}\\frac{{{_improper(match)}}}{{{match[4]}}}", text)


def _improper(match: re.Match[str]) -> int:
    return int(match[2]) * int(match[4]) + int(match[3])


def _parser() -> Any:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    boxed = LatexExtractionConfig(
        boxed_match_priority=0, normalization_config=NormalizationConfig(units=True), try_extract_without_anchor=True
    )
    options = {"extraction_config": [boxed, ExprExtractionConfig()], "parsing_timeout": None}
    return lambda text: parse(text, **options)


@lru_cache(maxsize=4096)
def _read(text: str) -> tuple[Any, ...]:
    return tuple(_parser()(text))


def read_answer(text: str, boxed: bool) -> tuple[Any, ...]:
    """Expressions that a text may mean; `boxed` says that it is the answer itself, not a sentence with it."""
    if boxed:
        return _read(f"\\boxed{{{tidy(text)}}}")
    return _read(text)


def read_gold(gold: str) -> tuple[Any, ...]:
    """Expressions that a reference answer may mean: LaTeX with or without dollars or a box, or a number."""
    from .text import last_boxed

    inside = last_boxed(gold)
    if inside is None and "$" in gold.strip().strip("$"):
        return _read(gold)
    return _read(f"\\boxed{{{tidy(inside or gold)}}}")


def is_equal(gold: str, answer: str, boxed: bool) -> bool:
    """Whether an answer means the same as the gold one."""
    from math_verify import verify

    from .text import last_boxed

    inside = last_boxed(gold)
    reference = gold if inside is None else inside
    if boxed and plain(reference) == plain(answer):
        return True
    if boxed and _CHOICE.fullmatch(plain(reference)):  # a letter: of a choice, or a variable
        found = _CHOICE.fullmatch(plain(answer))
        return found is not None and found[1] == _CHOICE.fullmatch(plain(reference))[1]  # type: ignore[index]
    found_expressions = list(read_answer(answer, boxed))
    return bool(found_expressions) and verify(list(read_gold(gold)), found_expressions, timeout_seconds=None)


def main() -> None:
    """Answer requests until standard input ends."""
    memory, longest = int(sys.argv[2]), int(sys.argv[3])
    requests, replies = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not disturb the protocol

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # that its own time limit is off
    from math_verify import verify

    verify(list(_read("\\boxed{1}")), list(_read("\\boxed{1}")), timeout_seconds=None)  # grammars load on first use
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    if hasattr(sys, "set_int_max_str_digits"):  # from Python 3.10.7
        sys.set_int_max_str_digits(10_000)
    reply({"ready": True})
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for line in requests:
        signal.alarm(longest)  # ends this process, should its parent be gone
        request = json.loads(line)
        try:
            readable = bool(read_gold(request["gold"])) or bool(plain(request["gold"]))
        except (MemoryError, RecursionError, ValueError, OverflowError):
            readable = False
        reply({"gold": readable})
        if not readable:
            signal.alarm(0)
            continue
        try:
            equal, error = is_equal(request["gold"], request["answer"], request["boxed"]), ""
        except (MemoryError, RecursionError, ValueError, OverflowError) as failure:
            equal, error = False, type(failure).__name__
        signal.alarm(0)
        reply({"equal": equal, "error": error})
