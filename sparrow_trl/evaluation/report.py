"""Results as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .benchmarks import BENCHMARKS


if TYPE_CHECKING:
    from rich.table import Table

    from .run import Evaluation


def table(evaluation: Evaluation) -> Table:
    """One row a suite: the dense decode, which judges the policy, and beside it the sparse one."""
    from rich.table import Table

    sparse = any("sparse" in by_decode for by_decode in evaluation.results.values())
    result = Table(title=f"{evaluation.model} (95 % bootstrap intervals over problems)", title_justify="left")
    result.add_column("suite")
    result.add_column("problems", justify="right")
    columns = ("accuracy", "pass@k", "exact", "tokens", "cut off")
    for name in columns:
        result.add_column(name, justify="right")
    if sparse:
        for name in ("sparse accuracy", "sparse - dense", "KV read"):
            result.add_column(name, justify="right")
    for name, by_decode in evaluation.results.items():
        dense = by_decode["dense"]
        row = [
            BENCHMARKS[name].title,
            str(dense["num_problems"]),
            f"Mean@{dense['num_samples']} {_with_interval(dense['mean'], dense['mean_interval'])}",
            _best_pass(dense),
            f"{dense['exact_match']:.3f}" if "exact_match" in dense else "",
            f"{dense['mean_tokens']:.0f}",
            f"{dense['unfinished']:.0%}",
        ]
        if "sparse" in by_decode:
            other = by_decode["sparse"]
            row += [
                _with_interval(other["mean"], other["mean_interval"]),
                _with_interval(other["minus_dense"], other["minus_dense_interval"], sign="+"),
                f"{other['kv_share']:.0%}",
            ]
        result.add_row(*row)
    return result


def _with_interval(value: float, ends: list[float], sign: str = "") -> str:
    return f"{value:{sign}.3f} [{ends[0]:{sign}.3f}, {ends[1]:{sign}.3f}]"


def _best_pass(results: dict[str, Any]) -> str:
    passes = {int(k): value for k, value in results["pass_at"].items() if int(k) > 1}
    if not passes:
        return ""
    k = max(passes)
    return f"@{k} {passes[k]['value']:.3f}"
