"""
What a run leaves beside its model, in the folder `sparrow/`, so that others can check and repeat it.

| file | content | written by |
|---|---|---|
| `run.json` | configuration, command, versions, hardware, averages of the logged metrics | the trainer |
| `sparrow_schedule.json` | the schedule of the last rollouts | the trainer |
| `tail.json`, `*.png` | tail of the acceptance rate by bin, and its plots | the tail monitor |
| `adapter/` | the LoRA of DistillSparse | the trainer |
| `eval.json` | accuracy under dense and sparse decoding | `sparrow eval` |
| `bench.json` | speed | `sparrow bench rollout --json` |
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..processes import warn
from ..sparsity.schedule import RECORD_FOLDER
from ..validation import integer


T = TypeVar("T")


RUN_FILE = "run.json"

_SECRETS = ("token", "hub_token", "push_to_hub_token")
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")
# Means over a whole run would mix what grows with the length of completions: only these say something as a mean.
_AVERAGED = ("rollout_tokens_per_second", "rollout_seconds", "kv_share", "budget", "clipped_fraction")


@dataclass
class RunRecord:
    """
    How a model was trained.

    Args:
        base_model (`str`, *optional*): the model that the training started from.
        dataset (`str`, *optional*): name of the training data.
        command (`str`): the command line that repeats the run.
        config (`dict`): the arguments of the trainer, without tokens.
        environment (`dict[str, str]`): versions of Python and packages.
        hardware (`dict`): as [`~sparrow_trl.environment.hardware`] gives it.
        num_processes (`int`): processes that trained.
        global_step (`int`): optimizer steps done.
        metrics (`dict[str, float]`): averages over the logs of the run, by name under `sparrow/`.
    """

    base_model: str | None
    dataset: str | None
    command: str
    config: dict[str, Any]
    environment: dict[str, str]
    hardware: dict[str, Any]
    num_processes: int = 1
    global_step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write it to `folder/sparrow/run.json`."""
        path = Path(folder) / RECORD_FOLDER / RUN_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1, default=str) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> RunRecord | None:
        """The record of `folder`, or `None` where there is none that can be read, with a warning if it is damaged."""
        return read_record(Path(folder) / RECORD_FOLDER / RUN_FILE, cls._parse)

    @classmethod
    def _parse(cls, values: dict[str, Any]) -> RunRecord:
        record = cls(**{name: values[name] for name in cls.__dataclass_fields__ if name in values})
        for name in ("config", "environment", "hardware", "metrics"):
            if not isinstance(getattr(record, name), dict):
                raise TypeError(f"{name}={getattr(record, name)!r} is not an object")
        for name in ("num_processes", "global_step"):
            integer(name, getattr(record, name))
        record.metrics = {name: float(value) for name, value in record.metrics.items()}
        return record


def read_record(path: Path, parse: Callable[[dict[str, Any]], T]) -> T | None:
    """What `parse` makes of the object in a JSON file; `None` where it is missing or, with a warning, damaged."""
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise TypeError(f"it holds a {type(values).__name__}, not an object")
        return parse(values)
    except (OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        warn(
            f"{path} is damaged ({type(error).__name__}: {error}), and what it says is left out of the model card. "
            "Mend it, or remove it: `sparrow push` writes the card anew."
        )
        return None


def public_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the trainer's arguments without tokens."""
    return {
        name: public_config(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name not in _SECRETS
    }


def _without_secrets(argv: Iterable[str]) -> list[str]:
    """Arguments of a command line without the options that hold tokens, and their values."""
    kept: list[str] = []
    skips = False
    for argument in argv:
        name = argument.partition("=")[0].lstrip("-").replace("-", "_")
        is_secret = argument.startswith("--") and name in _SECRETS
        if not skips and not is_secret:
            kept.append(_TOKEN.sub("hf_...", argument))  # it may stand within another option's value
        skips = is_secret and "=" not in argument
    return kept


def average_metrics(log_history: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Averages over the logs of a run of those `sparrow/` metrics for which an average means something."""
    values: dict[str, list[float]] = {}
    for logs in log_history:
        for name in _AVERAGED:
            value = logs.get(f"sparrow/{name}")
            if isinstance(value, (int, float)):
                values.setdefault(name, []).append(float(value))
    return {name: sum(found) / len(found) for name, found in values.items()}


def reproduce_command(argv: Sequence[str] | None = None, num_processes: int = 1) -> str:
    """
    The command line that starts this process again. A process that a launcher started (`accelerate launch`,
    `torchrun`) is started by `accelerate launch` with the same number of processes. Options that hold tokens are left out.

    Args:
        argv (`Sequence[str]`, *optional*): the arguments of Python; by default those of this process.
    """
    arguments = _without_secrets(sys.orig_argv[1:] if argv is None else argv)
    if num_processes > 1 or "LOCAL_RANK" in os.environ:
        while arguments and arguments[0].startswith("-") and arguments[0] not in ("-m", "-c"):
            del arguments[0]  # options of the interpreter, which the launcher sets itself
        return shlex.join(["accelerate", "launch", "--num_processes", str(num_processes), *arguments])
    return shlex.join(["python", *arguments])
