import json
import os
import socket
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopback_hub import LoopbackHub
from sparrow_trl import SparsitySchedule
from sparrow_trl.sparsity import DENSE_BUDGET, SCHEDULE_FILE, is_hub_repo


ROOT = Path(__file__).resolve().parents[1]
QWEN_086 = [29, 61, 93, 93, 125, 157, 189, 221, 221, 253, 253]


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def loopback_hub():
    with LoopbackHub() as hub:
        yield hub


schedules = st.builds(
    SparsitySchedule,
    budgets=st.lists(st.integers(0, 5000), max_size=25).map(tuple),
    bin_tokens=st.integers(1, 10_000),
    page_size=st.sampled_from([1, 2, 8, 16, 128]),
    sink_pages=st.integers(0, 4),
    recent_pages=st.integers(1, 4),
    dense_layers=st.lists(st.integers(0, 40), max_size=4).map(tuple),
    target=st.none() | st.floats(0.01, 1.0),
    provenance=st.dictionaries(
        st.text(), st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False)
    ),
)


# Budgets


def test_bins_start_at_multiples_of_bin_tokens_and_the_last_is_open_ended():
    schedule = SparsitySchedule(budgets=(4, 9, 2), bin_tokens=100)
    at = {0: 4, 99: 4, 100: 9, 199: 9, 200: 2, 299: 2, 300: 2, 10**9: 2}
    assert {position: schedule.budget_at(position) for position in at} == at


def test_dense_budget_exceeds_any_sequence():
    schedule = SparsitySchedule.dense(page_size=8)
    assert schedule.is_dense and schedule.budgets == () and schedule.page_size == 8
    assert schedule.budget_at(0) == schedule.budget_at(10**7) == DENSE_BUDGET
    assert schedule.budgets_at(torch.tensor([0, 10**7])).tolist() == [DENSE_BUDGET, DENSE_BUDGET]


def test_a_zero_budget_is_sparse_not_dense():
    schedule = SparsitySchedule.fixed(0)
    assert not schedule.is_dense
    assert schedule.budget_at(5000) == 0


@given(schedules, st.lists(st.integers(0, 200_000), min_size=1, max_size=20))
def test_budgets_at_agrees_with_budget_at(schedule, positions):
    expected = [schedule.budget_at(position) for position in positions]
    for dtype in (torch.int64, torch.int32):
        budgets = schedule.budgets_at(torch.tensor(positions, dtype=dtype))
        assert budgets.dtype == torch.int64
        assert budgets.tolist() == expected


def test_budgets_at_keeps_shape_and_device():
    schedule = SparsitySchedule.fixed(7)
    assert schedule.budgets_at(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3)
    assert schedule.budgets_at(torch.zeros((), dtype=torch.int64)).item() == 7
    assert schedule.budgets_at(torch.zeros(4, dtype=torch.int64, device="meta")).device.type == "meta"


def test_negative_position_is_refused():
    with pytest.raises(ValueError, match="position=-1"):
        SparsitySchedule.fixed(4).budget_at(-1)


# Validation


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"page_size": 24}, ValueError, "page_size=24 is not a power of two"),
        ({"page_size": 0}, ValueError, "page_size=0 is below 1"),
        ({"page_size": 2048}, ValueError, "page_size=2048 is above 1024"),
        ({"sink_pages": 1025}, ValueError, "sink_pages=1025 is above 1024"),
        ({"recent_pages": 1025}, ValueError, "recent_pages=1025 is above 1024"),
        ({"bin_tokens": 2**30 + 1}, ValueError, f"bin_tokens={2**30 + 1} is above {2**30}"),
        ({"bin_tokens": 0}, ValueError, "bin_tokens=0 is below 1"),
        ({"bin_tokens": -2000}, ValueError, "bin_tokens=-2000 is below 1"),
        ({"sink_pages": -1}, ValueError, "sink_pages=-1 is below 0"),
        ({"recent_pages": 0}, ValueError, "recent_pages=0 is below 1"),
        ({"budgets": (29, -1)}, ValueError, r"budgets\[1\]=-1 is below 0"),
        ({"budgets": (DENSE_BUDGET + 1,)}, ValueError, f"budgets.*is above {DENSE_BUDGET}"),
        ({"budgets": (29.5,)}, TypeError, r"budgets\[0\]=29.5 is not an integer"),
        ({"budgets": (True,)}, TypeError, "is a bool"),
        ({"budgets": 29}, TypeError, "budgets=29 is not a sequence"),
        ({"budgets": "29"}, TypeError, "budgets='29' is not a sequence"),
        ({"dense_layers": (-1,)}, ValueError, r"dense_layers\[0\]=-1 is below 0"),
        ({"target": 1.2}, ValueError, r"target=1.2 is not in \(0, 1\]"),
        ({"target": 0}, ValueError, "target=0 is not in"),
        ({"target": float("nan")}, ValueError, "target=nan is not in"),
        ({"target": "0.86"}, TypeError, "target='0.86' is not a number"),
        ({"target": True}, TypeError, "target=True is not a number"),
        ({"provenance": {"when": object()}}, ValueError, "provenance cannot be stored as JSON"),
        ({"provenance": {"tail": float("nan")}}, ValueError, "provenance cannot be stored as JSON"),
        ({"provenance": "here"}, TypeError, "provenance is a str"),
    ],
)
def test_bad_field_is_refused_by_name(kwargs, error, message):
    with pytest.raises(error, match=message):
        SparsitySchedule(**{"budgets": (29,), **kwargs})


def test_fields_are_normalised():
    schedule = SparsitySchedule(budgets=np.array([1, 2]), dense_layers=[3, 0, 3], bin_tokens=np.int64(10))
    assert schedule.budgets == (1, 2) and all(type(budget) is int for budget in schedule.budgets)
    assert schedule.dense_layers == (0, 3)
    assert type(schedule.bin_tokens) is int


def test_frozen_hashable_and_not_tied_to_the_callers_provenance():
    provenance = {"runs": [1, 2]}
    schedule = SparsitySchedule.fixed(4, provenance=provenance)
    provenance["runs"].append(3)
    assert schedule.provenance == {"runs": [1, 2]}
    with pytest.raises(FrozenInstanceError):
        schedule.budgets = (5,)
    assert hash(schedule) == hash(replace(schedule))
    assert schedule != replace(schedule, provenance={})


# Presets


def test_published_preset():
    schedule = SparsitySchedule.from_preset("qwen3-1.7b")
    assert [schedule.budget_at(2000 * b) for b in range(11)] == QWEN_086
    assert len(schedule.budgets) == 20
    assert (schedule.page_size, schedule.bin_tokens, schedule.sink_pages, schedule.recent_pages) == (16, 2000, 1, 2)
    assert schedule.dense_layers == (0, 1)
    assert schedule.target == 0.86
    assert "2606.08446" in schedule.provenance["source"]


def test_every_preset_loads_and_rises():
    presets = SparsitySchedule.presets()
    assert sorted(presets) == ["qwen3-1.7b", "qwen3-14b", "qwen3-4b", "qwen3-8b"]
    assert sum(map(len, presets.values())) == 8 + 6 + 5 + 1
    for name, targets in presets.items():
        loaded = [SparsitySchedule.from_preset(name, target) for target in targets]
        for schedule in loaded:
            assert len(schedule.budgets) == 20
            assert list(schedule.budgets) == sorted(schedule.budgets)
        for lower, higher in zip(loaded, loaded[1:], strict=False):
            assert lower.target < higher.target
            assert all(a <= b for a, b in zip(lower.budgets, higher.budgets, strict=True))


def test_unknown_preset_and_target_list_what_there_is():
    with pytest.raises(ValueError, match="'llama'; the published ones are qwen3-1.7b, qwen3-4b, qwen3-8b, qwen3-14b"):
        SparsitySchedule.from_preset("llama")
    with pytest.raises(ValueError, match=r"target=0.83; it has 0.75, 0.80, 0.86, 0.87, 0.92. .*sparse_target"):
        SparsitySchedule.from_preset("qwen3-8b", 0.83)


# Storage


@given(schedules)
def test_json_and_dict_round_trip_exactly(schedule):
    assert SparsitySchedule.from_json(schedule.to_json()) == schedule
    assert SparsitySchedule.from_dict(schedule.to_dict()) == schedule
    assert SparsitySchedule.from_json(schedule.to_json()).to_json() == schedule.to_json()


def test_json_holds_the_fields_by_name():
    values = json.loads(SparsitySchedule.from_preset("qwen3-4b", 0.80).to_json())
    assert values["budgets"][:4] == [29, 29, 45, 61]
    assert values["target"] == 0.8
    assert values["dense_layers"] == [0, 1]


def test_save_and_load_without_the_network(tmp_path, no_network):
    schedule = SparsitySchedule.from_preset("qwen3-14b")
    path = schedule.save_pretrained(tmp_path / "made" / "here")
    assert path == tmp_path / "made" / "here" / SCHEDULE_FILE
    for source in (path, path.parent, str(path), str(path.parent)):
        assert SparsitySchedule.from_pretrained(source) == schedule
        assert SparsitySchedule.resolve(source) == schedule


def test_a_relative_folder_that_looks_like_a_repository_is_read_locally(tmp_path, monkeypatch, no_network):
    monkeypatch.chdir(tmp_path)
    schedule = SparsitySchedule.fixed(5)
    schedule.save_pretrained("user/name")
    assert SparsitySchedule.from_pretrained("user/name") == schedule
    assert SparsitySchedule.resolve("user/name") == schedule


def test_missing_files_are_named_without_the_network(tmp_path, no_network):
    with pytest.raises(FileNotFoundError, match=f"has no {SCHEDULE_FILE}"):
        SparsitySchedule.from_pretrained(tmp_path)
    for missing in (str(tmp_path / "absent.json"), "./absent/folder", "absent/folder.json", "a/b/c", "absent"):
        with pytest.raises(FileNotFoundError, match="no schedule file or folder"):
            SparsitySchedule.from_pretrained(missing)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[29, 61]", "JSON list, not an object"),
        ("{}", "needs the field 'budgets'"),
        ('{"budgets": [29], "pages": 3}', "Unknown schedule field pages; the fields are budgets, bin_tokens"),
        ('{"budgets": [29], "page_size": 24}', "page_size=24"),
        ('{"budgets": [29], "page_size": "16"}', "page_size='16' is not an integer"),
    ],
)
def test_broken_file_is_named_with_the_reason(tmp_path, text, message):
    path = tmp_path / SCHEDULE_FILE
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        SparsitySchedule.from_pretrained(tmp_path)
    assert str(path) in str(caught.value)


def test_a_folder_is_needed_to_save(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; give a folder"):
        SparsitySchedule.fixed(3).save_pretrained(tmp_path / "file")


HUB_ROUND_TRIP = """
import sys
from sparrow_trl.sparsity import SparsitySchedule
schedule = SparsitySchedule.from_preset("qwen3-8b", 0.87)
print(schedule.push_to_hub("someone/schedule"))
assert SparsitySchedule.resolve("someone/schedule") == schedule
for missing in ("someone/else", "someone/empty"):
    try:
        SparsitySchedule.from_pretrained(missing)
    except FileNotFoundError as error:
        assert repr(missing) in str(error), error
    else:
        sys.exit(f"{missing} was found")
"""


def test_hub_round_trip_through_the_real_client(tmp_path, loopback_hub):
    loopback_hub.files["someone/empty"] = {}
    env = {**os.environ, "HF_ENDPOINT": loopback_hub.url, "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_test"}
    env["NO_PROXY"] = "127.0.0.1"
    env.pop("HF_HUB_OFFLINE", None)
    run = subprocess.run(
        [sys.executable, "-c", HUB_ROUND_TRIP], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    stored = loopback_hub.files["someone/schedule"]
    assert list(stored) == [SCHEDULE_FILE]
    assert SparsitySchedule.from_json(stored[SCHEDULE_FILE].decode()) == SparsitySchedule.from_preset("qwen3-8b", 0.87)


def test_hub_offline_is_an_error_that_names_the_repository(tmp_path, no_network):
    with pytest.raises(FileNotFoundError, match="No schedule in 'someone/schedule'"):
        SparsitySchedule.from_pretrained("someone/schedule", local_files_only=True, cache_dir=tmp_path)


# What `sparse_schedule` accepts


def test_resolve_forms(tmp_path, no_network):
    fixed = SparsitySchedule.fixed(64)
    assert SparsitySchedule.resolve(fixed) is fixed
    assert SparsitySchedule.resolve(fixed.to_dict()) == fixed
    assert SparsitySchedule.resolve("fixed:64") == fixed
    assert SparsitySchedule.resolve("dense") == SparsitySchedule.dense()
    preset = SparsitySchedule.from_preset
    assert SparsitySchedule.resolve("qwen3-1.7b") == preset("qwen3-1.7b", 0.86)
    assert SparsitySchedule.resolve("qwen3-1.7b", target=0.92) == preset("qwen3-1.7b", 0.92)
    assert SparsitySchedule.resolve("qwen3-1.7b@0.80", target=0.92) == preset("qwen3-1.7b", 0.80)


@pytest.mark.parametrize("model", ["Qwen/Qwen3-1.7B", "/models/Qwen3-1.7B/", "qwen3-1.7b", "C:\\models\\Qwen3-1.7B"])
def test_auto_knows_the_published_models(model, recwarn):
    assert SparsitySchedule.resolve("auto", model) == SparsitySchedule.from_preset("qwen3-1.7b", 0.86)
    assert SparsitySchedule.resolve("auto", model, target=0.75).target == 0.75
    assert not recwarn.list


@pytest.mark.parametrize("model", [None, "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen3-1.7B-Base", "Qwen/Qwen3-0.6B"])
def test_auto_is_dense_with_one_warning_elsewhere(model):
    with pytest.warns(UserWarning, match="so the rollout is dense") as caught:
        schedule = SparsitySchedule.resolve("auto", model)
    assert schedule == SparsitySchedule.dense()
    assert len(caught) == 1
    assert "'fixed:64'" in str(caught[0].message) and repr(str(model)) in str(caught[0].message)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("fixed:many", ValueError, "'many' is not a number of pages"),
        ("fixed:-3", ValueError, "'-3' is not a number of pages"),
        ("llama-7b", ValueError, "sparse_schedule='llama-7b' names no schedule; give .*'qwen3-1.7b@0.86'"),
        ("qwen3-1.7b@0.85", ValueError, "no schedule for target=0.85; it has 0.75, 0.80"),
        ("qwen3-1.7b@high", ValueError, "sparse_schedule='qwen3-1.7b@high': 'high' is not a target, a number in"),
        ("qwen3-1.7b@", ValueError, "sparse_schedule='qwen3-1.7b@': '' is not a target, a number in"),
        ("qwen3-1.7b@nan", ValueError, "no schedule for target=nan; it has 0.75, 0.80"),
        ("", ValueError, "names no schedule"),
        ("absent.json", FileNotFoundError, "no schedule file or folder 'absent.json'"),
        (64, TypeError, "sparse_schedule=64 is a int"),
        ({"budget": 3}, ValueError, "Unknown schedule field budget"),
    ],
)
def test_resolve_refuses(value, error, message, no_network):
    with pytest.raises(error, match=message):
        SparsitySchedule.resolve(value)


@pytest.mark.parametrize("value", ["auto", "qwen3-1.7b"])
def test_a_target_that_a_preset_does_not_have_names_the_option(value):
    with pytest.raises(ValueError, match=r"target=0.85; it has .*0.86.* Set the option sparse_target"):
        SparsitySchedule.resolve(value, "Qwen/Qwen3-1.7B", target=0.85)


def test_what_can_only_be_a_hub_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert all(map(is_hub_repo, ("user/name", "user-1/na.me", "_user/name-2")))
    assert not any(
        map(is_hub_repo, ("name", "./user/name", "a/b/c", "user/file.json", "/user/name", "-user/name", ""))
    )
    (tmp_path / "user" / "name").mkdir(parents=True)
    assert not is_hub_repo("user/name")


# Plot and import


def test_plot_draws_kept_tokens(tmp_path):
    pytest.importorskip("matplotlib")
    schedule = SparsitySchedule(budgets=(10, 20), bin_tokens=1000)
    ax = schedule.plot(tmp_path / "schedule.png")
    steps = ax.patches[0].get_data()
    assert steps.values.tolist() == [(10 + 3) * 16, (20 + 3) * 16, (20 + 3) * 16]
    assert steps.edges.tolist() == [0, 1000, 2000, 3000]
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")
    assert SparsitySchedule.dense().plot(ax=ax) is ax


def test_plot_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        SparsitySchedule.fixed(3).plot()


def test_importing_the_schedule_is_cheap():
    check = (
        "import sys; from sparrow_trl import SparsitySchedule; SparsitySchedule.resolve('qwen3-1.7b').to_json();"
        "sys.exit(', '.join({'torch', 'trl', 'transformers', 'matplotlib', 'huggingface_hub'} & set(sys.modules)) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
