"""The two example scripts: an ordinary one of TRL, and the same with sparse rollouts, which is one line away."""

import ast
import difflib
import json
import runpy
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

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
