"""Publishing: record, model card and upload, with the real client of the Hub against a server on this machine."""

import json
import shlex
import sys

import pytest
import torch
import transformers.utils.hub
from huggingface_hub import ModelCard, constants
from huggingface_hub.errors import HfHubHTTPError
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from loopback_hub import TOKEN, USER, LoopbackHub
from sparrow_trl import SparsitySchedule
from sparrow_trl.cli import main
from sparrow_trl.hub import PushError, RunRecord, make_card, push_folder, reproduce_command
from sparrow_trl.hub.record import average_metrics, public_config
from sparrow_trl.sparsity import SCHEDULE_FILE
from tiny import tiny_model
from training import SPARSE, make_trainer


REPO = f"{USER}/policy"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that the client in this process talks to, with a token that may write."""
    with LoopbackHub() as server:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the server speaks LFS
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)
        # The client waits between its own attempts; here there is nothing to wait for
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield server


@pytest.fixture
def saved(tmp_path):
    """A folder that a training could have left."""
    folder = tmp_path / "out"
    tiny_model().save_pretrained(folder)
    return folder


def same_weights(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


# --- the trainer ---


def test_push_gives_the_dense_policy_and_its_evidence(hub, tmp_path):
    trainer = make_trainer(tmp_path / "out", max_steps=1, hub_model_id=REPO)
    trainer.train()
    commit = trainer.push_to_hub()

    assert commit.commit_url.startswith(f"{hub.url}/{REPO}/commit/")
    files = hub.files[REPO]
    assert {"config.json", "model.safetensors", "README.md", "sparrow/run.json", f"sparrow/{SCHEDULE_FILE}"} <= set(
        files
    )
    assert any(request.startswith("PUT /lfs/") for request in hub.requests)  # the weights went through LFS
    loaded = AutoModelForCausalLM.from_pretrained(REPO, cache_dir=tmp_path / "other")
    assert same_weights(loaded, trainer.model)
    assert SparsitySchedule.from_pretrained(REPO) == SparsitySchedule.from_dict(SPARSE)


def test_card_of_a_run(hub, tmp_path):
    trainer = make_trainer(tmp_path / "out", max_steps=2, hub_model_id=REPO)
    trainer.train()
    trainer.push_to_hub(dataset_name="someone/problems", tags=["mine"])
    card = ModelCard(hub.files[REPO]["README.md"].decode())
    assert {"sparrow", "grpo", "trl", "mine"} <= set(card.data.tags)
    assert card.data.datasets == ["someone/problems"]
    assert card.data.library_name == "transformers"
    assert f'from_pretrained("{REPO}")' in card.text
    assert "| optimizer steps | 2 |" in card.text
    assert "2 scored pages of 4 tokens" in card.text
    speed = average_metrics(trainer.state.log_history)["rollout_tokens_per_second"]
    assert f"{speed:,.0f} tokens/s on average" in card.text
    assert "zhou2026sparrow" in card.text and "vonwerra2020trl" in card.text and "shao2024deepseekmath" in card.text
    assert shlex.join(sys.orig_argv[1:]) in card.text


def test_record_keeps_no_token(hub, tmp_path):
    trainer = make_trainer(tmp_path / "out", max_steps=1, hub_token="hf_secret")
    trainer.save_model()
    record = RunRecord.load(tmp_path / "out")
    assert record.config["max_steps"] == 1
    assert "hf_secret" not in (tmp_path / "out" / "sparrow" / "run.json").read_text()


def test_every_save_is_pushed(hub, tmp_path):
    trainer = make_trainer(
        tmp_path / "out",
        max_steps=2,
        hub_model_id=REPO,
        push_to_hub=True,
        hub_always_push=True,
        save_strategy="steps",
        save_steps=1,
    )
    trainer.train()
    assert hub.commits[REPO][-1] == "Training in progress, step 2"
    assert not [path for path in hub.files[REPO] if path.startswith("checkpoint-")]
    assert same_weights(AutoModelForCausalLM.from_pretrained(REPO, cache_dir=tmp_path / "other"), trainer.model)


def test_a_lora_policy_is_pushed_as_an_adapter(hub, tmp_path):
    pytest.importorskip("peft")
    peft_config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = make_trainer(tmp_path / "out", max_steps=1, hub_model_id=REPO, arguments={"peft_config": peft_config})
    trainer.train()
    trainer.push_to_hub()
    assert "adapter_model.safetensors" in hub.files[REPO]
    card = ModelCard(hub.files[REPO]["README.md"].decode())
    assert card.data.library_name == "peft" and "AutoPeftModelForCausalLM" in card.text


def test_sparsity_off_pushes_as_trl_does(hub, tmp_path):
    trainer = make_trainer(tmp_path / "out", max_steps=1, hub_model_id=REPO, sparse_schedule=None)
    trainer.push_to_hub()
    assert "model.safetensors" in hub.files[REPO]
    assert not [path for path in hub.files[REPO] if path.startswith("sparrow/")]
    hub.fail("POST .*/commit/", times=100, status=500)
    with pytest.raises(HfHubHTTPError):
        trainer.push_to_hub()


# --- what fails ---


def test_a_failed_push_is_a_warning_and_can_be_finished_later(hub, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sparrow_trl.hub.push.FIRST_WAIT", 0.0)
    out = tmp_path / "out"
    trainer = make_trainer(out, max_steps=1, hub_model_id=REPO)
    trainer.train()
    hub.fail("POST .*/commit/", times=1000, status=500)
    with pytest.warns(UserWarning, match="nothing is lost") as caught:
        assert trainer.push_to_hub() is None
    assert hub.files[REPO] == {}
    assert same_weights(AutoModelForCausalLM.from_pretrained(out), trainer.model)

    hub.faults.clear()
    [command] = {
        str(w.message).partition("finish it by hand: ")[2].partition("\n")[0]
        for w in caught
        if "by hand" in str(w.message)
    }
    assert main(shlex.split(command)[1:]) == 0
    assert f"{hub.url}/{REPO}/commit/" in capsys.readouterr().out
    assert same_weights(AutoModelForCausalLM.from_pretrained(REPO, cache_dir=tmp_path / "other"), trainer.model)


def test_an_upload_that_fails_in_the_background_is_made_up_for(hub, tmp_path):
    trainer = make_trainer(
        tmp_path / "out", max_steps=1, hub_model_id=REPO, push_to_hub=True, save_strategy="steps", save_steps=1
    )
    hub.fail("POST .*/commit/", times=1, status=500)
    with pytest.warns(UserWarning, match="An upload to the Hub failed"):
        trainer.train()
    assert hub.commits[REPO] == ["Training in progress, step 1"]
    assert same_weights(AutoModelForCausalLM.from_pretrained(REPO, cache_dir=tmp_path / "other"), trainer.model)


def test_an_upload_that_fails_in_the_background_is_told(hub, tmp_path):
    trainer = make_trainer(
        tmp_path / "out",
        max_steps=2,
        hub_model_id=REPO,
        push_to_hub=True,
        hub_always_push=True,
        save_strategy="steps",
        save_steps=1,
    )
    hub.fail("POST .*/commit/", times=1000, status=403)
    with pytest.warns(UserWarning, match="An upload to the Hub failed"):
        trainer.train()
    assert (tmp_path / "out" / "checkpoint-2" / "model.safetensors").is_file()


def test_no_network_is_no_reason_not_to_train(hub, tmp_path):
    hub.fail(".*", times=10**6, status=503)
    with pytest.warns(UserWarning, match="An upload to the Hub failed"):
        trainer = make_trainer(
            tmp_path / "out",
            max_steps=2,
            hub_model_id=REPO,
            push_to_hub=True,
            hub_always_push=True,
            save_strategy="steps",
            save_steps=1,
        )
        hub.faults.clear()  # it is back when the first checkpoint is saved
    trainer.train()
    assert hub.commits[REPO][-1] == "Training in progress, step 2"
    assert same_weights(AutoModelForCausalLM.from_pretrained(REPO, cache_dir=tmp_path / "other"), trainer.model)


def test_a_refused_token_is_an_error_before_any_time_is_spent(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(HfHubHTTPError, match="401"):
        make_trainer(tmp_path / "out", hub_model_id=REPO, push_to_hub=True)


def test_a_failed_card_leaves_the_checkpoint(hub, tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path / "out", max_steps=1, hub_model_id=REPO)

    def broken(*args, **kwargs):
        raise KeyError("tail")

    monkeypatch.setattr("sparrow_trl.hub.publishing.make_card", broken)
    with pytest.warns(UserWarning, match="model card could not be written"):
        trainer.push_to_hub()
    assert "model.safetensors" in hub.files[REPO] and "README.md" in hub.files[REPO]


@pytest.mark.parametrize("status", [500, 503, None])
def test_uploads_are_tried_again(hub, saved, status):
    hub.fail("PUT /lfs/", times=8, status=status)  # more than the client's own attempts
    waits = []
    push_folder(saved, REPO, sleep=waits.append)
    assert hub.files[REPO]["model.safetensors"] == (saved / "model.safetensors").read_bytes()
    assert waits == [2.0 * 2**attempt for attempt in range(len(waits))]


def test_what_has_arrived_is_not_sent_again(hub, saved):
    hub.fail("POST .*/commit/", times=2, status=500)
    push_folder(saved, REPO, sleep=lambda seconds: None)
    assert len([request for request in hub.requests if request.startswith("PUT /lfs/")]) == 1


def test_a_refused_push_is_not_tried_again(hub, saved):
    waits = []
    with pytest.raises(PushError, match="sparrow push"):
        push_folder(saved, REPO, token="hf_wrong", sleep=waits.append)
    assert waits == []


def test_offline_mode_is_not_tried_again(hub, saved, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    waits = []
    with pytest.raises(PushError, match="To try again: sparrow push"):
        push_folder(saved, REPO, sleep=waits.append)
    assert waits == []


def test_private_repositories(hub, saved, tmp_path, monkeypatch):
    push_folder(saved, REPO, private=True)
    assert REPO in hub.private
    assert same_weights(AutoModelForCausalLM.from_pretrained(REPO, cache_dir=tmp_path / "mine"), tiny_model())
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(OSError, match=REPO):
        AutoModelForCausalLM.from_pretrained(REPO, cache_dir=tmp_path / "theirs")


def test_push_without_blocking(hub, tmp_path):
    trainer = make_trainer(tmp_path / "out", max_steps=1, hub_model_id=REPO)
    future = trainer.push_to_hub(blocking=False)
    assert future.result(timeout=60).commit_url.startswith(hub.url)


# --- the command ---


def test_push_leaves_out_what_resumes_a_run(hub, tmp_path):
    trainer = make_trainer(tmp_path / "out", max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    assert main(["push", str(tmp_path / "out" / "checkpoint-1"), REPO, "--private"]) == 0
    assert "model.safetensors" in hub.files[REPO] and "sparrow/run.json" in hub.files[REPO]
    assert (tmp_path / "out" / "checkpoint-1" / "sparrow" / "monitor.json").is_file()
    state = ("optimizer", "scheduler", "rng_state", "sparrow/monitor", "sparrow/distill")
    assert not [path for path in hub.files[REPO] if path.startswith(state)]


@pytest.mark.parametrize(
    ("folder", "repo_id", "message"),
    [("missing", REPO, "no folder"), ("empty", REPO, "holds no model"), ("out", "not a name!", "repo_id")],
)
def test_push_refuses(hub, saved, tmp_path, capsys, folder, repo_id, message):
    (tmp_path / "empty").mkdir()
    assert main(["push", str(tmp_path / folder), repo_id]) == 2
    assert message in capsys.readouterr().err
    assert not hub.files


def test_push_leaves_a_folder_without_a_model_alone(hub, tmp_path, capsys):
    (tmp_path / "README.md").write_text("my project")
    assert main(["push", str(tmp_path), REPO]) == 2
    assert (tmp_path / "README.md").read_text() == "my project"


def test_push_of_a_card_that_cannot_be_read(hub, saved, capsys):
    (saved / "README.md").write_text("---\na: [\n---\n")
    assert main(["push", str(saved), REPO]) == 2
    assert "ParserError" in capsys.readouterr().err


# --- the card ---


def test_card_shows_what_lies_beside_the_model(saved):
    record = saved / "sparrow"
    record.mkdir()
    bins = [
        {"first": 0, "last": 1999, "tokens": 5000, "tail": 0.912, "low": 0.905, "high": 0.919, "mean": 0.98},
        {"first": 2000, "last": 3999, "tokens": 0, "tail": None, "low": 0.0, "high": 1.0, "mean": None},
    ]
    (record / "tail.json").write_text(json.dumps({"threshold": 0.86, "floor": 0.999, "bins": bins}))
    (record / "tail.png").write_bytes(b"")
    result = {"suite": "math500", "dataset": "HuggingFaceH4/MATH-500", "metric": "accuracy", "problems": 500}
    results = [
        {**result, "decode": "sparse", "value": 0.41, "low": 0.39, "high": 0.43},
        {**result, "decode": "dense", "value": 0.42, "low": 0.40, "high": 0.44},
    ]
    (record / "eval.json").write_text(json.dumps({"results": results}))
    card = make_card(saved, repo_id=REPO)
    assert "| 0 to 1,999 | 5,000 | 0.912 | 0.905 to 0.919 | 0.980 |" in card.text
    assert "Threshold of this run: 0.86" in card.text and "2,000 to 3,999" not in card.text
    assert "![tail.png](sparrow/tail.png)" in card.text
    dense, sparse = card.data.eval_results
    assert (dense.metric_value, dense.dataset_args) == (0.42, {"decode": "dense"})
    assert (sparse.metric_value, sparse.metric_name) == (0.41, "accuracy, sparse decoding")
    assert card.data.to_dict()["model-index"][0]["name"] == "policy"
    ModelCard(str(card))  # its metadata can be read back


def test_card_of_a_bare_model_says_what_is_missing(saved):
    card = make_card(saved)
    assert "No record of the run" in card.text and "was not recorded" in card.text
    assert "## Evaluation" not in card.text and "## Speed" not in card.text
    (saved / "sparrow").mkdir()
    (saved / "sparrow" / "run.json").write_text("{broken")
    assert "No record of the run" in make_card(saved).text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("eval.json", "{broken"),
        ("eval.json", '{"results": 3}'),
        ("eval.json", '{"results": ["math500"]}'),
        ("eval.json", '{"results": [{"suite": "math500", "metric": "accuracy", "decode": "dense"}]}'),
        ("tail.json", "[]"),
        ("tail.json", '{"bins": [{"first": 0, "tokens": 5}]}'),
        ("tail.json", '{"threshold": "high"}'),
        ("bench.json", '{"runs": [{"decode": {"steps": [{"batch": 1}]}}]}'),
        ("run.json", '{"base_model": null}'),
        ("run.json", json.dumps({**vars(RunRecord(None, None, "", {}, {}, {})), "config": []})),
        ("run.json", json.dumps({**vars(RunRecord(None, None, "", {}, {}, {})), "global_step": "many"})),
    ],
)
def test_damaged_evidence_is_left_out_with_a_warning(hub, saved, name, text):
    bare = make_card(saved, repo_id=REPO).text
    (saved / "sparrow").mkdir()
    (saved / "sparrow" / name).write_text(text)
    with pytest.warns(UserWarning, match="is damaged") as caught:
        assert main(["push", str(saved), REPO]) == 0
    [message] = [str(warning.message) for warning in caught if "is damaged" in str(warning.message)]
    assert str(saved / "sparrow" / name) in message
    card = ModelCard(hub.files[REPO]["README.md"].decode()).text
    before, _, rest = card.partition("## Files")
    assert (before + rest[rest.index("## Limits") :]).split() == bare.split()


def test_damaged_evidence_does_not_end_a_training(hub, tmp_path):
    trainer = make_trainer(tmp_path / "out", max_steps=1, hub_model_id=REPO)
    (tmp_path / "out" / "sparrow").mkdir(parents=True)
    (tmp_path / "out" / "sparrow" / "eval.json").write_text('{"results": [{"suite": "math500"}]}')
    trainer.train()
    with pytest.warns(UserWarning, match="eval.json is damaged"):
        trainer.push_to_hub()
    assert "| optimizer steps | 1 |" in hub.files[REPO]["README.md"].decode()  # the rest of our card is there


def test_local_paths_do_not_become_metadata(saved):
    (saved / "sparrow").mkdir()
    record = RunRecord(str(saved), "data/train.jsonl/x", "python x.py", {}, {}, {})
    record.save(saved)
    metadata = make_card(saved).data.to_dict()
    assert "base_model" not in metadata and "datasets" not in metadata


@pytest.mark.parametrize(
    ("argv", "num_processes", "expected"),
    [
        (["train.py", "--lr", "1e-6"], 1, "python train.py --lr 1e-6"),
        (["-u", "train.py", "a b"], 4, "accelerate launch --num_processes 4 train.py 'a b'"),
        (["-m", "package.train"], 2, "accelerate launch --num_processes 2 -m package.train"),
    ],
)
def test_reproduce_command(argv, num_processes, expected, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert reproduce_command(argv, num_processes) == expected


def test_reproduce_command_tells_no_token(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    argv = ["x.py", "--hub_token", "hf_a", "--token=hf_b", "--hub-token", "hf_c", "--lr", "1"]
    assert reproduce_command(argv) == "python x.py --lr 1"
    token = "hf_" + "aB3" * 11
    argv = ["x.py", "--model_init_kwargs", json.dumps({"token": token}), "--hub_tok", token]
    assert token not in reproduce_command(argv)


def test_public_config_looks_into_nested_options():
    config = {"seed": 1, "hub_token": "hf_a", "model_init_kwargs": {"token": "hf_b", "dtype": "float32"}}
    assert public_config(config) == {"seed": 1, "model_init_kwargs": {"dtype": "float32"}}


def test_averages_leave_out_what_is_no_number():
    logs = [{"sparrow/kv_share": 0.2}, {"loss": 1.0}, {"sparrow/kv_share": 0.4, "sparrow/budget": 8}]
    assert average_metrics(logs) == {"kv_share": pytest.approx(0.3), "budget": 8.0}
