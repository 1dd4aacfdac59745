"""The two example scripts: an ordinary one of TRL, and the same with sparse rollouts, which is one line away."""

import ast
import difflib
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from sparrow_trl.attention import TeacherForced
from sparrow_trl.rollout.isolation import rollout_mode
from tiny import tiny_model, tiny_tokenizer


SCRIPTS = Path(__file__).parents[1] / "examples" / "scripts"
IMPORT = "from sparrow_trl import SparrowGRPOConfig as GRPOConfig, SparrowGRPOTrainer as GRPOTrainer"


def test_scripts_differ_in_the_import_alone():
    trl, sparrow = ((SCRIPTS / name).read_text().splitlines() for name in ("grpo_trl.py", "grpo_sparrow.py"))
    changes = [line for line in difflib.ndiff(trl, sparrow) if line.startswith(("-", "+"))]
    assert changes == ["- from trl import GRPOConfig, GRPOTrainer", f"+ {IMPORT}"]


@pytest.mark.parametrize("name", ["grpo_trl.py", "grpo_sparrow.py"])
def test_scripts_need_peft_for_lora_alone(name):
    imports = [node for node in ast.parse((SCRIPTS / name).read_text()).body if isinstance(node, ast.ImportFrom)]
    assert "peft" not in [node.module for node in imports]


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """A tiny model and a dataset in folders, and the command line that names them."""
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {i} + {i}? Answer at length."}], "solution": f"${2 * i}$"}
        for i in range(8)
    ]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {
        "model_name_or_path": tmp_path / "model",
        "dataset_name": tmp_path / "data",
        "output_dir": tmp_path / "out",
        "report_to": "none",
        "bf16": "false",
        "max_steps": 1,
        "save_steps": 1,
        "logging_steps": 1,
        "max_completion_length": 8,
        "num_generations": 4,
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["grpo.py", *arguments, "--use_cpu"])
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("grpo_trl.py", []),
        ("grpo_sparrow.py", ["--sparse_schedule", '{"budgets": [2], "page_size": 4}']),
        ("grpo_sparrow.py", ["--sparse_schedule", "dense", "--lora_r", "4"]),
    ],
    ids=["TRL", "sparse", "dense, LoRA"],
)
def test_script_trains_and_saves(offline, monkeypatch, script, options):
    pytest.importorskip("math_verify")
    monkeypatch.setattr(sys, "argv", [*sys.argv, *options])
    runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    AutoModelForCausalLM.from_pretrained(offline)
    history = json.loads((offline / "checkpoint-1" / "trainer_state.json").read_text())["log_history"]
    assert "rewards/accuracy_reward/mean" in history[0]
    shares = [entry["sparrow/kv_share"] for entry in history if "sparrow/kv_share" in entry]
    if script == "grpo_trl.py":
        assert not shares
    else:
        assert (shares[0] < 1) == ("dense" not in options)


def test_distillation_of_a_frozen_policy(tmp_path):
    """The script's parts on a tiny model: what it writes, and that its tails are those of the completions it sampled."""
    script = runpy.run_path(str(SCRIPTS.parent / "distill_frozen_policy.py"))
    options = script["Arguments"](
        output_dir=str(tmp_path),
        minutes=0.02,
        budget=1,
        prompt_tokens=40,
        completion_tokens=40,
        held_out=3,
        measurements=1,
        batch=2,
        steps=1,
        bf16=False,
        other_budgets="2",
    )
    stream = torch.randint(5, 200, (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    model = tiny_model(eos_token_id=None)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    record = script["run"](model, stream, options, "tiny", Console(quiet=True))
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert record == json.loads((tmp_path / "distill.json").read_text())
    first, *_, last = record["measurements"]
    assert [point["lora"] for point in (first, last)] == [False, True]
    assert first["tokens"] == 120 and record["updates"][-1]["minutes"] >= 0.02
    assert first["tail_interval"][0] <= first["tail"] <= first["tail_interval"][1]
    assert record["tail_lift"] == last["tail"] - first["tail"]
    assert [point["budget"] for point in record["without"]] == [1, 2]
    assert record["without"][0]["tail"] == first["tail"] < record["without"][1]["tail"]
    # 4 kept pages have a tail of 0.7 and 16 one of 0.8: 8 lie in the middle
    curve = [{"budget": 1, "tail": 0.7}, {"budget": 13, "tail": 0.8}]
    assert script["equal_budget"](curve, 0.75) == pytest.approx(5)
    assert script["equal_budget"](curve, 0.81) is None
    assert (tmp_path / "distill.png").stat().st_size > 1000
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()

    engine = script["RolloutEngine"](model, script["SparsitySchedule"].fixed(1), progress_bar=False)
    prompts = script["passages"](stream, 40, 0)[:3]
    config = script["GenerationConfig"](do_sample=True, max_new_tokens=40)
    completions = engine.generate(prompts, config, seed=1).completion_ids
    rates = []
    for prompt, completion in zip(prompts, completions, strict=True):
        with torch.no_grad():
            ids = torch.tensor([prompt + completion])
            dense = model(input_ids=ids).logits[0, 39:-1].softmax(-1)
            with rollout_mode(model):
                state = TeacherForced(engine.schedule, [80], [40])
                sparse = model(input_ids=ids, sparrow=state).logits[0, 39:-1].softmax(-1)
        rates.append(torch.minimum(dense, sparse).sum(-1))
    pooled = torch.cat(rates)
    assert pooled.min() < 0.99  # some page was left out
    assert first["tail"] == pytest.approx(torch.quantile(pooled, 0.05).item(), abs=1e-4)
    assert first["mean"] == pytest.approx(pooled.mean().item(), abs=1e-4)


def test_distillation_along_with_the_policy(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS.parent)
    script = runpy.run_path(str(SCRIPTS.parent / "distill_training.py"))
    options = script["Arguments"](
        output_dir=str(tmp_path),
        steps=2,
        budget=1,
        prompt_tokens=40,
        completion_tokens=40,
        held_out=12,
        batch=16,
        bin_tokens=40,
        bf16=False,
    )
    stream = torch.randint(5, 200, (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    model, schedule = tiny_model(eos_token_id=None), {"budgets": [1], "page_size": 4}
    record = script["run"](model, tiny_tokenizer(), stream, options, "tiny", sparse_schedule=schedule)
    assert record["tails"] == json.loads((tmp_path / "tails.json").read_text())["tails"]
    assert len([entry for entry in record["log"] if "sparrow/distill/kl" in entry]) == 2
    ((first, without, with_it),) = script["rows_of"](record)
    assert first == 40 and without["tokens"] > 200 and with_it["tokens"] > 200
    assert without["value"] != with_it["value"]
    assert (tmp_path / "tails.png").stat().st_size > 1000
    assert (tmp_path / "sparrow" / "adapter" / "adapter_config.json").is_file()
    assert script["different_words_reward"](["a B b c", ""]) == [0.75, 0.0]
