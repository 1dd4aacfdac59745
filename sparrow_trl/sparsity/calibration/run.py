"""Find the schedule of a model: search each bin's budget, check the schedule on its own trajectories, mend it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...environment import versions
from ...monitor.histogram import TAIL_QUANTILE, order_statistics
from ...rollout import RolloutEngine
from ..schedule import SparsitySchedule
from .bases import Bases, longest_context, make_bases
from .curves import Tail, tail_of
from .measure import Measurer, Store, settings_key
from .options import CalibrationOptions, MeasureOptions
from .plan import bins_within, place_stretches
from .provenance import architecture, check_made_for, weights_fingerprint
from .search import FIRST_TOKENS, BinSearch, extrapolate, shared_effect
from .stretches import DECODE_WORK, OWN_PAST_WORK, SCORE_WORK, Stretch
from .texts import Source, load_source


USUAL_ROUNDS = 6  # of a search, for the progress bar
MOST_ROUNDS = 12
ROOM = 0.015  # a checked bin with more of it above the target is made cheaper
CHECK_STREAM, PROBE_STREAM = 1_000_000, 0
GROWTH_RULE = (
    "Bins behind the last known one keep its share of the context, so their budget grows in proportion to the middle of "
    "the bin; bins before or between known ones take the budget of the next known one; budgets never fall."
)


@dataclass
class TailReport:
    """
    Tails of a schedule on its own trajectories.

    Attributes:
        schedule (`SparsitySchedule`): what was measured.
        tails (`dict[int, Tail]`): of each bin that has tokens.
        min_tokens (`int`): independent tokens that a bin needs to be judged.
        source (`dict`): the data.
        way (`str`): how the bins were reached.
    """

    schedule: SparsitySchedule
    tails: dict[int, Tail]
    min_tokens: int
    source: dict[str, Any]
    way: str

    def is_known(self, index: int) -> bool:
        """Whether a bin has enough tokens."""
        return index in self.tails and self.tails[index].effective_tokens >= self.min_tokens

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "schedule": self.schedule.to_dict(),
            "source": self.source,
            "way": self.way,
            "bins": [
                {
                    "index": index,
                    "budget": self.schedule.budget_at(index * self.schedule.bin_tokens),
                    "enough_tokens": self.is_known(index),
                    **asdict(tail),
                }
                for index, tail in self.tails.items()
            ],
        }


@dataclass
class Calibration:
    """
    The schedule found, and how.

    Attributes:
        schedule (`SparsitySchedule`): with its provenance.
        searches (`dict[int, BinSearch]`): of each bin the budgets measured, with dense pasts.
        checks (`list[TailReport]`): of the schedules checked, the last one last.
        effect (`float`): design effect of the search.
    """

    schedule: SparsitySchedule
    searches: dict[int, BinSearch]
    checks: list[TailReport] = field(default_factory=list)
    effect: float = 1.0


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
        calibrator = _Calibrator(model, tokenizer, source, layout, options, max_context, store, bar)
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
            "bins": _described_bins(calibration, options),
            "checks": [_described_check(check) for check in calibration.checks],
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
        "data": _described(source),
        "schedule": {key: value for key, value in schedule.to_dict().items() if key != "provenance"},
        "actor": actor_name,
    }
    store = Store(None if out is None else Path(out), settings)
    with _bar("tail", progress_bar) as bar:
        measurer, bases, plan = _prepare(model, tokenizer, source, schedule, options, max_context, store, bar, actor)
        stretches = plan["check"]
        bar.total = _work(bases.texts, stretches, own_past=True) + sum(map(len, measurer.texts))
        tails = _check(measurer, schedule, stretches, options)
    return TailReport(schedule, tails, options.min_tokens, _described(source), bases.way)


class _Calibrator:
    """The steps of one calibration."""

    def __init__(self, model, tokenizer, source, layout, options, max_context, store, bar):
        self.options, self.layout, self.bar = options, layout, bar
        self.max_context = max_context
        self.measurer, self.bases, plan = _prepare(model, tokenizer, source, layout, options, max_context, store, bar)
        self.probes, self.checked = plan["probe"], plan["check"]
        always = options.sink_pages + options.recent_pages
        first = max(1, FIRST_TOKENS // options.page_size)
        self.searches = {}
        for index, stretches in self.probes.items():
            if stretches:
                last = min((index + 1) * options.bin_tokens, max_context) - 1
                largest = max(0, last // options.page_size + 1 - always)
                start = min(round(first * (index + 1) ** 0.5), max(1, largest // 2))
                self.searches[index] = BinSearch(index, largest, start, always)
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or max_context
        self.num_bins = -(-max(limit, max_context) // options.bin_tokens)

    def run(self) -> Calibration:
        work = sum(map(len, self.measurer.texts))
        round_work = _work(self.bases.texts, self.probes, own_past=False)
        check_work = _work(self.measurer.texts, self.checked, own_past=True)
        rounds = len(self.options.budgets) or USUAL_ROUNDS
        self.bar.total = work + rounds * round_work + self.options.checks * check_work
        self._search()
        effect = self._effect()
        known = self._solve(effect)
        schedule = self._schedule(known)
        checks: list[TailReport] = []
        for turn in range(self.options.checks):
            self.bar.set_description(f"check {turn + 1}")
            self.bar.total = self.bar.n + (self.options.checks - turn) * check_work
            stretches = {index: self.checked[index] for index in known}
            tails = _check(self.measurer, schedule, stretches, self.options)
            checks.append(TailReport(schedule, tails, self.options.min_tokens, {}, self.bases.way))
            mended = self._mend(known, tails, effect, may_lower=turn + 1 < self.options.checks)
            known, before = mended, schedule
            schedule = self._schedule(known)
            if schedule.budgets == before.budgets:
                break
        self.bar.total = self.bar.n
        return Calibration(schedule, self.searches, checks, effect)

    def _search(self) -> None:
        """Measure budgets until each bin's target lies between two close ones."""
        options = self.options
        grid = list(options.budgets)
        for turn in range(len(grid) or MOST_ROUNDS):
            effect = self._effect()
            wanted: dict[int, int] = {}
            for index, search in self.searches.items():
                drawn = [sum(map(len, group)) for group in search.measured.values()]
                if drawn and min(drawn) < options.min_tokens:
                    continue  # it will not be judged
                budget = grid[turn] if grid else search.next_budget(options.target, effect, options.confidence)
                if budget is not None:
                    wanted[index] = budget
            if not wanted:
                break
            self.bar.set_description("budgets " + " ".join(str(wanted.get(index, "-")) for index in self.searches))
            known = {index: wanted.get(index, 0) for index in range(max(self.searches) + 1)}
            schedule = replace(self.layout, budgets=tuple(known.values()))
            stretches = [stretch for index in wanted for stretch in self.probes[index]]
            found = iter(self.measurer.measure(schedule, stretches))
            for index, budget in wanted.items():
                self.searches[index].measured[budget] = [next(found) for _ in self.probes[index]]

    def _effect(self) -> float:
        return shared_effect([group for search in self.searches.values() for group in search.measured.values()])

    def _solve(self, effect: float) -> dict[int, int]:
        """The cheapest budget of each bin that has enough tokens."""
        options, known, most = self.options, {}, 0.0
        for index, search in self.searches.items():
            tails = search.tails(effect, options.confidence)
            fewest = min(tail.effective_tokens for tail in tails.values())
            most = max(most, fewest)
            has_low_end = order_statistics(int(fewest), TAIL_QUANTILE, options.confidence)[0] is not None
            if fewest < options.min_tokens or not has_low_end:
                continue
            budget = search.curve(tails, "low").cheapest(options.target)
            if budget is None:
                largest = max(tails)
                raise ValueError(
                    f"No budget meets target={options.target} in bin {index}: {largest} scored pages, of "
                    f"{search.largest} that there are, have a tail of {tails[largest].value:.4f} (lower end "
                    f"{tails[largest].low:.4f}). Lower the target, or raise --probe-places, --budgets or the precision."
                )
            known[index] = budget
        if not known:
            raise ValueError(
                f"Too few tokens in every bin: at most {most:.0f} independent ones, and --min-tokens "
                f"{options.min_tokens} are needed. Raise --probe-places or --probe-tokens, or give longer texts or prompts."
            )
        return known

    def _schedule(self, known: dict[int, int]) -> SparsitySchedule:
        budgets = extrapolate(known, max(self.num_bins, max(known) + 1), self.options.bin_tokens)
        return replace(self.layout, budgets=tuple(budgets))

    def _mend(self, known: dict[int, int], tails: dict[int, Tail], effect: float, may_lower: bool) -> dict[int, int]:
        """More for bins whose lower end misses the target, less for those with room."""
        options, mended = self.options, dict(known)
        budgets = extrapolate(known, max(known) + 1, options.bin_tokens)
        for index, tail in tails.items():
            search = self.searches[index]
            slope = search.slope(search.tails(effect, options.confidence))
            budget = budgets[index]
            moved = search.moved(budget, tail.low, options.target, slope)
            if tail.low < options.target:
                mended[index] = min(max(moved, budget + 1), search.largest)
            elif may_lower and tail.low > options.target + ROOM:
                mended[index] = min(moved, budget)
        return mended


def _prepare(
    model,
    tokenizer,
    source: Source,
    layout: SparsitySchedule,
    options: MeasureOptions,
    max_context: int,
    store,
    bar,
    actor=None,
) -> tuple[Measurer, Bases, dict[str, dict[int, list[Stretch]]]]:
    """Texts, the places of stretches in them, and what measures them."""
    extra = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    engine = RolloutEngine(model, SparsitySchedule.dense(), stop_token_ids=extra)  # refuses misfits
    bases = make_bases(model, source, options, max_context, engine.stop_token_ids, store)
    bins = range(bins_within(max_context, layout.bin_tokens))
    lengths = [len(text) for text in bases.texts]
    plan = {}
    kinds = {"check": (options.check_places, options.check_tokens, CHECK_STREAM)}
    if isinstance(options, CalibrationOptions):
        kinds["probe"] = (options.probe_places, options.probe_tokens, PROBE_STREAM)
    for kind, (places, tokens, first_stream) in kinds.items():
        plan[kind] = place_stretches(
            lengths,
            bases.prompt_lengths,
            bins,
            bin_tokens=layout.bin_tokens,
            max_context=max_context,
            per_bin=places,
            length=tokens,
            first_stream=first_stream,
        )
        if not any(plan[kind].values()):
            raise ValueError(
                f"No bin can be measured: within --max-context {max_context} no text has room for {tokens} tokens "
                f"behind its prompt. Lower --{kind}-tokens, or give longer texts or prompts."
            )
    measurer = Measurer(
        model,
        layout,
        bases.texts,
        bases.prompt_lengths,
        [[stretch for stretches in group.values() for stretch in stretches] for group in plan.values()],
        seed=options.seed,
        temperature=options.temperature,
        stop_token_ids=engine.stop_token_ids,
        store=store,
        memory_fraction=options.memory_fraction,
        actor=actor,
        on_work=bar.update,
    )
    return measurer, bases, plan


def _check(
    measurer: Measurer, schedule: SparsitySchedule, stretches: dict[int, list[Stretch]], options: MeasureOptions
) -> dict[int, Tail]:
    """Tails of a schedule on its own trajectories."""
    places = {index: group for index, group in stretches.items() if group}
    found = iter(measurer.measure(schedule, [s for group in places.values() for s in group], own_past=True))
    arrays = {index: [next(found) for _ in group] for index, group in places.items()}
    effect = shared_effect(list(arrays.values()))
    return {index: tail_of(group, effect, options.confidence) for index, group in arrays.items()}


def _work(texts, stretches: dict[int, list[Stretch]], own_past: bool) -> float:
    """See [`StretchSampler`]: of a measurement, its dense prefill left out."""
    tokens = sum(stretch.length for group in stretches.values() for stretch in group)
    past = OWN_PAST_WORK * sum(map(len, texts)) if own_past else 0.0
    return past + tokens * (DECODE_WORK + SCORE_WORK)


def _described(source: Source) -> dict[str, Any]:
    return {
        "name": source.name,
        "kind": source.kind,
        "rows": len(source.rows),
        "tokens": source.tokens,
        "fingerprint": source.fingerprint(),
    }


def _described_bins(calibration: Calibration, options: CalibrationOptions) -> list[dict[str, Any]]:
    """Of each bin of the schedule, its budget, whether that was measured, and the curve."""
    described = []
    for index, budget in enumerate(calibration.schedule.budgets):
        entry: dict[str, Any] = {"index": index, "budget": budget, "status": "extrapolated"}
        search = calibration.searches.get(index)
        if search is not None:
            tails = search.tails(calibration.effect, options.confidence)
            enough = min(tail.effective_tokens for tail in tails.values()) >= options.min_tokens
            entry["status"] = "measured" if enough else "extrapolated: too few tokens"
            entry["budgets"] = list(tails)
            for name in ("value", "low", "high", "mean", "tokens"):
                entry[{"value": "tails"}.get(name, name)] = [getattr(tail, name) for tail in tails.values()]
        if calibration.checks and index in calibration.checks[-1].tails:
            checked = calibration.checks[-1]
            is_same = checked.schedule.budgets[index] == budget
            meets = checked.tails[index].low >= options.target
            entry["check"] = ("passed" if meets else "below the target") if is_same else "raised after the last check"
        described.append(entry)
    return described


def _described_check(check: TailReport) -> dict[str, Any]:
    return {
        "budgets": list(check.schedule.budgets),
        "bins": [{"index": index, **asdict(tail)} for index, tail in check.tails.items()],
    }


@contextmanager
def _bar(description: str, shown: bool) -> Iterator[tqdm]:
    bar_format = "{desc} {percentage:3.0f}% |{bar}| {elapsed}, {remaining} left"
    with tqdm(desc=description, total=1, disable=not shown, bar_format=bar_format, leave=False, mininterval=1) as bar:
        yield bar
