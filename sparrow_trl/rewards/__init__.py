"""Reward functions with TRL's signature, and what judges answers for them."""

from importlib import import_module
from typing import Any


_EXPORTS = {
    "AssertTests": "code_tests",
    "CallTests": "code_tests",
    "CodeReward": "code",
    "Comparison": "verifier",
    "Limits": "sandbox",
    "MathVerifier": "verifier",
    "MathsReward": "maths",
    "Outcome": "sandbox",
    "Recipe": "recipes",
    "Sandbox": "sandbox",
    "SandboxUnavailableError": "sandbox",
    "StdioTests": "code_tests",
    "ThinkFormatReward": "formats",
    "Verdict": "code_tests",
    "boxed_format_reward": "formats",
    "code_reward": "code",
    "extract_answer": "maths",
    "extract_code": "code",
    "get_recipe": "recipes",
    "grade_answers": "maths",
    "load_bundled": "recipes",
    "maths_reward": "maths",
    "overlong_reward": "formats",
    "parse_tests": "code_tests",
    "prefills_thinking": "text",
    "run_programs": "code",
    "run_tests": "code_tests",
    "think_format_reward": "formats",
}

__all__ = [
    "AssertTests",
    "CallTests",
    "CodeReward",
    "Comparison",
    "Limits",
    "MathVerifier",
    "MathsReward",
    "Outcome",
    "Recipe",
    "Sandbox",
    "SandboxUnavailableError",
    "StdioTests",
    "ThinkFormatReward",
    "Verdict",
    "boxed_format_reward",
    "code_reward",
    "extract_answer",
    "extract_code",
    "get_recipe",
    "grade_answers",
    "load_bundled",
    "maths_reward",
    "overlong_reward",
    "parse_tests",
    "prefills_thinking",
    "run_programs",
    "run_tests",
    "think_format_reward",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
