"""Calibration from the data to the file: it finds, remembers, resumes, checks, and refuses what does not fit."""

import json
import random

import datasets
import numpy as np
import pytest
import torch

from sparrow_trl import SparsitySchedule
from sparrow_trl.cli import main
from sparrow_trl.sparsity.calibration import CalibrationOptions, Source, calibrate_schedule, load_source, measure_tail
from sparrow_trl.sparsity.calibration import calibrator as calibrator_module
from sparrow_trl.sparsity.calibration.auto import calibrate_for_training
from sparrow_trl.sparsity.calibration.bases import make_bases
from sparrow_trl.sparsity.calibration.curves import Tail
from sparrow_trl.sparsity.calibration.measure import Store
from sparrow_trl.sparsity.calibration.options import MeasureOptions
from sparrow_trl.sparsity.calibration.provenance import check_made_for, weights_fingerprint
from sparrow_trl.sparsity.calibration.stretches import StretchSampler
from tiny import tiny_model, tiny_tokenizer


SMALL = CalibrationOptions(
    target=0.9,
    max_context=384,
    bin_tokens=128,
    texts=4,
    probe_places=16,
    probe_tokens=16,
    check_places=16,
    check_tokens=16,
    prompt_length=16,
    min_tokens=60,
    dense_layers=(0,),
)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    letters = random.Random(0).choices("abcdefgh \n", k=4000)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(letters))
    return path


@pytest.fixture(scope="module")
def calibration(model, tokenizer, text):
    return calibrate_schedule(model, tokenizer, text, progress_bar=False, options=SMALL)


def without_date(schedule):
    return {key: value for key, value in schedule.provenance.items() if key != "date"}


def test_the_schedule_and_its_provenance(calibration, model):
    schedule, provenance = calibration.schedule, calibration.schedule.provenance
    assert schedule.target == 0.9 and schedule.bin_tokens == 128 and schedule.dense_layers == (0,)
    assert list(schedule.budgets) == sorted(schedule.budgets)
    assert len(schedule.budgets) == 4096 // 128  # as far as the model's positions
    assert provenance["kind"] == "calibrated" and "windows of real text" in provenance["way"]
    assert provenance["model"]["weights"] == weights_fingerprint(model)
    assert provenance["data"]["kind"] == "text" and provenance["data"]["tokens"] == 3998
    assert provenance["settings"]["target"] == 0.9 and provenance["versions"]["torch"] == torch.__version__
    assert [entry["status"] for entry in provenance["bins"][:4]] == ["measured"] * 3 + ["extrapolated"]
    assert SparsitySchedule.from_json(schedule.to_json()) == schedule


def test_budgets_meet_the_target_by_the_lower_end(calibration):
    """Of the first schedule, before any mending: from the raw rates, with NumPy alone."""
    first = calibration.checks[0].schedule.budgets
    for index, search in calibration.searches.items():
        pooled = {budget: np.concatenate(group) for budget, group in search.measured.items()}
        enough = [b for b, rates in pooled.items() if np.percentile(rates, 5) >= 0.9]
        assert (
            first[index] <= max(*first[:index], min(enough) * 1.5 + 4, 0)
            if index
            else first[index] <= min(enough) * 1.5 + 4
        )
        too_few = [b for b, rates in pooled.items() if np.percentile(rates, 5) < 0.88]
        assert all(first[index] > budget for budget in too_few)
        for entry, rates in zip(
            calibration.schedule.provenance["bins"][index]["tails"], (pooled[b] for b in sorted(pooled)), strict=True
        ):
            assert entry == pytest.approx(np.percentile(rates, 5))


def test_checks_use_the_schedules_own_past(calibration, model, tokenizer, text):
    """The last check equals a measurement of that schedule."""
    check = calibration.checks[-1]
    report = measure_tail(model, tokenizer, check.schedule, text, progress_bar=False, max_context=384, **SHARED)
    assert report.tails == check.tails
    other = measure_tail(
        model, tokenizer, check.schedule, text, progress_bar=False, max_context=384, **{**SHARED, "seed": 1}
    )
    assert other.tails != check.tails


SHARED = {
    name: getattr(SMALL, name)
    for name in ("texts", "check_places", "check_tokens", "prompt_length", "min_tokens", "seed")
}


def test_an_interrupted_run_goes_on(calibration, model, tokenizer, text, tmp_path, monkeypatch):
    original, calls = StretchSampler.generate, []

    def generate(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(StretchSampler, "generate", generate)
    with pytest.raises(KeyboardInterrupt):
        calibrate_schedule(model, tokenizer, text, out=tmp_path, progress_bar=False, options=SMALL)
    resumed = calibrate_schedule(model, tokenizer, text, out=tmp_path, progress_bar=False, options=SMALL)
    assert without_date(resumed.schedule) == without_date(calibration.schedule)
    assert resumed.schedule.budgets == calibration.schedule.budgets
    done = len(calls)
    again = calibrate_schedule(model, tokenizer, text, out=tmp_path, progress_bar=False, options=SMALL)
    assert len(calls) == done and again.schedule.budgets == resumed.schedule.budgets
    calibrate_schedule(model, tokenizer, text, out=tmp_path, progress_bar=False, options=SMALL, seed=1)
    assert len(calls) > done  # other settings do not mix with these


def test_a_store_without_a_folder_forgets(tmp_path):
    store = Store(None, {})
    store.save("a", [np.ones(2)])
    assert store.load("a") is None
    kept = Store(tmp_path, {"a": 1})
    kept.save(["b", 2], [np.ones(2), np.empty(0), np.zeros(3)])
    assert [len(array) for array in kept.load(["b", 2])] == [2, 0, 3]
    assert Store(tmp_path, {"a": 2}).load(["b", 2]) is None


def test_a_bin_that_sags_is_mended(model, tokenizer, text, monkeypatch):
    """The check says that bin 1 sags and bin 2 has room: the next schedule has more there, and less here."""
    seen = []

    def check(measurer, schedule, stretches, options):
        seen.append(schedule.budgets)
        lows = {0: 0.805, 1: 0.76, 2: 0.85} if len(seen) == 1 else {0: 0.805, 1: 0.805, 2: 0.805}
        return {index: Tail(low + 0.01, low, low + 0.02, 0.97, 256, 1.0) for index, low in lows.items()}

    monkeypatch.setattr(calibrator_module, "check_schedule", check)
    found = calibrate_schedule(
        model, tokenizer, text, progress_bar=False, options=SMALL, budgets=(1, 2, 4, 8, 16), target=0.8
    )
    first, second = seen
    assert second[0] == first[0] and second[1] > first[1]
    assert second[2] <= max(first[2], second[1])
    assert found.schedule.budgets == second
    assert [entry.get("check") for entry in found.schedule.provenance["bins"][:3]] == ["passed"] * 3
    assert sorted(found.searches[0].measured) == [1, 2, 4, 8, 16]


def test_a_bin_with_too_few_tokens_in_the_check_keeps_its_budget(model, tokenizer, text, monkeypatch):
    said = []

    def check(measurer, schedule, stretches, options):
        tails = {index: Tail(0.81, 0.805, 0.82, 0.97, 256, 1.0) for index in stretches}
        return {**tails, 1: Tail(0.7, 0.0, 0.9, 0.97, 12, 1.0)}

    monkeypatch.setattr(calibrator_module, "check_schedule", check)
    monkeypatch.setattr(calibrator_module.logger, "warning", said.append)
    found = calibrate_schedule(model, tokenizer, text, progress_bar=False, options=SMALL, checks=1, target=0.8)
    assert found.schedule.budgets == found.checks[0].schedule.budgets
    assert [entry.get("check") for entry in found.schedule.provenance["bins"][:3]] == [
        "passed",
        "too few tokens",
        "passed",
    ]
    (message,) = said
    assert "Bins 1 had too few tokens in the check (12)" in message and "--check-places" in message


def test_a_bin_raised_after_the_last_check_says_so(model, tokenizer, text, monkeypatch):
    def check(measurer, schedule, stretches, options):
        return {index: Tail(0.85, 0.84, 0.86, 0.97, 256, 1.0) for index in stretches}

    monkeypatch.setattr(calibrator_module, "check_schedule", check)
    found = calibrate_schedule(model, tokenizer, text, progress_bar=False, options=SMALL, checks=1)
    assert all(
        after >= before for after, before in zip(found.schedule.budgets, found.checks[0].schedule.budgets, strict=True)
    )
    assert found.schedule.provenance["bins"][1]["check"] in ("raised after the last check", "below the target")


def test_prompts_are_completed_by_the_model_itself(model, tokenizer):
    prompts = [f"{letter} is the first letter" for letter in "abcdefgh"]
    found = calibrate_schedule(
        model,
        tokenizer,
        prompts,
        progress_bar=False,
        options=SMALL,
        checks=0,
        budgets=(2, 8),
        target=0.3,
        min_tokens=10,
    )
    provenance = found.schedule.provenance
    assert "dense completions of prompts" in provenance["way"] and provenance["data"]["rows"] == 8
    assert found.checks == []


def test_bins_without_enough_tokens_are_not_known(model, tokenizer, text):
    changes = {"max_context": 200, "budgets": (4, 8), "target": 0.5, "confidence": 0.5, "min_tokens": 28, "checks": 0}
    found = calibrate_schedule(model, tokenizer, text, progress_bar=False, options=SMALL, **changes)
    statuses = [entry["status"] for entry in found.schedule.provenance["bins"][:3]]
    assert statuses == ["measured", "measured", "extrapolated"]
    budgets = found.schedule.budgets
    assert budgets[2] >= budgets[1] * 2.5 / 1.5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_context": 5000}, "--max-context 5000 is beyond the model's 4096 positions"),
        ({"texts": 40}, r"has 3,998 tokens, and 40 windows of 384 are wanted"),
        ({"min_tokens": 10_000}, "Too few tokens in every bin"),
        ({"check_tokens": 300}, "--check-tokens 300 is longer than a bin of 128"),
        ({"target": 1.0}, "--target 1.0"),
        ({"target": 0.0}, "--target 0.0"),
        ({"confidence": 1.0}, "--confidence 1.0"),
        ({"temperature": 0.0}, "--temperature 0.0"),
        ({"budgets": (-1,)}, "--budgets -1"),
        ({"probe_places": 0}, "--probe-places 0"),
        ({"memory_fraction": 1e-9}, "lower --max-context"),
        ({"max_context": 40, "prompt_length": 30}, "No bin can be measured"),
        ({"budgets": (1,), "target": 0.999}, r"No budget meets target=0.999 in bin"),
        ({"page_size": 24}, "page_size=24"),
    ],
)
def test_what_does_not_fit_is_said(model, tokenizer, text, changes, said):
    with pytest.raises(ValueError, match=said):
        calibrate_schedule(model, tokenizer, text, progress_bar=False, options=SMALL, **changes)


def test_a_schedule_of_another_model_is_refused(calibration, tokenizer, text):
    other = tiny_model("llama", num_hidden_layers=3)
    with pytest.raises(ValueError, match="calibrated for another model.*layers 4 against 3"):
        measure_tail(other, tokenizer, calibration.schedule, text, progress_bar=False)
    check_made_for(SparsitySchedule.fixed(4), other.config)
    check_made_for(SparsitySchedule.from_preset("qwen3-1.7b"), other.config)
    with pytest.raises(ValueError, match="dense"):
        measure_tail(other, tokenizer, SparsitySchedule.dense(), text, progress_bar=False)


# In the trainer


def train_rows(length, count=9):
    return [{"prompt": "".join(random.Random(seed).choices("abcdefgh ", k=length))} for seed in range(count)]


def auto(model, tokenizer, rows, folder, max_completion_length=64):
    options = CalibrationOptions(
        texts=2, probe_places=12, probe_tokens=16, min_tokens=40, target=0.3, checks=0, confidence=0.5
    )
    return calibrate_for_training(
        model, tokenizer, rows, folder, name="tiny", max_completion_length=max_completion_length, options=options,
        progress_bar=False,
    )  # fmt: skip


def test_auto_calibrates_once(model, tokenizer, tmp_path, monkeypatch):
    first = auto(model, tokenizer, train_rows(1300), tmp_path)
    assert not first.is_dense and first.target == 0.3
    assert first.provenance["data"]["name"] == "the first training prompts" and first.provenance["data"]["rows"] == 2
    assert first.provenance["max_context"] == 1364
    [cached] = tmp_path.rglob("sparrow_schedule.json")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [cached.name]  # no partial results
    monkeypatch.setattr("sparrow_trl.sparsity.calibration.auto.calibrate_schedule", None)
    assert auto(model, tokenizer, iter(train_rows(1300)), tmp_path) == first
    with pytest.raises(TypeError):  # another model is calibrated anew
        auto(tiny_model("llama", seed=1), tokenizer, train_rows(1300), tmp_path)


@pytest.mark.parametrize(
    ("rows", "said"),
    [(None, "no training prompts"), ([{"text": "a"}], "no training prompts"), (train_rows(100), "too short")],
)
def test_auto_is_dense_where_there_is_nothing_to_gain(model, tokenizer, tmp_path, rows, said):
    with pytest.warns(UserWarning, match=f"no published schedule.*{said}"):
        assert auto(model, tokenizer, rows, tmp_path).is_dense


# What is calibrated on


def test_sources(tokenizer, tmp_path, text):
    rows = [{"prompt": "one two"}, {"prompt": "three"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "disk")
    expected = [tokenizer("one two")["input_ids"], tokenizer("three")["input_ids"]]
    for given in (
        tmp_path / "rows.jsonl",
        str(tmp_path / "rows.parquet"),
        tmp_path / "disk",
        rows,
        ["one two", "three"],
        datasets.Dataset.from_list(rows),
    ):
        source = load_source(given, tokenizer)
        assert (source.kind, source.rows) == ("prompt", expected)
    texts = load_source([{"text": "one"}, {"text": "two"}], tokenizer)
    assert texts.kind == "text" and texts.rows == [tokenizer("one\n\ntwo\n\n")["input_ids"]]
    assert load_source(text, tokenizer).tokens == 3998
    assert load_source(texts, tokenizer) is texts


def test_messages_go_through_the_chat_template(tokenizer):
    messages = [{"role": "user", "content": "hello"}]
    source = load_source([{"prompt": messages}], tokenizer)
    assert tokenizer.decode(source.rows[0]) == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )


def test_the_default_text_is_long(tokenizer):
    source = load_source(None, tokenizer)
    assert source.kind == "text" and source.tokens > 100_000


def test_windows_do_not_overlap():
    source = Source("numbers", "text", [list(range(1000))])
    windows = source.windows(7, 100, seed=3)
    assert all(window == list(range(window[0], window[0] + 100)) for window in windows)
    assert all(b[0] >= a[0] + 100 for a, b in zip(windows, windows[1:], strict=False))
    assert windows != source.windows(7, 100, seed=4) and windows == source.windows(7, 100, seed=3)
    assert source.fingerprint() != Source("numbers", "text", [list(range(999))]).fingerprint()


def test_bad_data(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="neither a column 'prompt' nor a column 'text'; it has question, answer"):
        load_source([{"question": "?", "answer": "!"}], tokenizer)
    with pytest.raises(ValueError, match="has no rows"):
        load_source([], tokenizer)
    with pytest.raises(ValueError, match="All prompts"):
        load_source([{"prompt": ""}], tokenizer)
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        load_source(tmp_path / "nothing.jsonl", tokenizer)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match="is empty"):
        load_source(tmp_path / "empty.txt", tokenizer)
    with pytest.raises(ValueError, match="neither UTF-8 text nor a file of rows"):
        load_source(tmp_path / "binary.txt", tokenizer)
    datasets.DatasetDict({"test": datasets.Dataset.from_list([{"text": "a"}])}).save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match="has no split 'train'; it has test"):
        load_source(tmp_path / "splits", tokenizer)
    assert load_source(tmp_path / "splits", tokenizer, split="test").kind == "text"


def test_prompts_without_room(model, tokenizer):
    with pytest.raises(ValueError, match="leaves no room for a completion"):
        calibrate_schedule(model, tokenizer, ["a" * 500], progress_bar=False, options=SMALL)


# The commands


@pytest.fixture(scope="module")
def folder(model, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def run(capsys, *argv):
    try:
        status = main(argv)
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    return status, " ".join(captured.out.split()), " ".join(captured.err.split())


FLAGS = "--max-context 384 --texts 4 --check-places 16 --check-tokens 16 --prompt-length 16 --min-tokens 60".split()  # noqa: SIM905


def test_commands(capsys, folder, text, tmp_path, calibration):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    status, printed, _ = run(
        capsys, "calibrate", folder, "--dataset", str(text), "--out", str(out), "--target", "0.9",
        "--bin-tokens", "128", "--probe-tokens", "16", "--probe-places", "16", *FLAGS,
    )  # fmt: skip
    assert status == 0, printed
    schedule = SparsitySchedule.from_pretrained(out)
    assert schedule.target == 0.9 and schedule.provenance["command"].startswith("sparrow calibrate")
    assert (out / "sparrow_calibration.png").stat().st_size > 1000
    assert f"{schedule.budgets[2]}" in printed and "extrapolated" in printed
    status, printed, err = run(
        capsys, "tail", folder, "--schedule", str(out), "--dataset", str(text), "--out", str(tmp_path / "tail"),
        "--seed", "1", *FLAGS,
    )  # fmt: skip
    assert status == 0, err
    results = json.loads((tmp_path / "tail" / "sparrow_tail.json").read_text())
    [report] = results["reports"].values()
    assert [entry["index"] for entry in report["bins"]] == [0, 1, 2]
    assert f"{report['bins'][1]['value']:.3f}" in printed
    assert (tmp_path / "tail" / "sparrow_tail.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["calibrate"], "--out"),
        (["calibrate", "--out", "x", "--target", "1.5"], "--target 1.5 is not between 0 and 1"),
        (["calibrate", "--out", "x", "--checks", "-1"], "--checks -1"),
        (["tail"], "--schedule"),
        (["tail", "--schedule", "fixed:4", "--texts", "0"], "--texts 0"),
        (["tail", "/no/such/model", "--schedule", "fixed:4"], "OSError"),
        (["tail", "--schedule", "dense", "--dataset", "/no/such.txt"], "dense"),
    ],
)
def test_mistakes(capsys, argv, said):
    status, out, err = run(capsys, *argv)
    assert status == 2 and said in err and not out


def test_nothing_is_measured_behind_the_end_of_a_completion(model, tmp_path):
    store = Store(tmp_path, {})
    store.save(["completions", 64, [3, 3]], [np.array([9, 9, 2]), np.array([9, 9, 9])])
    source = Source("prompts", "prompt", [[5, 6, 7]] * 2)
    bases = make_bases(model, source, MeasureOptions(texts=2), 64, [2], store)
    assert bases.texts == [[5, 6, 7, 9, 9], [5, 6, 7, 9, 9, 9]]


@pytest.mark.parametrize("temperature", [0.0, float("inf"), float("nan")])
def test_temperatures_that_are_none(temperature):
    with pytest.raises(ValueError, match="--temperature"):
        MeasureOptions(temperature=temperature)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.jsonl", "", "is empty"),
        ("broken.jsonl", "{broken\n", "is no file of rows"),
        ("numbers.jsonl", '{"text": 5}\n', "text in row 0 .* is a int, not a string"),
        ("prompts.jsonl", '{"prompt": 5}\n', "prompt in row 0 .* is a int, not a string or messages"),
    ],
)
def test_files_that_hold_no_rows_of_text(tokenizer, tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=said):
        load_source(str(tmp_path / name), tokenizer)


def test_rows_without_a_prompt_are_left_out(tokenizer):
    rows = [{"prompt": "one"}, {"other": 1}, {"prompt": None}, {"prompt": ""}]
    assert load_source(rows, tokenizer).rows == load_source(["one"], tokenizer).rows
