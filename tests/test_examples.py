"""The examples: one step of each script. The first two differ in one line: one is of TRL, the other has sparse rollouts."""

import ast
import difflib
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from rich.console import Console
from transformers import AutoModelForCausalLM
from trl import ModelConfig, TrlParser

from sparrow_trl import SparrowGRPOConfig
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


MATHS = [
    {
        "prompt": [{"role": "user", "content": f"What is {i} + {i}? Answer at length."}],
        "solution": f"${2 * i}$",
        "problem": f"What is {i} + {i}?",
        "answer": str(2 * i),
    }
    for i in range(8)
]
CODE = [
    {
        "question": "Print the number twice.",
        "input_output": json.dumps({"inputs": ["1", "2", "3"], "outputs": ["1 1", "2 2", "3 3"]}),
        "starter_code": "",
        "difficulty": difficulty,
    }
    for difficulty in ["EASY", "HARD"] * 4
]


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """A tiny model and datasets in folders, and the command line that names them, with that of maths."""
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    for name, rows in (("maths", MATHS), ("code", CODE)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {
        "model_name_or_path": tmp_path / "model",
        "dataset_name": tmp_path / "maths",
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


def log_of(folder):
    return json.loads((folder / "checkpoint-1" / "trainer_state.json").read_text())["log_history"]


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
    history = log_of(offline)
    assert "rewards/accuracy_reward/mean" in history[0]
    shares = [entry["sparrow/kv_share"] for entry in history if "sparrow/kv_share" in entry]
    if script == "grpo_trl.py":
        assert not shares
    else:
        assert (shares[0] < 1) == ("dense" not in options)


SPARSE = ["--sparse_schedule", '{"budgets": [2], "page_size": 4}']
SMALL = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1"]
LORA = ["--use_peft", "--lora_r", "4"]


def run(script, monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", [*sys.argv, *SPARSE, *SMALL, *options])
    runpy.run_path(str(SCRIPTS / script), run_name="__main__")


@pytest.mark.parametrize(
    ("script", "options", "rewards", "weights"),
    [
        ("grpo_maths.py", [], ["maths_reward", "think_format_reward", "soft_overlong_punishment_reward"], [1, 0, 0]),
        (
            "grpo_maths.py",
            [*LORA, "--reward_weights", "1", "0.5", "0.25", "--eval_strategy", "steps", "--eval_problems", "2",
             "--per_device_eval_batch_size", "4"],
            ["maths_reward", "think_format_reward", "soft_overlong_punishment_reward"],
            [1, 0.5, 0.25],
        ),
        ("grpo_code.py", ["--dataset_name", "code"], ["code_reward", "program_reward"], [1, 0]),
        ("grpo_code.py", ["--dataset_name", "code", *LORA], ["code_reward", "program_reward"], [1, 0]),
    ],
    ids=["maths", "maths, LoRA", "code", "code, LoRA"],
)  # fmt: skip
def test_script_with_rewards_of_this_package(offline, monkeypatch, recwarn, script, options, rewards, weights):
    pytest.importorskip("math_verify")
    monkeypatch.chdir(offline.parent)
    run(script, monkeypatch, *options)
    assert not [str(warning.message) for warning in recwarn if "dropout" in str(warning.message)]
    history = log_of(offline)
    step = history[0]
    means = [step[f"rewards/{name}/mean"] for name in rewards]
    assert step["reward"] == pytest.approx(sum(mean * weight for mean, weight in zip(means, weights, strict=True)))
    assert step["sparrow/kv_share"] < 1
    assert any("eval_reward" in entry for entry in history) == ("--eval_strategy" in options)
    if "--use_peft" in options:
        adapter = json.loads((offline / "adapter_config.json").read_text())
        assert adapter["r"] == 4 and adapter["lora_dropout"] == 0 and "down_proj" in adapter["target_modules"]
    else:
        trained = AutoModelForCausalLM.from_pretrained(offline).state_dict()
        assert trained.keys() == tiny_model().state_dict().keys()


@pytest.fixture
def built(monkeypatch):
    """The trainers that scripts build, which then do not train."""
    trainers = []
    for name in ("train", "save_model", "end"):
        monkeypatch.setattr(f"sparrow_trl.SparrowGRPOTrainer.{name}", lambda self, *_, **__: trainers.append(self))
    return trainers


def test_maths_script_goes_by_answers_and_holds_problems_out(offline, monkeypatch, built):
    pytest.importorskip("math_verify")
    names = ["--problem_column", "solution", "--answer_column", "problem"]
    with pytest.raises(ValueError, match="eval_problems=64 is no part of 8 problems"):
        run("grpo_maths.py", monkeypatch, "--eval_strategy", "epoch")
    run("grpo_maths.py", monkeypatch, "--eval_strategy", "epoch", "--eval_problems", "3", *names)
    trainer = built[0]
    asked = [
        {row["prompt"][0]["content"].split("\n")[0] for row in part}
        for part in (trainer.train_dataset, trainer.eval_dataset)
    ]
    assert [len(part) for part in asked] == [5, 3]
    assert set.union(*asked) == {row["solution"] for row in MATHS}
    assert set(trainer.train_dataset["solution"]) <= {row["problem"] for row in MATHS}
    answers = [r"<think>2 + 2</think>\boxed{4}", r"\boxed{4}", r"<think>It is \boxed{4}"]
    messages = [[{"role": "assistant", "content": text}] for text in answers]
    given = {
        "prompts": [MATHS[2]["prompt"]] * 3,
        "completions": messages,
        "completion_ids": [[0] * n for n in (7, 8, 9)],
    }
    rewards = [function(**given, solution=["4"] * 3) for function in trainer.reward_funcs]
    assert rewards == [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, -1.0, -1.0]]


def test_code_script_goes_by_tests_and_difficulty(offline, monkeypatch, built):
    options = ["--dataset_name", str(offline.parent / "code"), "--difficulties"]
    with pytest.raises(ValueError, match="no problem that is MEDIUM; it has EASY, HARD"):
        run("grpo_code.py", monkeypatch, *options, "EASY", "MEDIUM")
    maths = ["--dataset_name", str(offline.parent / "maths")]
    with pytest.raises(ValueError, match=r"needs the column 'question'.*'problem'"):
        run("grpo_code.py", monkeypatch, *maths)
    run("grpo_code.py", monkeypatch, *options, "HARD", "--partial", "--max_tests", "2", "--cpu_seconds", "5")
    trainer = built[0]
    assert set(trainer.train_dataset["difficulty"]) == {"HARD"} and len(trainer.train_dataset) == 4
    right = "```python\nn = input()\nprint(n, n)\n```"
    half = "```python\nprint(1, 1)\n```"
    messages = [[{"role": "assistant", "content": text}] for text in (right, half, "I cannot.")]
    columns = {"tests": [trainer.train_dataset[0]["tests"]] * 3, "difficulty": ["HARD"] * 3}
    rewards = [function(prompts=[""] * 3, completions=messages, **columns) for function in trainer.reward_funcs]
    assert rewards == [[1.0, 0.5, 0.0], [1.0, 1.0, 0.0]]
    limits = trainer.reward_funcs[0].sandbox.limits
    assert (limits.cpu_seconds, limits.wall_seconds) == (5, 10)


@pytest.mark.parametrize(
    ("script", "rows", "path", "options"),
    [
        ("grpo_maths.py", MATHS, "POLARIS-Project/Polaris-Dataset-53K", {}),
        ("grpo_code.py", CODE, "parquet", {"data_files": {"train": "hf://datasets/BAAI/TACO/ALL/train-*.parquet"}}),
    ],
)
def test_scripts_train_on_the_papers_data_by_default(offline, monkeypatch, built, script, rows, path, options):
    loaded = []

    def load_dataset(name, **kwargs):
        loaded.append((name, kwargs))
        return Dataset.from_list(rows)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    place = sys.argv.index("--dataset_name")
    monkeypatch.setattr(sys, "argv", sys.argv[:place] + sys.argv[place + 2 :])
    run(script, monkeypatch)
    assert loaded == [(path, {"split": "train", **options})]
    assert len(built[0].train_dataset) == len(rows)


@pytest.mark.parametrize(("script", "length"), [("grpo_maths.py", 37_000), ("grpo_code.py", 24_576)])
def test_defaults_of_scripts_are_the_papers(tmp_path, script, length):
    namespace = runpy.run_path(str(SCRIPTS / script))
    arguments = next(value for name, value in namespace.items() if name in ("MathsArguments", "CodeArguments"))
    parser = TrlParser((arguments, SparrowGRPOConfig, ModelConfig))
    parser.set_defaults(**namespace["DEFAULTS"])
    (tmp_path / "run.yaml").write_text("epsilon_high: 0.3\n")
    _, args, model = parser.parse_args_and_config(["--use_cpu", "true"])
    assert args.max_completion_length == length
    assert (args.num_generations, args.temperature, args.beta) == (8, 1.0, 0.0)
    assert (args.epsilon, args.epsilon_high) == (0.2, 0.28)
    assert (args.sparse_schedule, args.sparse_target) == ("auto", 0.86)
    assert args.vllm_importance_sampling_mode == "token_truncate"
    assert model.model_name_or_path == "Qwen/Qwen3-1.7B" and not model.use_peft
    # Files and flags come before them
    _, args, _ = parser.parse_args_and_config(
        ["--use_cpu", "true", "--config", str(tmp_path / "run.yaml"), "--max_completion_length", "100"]
    )
    assert (args.epsilon_high, args.max_completion_length) == (0.3, 100)


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


def test_decode_steps_with_and_without_the_lora(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS.parent)
    script = runpy.run_path(str(SCRIPTS.parent / "distill_overhead.py"))
    model = tiny_model(eos_token_id=None)
    prompts = torch.randint(5, 200, (3, 21), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        expected = [model(input_ids=torch.tensor([prompt + prompt[:1]])).logits[0, -1] for prompt in prompts]
        with rollout_mode(model, packed=True):
            step = script["decoder"](model, prompts, script["SparsitySchedule"].dense(page_size=4), torch.float32)
            for _ in range(3):
                torch.testing.assert_close(step(), torch.stack(expected), atol=1e-4, rtol=1e-4)
    arguments = script["OverheadArguments"](decode_steps=2, budget=1)
    for names in ("q_proj,v_proj", "all-linear"):
        with_lora, without = script["decode_seconds"](model, prompts, torch.bfloat16, names, arguments)
        assert len(with_lora) == len(without) == 2 and min(with_lora + without) > 0
    assert not any("forward" in vars(module) for module in model.modules())
