"""The configurations in `examples/`: accelerate's load and launch, and those of the paper's runs plan what it says."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.utils import DistributedType
from datasets import Dataset
from transformers import AutoModelForCausalLM

from sparrow_trl import SparsitySchedule
from sparrow_trl.cli import main
from sparrow_trl.train.arguments import make_parser
from tiny import tiny_model, tiny_tokenizer


ROOT = Path(__file__).parents[1]
ACCELERATE = ROOT / "examples" / "accelerate_configs"
RUNS = ROOT / "examples" / "runs"
DOCS = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
TYPES = {
    "cpu": DistributedType.NO,
    "cpu_2_processes": DistributedType.MULTI_GPU,
    "single_gpu": DistributedType.NO,
    "multi_gpu": DistributedType.MULTI_GPU,
    "zero2": DistributedType.DEEPSPEED,
}
GIB = 2**30


def named(folder):
    return [pytest.param(path, id=path.stem) for path in sorted(folder.glob("*.yaml"))]


@pytest.mark.parametrize("path", named(ACCELERATE))
def test_accelerate_knows_every_field(path):
    config = load_config_from_file(str(path))  # raises for a field that it does not know
    assert isinstance(config, ClusterConfig)
    assert config.distributed_type == TYPES[path.stem]
    assert config.use_cpu == path.stem.startswith("cpu")
    assert (config.num_processes > 1) == (path.stem in ("cpu_2_processes", "multi_gpu", "zero2"))
    # Parameters stay whole on every process: what shards them is refused by the trainer
    assert not config.fsdp_config and config.deepspeed_config.get("zero_stage", 0) < 3


@pytest.mark.parametrize(
    ("name", "processes"), [("cpu", 1), pytest.param("cpu_2_processes", 2, marks=pytest.mark.slow)]
)
def test_accelerate_launches_a_script_on_the_cpu(tmp_path, name, processes):
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    problems = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(8)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, problems)))
    script = ROOT / "examples" / "scripts" / "grpo_maths.py"
    options = "--use_cpu --bf16 false --report_to none --max_steps 1 --logging_steps 1 --max_completion_length 8"
    options += f" --gradient_accumulation_steps {8 // processes} --num_generations 4"
    options += ' --model_name_or_path model --dataset_name data --output_dir out --sparse_schedule {"budgets":[2],"page_size":4}'
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(ACCELERATE / f"{name}.yaml")]
    # Not what the launcher of these tests may have set for processes of its own
    launched = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    environment = {key: value for key, value in os.environ.items() if key not in launched}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    result = subprocess.run(
        [*command, str(script), *options.split()],
        cwd=tmp_path,
        env=environment,
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )
    # The end of an interpreter that has talked over gloo may abort, see `distributed_run.py`
    aborted = processes > 1 and "terminate called without an active exception" in result.stderr
    assert result.returncode == 0 or aborted, result.stdout[-2000:] + result.stderr[-4000:]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    record = json.loads((tmp_path / "out" / "sparrow" / "run.json").read_text())
    assert record["global_step"] == 1
    assert record["num_processes"] == processes


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """What the runs would find on the Hub, in the working directory: the models' configurations, and rows of data."""
    for path in (ROOT / "examples" / "configs").glob("qwen3-*.json"):
        folder = tmp_path / "Qwen" / path.stem.replace("qwen", "Qwen").replace("b", "B")
        folder.mkdir(parents=True)
        shutil.copy(path, folder / "config.json")
        tiny_tokenizer().save_pretrained(folder)
    maths = {"problem": "1 + 1?", "answer": "2", "difficulty": "3/8"}
    code = {
        "question": "Double it.",
        "input_output": json.dumps({"inputs": ["4"], "outputs": ["8"]}),
        "starter_code": "",
        "difficulty": "EASY",
    }

    def load_dataset(path, *, data_files=None, **options):
        assert options == {"split": "train"}
        named = {"POLARIS-Project/Polaris-Dataset-53K": maths, "hf://datasets/BAAI/TACO/ALL/train-*.parquet": code}
        return Dataset.from_list([named[path if data_files is None else data_files["train"]]] * 8)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")  # of the tables that are printed
    monkeypatch.setattr("datasets.load_dataset", load_dataset)


def plan_of(capsys, arguments) -> dict[str, str]:
    assert main(["train", *arguments, "--dry-run", "--chip", "h200"]) == 0, capsys.readouterr().err
    lines = [line for line in capsys.readouterr().out.splitlines() if line.count("│") == 3]
    return dict([cell.strip() for cell in line.strip().split("│")[1:-1]] for line in lines)


def gib(text: str) -> float:
    return float(text.removesuffix(" GiB").replace(",", ""))


@pytest.mark.parametrize("path", named(RUNS))
def test_runs_plan_what_is_known_of_the_papers(hub, capsys, path):
    model, data = re.fullmatch(r"(qwen3-[\d.]+b)-(polaris|taco)(?:-distill)?", path.stem).groups()
    plan = plan_of(capsys, ["--config", str(path)])
    budgets = SparsitySchedule.from_preset(model, 0.86).budgets
    assert plan["schedule"].startswith(", ".join(map(str, budgets)))
    assert plan["model"].lower() == f"qwen/{model}"
    size = float(model.removeprefix("qwen3-").removesuffix("b")) * 1e9
    assert int(plan["parameters"].replace(",", "")) == pytest.approx(size, rel=0.1)
    assert plan["completions per generation batch"] == "32"  # of a process
    assert plan["prompts per generation batch"] == "4"
    assert plan["optimizer steps per generation batch"] == "1"
    assert float(plan["expected speed-up of decoding, at full length"].removesuffix("x")) > 1

    _, args, _, _ = make_parser().parse_args_and_config(["--config", str(path), "--use_cpu", "true"])
    assert args.max_completion_length == (24576 if data == "taco" else 37000 if model == "qwen3-1.7b" else 32768)
    assert (args.num_generations, args.temperature, args.beta) == (8, 1.0, 0.0)
    assert (args.epsilon, args.epsilon_high) == (0.2, 0.28)
    assert args.vllm_importance_sampling_mode == "token_truncate"
    assert args.distill_sparse == path.stem.endswith("distill")
    assert args.output_dir == path.stem

    # DDP for what fits on a GPU of 141 GB with room for cache and activations, ZeRO-2 for the others
    text = path.read_text(encoding="utf-8")
    needed = sum(gib(plan[name]) for name in ("weights", "gradients", "moments of the optimizer (AdamW)"))
    launcher = re.search(r"accelerate_configs/(\w+)\.yaml", text)[1]
    assert (ACCELERATE / f"{launcher}.yaml").is_file()
    assert (launcher == "zero2") == (needed > 141e9 / GIB / 2)
    if launcher == "zero2":
        assert float(re.search(r"would take (\d+) GiB", text)[1]) == pytest.approx(needed, abs=0.5)
    assert f"--config examples/runs/{path.name}" in text


def test_distillation_goes_on_with_fewer_pages(hub, tmp_path):
    """The two parts of that run, on a tiny model: the second has the LoRA and its optimizer, and another schedule."""
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    options = "--model_name_or_path model --output_dir out --use_cpu true --bf16 false --report_to none --save_steps 1"
    options += " --tail_monitor false --max_completion_length 8 --per_device_train_batch_size 8 --gradient_accumulation_steps 1"
    parts = [(2, "--max_steps 1"), (1, "--max_steps 2 --resume_from_checkpoint out/checkpoint-1")]
    for budget, of_part in parts:
        schedule = ["--sparse_schedule", json.dumps({"budgets": [budget], "page_size": 4})]
        config = ["--config", str(RUNS / "qwen3-1.7b-polaris-distill.yaml")]
        assert main(["train", *config, *options.split(), *schedule, *of_part.split()]) == 0
    for step, (budget, _) in enumerate(parts, start=1):
        folder = tmp_path / "out" / f"checkpoint-{step}"
        state = torch.load(folder / "sparrow" / "distill.pt")
        assert {int(moments["step"]) for moments in state["update"]["optimizer"]["state"].values()} == {step}
        assert SparsitySchedule.from_pretrained(folder).budgets == (budget,)


def test_every_run_is_on_the_page():
    assert set(re.findall(r"^\| `([\w.-]+)\.yaml` \|", DOCS, re.MULTILINE)) == {
        path.stem for path in (*RUNS.glob("*.yaml"), *ACCELERATE.glob("*.yaml"))
    }


@pytest.mark.parametrize(
    "options", re.findall(r"^\| [^|]+ \| `(--sparse_[^`]+)` \|", DOCS, re.MULTILINE), ids=lambda options: options
)
def test_variants_of_a_run_plan_other_schedules(hub, capsys, options):
    plan = plan_of(capsys, ["--config", str(RUNS / "qwen3-1.7b-polaris.yaml"), *options.split()])
    name, value = options.split()
    if value == "dense":
        assert plan["schedule"] == "dense"
    elif value.startswith("fixed:"):
        kept = yaml.safe_load(re.search(rf"`{options}` \| .*?([\d,]+) tokens", DOCS)[1].replace(",", ""))
        assert plan["schedule"].startswith(value.removeprefix("fixed:") + " scored pages")
        assert 16 * (int(value.removeprefix("fixed:")) + 3) == kept  # the first page and the last two come on top
    else:
        target = float(value) if name == "--sparse_target" else float(value.partition("@")[2])
        budgets = SparsitySchedule.from_preset("qwen3-1.7b", target).budgets
        assert plan["schedule"].startswith(", ".join(map(str, budgets)))
