"""The results as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


NAMES = {"generate": "HF generate", "continuous batching": "HF continuous batching"}


def print_results(results: dict[str, Any], console: Console) -> None:
    """Print what [`~sparrow_trl.benchmark.rollout.run`] has returned."""
    _print_setting(results, console)
    for run in results["runs"]:
        console.rule(f"[bold]{run['dtype']}")
        if "decode" in run:
            _print_decode(run["decode"], console)
        if "rollouts" in run:
            _print_rollouts(run["rollouts"], results["options"], console)
    checks = [check for run in results["runs"] for check in run["checks"]]
    console.print(f"{len(checks)} checks passed.")


def _print_setting(results: dict[str, Any], console: Console) -> None:
    hardware, model = results["hardware"], results["model"]
    gpus = ", ".join(gpu["name"] for gpu in hardware["gpus"])
    console.print(f"[bold]{results['command']}")
    console.print(
        f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['threads']} threads, "
        f"{hardware['memory'] / 2**30:.0f} GiB{', ' + gpus if gpus else ''}; on {model['device']}"
    )
    console.print(", ".join(f"{name} {version}" for name, version in results["versions"].items()), highlight=False)
    console.print(
        f"{model['name']}: {model['parameters'] / 1e6:,.1f}M parameters, {model['layers']} layers, "
        f"{model['heads']} query and {model['kv_heads']} KV heads, attention of HF: {model['attention']}"
    )


def _print_decode(decode: dict[str, Any], console: Console) -> None:
    bandwidth = decode["bandwidth"]
    for context in dict.fromkeys(row["context"] for row in decode["steps"]):
        rows = [row for row in decode["steps"] if row["context"] == context]
        table = Table(title=f"One decode step, batch {rows[0]['batch']}, context {context:,}", title_justify="left")
        for heading in ("", "median", "fastest - slowest", "tokens/s", "x generate", "KV read", "floor", "x floor"):
            table.add_column(heading, justify="left" if not heading else "right")
        for row in rows:
            table.add_row(
                _name(row["contender"]),
                _milliseconds(row["median"]),
                f"{_milliseconds(row['fastest'])} - {_milliseconds(row['slowest'])}",
                f"{row['tokens_per_second']:,.1f}",
                f"{row['speedup']:.2f}",
                f"{row['kv_bytes'] / 1e6:,.0f} MB",
                _milliseconds(row["floor_seconds"]),
                "-" if row["over_floor"] is None else f"{row['over_floor']:.2f}",
            )
        console.print(table)
    weights = decode["steps"][0]["weight_bytes"]
    counted = (
        "no floor: the weights that experts read are not known" if weights is None else f"{weights / 1e6:,.0f} MB"
    )
    console.print(f"Floor: (weights + KV read) / copy bandwidth; weights {counted}; KV read includes landmarks.")
    console.print(
        f"Bandwidth between the steps: copy {_gigabytes(bandwidth, 'copy')} ({bandwidth['convention']}); "
        f"read alone {_gigabytes(bandwidth, 'read')}."
    )
    for growth in decode["growth"]:
        console.print(
            f"{_name(growth['contender'])}: a step at {growth['context']:,} takes {growth['ratio']:.2f} times one at "
            f"{growth['shortest']:,}."
        )


def _print_rollouts(rollouts: dict[str, Any], options: dict[str, Any], console: Console) -> None:
    lengths = sorted(rollouts["lengths"])
    table = Table(
        title=f"{len(lengths)} completions in groups of {options['group']}, prompts of {options['prompt_length']} "
        f"tokens, completions of {lengths[0]} to {lengths[-1]} (median {options['median_length']}), "
        f"{sum(lengths):,} tokens",
        title_justify="left",
    )
    for heading in ("", "seconds", "tokens/s", "x generate", "KV share"):
        table.add_column(heading, justify="left" if not heading else "right")
    for row in rollouts["contenders"]:
        stats = row.get("stats")
        table.add_row(
            _name(row["contender"]),
            f"{row['median']:,.1f}" if "median" in row else "-",
            f"{row['tokens_per_second']:,.1f}" if "tokens_per_second" in row else "-",
            f"{row['speedup']:.2f}" if "speedup" in row else "-",
            f"{stats['kv_share']:.2f}" if stats else "-",
        )
    console.print(table)
    for row in rollouts["contenders"]:
        if "note" in row:
            console.print(f"{_name(row['contender'])}: {row['note']}.", highlight=False)


def _name(contender: str) -> str:
    return NAMES.get(contender, f"sparrow, {contender}")


def _gigabytes(bandwidth: dict[str, Any], name: str) -> str:
    low, high = bandwidth[f"{name}_range"]
    return f"{bandwidth[name] / 1e9:.1f} GB/s (median; {low / 1e9:.1f} to {high / 1e9:.1f})"


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"
