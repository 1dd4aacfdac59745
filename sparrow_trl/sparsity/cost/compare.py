"""The cost model against measured decode steps, in the same units."""

from __future__ import annotations

from typing import Any

from ..schedule import SparsitySchedule
from .chips import Chip
from .decode import speedup, step_cost
from .options import BYTES_PER_VALUE
from .shape import ModelShape


def compare_with_bench(results: dict[str, Any], shape: ModelShape, chips: dict[str, Chip]) -> list[dict[str, Any]]:
    """
    Set the decode steps of `sparrow bench rollout` beside what the model predicts for them.

    Args:
        results (`dict`): its JSON.
        shape (`ModelShape`): the model that was measured.
        chips (`dict[str, Chip]`): of each dtype, the machine; its bandwidth is replaced by the one measured between the
            steps.

    Returns:
        `list[dict]`: a row for each sparse step, with the KV bytes and the speed-up over the dense step of this engine,
        measured and predicted, and `error`, the predicted speed-up over the measured one.

    Raises:
        ValueError: the results hold no decode steps, or are of a model of another shape.
    """
    model = results["model"]
    found = (model["layers"], model["heads"], model["kv_heads"])
    expected = (len(shape.windows), shape.heads, shape.kv_heads)
    if found != expected:
        raise ValueError(
            f"The measurement is of {model['name']} with {found[0]} layers, {found[1]} heads and {found[2]} KV heads; "
            f"{shape.name} has {expected[0]}, {expected[1]} and {expected[2]}. Name the measured model with --model."
        )
    schedules = {name: SparsitySchedule.from_dict(values) for name, values in results["schedules"].items()}
    rows = []
    for run in results["runs"]:
        if "decode" not in run:
            continue
        size, bandwidth = BYTES_PER_VALUE[run["dtype"]], run["decode"]["bandwidth"]["copy"]
        known = chips[run["dtype"]]
        chip = Chip(known.name, known.flops, bandwidth, known.memory)
        steps = {(step["contender"], step["context"]): step for step in run["decode"]["steps"]}
        for (name, context), step in steps.items():
            if name not in schedules or schedules[name].is_dense:
                continue
            dense_step = steps["dense", context]
            batch = step["batch"]
            # A step at `context` cached tokens adds one, which its query sees too.
            dense, sparse = (step_cost(shape, schedules[key], context + 1, batch, size) for key in ("dense", name))
            measured, predicted = dense_step["median"] / step["median"], speedup(dense, sparse, chip)
            rows.append(
                {
                    "dtype": run["dtype"],
                    "schedule": name,
                    "context": context,
                    "batch": batch,
                    "kv_bytes_measured": step["kv_bytes"],
                    "kv_bytes_predicted": sparse.kv_bytes,
                    "seconds_measured": step["median"],
                    "seconds_predicted": sparse.seconds(chip),
                    "speedup_measured": measured,
                    "speedup_predicted": predicted,
                    "error": predicted / measured,
                }
            )
    if not rows:
        raise ValueError("The file holds no sparse decode steps; measure with `sparrow bench rollout --context ...`.")
    return rows
