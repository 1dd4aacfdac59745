"""What an evaluation found: its numbers, their differences, and where they are kept."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..sparsity.schedule import RECORD_FOLDER
from .benchmarks import BENCHMARKS, Benchmark
from .statistics import bootstrap_interval, summarise


@dataclass
class Evaluation:
    """
    Results: `results[suite][decode]`, in `results.json` under `details`. What judges the policy is the dense decode; the sparse
    one shows what the rollout's actor loses.

    Args:
        model (`str`): name of the model.
        results (`dict`): by suite and decode.
        settings (`dict`): what they were made with.
    """

    model: str
    results: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As plain values that JSON can hold: `results`, a list of single numbers, and `details`, all by suite."""
        return {
            "model": self.model,
            "judged_by": "dense",
            "settings": self.settings,
            "results": self.rows(),
            "details": self.results,
        }

    def rows(self) -> list[dict[str, Any]]:
        """Single numbers with their intervals, as a model card shows them."""
        rows = []
        for suite, by_decode in self.results.items():
            benchmark = BENCHMARKS[suite]
            for decode, numbers in by_decode.items():
                values = {f"Mean@{numbers['num_samples']}": (numbers["mean"], numbers["mean_interval"])}
                for k, number in numbers["pass_at"].items():
                    if int(k) > 1:
                        values[f"pass@{k}"] = (number["value"], number["interval"])
                for metric, (value, (low, high)) in values.items():
                    rows.append(
                        {
                            "suite": benchmark.title,
                            "dataset": None if benchmark.dataset_id == "bundled" else benchmark.dataset_id,
                            "metric": metric,
                            "decode": decode,
                            "value": value,
                            "low": low,
                            "high": high,
                            "problems": numbers["num_problems"],
                        }
                    )
        return rows

    def save_beside_model(self, folder: str | os.PathLike[str]) -> Path:
        """
        Put the numbers into `sparrow/eval.json` of a model's folder, where its card finds them. Those of other suites that
        are there already stay.
        """
        path = Path(folder) / RECORD_FOLDER / "eval.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        earlier = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []
        rows = self.rows()
        replaced = {(row["suite"], row["decode"]) for row in rows}
        kept = [row for row in earlier if (row["suite"], row["decode"]) not in replaced]
        write_file(path, json.dumps({"results": [*kept, *rows]}, indent=2) + "\n")
        return path


def summary(batches: Sequence[Mapping[str, Any]], benchmark: Benchmark, seed: int) -> dict[str, Any]:
    """Numbers of one benchmark from its batches. Answers without a readable reference are counted, and left out."""
    records = [record for batch in batches for record in batch["records"]]
    by_problem: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        by_problem.setdefault(record["problem"], []).append(record)
    readable = {name: rows for name, rows in by_problem.items() if all(row["right"] is not None for row in rows)}
    if not readable:
        raise ValueError(f"No reference answer of the suite {benchmark.name!r} could be read.")
    samples = [[bool(row["right"]) for row in rows] for rows in readable.values()]
    tokens = [record["tokens"] for record in records]
    seconds = sum(batch["seconds_rollout"] for batch in batches)
    dense = sum(batch["kv_bytes_dense"] for batch in batches)
    result: dict[str, Any] = {
        **summarise(samples, (*benchmark.pass_at, len(samples[0])), seed=seed),
        "num_problems": len(samples),
        "num_samples": len(samples[0]),
        "unreadable_references": len(by_problem) - len(readable),
        "timeouts": sum(record["timed_out"] for record in records),
        "mean_tokens": float(np.mean(tokens)),
        "unfinished": float(np.mean([record["finish_reason"] == "length" for record in records])),
        "tokens_per_second": sum(tokens) / seconds if seconds else 0.0,
        "kv_share": sum(batch["kv_bytes_read"] for batch in batches) / dense if dense else 1.0,
        "per_problem": {name: float(np.mean(row)) for name, row in zip(readable, samples, strict=True)},
    }
    if not benchmark.is_code:
        result["exact_match"] = float(np.mean([bool(row["exact"]) for rows in readable.values() for row in rows]))
    return result


def add_difference(by_decode: dict[str, dict[str, Any]]) -> None:
    """Sparse minus dense, with an interval from the same problems."""
    if "sparse" not in by_decode:
        return
    dense, sparse = by_decode["dense"]["per_problem"], by_decode["sparse"]["per_problem"]
    differences = [sparse[name] - dense[name] for name in dense if name in sparse]
    by_decode["sparse"]["minus_dense"] = float(np.mean(differences))
    by_decode["sparse"]["minus_dense_interval"] = list(bootstrap_interval(differences))


def write_file(path: Path, text: str) -> None:
    """Write a file in one piece, or not at all."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
