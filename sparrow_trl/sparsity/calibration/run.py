"""Find the schedule of a model, or measure the tail of one that is there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...environment import versions
from ..schedule import SparsitySchedule
from .bases import longest_context
from .calibrator import Calibrator, check_schedule, prepare, work_of
from .measure import Store, settings_key
from .options import CalibrationOptions, MeasureOptions
from .provenance import architecture, check_made_for, weights_fingerprint
from .results import Calibration, TailReport, described_bins, described_check
from .texts import Source, load_source


GROWTH_RULE = (
    "Bins behind the last known one keep its share of the context, so their budget grows in proportion to the middle of "
    "the bin; bins before or between known ones take the budget of the next known one; budgets never fall."
)


def calibrate_schedule(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Any = None,
    *,
    out: str | os.PathLike[str] | None = None,
    name: str | None = None,
    revision: str | None = None,
    split: str = "train",
    progress_bar: bool = True,
    options: CalibrationOptions | None = None,
    **changes: Any,
) -> Calibration:
    """
    Find the cheapest schedule whose tail meets the target in every length bin (arXiv 2606.08446).

    Budgets are searched bin by bin: the sparse model generates stretches at places inside texts, the dense model scores
    them. In each bin the cheapest budget is taken whose tail meets the target by the lower end of its confidence
    interval. The schedule is then checked on its own trajectories, where the past was read sparsely too, and bins that
    sag are mended.

    Args:
        model ([`~transformers.PreTrainedModel`]): the model, as it will be sampled from.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): its tokenizer.
        dataset: texts or prompts, see [`load_source`]; by default the topics of Python's `help()`.
        out (`str` or `os.PathLike`, *optional*): folder of partial results, with which an interrupted run goes on.
        name, revision (`str`, *optional*): of the model, for the provenance.
        progress_bar (`bool`, *optional*, defaults to `True`): whether to show one.
        options ([`CalibrationOptions`], *optional*): all settings; `changes` replace single ones, as in `target=0.9`.

    Returns:
        [`Calibration`].

    Raises:
        UnsupportedModelError: for models that the engine would run wrongly.
        ValueError: too little text, too few tokens in every bin, or a target that cannot be met.
    """
    options = replace(options or CalibrationOptions(), **changes)
    source = load_source(dataset, tokenizer, split)
    max_context = longest_context(model, options)
    _, settings = key_of(model, source, options, name, revision)
    store = Store(None if out is None else Path(out), settings)
    layout = SparsitySchedule(
        budgets=(0,),
        bin_tokens=options.bin_tokens,
        page_size=options.page_size,
        sink_pages=options.sink_pages,
        recent_pages=options.recent_pages,
        dense_layers=options.dense_layers,
        target=options.target,
    )
    with _bar("calibrate", progress_bar) as bar:
        calibrator = Calibrator(model, tokenizer, source, layout, options, max_context, store, bar)
        calibration = calibrator.run()
    schedule = replace(
        calibration.schedule,
        provenance={
            "kind": "calibrated",
            "model": settings["model"],
            "data": settings["data"],
            "way": f"{calibrator.bases.way}; each budget generated its own, and the dense model scored them",
            "past": "dense in the search, the schedule's own in the checks",
            "max_context": max_context,
            "seed": options.seed,
            "settings": asdict(options),
            "design_effect": calibration.effect,
            "growth_rule": GROWTH_RULE,
            "bins": described_bins(calibration, options),
            "checks": [described_check(check) for check in calibration.checks],
            "versions": versions(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        },
    )
    return replace(calibration, schedule=schedule)


def key_of(
    model: PreTrainedModel, source: Source, options: CalibrationOptions, name: str | None, revision: str | None = None
) -> tuple[str, dict[str, Any]]:
    """A hash of all that a calibration depends on, and that as plain values."""
    identity = {
        "name": name or model.config.name_or_path or None,
        "revision": revision,
        "architecture": architecture(model.config),
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": weights_fingerprint(model),
    }
    settings = {
        "options": asdict(options),
        "model": identity,
        "data": _described(source),
        "max_context": longest_context(model, options),
    }
    return settings_key(settings), settings


def measure_tail(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    schedule: SparsitySchedule,
    dataset: Any = None,
    *,
    out: str | os.PathLike[str] | None = None,
    split: str = "train",
    progress_bar: bool = True,
    actor: Callable[[], AbstractContextManager] | None = None,
    actor_name: str | None = None,
    options: MeasureOptions | None = None,
    **changes: Any,
) -> TailReport:
    """
    The tail of a schedule in each length bin, on its own trajectories: text behind the prompt is read sparsely, as it
    would have been decoded, then tokens are generated and scored densely.

    Args:
        schedule (`SparsitySchedule`): not dense, and not made for another model.
        actor (`Callable`, *optional*): makes a context manager, inside which the sparse actor runs and the dense policy
            does not: for example one that switches an adapter on.
        actor_name (`str`, *optional*): tells its partial results apart from those of others.

    The other arguments are those of [`calibrate_schedule`].

    Returns:
        [`TailReport`].

    Raises:
        ValueError: the schedule is dense or made for another model, or there is too little text.
    """
    options = replace(options or MeasureOptions(), **changes)
    if schedule.is_dense:
        raise ValueError("The schedule is dense: its acceptance rate is 1 by definition. Give a sparse one.")
    check_made_for(schedule, model.config)
    source = load_source(dataset, tokenizer, split)
    max_context = longest_context(model, options)
    settings = {
        "options": asdict(options),
        "model": weights_fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_context": max_context,
        "data": _described(source),
        "schedule": {key: value for key, value in schedule.to_dict().items() if key != "provenance"},
        "actor": actor_name,
    }
    store = Store(None if out is None else Path(out), settings)
    with _bar("tail", progress_bar) as bar:
        measurer, bases, plan = prepare(model, tokenizer, source, schedule, options, max_context, store, bar, actor)
        stretches = plan["check"]
        bar.total = work_of(bases.texts, stretches, own_past=True) + sum(map(len, measurer.texts))
        tails = check_schedule(measurer, schedule, stretches, options)
    return TailReport(schedule, tails, options.min_tokens, _described(source), bases.way)


def _described(source: Source) -> dict[str, Any]:
    return {
        "name": source.name,
        "kind": source.kind,
        "rows": len(source.rows),
        "tokens": source.tokens,
        "fingerprint": source.fingerprint(),
    }


@contextmanager
def _bar(description: str, shown: bool) -> Iterator[tqdm]:
    bar_format = "{desc} {percentage:3.0f}% |{bar}| {elapsed}, {remaining} left"
    with tqdm(desc=description, total=1, disable=not shown, bar_format=bar_format, leave=False, mininterval=1) as bar:
        yield bar
