"""The sparsity schedule: how many pages of the KV cache a query keeps, by its position."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..validation import fraction, integer
from .presets import find_preset, load_presets, preset_name


if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes


DENSE_BUDGET = 2**30
"""The budget of a dense schedule, and the largest one allowed: more pages than any sequence has."""

MAX_PAGE_SIZE = 1024
"""The largest page, in tokens: one mean key tells nothing about more of them (the paper finds 128 worse than 16)."""

MAX_FORCED_PAGES = 1024
"""The most sink pages, and the most recent ones. Every query has room for all of them, however short its sequence is."""

MAX_BIN_TOKENS = 2**30
"""The widest bin, in tokens: longer than any sequence."""

SCHEDULE_FILE = "sparrow_schedule.json"
"""The file name under which a schedule is stored in a folder or a Hub repository."""

RECORD_FOLDER = "sparrow"
"""The folder of a trained model that holds how it was trained, its schedule among other things."""

DEFAULT_TARGET = 0.86
"""The tail at or above which the paper saw stable training (arXiv 2606.08446)."""

_REPO_ID = re.compile(r"\w[\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class SparsitySchedule:
    """
    Budget of scored pages as a step function of the position of the querying token.

    A query keeps the first `sink_pages` pages, the last `recent_pages` pages and, of the pages between, the
    `budget_at(position)` best-scored ones. A sequence with no more pages than that attends to all of them. The layers
    in `dense_layers` always do.

    Args:
        budgets (`tuple[int, ...]`):
            Scored pages to keep, one number a bin of positions. The last bin is open-ended. `()` means dense.
        bin_tokens (`int`, *optional*, defaults to `2000`):
            Width of a bin in tokens of position (prompt + completion), at most 2**30.
        page_size (`int`, *optional*, defaults to `16`):
            Tokens in a page, a power of two, at most 1024.
        sink_pages (`int`, *optional*, defaults to `1`):
            Pages at the start of the sequence that are always kept, at most 1024.
        recent_pages (`int`, *optional*, defaults to `2`):
            Pages at the end of the sequence that are always kept, the one being filled included, at most 1024.
        dense_layers (`tuple[int, ...]`, *optional*, defaults to `(0, 1)`):
            Indices of the layers that read the whole cache.
        target (`float`, *optional*):
            The tail (5th percentile of the acceptance rate, per bin) that the budgets were chosen for, if any.
        provenance (`dict`, *optional*):
            Where the schedule comes from: anything that JSON can hold.

    Raises:
        `ValueError`: a field is out of range, or `provenance` cannot be stored as JSON.
        `TypeError`: a field is not of the stated type.
    """

    budgets: tuple[int, ...]
    bin_tokens: int = 2000
    page_size: int = 16
    sink_pages: int = 1
    recent_pages: int = 2
    dense_layers: tuple[int, ...] = (0, 1)
    target: float | None = None
    provenance: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        def normalise(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        normalise("budgets", _int_tuple("budgets", self.budgets, low=0, high=DENSE_BUDGET))
        normalise("dense_layers", tuple(sorted(set(_int_tuple("dense_layers", self.dense_layers, low=0)))))
        normalise("bin_tokens", integer("bin_tokens", self.bin_tokens, low=1, high=MAX_BIN_TOKENS))
        normalise("page_size", integer("page_size", self.page_size, low=1, high=MAX_PAGE_SIZE))
        normalise("sink_pages", integer("sink_pages", self.sink_pages, low=0, high=MAX_FORCED_PAGES))
        normalise("recent_pages", integer("recent_pages", self.recent_pages, low=1, high=MAX_FORCED_PAGES))
        if self.page_size & (self.page_size - 1):
            raise ValueError(
                f"page_size={self.page_size} is not a power of two; use 16 (the published value) or 8, 32, 64."
            )
        if self.target is not None:
            normalise("target", fraction("target", self.target))
        normalise("provenance", _json_copy(self.provenance))

    @property
    def is_dense(self) -> bool:
        """Whether every query reads the whole cache."""
        return not self.budgets

    def budget_at(self, position: int) -> int:
        """
        Scored pages kept by the query at `position`.

        Args:
            position (`int`): 0-based position of the querying token in prompt + completion.

        Returns:
            `int`: the budget of bin `position // bin_tokens`, or `DENSE_BUDGET` for a dense schedule.
        """
        if position < 0:
            raise ValueError(f"position={position} is negative; positions count from 0.")
        if self.is_dense:
            return DENSE_BUDGET
        return self.budgets[min(position // self.bin_tokens, len(self.budgets) - 1)]

    def budgets_at(self, positions: torch.Tensor) -> torch.Tensor:
        """
        `budget_at` for a tensor of positions, without a host synchronisation (so positions are not validated).

        Args:
            positions (`torch.Tensor`): integer tensor of any shape; 0-based positions, none negative.

        Returns:
            `torch.Tensor`: int64 tensor of the same shape and device.
        """
        table = _budget_table(self.budgets or (DENSE_BUDGET,), positions.device)
        return table[(positions // self.bin_tokens).clamp(0, len(table) - 1).long()]

    @classmethod
    def fixed(cls, budget: int, **kwargs: Any) -> SparsitySchedule:
        """The same `budget` of scored pages at every position. `kwargs` are the other fields."""
        return cls(budgets=(budget,), **kwargs)

    @classmethod
    def dense(cls, **kwargs: Any) -> SparsitySchedule:
        """Every query reads the whole cache. `kwargs` are the other fields."""
        return cls(budgets=(), **kwargs)

    @classmethod
    def from_preset(cls, name: str, target: float = DEFAULT_TARGET) -> SparsitySchedule:
        """
        A schedule published with the paper.

        Args:
            name (`str`): `"qwen3-1.7b"` or a model name that ends so, as in `"Qwen/Qwen3-1.7B"`.
            target (`float`, *optional*, defaults to `0.86`): the tail it was made for; see [`presets`].

        Raises:
            `ValueError`: there is no such preset, or not for this target.
        """
        return cls(**find_preset(name, target))

    @staticmethod
    def presets() -> dict[str, tuple[float, ...]]:
        """The published presets: name -> the targets there is a schedule for."""
        return {name: tuple(map(float, by_target)) for name, by_target in load_presets()["schedules"].items()}

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dict of plain Python values; [`from_dict`] is its inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SparsitySchedule:
        """A schedule from a mapping of its fields, of which `budgets` is required. An unknown field is an error."""
        known = [f.name for f in fields(cls)]
        unknown = [str(key) for key in values if key not in known]
        if unknown:
            raise ValueError(f"Unknown schedule field {', '.join(unknown)}; the fields are {', '.join(known)}.")
        if "budgets" not in values:
            raise ValueError("A schedule needs the field 'budgets' (a list of pages, one a bin; [] means dense).")
        return cls(**values)

    def to_json(self) -> str:
        """The schedule as a JSON text; [`from_json`] is its exact inverse."""
        lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in self.to_dict().items())
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> SparsitySchedule:
        """A schedule from the text that [`to_json`] writes."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"The schedule is not valid JSON: {error}.") from error
        if not isinstance(values, dict):
            raise ValueError(
                f"The schedule is a JSON {type(values).__name__}, not an object with the field 'budgets'."
            )
        return cls.from_dict(values)

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> Path:
        """Write `sparrow_schedule.json` into a folder (made if missing) and return the file's path."""
        folder = Path(save_directory)
        if folder.is_file():
            raise ValueError(f"save_directory={str(folder)!r} is a file; give a folder.")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / SCHEDULE_FILE
        path.write_text(self.to_json(), encoding="utf-8")
        return path

    @classmethod
    def from_pretrained(cls, path_or_repo: str | os.PathLike[str], **hub_kwargs: Any) -> SparsitySchedule:
        """
        Load a schedule from a JSON file, from a folder that holds `sparrow_schedule.json`, or from the Hub. A folder or
        repository with a model trained by this package has it in its folder `sparrow/`, which is looked at too.

        Args:
            path_or_repo (`str` or `os.PathLike`):
                A path, or the id `"user/name"` of a Hub repository. What exists locally is read locally, without the
                network.
            hub_kwargs:
                Passed to `huggingface_hub.hf_hub_download`: `revision`, `token`, `cache_dir`, `local_files_only`, ...

        Raises:
            `FileNotFoundError`: there is no such file, folder or repository, or no schedule in it.
            `ValueError`: the file is not a valid schedule.
        """
        path = Path(path_or_repo).expanduser()
        if path.is_dir():
            folder, path = path, path / SCHEDULE_FILE
            if not path.is_file():
                path = folder / RECORD_FOLDER / SCHEDULE_FILE
            if not path.is_file():
                raise FileNotFoundError(f"The folder {str(folder)!r} has no {SCHEDULE_FILE}.")
        elif not path.exists():
            path = _download(os.fspath(path_or_repo), **hub_kwargs)
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} does not hold a sparsity schedule: {error}") from error

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Upload sparsity schedule",
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
    ) -> str:
        """
        Upload the schedule as `sparrow_schedule.json` to the Hub model repository `repo_id`, made if missing.

        Returns:
            `str`: the address of the commit.
        """
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        commit = api.upload_file(
            path_or_fileobj=self.to_json().encode(),
            path_in_repo=SCHEDULE_FILE,
            repo_id=repo_id,
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
        )
        return commit.commit_url

    def plot(self, path: str | os.PathLike[str] | None = None, ax: Axes | None = None) -> Axes:
        """
        Draw kept tokens against position, with the diagonal of dense attention.

        Args:
            path (`str` or `os.PathLike`, *optional*): where to save the figure; its suffix gives the format.
            ax (`matplotlib.axes.Axes`, *optional*): where to draw; a new figure if not given.

        Returns:
            `matplotlib.axes.Axes`: what was drawn on.

        Raises:
            `ImportError`: matplotlib is not installed.
        """
        from .plot import plot_schedule

        return plot_schedule(self, path, ax)

    @classmethod
    def resolve(
        cls,
        value: SparsitySchedule | Mapping[str, Any] | str | os.PathLike[str],
        model_name_or_path: str | os.PathLike[str] | None = None,
        target: float = DEFAULT_TARGET,
    ) -> SparsitySchedule:
        """
        The schedule that the option `sparse_schedule` means.

        Args:
            value:
                A schedule; a mapping of its fields; `"dense"`; `"fixed:64"` (scored pages); a published preset as
                `"qwen3-1.7b"` or `"qwen3-1.7b@0.86"`; the path of a JSON file or of a folder with
                `sparrow_schedule.json`; a Hub repository `"user/name"`; or `"auto"`: the published preset if the
                model is one of those, else dense, with a warning.
            model_name_or_path (`str` or `os.PathLike`, *optional*): the model, for `"auto"`.
            target (`float`, *optional*, defaults to `0.86`): the tail, where a preset is named without one.

        Raises:
            `ValueError`: `value` names no schedule.
            `FileNotFoundError`: `value` is a path or repository that does not exist.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        if isinstance(value, os.PathLike):
            return cls.from_pretrained(value)
        if not isinstance(value, str):
            raise TypeError(f"sparse_schedule={value!r} is a {type(value).__name__}; {_FORMS}.")
        if value == "dense":
            return cls.dense()
        if value == "auto":
            return cls._auto(model_name_or_path, target)
        if value.startswith("fixed:"):
            return cls._fixed_from_text(value)
        name, at, preset_target = value.partition("@")
        if name.lower() in load_presets()["schedules"]:
            try:
                return cls.from_preset(name.lower(), _target_from_text(preset_target) if at else target)
            except ValueError as error:
                raise ValueError(f"sparse_schedule={value!r}: {error}") from error
        if value and (_is_path(value) or is_hub_repo(value)):
            return cls.from_pretrained(value)
        raise ValueError(f"sparse_schedule={value!r} names no schedule; {_FORMS}.")

    @classmethod
    def _auto(cls, model_name_or_path: str | os.PathLike[str] | None, target: float) -> SparsitySchedule:
        known = load_presets()["schedules"]
        if model_name_or_path is not None and preset_name(model_name_or_path) in known:
            return cls.from_preset(os.fspath(model_name_or_path), target)
        warnings.warn(
            f"sparse_schedule='auto': there is no published schedule for the model {str(model_name_or_path)!r} "
            f"(there is for {', '.join(known)}), so the rollout is dense. To make it sparse, set sparse_schedule to a "
            "preset ('qwen3-1.7b@0.86'), a fixed number of pages ('fixed:64'), a schedule file or a Hub repository; "
            "sparse_schedule='dense' keeps it dense without this warning.",
            UserWarning,
            stacklevel=3,
        )
        return cls.dense()

    @classmethod
    def _fixed_from_text(cls, value: str) -> SparsitySchedule:
        number = value.removeprefix("fixed:")
        if not number.isdecimal():
            raise ValueError(f"sparse_schedule={value!r}: {number!r} is not a number of pages, as in 'fixed:64'.")
        return cls.fixed(int(number))


_FORMS = (
    "give a SparsitySchedule, a dict of its fields, 'auto', 'dense', 'fixed:64', a published preset as "
    "'qwen3-1.7b@0.86', the path of a file or folder, or a Hub repository 'user/name'"
)


def _int_tuple(name: str, values: Any, low: int, high: int | None = None) -> tuple[int, ...]:
    if isinstance(values, (str, Mapping)) or not hasattr(values, "__iter__"):
        raise TypeError(f"{name}={values!r} is not a sequence of integers.")
    return tuple(integer(f"{name}[{index}]", value, low, high) for index, value in enumerate(values))


def _json_copy(provenance: Any) -> dict[str, Any]:
    """A copy as JSON would give it back, so that what is stored and what is loaded compare equal."""
    if not isinstance(provenance, Mapping):
        raise TypeError(f"provenance is a {type(provenance).__name__}, not a dict.")
    try:
        return json.loads(json.dumps(dict(provenance), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"provenance cannot be stored as JSON: {error}.") from error


@lru_cache(maxsize=64)
def _budget_table(budgets: tuple[int, ...], device: torch.device) -> torch.Tensor:
    # Kept per device: the decode loop must not copy it from the host again at each step.
    import torch

    return torch.tensor(budgets, dtype=torch.int64, device=device)


def _target_from_text(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a target, a number in (0, 1] as in 'qwen3-1.7b@0.86'.") from None


def is_hub_repo(text: str) -> bool:
    """Whether `text` can only mean a Hub repository `user/name`: it is no path of something that exists here."""
    return _REPO_ID.fullmatch(text) is not None and not _is_path(text)


def _is_path(text: str) -> bool:
    path = Path(text).expanduser()
    return path.exists() or path.is_absolute() or text.startswith(".") or path.suffix == ".json"


def _download(repo_id: str, **hub_kwargs: Any) -> Path:
    if not is_hub_repo(repo_id):
        raise FileNotFoundError(f"There is no schedule file or folder {repo_id!r}.")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        try:
            return Path(hf_hub_download(repo_id, SCHEDULE_FILE, **hub_kwargs))
        except EntryNotFoundError:
            return Path(hf_hub_download(repo_id, f"{RECORD_FOLDER}/{SCHEDULE_FILE}", **hub_kwargs))
    except (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise FileNotFoundError(
            f"No schedule in {repo_id!r}: it is no local path, and {SCHEDULE_FILE} could not be had from a Hub "
            f"repository of that name ({type(error).__name__}: {error})."
        ) from error
