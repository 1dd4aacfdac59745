"""`sparrow train`: plans, mistakes, and a real run of a tiny model."""

import json

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, GenerationConfig
from trl import ModelConfig

from sparrow_trl import RolloutEngine, SparrowGRPOConfig, SparrowGRPOTrainer, SparsitySchedule
from sparrow_trl.cli import main
from sparrow_trl.rewards import Sandbox, SandboxUnavailableError
from sparrow_trl.sparsity.cost import CHIPS
from sparrow_trl.train.arguments import get_reward_funcs, make_parser
from sparrow_trl.train.plan import make_plan
from tiny import tiny_model, tiny_tokenizer
from training import make_config, prompts


def letters(completions, **kwargs):
    """A reward that `--reward_funcs test_train_command.letters` finds."""
    return [float(sum(character.isalpha() for character in completion)) for completion in completions]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with its tokenizer, and prompts in a file."""
    path = tmp_path_factory.mktemp("train")
    tiny_model().save_pretrained(path / "model")
    tiny_tokenizer().save_pretrained(path / "model")
    with open(path / "prompts.jsonl", "w") as file:
        for row in prompts(8):
            file.write(json.dumps(row) + "\n")
    return path


def flags(folder, **options) -> list[str]:
    values = {
        "model_name_or_path": folder / "model",
        "dataset_name": folder / "prompts.jsonl",
        "reward_funcs": "test_train_command.letters",
        "output_dir": folder / "out",
        "use_cpu": "true",
        "bf16": "false",
        "report_to": "none",
        "max_completion_length": 10,
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "sparse_schedule": json.dumps({"budgets": [2], "page_size": 4}),
        **options,
    }
    return [
        "train",
        *(part for name, value in values.items() if value is not None for part in (f"--{name}", str(value))),
    ]


def test_a_run_from_a_yaml_file(folder, capsys):
    config = dict(zip(*[iter(flags(folder)[1:])] * 2, strict=True))
    config = {name.removeprefix("--"): value for name, value in config.items()}
    config |= {"max_steps": 2, "use_cpu": True, "bf16": False, "num_generations": 4, "max_completion_length": 10}
    config |= {"per_device_train_batch_size": 8, "reward_funcs": ["test_train_command.letters"], "save_strategy": "no"}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", "--config", str(folder / "run.yaml"), "--max_steps", "1"]) == 0
    record = json.loads((folder / "out" / "sparrow" / "run.json").read_text())
    assert record["global_step"] == 1
    assert (folder / "out" / "model.safetensors").is_file()
    assert "The model is in" in capsys.readouterr().out


def test_dry_run_plans_without_loading_weights(folder, capsys, monkeypatch):
    def loaded(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", loaded)
    arguments = flags(folder, chip="h100", num_train_epochs=2, gradient_accumulation_steps=2)
    assert main([*arguments, "--dry-run"]) == 0
    plan = dict(
        [cell.strip() for cell in line.strip().split("│")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if line.count("│") == 3
    )
    parameters = sum(parameter.numel() for parameter in tiny_model().parameters())
    assert plan["parameters"] == f"{parameters:,}"
    assert plan["completions per generation batch"] == "16"  # 8 on the device, accumulated twice
    assert plan["prompts per generation batch"] == "4"
    assert plan["optimizer steps"] == "4"  # 8 prompts, 4 to a step, 2 epochs
    assert plan["schedule"].startswith("2 scored pages")


def plan_memory(folder, dtype="float32", chip="h100", **options) -> dict:
    args = SparrowGRPOConfig(
        output_dir=str(folder / "out"),
        use_cpu=True,
        sparse_schedule={"budgets": [2], "page_size": 4},
        num_generations=4,
        max_completion_length=10,
        **{"bf16": False, "per_device_train_batch_size": 8, **options},
    )
    model = ModelConfig(model_name_or_path=str(folder / "model"), dtype=dtype)
    return make_plan(args, model, chip, prompt_length=9)["memory of a process"]


@pytest.mark.parametrize("max_num_seqs", [256, 6])
def test_planned_cache_is_what_a_rollout_allocates(folder, max_num_seqs):
    plan = plan_memory(folder, rollout_max_num_seqs=max_num_seqs)
    engine = RolloutEngine(tiny_model(), SparsitySchedule((2,), page_size=4), max_num_seqs=max_num_seqs)
    stats = engine.generate([[5] * 9] * 4 + [[6] * 9] * 4, GenerationConfig(max_new_tokens=10)).stats
    footprint = engine._footprint  # measured on the tensors of the cache
    page = (4 * footprint.token_numel + footprint.page_numel) * 4
    assert plan["KV page of 4 tokens"] == page
    assert plan["KV cache that a rollout wants: its sequences at full length"] == page * stats.pages_total
    assert plan["sequences at full length that fit at once"] == min(8, max_num_seqs)


def test_planned_memory_follows_dtypes_and_the_chip(folder):
    parameters = sum(parameter.numel() for parameter in tiny_model().parameters())
    optimizer, allowed = "moments of the optimizer (AdamW)", "KV cache that it may take (rollout_memory_fraction)"
    plan = plan_memory(folder)
    assert (plan["weights"], plan["gradients"], plan[optimizer]) == (4 * parameters, 4 * parameters, 8 * parameters)
    assert plan["copies of weights in a rollout"] == 0  # computed with as they are
    assert plan[allowed] == int(0.5 * (CHIPS["h100"].memory - 12 * parameters))
    mixed = plan_memory(folder, bf16=True, rollout_memory_fraction=0.9)
    assert mixed["weights"] == plan["weights"]
    assert 2 * mixed["KV page of 4 tokens"] == plan["KV page of 4 tokens"]
    assert 0 < mixed["copies of weights in a rollout"] <= 2 * parameters
    assert mixed[allowed] == int(
        0.9 * (CHIPS["h100"].memory - 12 * parameters - mixed["copies of weights in a rollout"])
    )
    half = plan_memory(folder, "bfloat16", bf16=True)
    assert (half["weights"], half[optimizer]) == (2 * parameters, 4 * parameters)
    assert half["copies of weights in a rollout"] == 0
    stored = tiny_model().config.dtype or torch.float32
    assert plan_memory(folder, "auto")["weights"] == stored.itemsize * parameters


def test_planned_sequences_fit_the_memory(folder, monkeypatch):
    monkeypatch.setattr("sparrow_trl.train.plan.measure_chip", lambda *args: CHIPS["h100"])
    whole = plan_memory(folder, chip=None)
    pages = whole["KV cache that a rollout wants: its sequences at full length"] // whole["KV page of 4 tokens"]
    assert pages == 2 * 3 + 8 * 3  # two prompts of nine tokens, eight completions from within their last page on
    fixed = whole["weights"] + whole["moments of the optimizer (AdamW)"]
    room = 2 * 20 * whole["KV page of 4 tokens"]  # half of it: five with two prompts would take 21 pages
    monkeypatch.setattr("sparrow_trl.train.plan.free_memory", lambda device: fixed + room)
    monkeypatch.setattr("sparrow_trl.train.plan.torch.cuda.is_available", lambda: False)
    assert plan_memory(folder, chip=None)["sequences at full length that fit at once"] == 4


@pytest.mark.parametrize(
    ("saved", "dtype"), [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "auto"), ("float32", "auto")]
)
def test_dry_run_counts_the_memory_that_training_takes(tmp_path, saved, dtype):
    tiny_model().to(getattr(torch, saved)).save_pretrained(tmp_path)
    args = make_config(tmp_path / "out")
    memory = make_plan(args, ModelConfig(str(tmp_path), dtype=dtype), "h100")["memory of a process"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.tensor([[7, 8]])).logits.sum().backward()
    optimizer.step()
    weights, moments = list(model.parameters()), []
    for state in optimizer.state.values():
        moments += [state["exp_avg"], state["exp_avg_sq"]]
    assert memory["weights"] == sum(tensor.nbytes for tensor in weights)
    trained = sum(weight.grad.nbytes for weight in weights) + sum(moment.nbytes for moment in moments)
    assert memory["gradients"] + memory["moments of the optimizer (AdamW)"] == trained


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_name_or_path": None}, "--model_name_or_path"),
        ({"dataset_name": None}, "--dataset_name"),
        ({"reward_funcs": None}, "--reward_funcs"),
        ({"reward_funcs": "good_reward"}, "'good_reward' is none of"),
        ({"reward_funcs": "nowhere.good"}, "'nowhere.good' cannot be imported"),
        ({"reward_funcs": "test_train_command.missing"}, "cannot be imported"),
        ({"dataset_train_split": "validation"}, "dataset_train_split='validation' is no split"),
        ({"sparse_schedule": "fixed:many"}, "'many' is not a number of pages"),
        ({"num_generations": 3}, "num_generations"),
        ({"config": "list.yaml"}, "Error"),
        ({"config": "broken.yaml"}, "Error"),
        ({"chip": "abacus"}, "chip='abacus'"),
    ],
)
def test_mistakes_are_named(folder, capsys, options, message):
    if "config" in options:
        (folder / "list.yaml").write_text("- 1")
        (folder / "broken.yaml").write_text("a: [")
        options = {"config": folder / options["config"]}
    assert main([*flags(folder, **options), "--dry-run"]) == 2
    assert message in capsys.readouterr().err


def test_a_dataset_without_prompts_is_named(folder, capsys):
    (folder / "questions.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    assert main([*flags(folder, dataset_name=folder / "questions.jsonl"), "--dry-run"]) == 2
    assert "no column 'prompt'; it has question, answer" in capsys.readouterr().err


def test_a_lora_has_no_dropout_unless_asked_for(folder):
    for options, dropout in (({}, 0.0), ({"lora_dropout": 0.1}, 0.1)):
        _, _, model, _ = make_parser().parse_args_and_config(flags(folder, use_peft="true", **options)[1:])
        assert model.lora_dropout == dropout
    (folder / "lora.yaml").write_text("lora_dropout: 0.2")
    _, _, model, _ = make_parser().parse_args_and_config([*flags(folder)[1:], "--config", str(folder / "lora.yaml")])
    assert model.lora_dropout == 0.2


@pytest.mark.parametrize("options", [{"reward_funcs": "code_reward"}, {"reward_funcs": None, "recipe": "tiny-code"}])
def test_a_machine_without_sandboxes_is_found_out_first(folder, capsys, monkeypatch, options):
    def refuse(self):
        raise SandboxUnavailableError("Install bubblewrap.")

    monkeypatch.setattr(Sandbox, "_find_isolation", refuse)
    monkeypatch.setattr("sparrow_trl.rewards.code.shared_sandbox", Sandbox)  # not the one of tests before
    monkeypatch.setattr("sparrow_trl.train.run.load_datasets", None)  # nothing is loaded
    assert main(flags(folder, **options)) == 2
    assert "SandboxUnavailableError: Install bubblewrap." in capsys.readouterr().err


def test_a_dry_run_needs_no_sandbox(folder, capsys, monkeypatch):
    monkeypatch.setattr("sparrow_trl.train.run.check_sandboxes", None)
    assert main([*flags(folder, reward_funcs="code_reward"), "--dry-run"]) == 0


def test_the_run_is_ended(folder, monkeypatch):
    ended = []
    monkeypatch.setattr(SparrowGRPOTrainer, "end", lambda self: ended.append(self.state.global_step))
    assert main(flags(folder, max_steps=1, save_strategy="no")) == 0
    assert ended == [1]


def test_overlong_reward_goes_by_the_limit_of_the_run():
    pytest.importorskip("sparrow_trl.rewards")
    [reward] = get_reward_funcs(["overlong_reward"], None, 80)
    lengths = [70, 75, 80, 90]
    assert reward(completion_ids=[[0] * length for length in lengths], completions=[""] * 4) == [0.0, -0.5, -1.0, -1.0]
