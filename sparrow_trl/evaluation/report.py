"""Results as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .benchmarks import BENCHMARKS


if TYPE_CHECKING:
    from rich.table import Table

    from .results import Evaluation


def table(evaluation: Evaluation) -> Table:
    """For each suite a row of the dense decode, which judges the policy, and below it one of the sparse decode."""
    from rich.box import SIMPLE
    from rich.table import Table

    title = f"{evaluation.model}: 95 % bootstrap intervals over problems"
    result = Table(title=title, title_justify="left", title_style="", box=SIMPLE, padding=(0, 1, 0, 0))
    result.add_column("suite")
    result.add_column("decode")
    for name in ("accuracy", "interval", "pass@k", "exact", "tokens", "cut off", "KV read", "minus dense"):
        result.add_column(name, justify="right", no_wrap=True)
    for name, by_decode in evaluation.results.items():
        for kind, numbers in by_decode.items():
            dense = kind == "dense"
            result.add_row(
                f"{BENCHMARKS[name].title}, {numbers['num_problems']} x {numbers['num_samples']}" if dense else "",
                kind,
                f"{numbers['mean']:.3f}",
                _interval(numbers["mean_interval"]),
                _best_pass(numbers),
                f"{numbers['exact_match']:.3f}" if "exact_match" in numbers else "",
                f"{numbers['mean_tokens']:.0f}",
                f"{numbers['unfinished']:.0%}",
                f"{numbers['kv_share']:.0%}",
                "" if dense else f"{numbers['minus_dense']:+.3f} {_interval(numbers['minus_dense_interval'], '+')}",
            )
    return result


def _interval(ends: list[float], sign: str = "") -> str:
    return f"{ends[0]:{sign}.3f} to {ends[1]:{sign}.3f}"


def _best_pass(results: dict[str, Any]) -> str:
    passes = {int(k): value for k, value in results["pass_at"].items() if int(k) > 1}
    if not passes:
        return ""
    k = max(passes)
    return f"@{k}: {passes[k]['value']:.3f}"
