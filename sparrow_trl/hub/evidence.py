"""Reads the measurements that lie beside a model, for its card."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from .record import RECORD_FOLDER, read_record


class TailRow(NamedTuple):
    """The acceptance rate in one bin of positions."""

    first: int
    last: int
    tokens: int
    tail: float
    low: float  # of the tail's confidence interval
    high: float
    mean: float


class EvalRow(NamedTuple):
    """One number of an evaluation."""

    suite: str
    dataset: str | None
    metric: str
    decode: str
    value: float
    low: float
    high: float
    problems: int


def read_tail(folder: Path) -> tuple[list[TailRow], float | None, float | None]:
    """
    The bins in `sparrow/tail.json` that have tokens, the threshold, and the noise floor; nothing where it is missing or,
    with a warning, damaged.
    """
    return read_record(folder / RECORD_FOLDER / "tail.json", _parse_tail) or ([], None, None)


def _parse_tail(report: dict[str, Any]) -> tuple[list[TailRow], float | None, float | None]:
    rows = [
        TailRow(
            *(int(row[name]) for name in ("first", "last", "tokens")),
            *(float(row[name]) for name in ("tail", "low", "high", "mean")),
        )
        for row in report.get("bins", ())
        if row.get("tokens")
    ]
    threshold, floor = (None if report.get(name) is None else float(report[name]) for name in ("threshold", "floor"))
    return rows, threshold, floor


def read_eval(folder: Path) -> list[EvalRow]:
    """The results in `sparrow/eval.json`, dense decoding first; none where it is missing or, with a warning, damaged."""
    return read_record(folder / RECORD_FOLDER / "eval.json", _parse_eval) or []


def _parse_eval(report: dict[str, Any]) -> list[EvalRow]:
    rows = [
        EvalRow(
            suite=str(row["suite"]),
            dataset=None if row.get("dataset") is None else str(row["dataset"]),
            metric=str(row["metric"]),
            decode=str(row["decode"]),
            value=float(row["value"]),
            low=float(row["low"]),
            high=float(row["high"]),
            problems=int(row["problems"]),
        )
        for row in report.get("results", ())
    ]
    return sorted(rows, key=lambda row: row.decode != "dense")


def read_bench(folder: Path) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """
    A title and the rows (contender, time of a step, speed-up) of each dtype and context in `sparrow/bench.json`; none
    where it is missing or, with a warning, damaged.
    """
    return read_record(folder / RECORD_FOLDER / "bench.json", _parse_bench) or []


def _parse_bench(report: dict[str, Any]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    machine = report.get("hardware", {})
    gpus = [gpu.get("name") for gpu in machine.get("gpus") or ()]
    hardware = ", ".join(gpus) or f"{machine.get('cpu')}, {machine.get('cores')} cores"
    found: dict[tuple[Any, ...], list[tuple[str, str, str]]] = {}
    for run in report.get("runs", ()):
        for step in run.get("decode", {}).get("steps", ()):
            key = (run["dtype"], step["batch"], step["context"])
            row = (step["contender"], f"{1000 * step['median']:.1f} ms", f"{step['speedup']:.1f}x")
            found.setdefault(key, []).append(row)
    return [
        (f"One decode step, {dtype}, {batch} sequences at {context:,} tokens ({hardware})", rows)
        for (dtype, batch, context), rows in found.items()
    ]
