"""The steps of one calibration: search each bin's budget, check the schedule on its own trajectories, mend it."""

from __future__ import annotations

from dataclasses import replace

from transformers.utils import logging

from ...rollout import RolloutEngine
from ..schedule import SparsitySchedule
from .bases import Bases, make_bases
from .curves import Tail, tail_of
from .measure import Measurer
from .options import CalibrationOptions, MeasureOptions
from .plan import bins_within, place_stretches
from .results import Calibration, TailReport
from .search import FIRST_TOKENS, BinSearch, extrapolate, shared_effect
from .stretches import DECODE_WORK, OWN_PAST_WORK, SCORE_WORK, Stretch
from .texts import Source


logger = logging.get_logger(__name__)

USUAL_ROUNDS = 6  # of a search, for the progress bar
MOST_ROUNDS = 12
ROOM = 0.015  # a checked bin with more of it above the target is made cheaper
CHECK_STREAM, PROBE_STREAM = 1_000_000, 0


class Calibrator:
    """The steps of one calibration."""

    def __init__(self, model, tokenizer, source, layout, options, max_context, store, bar):
        self.options, self.layout, self.bar = options, layout, bar
        self.max_context = max_context
        self.measurer, self.bases, plan = prepare(model, tokenizer, source, layout, options, max_context, store, bar)
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
        round_work = work_of(self.bases.texts, self.probes, own_past=False)
        check_work = work_of(self.measurer.texts, self.checked, own_past=True)
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
            tails = check_schedule(self.measurer, schedule, stretches, self.options)
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
            if fewest < options.min_tokens or not all(tail.has_low_end(options.confidence) for tail in tails.values()):
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
        """
        More for bins whose lower end misses the target, less for those with room. Bins with too few tokens in the check
        for a lower end stay as the search found them, with a warning.
        """
        options, mended = self.options, dict(known)
        budgets = extrapolate(known, max(known) + 1, options.bin_tokens)
        unchecked = [index for index, tail in tails.items() if not tail.has_low_end(options.confidence)]
        if unchecked:
            logger.warning(
                f"Bins {', '.join(map(str, unchecked))} had too few tokens in the check ("
                f"{', '.join(str(tails[index].tokens) for index in unchecked)}) for an interval, and keep the budgets of "
                "the search. Raise --check-places, or give longer texts or prompts."
            )
        for index, tail in tails.items():
            if index in unchecked:
                continue
            search = self.searches[index]
            slope = search.slope(search.tails(effect, options.confidence))
            budget = budgets[index]
            moved = search.moved(budget, tail.low, options.target, slope)
            if tail.low < options.target:
                mended[index] = min(max(moved, budget + 1), search.largest)
            elif may_lower and tail.low > options.target + ROOM:
                mended[index] = min(moved, budget)
        return mended


def prepare(
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


def check_schedule(
    measurer: Measurer, schedule: SparsitySchedule, stretches: dict[int, list[Stretch]], options: MeasureOptions
) -> dict[int, Tail]:
    """Tails of a schedule on its own trajectories."""
    places = {index: group for index, group in stretches.items() if group}
    found = iter(measurer.measure(schedule, [s for group in places.values() for s in group], own_past=True))
    arrays = {index: [next(found) for _ in group] for index, group in places.items()}
    effect = shared_effect(list(arrays.values()))
    return {index: tail_of(group, effect, options.confidence) for index, group in arrays.items()}


def work_of(texts, stretches: dict[int, list[Stretch]], own_past: bool) -> float:
    """See [`StretchSampler`]: of a measurement, its dense prefill left out."""
    tokens = sum(stretch.length for group in stretches.values() for stretch in group)
    past = OWN_PAST_WORK * sum(map(len, texts)) if own_past else 0.0
    return past + tokens * (DECODE_WORK + SCORE_WORK)
