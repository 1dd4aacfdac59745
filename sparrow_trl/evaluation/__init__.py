"""Benchmarks, metrics and suites for `evaluate`, run through the rollout engine."""

from importlib import import_module
from pathlib import Path
from typing import Any


_EXPORTS = {
    "BENCHMARKS": "benchmarks",
    "Benchmark": "benchmarks",
    "Evaluation": "results",
    "Sampling": "run",
    "bootstrap_interval": "statistics",
    "evaluate_model": "run",
    "pass_at_k": "statistics",
    "suite_path": "suite",
}

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "Evaluation",
    "Sampling",
    "bootstrap_interval",
    "evaluate_model",
    "metric_path",
    "pass_at_k",
    "suite_path",
]


def metric_path(name: str) -> str:
    """
    Folder of a metric that ships with the package, for `evaluate.load`: `"answer_accuracy"`, `"pass_at_k"` or
    `"code_execution"`.
    """
    folder = Path(__file__).with_name("metrics")
    if not (folder / name / f"{name}.py").is_file():
        known = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
        raise ValueError(f"There is no metric {name!r}; there are {known}.")
    return str(folder / name)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
