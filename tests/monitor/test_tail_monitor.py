"""The tail monitor in short training runs of tiny models."""

import functools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig

from sparrow_trl import SparrowGRPOConfig
from sparrow_trl.attention import TeacherForced
from sparrow_trl.hub.evidence import read_tail
from sparrow_trl.monitor import AcceptanceHistogram, BatchReport, Scorer, TailMonitor, Verdict
from sparrow_trl.monitor.callback import TailCallback
from sparrow_trl.monitor.histogram import TailEstimate
from sparrow_trl.rollout.isolation import rollout_mode
from sparrow_trl.sparsity import SparsitySchedule
from tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer
from training import RecordingTrainer, logged, make_config, make_trainer, prompts


SCHEDULE = SparsitySchedule((2,), page_size=4, bin_tokens=16)
OPTIONS = {
    "sparse_schedule": SCHEDULE,
    "tail_share": 1.0,
    "tail_min_tokens": 20,
    "max_completion_length": 24,
}


class MeasuringTrainer(RecordingTrainer):
    """Keeps every histogram that the monitor measured, by statistic."""

    def __init__(self, *args, **kwargs):
        self.measured = []
        super().__init__(*args, **kwargs)
        if self.tail_monitor is not None:
            decide = self.tail_monitor._decide
            self.tail_monitor._decide = lambda measured, step: (
                self.measured.append(measured),
                decide(measured, step),
            )[1]


def make(tmp_path, **options):
    arguments = options.pop("arguments", {})
    return make_trainer(tmp_path, MeasuringTrainer, arguments=arguments, **{**OPTIONS, **options})


@torch.no_grad()
def distributions(model, prompt, completion, schedule, temperature=1.0):
    """`(len(completion), vocab_size)` float64 probabilities, dense by a plain forward, sparse by a teacher-forced one."""
    ids = torch.tensor([prompt + completion])
    if schedule is None:
        logits = model(input_ids=ids).logits
    else:
        state = TeacherForced(schedule, [ids.shape[1]], [len(prompt)])
        with rollout_mode(model):
            positions = torch.arange(ids.shape[1])[None]
            logits = model(input_ids=ids, position_ids=positions, use_cache=False, sparrow=state).logits
    return (logits[0, len(prompt) - 1 : -1].double() / temperature).softmax(-1)


def expected_rates(model, rollouts, schedule=SCHEDULE, temperature=1.0, top_k=None):
    """Bin and rate of each sampled token: over the vocabulary, or over the ids that are in the top-k of both sides."""
    bins, rates = [], []
    for prompt_ids, completion_ids, _ in rollouts:
        for prompt, completion in zip(prompt_ids, completion_ids, strict=True):
            dense = distributions(model, prompt, completion, None, temperature)
            sparse = distributions(model, prompt, completion, schedule, temperature)
            smaller = torch.minimum(dense, sparse)
            if top_k is not None:
                both = torch.ones_like(smaller, dtype=torch.bool)
                for side in (dense, sparse):
                    both &= torch.zeros_like(both).scatter(-1, side.topk(top_k, dim=-1).indices, True)
                smaller = smaller * both
            rates += smaller.sum(-1).tolist()
            bins += [(len(prompt) - 1 + t) // schedule.bin_tokens for t in range(len(completion))]
    return np.array(bins), np.array(rates)


def check(histogram, bins, rates, tolerance=2e-3):
    for index in range(max(bins) + 1):
        values = rates[bins == index]
        assert histogram.tokens(index) == len(values)
        if len(values):
            assert histogram.mean(index) == pytest.approx(values.mean(), abs=1e-4)
            assert histogram.percentile(index=index) == pytest.approx(np.quantile(values, 0.05), abs=tolerance)


# --- what is measured ---


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {}),
        ("llama", {"temperature": 0.7, "top_p": 0.9, "top_k": 30}),
        ("gemma2", {}),  # soft-capped logits
        ("granite", {"per_device_train_batch_size": 4, "steps_per_generation": 2}),  # scaled logits, two chunks
    ],
)
def test_exact_rates_are_those_of_whole_distributions(tmp_path, model_type, options):
    schedule = SparsitySchedule((1,), page_size=4, bin_tokens=16, dense_layers=(0,))
    trainer = make(
        tmp_path,
        arguments={"model": tiny_model(model_type)},
        max_steps=1,
        tail_statistic="exact",
        sparse_schedule=schedule,
        **options,
    )
    trainer.train()
    temperature = options.get("temperature", 1.0)
    policy, (measured,) = tiny_model(model_type), trainer.measured
    bins, rates = expected_rates(policy, trainer.rollouts, schedule, temperature)
    assert rates.min() < 0.9
    check(measured["exact"], bins, rates)
    check(measured["lower"], *expected_rates(policy, trainer.rollouts, schedule, temperature, top_k=20))
    for index in set(bins.tolist()):
        assert measured["lower"].mean(index) <= measured["exact"].mean(index) <= measured["upper"].mean(index)
    step = trainer.state.log_history[0]
    assert step["sparrow/tail"] == pytest.approx(np.quantile(rates, 0.05), abs=2e-3)
    assert step["sparrow/acceptance"] == pytest.approx(rates.mean(), abs=1e-4)
    assert step["sparrow/tail_tokens"] == len(rates)
    assert step["sparrow/tail_lower"] <= step["sparrow/tail"] <= step["sparrow/tail_upper"]
    fullest = np.bincount(bins).argmax()
    assert step[f"sparrow/acceptance/bin_{fullest}"] == pytest.approx(rates[bins == fullest].mean(), abs=1e-4)
    assert step["sparrow/acceptance_floor"] == pytest.approx(1, abs=1e-4)  # the policy against itself
    assert step["sparrow/tail_floor"] == pytest.approx(1, abs=1e-3)


def test_bounds_take_no_pass_over_the_model_of_their_own(tmp_path, monkeypatch):
    trainer = make(tmp_path, max_steps=2, tail_statistic="lower", tail_floor_every=100)
    passes = []
    hidden_states = Scorer.hidden_states

    def counting(self, *args):
        passes.append(args)
        return hidden_states(self, *args)

    monkeypatch.setattr(Scorer, "hidden_states", counting)
    trainer.train()
    assert len(passes) == 1  # of the noise floor, in the first step
    check(trainer.measured[0]["lower"], *expected_rates(tiny_model(), trainer.rollouts[:1], top_k=20))
    assert not trainer.measured[0]["exact"].tokens()


@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
def test_dense_side_is_the_policy_also_where_trl_makes_no_pass(tmp_path, peft):
    """Without correction, and with a reference pass that must not be taken for the policy's."""
    arguments = {"peft_config": LoraConfig(r=4, task_type="CAUSAL_LM")} if peft else {}
    with pytest.warns(UserWarning, match="ends? in collapse"):
        trainer = make(
            tmp_path,
            arguments=arguments,
            max_steps=1,
            tail_statistic="lower",
            vllm_importance_sampling_correction=False,
            beta=0.1 if peft else 0.0,
        )
    trainer.train()
    check(trainer.measured[0]["lower"], *expected_rates(tiny_model(), trainer.rollouts, top_k=20))


def test_only_some_sequences_are_measured(tmp_path):
    trainer = make(tmp_path, max_steps=4, tail_share=0.25, tail_every=2, tail_statistic="lower", learning_rate=0.0)
    trainer.train()
    assert len(trainer.measured) == 2
    chosen = []
    for measured, (_, completion_ids, _) in zip(trainer.measured, trainer.rollouts[::2], strict=True):
        lengths = list(map(len, completion_ids))
        tokens = measured["lower"].tokens()
        pairs = [(i, j) for i in range(8) for j in range(i) if lengths[i] + lengths[j] == tokens]
        assert pairs
        chosen.append(pairs)
    assert chosen[0] != chosen[1]


def test_masked_completions_are_not_counted(tmp_path):
    model = tiny_model()
    model.generation_config.eos_token_id = list(range(100, 120))
    trainer = make(
        tmp_path,
        arguments={"model": model},
        max_steps=1,
        max_completion_length=6,
        mask_truncated_completions=True,
        tail_statistic="lower",
    )
    trainer.train()
    ends = (*trainer.eos_token_ids, trainer.processing_class.pad_token_id)
    complete = [len(completion) for completion in trainer.rollouts[0][1] if completion[-1] in ends]
    assert 0 < len(complete) < 8
    assert trainer.measured[0]["lower"].tokens() == sum(complete)


def test_tool_results_are_not_counted(tmp_path):
    from test_trainer import ToolCallingTrainer, multiply

    trainer = make_trainer(
        tmp_path,
        ToolCallingTrainer,
        arguments={
            "processing_class": tiny_tokenizer(tools=True),
            "tools": [multiply],
            "train_dataset": prompts(conversational=True),
        },
        max_steps=1,
        per_device_train_batch_size=4,
        **{**OPTIONS, "max_completion_length": 160, "tail_statistic": "lower"},
    )
    trainer.train()
    first, second = trainer.rollouts
    measured = trainer.tail_monitor.pooled["lower"].tokens()
    # The trainer of the test replaces half of the first turns, so these were sampled in no row of the batch
    sampled = sum(len(completion) for completion in first[1][1::2])
    longest = sampled + sum(len(completion) for completion in second[1])
    assert sampled < measured <= longest


def test_evaluations_are_left_out(tmp_path):
    trainer = make(tmp_path, arguments={"eval_dataset": prompts(2)}, max_steps=1, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert len(trainer.rollouts) == 2
    assert len(trainer.measured) == 1
    assert not [name for entry in trainer.state.log_history for name in entry if name.startswith("eval_sparrow/tail")]


def test_measuring_changes_nothing(tmp_path):
    runs = []
    for number, options in enumerate(({"tail_monitor": False}, {}, {"tail_statistic": "exact"})):
        trainer = make(tmp_path / str(number), max_steps=2, **options)
        trainer.train()
        runs.append((trainer.rollouts, [p.detach().clone() for p in trainer.model.parameters()]))
    for rollouts, parameters in runs[1:]:
        assert rollouts == runs[0][0]
        assert all(map(torch.equal, parameters, runs[0][1]))


def test_dense_schedule_has_no_monitor(tmp_path):
    assert make(tmp_path, sparse_schedule="dense").tail_monitor is None
    assert make(tmp_path, tail_monitor=False).tail_monitor is None
    assert make(tmp_path, sparse_schedule=None).tail_monitor is None


def test_statistic_is_the_bound_unless_distributions_are_too_flat(tmp_path):
    with pytest.warns(UserWarning, match="too flat"):
        flat = make(tmp_path, max_steps=2, tail_top_k=2)
        flat.train()
    assert flat.tail_monitor.statistic == "exact"
    assert flat.measured[1]["exact"].tokens()
    peaked = make(tmp_path, max_steps=1, tail_top_k=VOCAB_SIZE)
    peaked.train()
    assert peaked.tail_monitor.statistic == "lower"


# --- what is done about it ---


def run_with(tmp_path, action, threshold, **options):
    options = {"max_steps": 3, "tail_statistic": "exact", "learning_rate": 0.0, **options}
    trainer = make(tmp_path, tail_action=action, tail_threshold=threshold, **options)
    trainer.train()
    return trainer


def test_warns_once_for_each_bin(tmp_path):
    with pytest.warns(UserWarning, match="below the threshold of 0.99") as caught:
        trainer = run_with(tmp_path, "warn", 0.99)
    text = " ".join(str(warning.message) for warning in caught)
    assert 1 <= text.count("bin 2: ") <= 1
    assert logged(trainer, "sparrow/tail_breaches")[0] >= 1
    assert trainer.rollout_engine.schedule == SCHEDULE


def test_no_breach_no_warning(tmp_path, recwarn):
    trainer = run_with(tmp_path, "stop", 0.05)
    assert trainer.state.global_step == 3
    assert logged(trainer, "sparrow/tail_breaches") == [0.0] * 3
    assert not [warning for warning in recwarn if "threshold" in str(warning.message)]


def test_stop(tmp_path):
    with pytest.warns(UserWarning, match="Training stops"):
        trainer = run_with(tmp_path, "stop", 0.99)
    assert trainer.state.global_step == 1


def test_adapt_raises_budgets_and_logs_them(tmp_path):
    with pytest.warns(UserWarning, match="the budget of bin 2 goes from 2 to"):
        trainer = run_with(tmp_path, "adapt", 0.99, tail_min_budget=1)
    decisions = trainer.tail_monitor.controller.decisions
    assert decisions[0].step == 0
    now = trainer.rollout_engine.schedule
    assert now == trainer.tail_monitor.schedule != SCHEDULE
    assert now.budget_at(40) > 2
    assert list(now.budgets) == sorted(now.budgets)
    shares = logged(trainer, "sparrow/kv_share")
    assert shares[1] > shares[0]
    assert logged(trainer, "sparrow/budgets_raised")[0] >= 1
    last = trainer.state.log_history[-2]
    assert [last[f"sparrow/budget/bin_{index}"] for index in range(len(now.budgets))] == list(now.budgets)


def test_densify_until_the_sparse_tail_is_back(tmp_path):
    trainer = make(
        tmp_path, tail_action="densify", tail_threshold=0.99, tail_statistic="exact", max_steps=4, learning_rate=0.0
    )
    monitor, seen = trainer.tail_monitor, []
    after = trainer.after_rollout_scored

    def scored(batch):
        seen.append(trainer.rollout_engine.schedule.is_dense)
        if len(seen) == 3:
            monitor.judge.threshold = monitor.threshold = 0.05  # as if the actor had become better
        after(batch)

    trainer.after_rollout_scored = scored
    with pytest.warns(UserWarning) as caught:
        trainer.train()
    assert seen == [False, True, True, False]
    assert any("Rollouts are dense until" in str(warning.message) for warning in caught)
    assert any("sparse again" in str(warning.message) for warning in caught)
    assert logged(trainer, "sparrow/densified") == [1.0, 1.0, 0.0, 0.0]
    # Meanwhile the sparse schedule is measured on the dense completions
    check(trainer.measured[1]["exact"], *expected_rates(tiny_model(), trainer.rollouts[1:2]))


@pytest.mark.parametrize(
    ("action", "min_tokens", "decided"),
    [
        ("adapt", 60, {2}),  # the resumed run starts with other budgets
        ("adapt", 100, {3}),  # it decides by tokens from before the checkpoint
        ("densify", 60, set()),
    ],
)
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, action, min_tokens, decided):
    options = {
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 3,
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
        "tail_action": action,
        "tail_threshold": 0.9,
        "tail_share": 0.5,
        "tail_min_tokens": min_tokens,
    }
    whole = make(tmp_path, **options)
    whole.train()
    torch.manual_seed(1234)  # whatever happened in between
    resumed = make(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.rollouts == whole.rollouts[3:]
    assert resumed.rollout_engine.schedule == whole.rollout_engine.schedule
    assert resumed.tail_monitor.state_dict() == whole.tail_monitor.state_dict()
    assert {decision.step for decision in whole.tail_monitor.controller.decisions} == decided
    assert whole.tail_monitor.is_densified == (action == "densify")
    saved = SparsitySchedule.from_pretrained(tmp_path / "checkpoint-3" / "sparrow")
    assert saved.page_size == 4
    for (name, expected), found in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(found, expected), name


@pytest.mark.parametrize(
    ("action", "message"), [("adapt", r"from \[2\] to \[2, 2, 12, 16\]"), ("densify", "tail_action='densify'")]
)
def test_a_run_resumed_without_the_monitor_goes_on_with_what_it_had_changed(tmp_path, action, message):
    options = {
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 1,
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
        "tail_action": action,
        "tail_threshold": 0.9,
        "tail_share": 0.5,
        "tail_min_tokens": 60,
    }
    whole = make(tmp_path / "whole", **options)
    whole.train()
    schedule = whole.rollout_engine.schedule
    assert schedule != SCHEDULE
    for folder, step in ((tmp_path / "whole", 3), (tmp_path / "resumed", 5)):
        resumed = make(tmp_path / "resumed", tail_monitor=False, **options)
        with pytest.warns(UserWarning, match=message):
            resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
        assert resumed.rollout_engine.schedule == schedule
        if step == 3:  # the other checkpoint was saved without the monitor
            assert resumed.rollouts == whole.rollouts[step:]
    other = make(tmp_path / "other", sparse_schedule="fixed:3", tail_monitor=False, **options)
    with pytest.warns(UserWarning, match="another sparse_schedule"):
        other.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert other.rollout_engine.schedule == SparsitySchedule.fixed(3)


def test_state_of_another_schedule_is_not_taken(tmp_path):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "tail_action": "adapt"}
    make(tmp_path, **{**options, "max_steps": 1}).train()
    other = make(tmp_path, sparse_schedule=SparsitySchedule((3,), page_size=4, bin_tokens=16), **options)
    with pytest.warns(UserWarning, match="another sparse_schedule"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert other.tail_monitor.controller.initial.budgets == (3,)


def test_tails_of_another_statistic_are_not_pooled_with_new_ones(tmp_path):
    build = functools.partial(TailMonitor, tiny_model(), SCHEDULE, threshold=0.86)
    saved = build(statistic="lower")
    rates = AcceptanceHistogram(SCHEDULE.bin_tokens)
    rates.add(torch.zeros(30, dtype=torch.long), torch.full((30,), 0.5))
    saved.judge.update(rates)
    saved.save(tmp_path)
    for statistic, tokens in (("lower", 30), ("auto", 30), ("exact", 0)):
        loaded = build(statistic=statistic)
        assert loaded.load(tmp_path) is None
        pending = AcceptanceHistogram()
        pending.load_state_dict(loaded.judge.state_dict()["pending"])
        assert pending.tokens() == tokens


def test_checkpoint_without_a_state_starts_anew(tmp_path):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make(tmp_path, tail_monitor=False, **{**options, "max_steps": 1}).train()
    trainer = make(tmp_path, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert len(trainer.measured) == 1


# --- what is told ---


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    run_with(tmp_path, "adapt", 0.9, save_strategy="steps", save_steps=2, max_steps=3)
    for name in ("tail_by_position", "budget_by_position", "tail_over_training"):
        path = tmp_path / "sparrow" / f"{name}.png"
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert path.stat().st_size > 5000


def test_report_is_what_the_model_card_reads(tmp_path):
    trainer = run_with(tmp_path, "warn", 0.05)
    rows, threshold, floor = read_tail(tmp_path)
    bins, rates = expected_rates(tiny_model(), trainer.rollouts)
    assert threshold == 0.05
    assert floor == pytest.approx(1, abs=1e-3)
    assert [row.first for row in rows] == [16 * index for index in sorted(set(bins.tolist()))]
    for row in rows:
        values = rates[bins == row.first // 16]
        assert (row.last, row.tokens) == (row.first + 15, len(values))
        assert row.tail == pytest.approx(np.quantile(values, 0.05), abs=2e-3)
        assert row.mean == pytest.approx(values.mean(), abs=1e-4)
        assert row.low <= row.tail <= row.high


def test_state_is_json(tmp_path):
    trainer = run_with(tmp_path, "adapt", 0.9, save_strategy="steps", save_steps=1, max_steps=1)
    state = json.loads((Path(tmp_path) / "checkpoint-1" / "sparrow" / "monitor.json").read_text())
    assert state == json.loads(json.dumps(trainer.tail_monitor.state_dict()))
    assert state["history"][0]["step"] == 0


def test_alert_on_trackio(monkeypatch):
    trackio = pytest.importorskip("trackio")
    alerts = []
    monkeypatch.setattr(trackio, "alert", lambda title, text, level: alerts.append((title, text, level)))
    monitor = TailMonitor(tiny_model(), SCHEDULE, threshold=0.86)
    for trackers in ([], ["trackio"]):
        with pytest.warns(UserWarning):
            TailCallback(monitor, True, trackers).tell(breach_report())
    assert alerts == []  # there is no run yet
    token = trackio.context_vars.current_run.set(object())
    try:
        with pytest.warns(UserWarning):
            TailCallback(monitor, True, ["trackio"]).tell(breach_report())
    finally:
        trackio.context_vars.current_run.reset(token)
    assert alerts == [("The tail is below 0.86", "bin 3: 0.500", trackio.AlertLevel.WARN)]


def test_metrics_are_finite(tmp_path):
    trainer = run_with(tmp_path, "adapt", 0.9)
    names = {name for entry in trainer.state.log_history for name in entry if name.startswith("sparrow/")}
    assert {"sparrow/tail", "sparrow/acceptance", "sparrow/tail_upper", "sparrow/tail_floor"} <= names
    for entry in trainer.state.log_history:
        for name in names & set(entry):
            assert type(entry[name]) is float
            assert math.isfinite(entry[name])


# --- bad input ---

BAD = {
    "tail_action": ["explode", "None"],
    "tail_statistic": ["upper"],
    "tail_threshold": [0.0, 1.0, 1.3, "0.86", [1]],
    "tail_confidence": [0.0, 1.0],
    "tail_share": [0.0, 1.5],
    "tail_every": [0, 1.5],
    "tail_top_k": [0],
    "tail_min_tokens": [3],
    "tail_floor_every": [0],
    "tail_min_budget": [0],
    "tail_max_budget": [4, 7],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_options_are_refused_by_name(tmp_path, name, value):
    with pytest.raises((ValueError, TypeError), match=name):
        make_config(tmp_path, SparrowGRPOConfig, **{name: value})


def test_threshold_is_the_target_unless_it_is_given(tmp_path):
    assert make(tmp_path, sparse_target=0.92).tail_monitor.threshold == 0.92
    assert make(tmp_path, sparse_target=0.92, tail_threshold=0.8).tail_monitor.threshold == 0.8
    with pytest.raises(ValueError, match="tail_threshold"):
        make_config(tmp_path, SparrowGRPOConfig, sparse_target=1.0)


def test_monitor_refuses_bad_arguments():
    build = functools.partial(TailMonitor, tiny_model(), SCHEDULE, threshold=0.86)
    for name, value in (("action", "x"), ("statistic", "x"), ("share", 0), ("every", 0), ("top_k", 0)):
        with pytest.raises(ValueError, match=name):
            build(**{name: value})
    with pytest.raises(ValueError, match="dense"):
        TailMonitor(tiny_model(), SparsitySchedule.dense(), threshold=0.86)


def breach_report():
    estimate = TailEstimate(0.5, 0.4, 0.6, 400)
    return BatchReport([Verdict(3, estimate, estimate, 0.86)], [], SCHEDULE, ["look at this"])


def test_only_the_main_process_tells(recwarn):
    monitor = TailMonitor(tiny_model(), SCHEDULE, threshold=0.86)
    TailCallback(monitor, False, []).tell(breach_report())
    assert not recwarn
    with pytest.warns(UserWarning, match="look at this"):
        TailCallback(monitor, True, []).tell(breach_report())
    assert isinstance(monitor.judged, AcceptanceHistogram)
