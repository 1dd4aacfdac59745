"""The schedules published with the paper (`presets.json`)."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any


@lru_cache(maxsize=1)
def load_presets() -> dict[str, Any]:
    """The contents of `presets.json`: the layout common to all, and `schedules[name][target]`, a list of budgets."""
    return json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))


def preset_name(model_name_or_path: str | os.PathLike[str]) -> str:
    """The name a model's preset would have: the last part of its name or path, in lower case."""
    return os.fspath(model_name_or_path).replace("\\", "/").rstrip("/").rpartition("/")[2].lower()


def find_preset(name: str, target: float) -> dict[str, Any]:
    """
    The fields of the published schedule `name` for `target`.

    Raises:
        `ValueError`: there is no such schedule; the message lists those there are.
    """
    presets = load_presets()
    preset = preset_name(name)
    if preset not in presets["schedules"]:
        known = ", ".join(presets["schedules"])
        raise ValueError(f"Unknown schedule preset {name!r}; the published ones are {known}.")
    for published, budgets in presets["schedules"][preset].items():
        if abs(float(published) - target) < 1e-9:
            layout = ("bin_tokens", "page_size", "sink_pages", "recent_pages", "dense_layers")
            origin = {key: presets[key] for key in ("source", "url", "statistic")}
            return {
                "budgets": budgets,
                **{key: presets[key] for key in layout},
                "target": float(published),
                "provenance": {"kind": "published", "preset": preset, **origin},
            }
    available = ", ".join(presets["schedules"][preset])
    raise ValueError(
        f"Preset {preset!r} has no schedule for target={target}; it has {available}. Set the option "
        "sparse_target, or what follows '@' in the name, to one of these."
    )
