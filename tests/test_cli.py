"""The command `sparrow`: its options, and `sparrow doctor`."""

import re
import subprocess
import sys

import pytest
import torch

from sparrow_trl import __version__, environment
from sparrow_trl.benchmark.decode import prefill
from sparrow_trl.benchmark.options import RolloutOptions
from sparrow_trl.cli import _parser, main
from tiny import tiny_config, tiny_model


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")  # which main sets
    monkeypatch.setenv("COLUMNS", "200")


def run(capsys, *argv):
    """Exit status, and what was printed with lines that were wrapped joined."""
    try:
        status = main(argv)
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    return status, re.sub(r"\s+", " ", captured.out), re.sub(r"\s+", " ", captured.err)


def test_version_and_help(capsys):
    assert run(capsys, "--version")[:2] == (0, f"sparrow-trl {__version__} ")
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert "doctor" in out and "bench" in out
    status, out, _ = run(capsys, "bench", "rollout", "--help")
    assert status == 0
    for name in RolloutOptions.__dataclass_fields__:
        flag = {"dtypes": "dtype", "schedules": "schedule", "contexts": "context"}.get(name, name)
        assert f"--{flag.replace('_', '-')}" in out


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from sparrow_trl.cli import main\n"
        "try: main(['bench', 'rollout', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'trl', 'numpy', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "required: COMMAND"),
        (["bench"], "required: BENCHMARK"),
        (["bench", "rollout", "--batch", "0"], "--batch 0 must be at least 1"),
        (["bench", "rollout", "--steps", "-1"], "--steps -1 must be at least 1"),
        (["bench", "rollout", "--context", "100", "0"], "--context 0 must be at least 1"),
        (["bench", "rollout", "--context", "--no-ragged"], "leaves nothing to measure"),
        (["bench", "rollout", "--completions", "30"], "--completions 30 is not a multiple of --group 8"),
        (["bench", "rollout", "--longest-length", "50"], "--longest-length 50 must be at least 100"),
        (["bench", "rollout", "--time-limit", "0"], "--time-limit 0.0 must be above 0"),
        (["bench", "rollout", "--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_mistakes_in_the_options(capsys, argv, said):
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert said in err


def test_an_interrupt_is_no_traceback(capsys, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("sparrow_trl.doctor.main", interrupt)
    assert run(capsys, "doctor") == (130, "", "interrupted ")


def test_schedules_and_budgets_are_collected():
    def schedules(*argv):
        return RolloutOptions.from_args(_parser().parse_args(["bench", "rollout", *argv])).schedules

    assert schedules() == ["fixed:64"]
    assert schedules("--budget", "8", "16") == ["fixed:8", "fixed:16"]
    assert schedules("--schedule", "qwen3-1.7b", "--budget", "8", "8") == ["qwen3-1.7b", "fixed:8"]


def test_doctor_says_what_is_there(capsys):
    status, out, _ = run(capsys, "doctor")
    assert status == 0
    assert f"torch │ {torch.__version__}" in out
    assert "Backend of rollouts: PyTorch ops on" in out
    assert "registered with transformers: yes" in out
    assert f"{environment.usable_cores()} cores" in out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torch>=99", f"torch>=99 is needed, and {torch.__version__} is installed"),
        ("no-such-package>=1", "no-such-package>=1 is needed, and it is not installed"),
        ('torch>=99; extra == "plot"', "torch>=99 is needed"),
    ],
)
def test_doctor_refuses_unfit_packages(capsys, monkeypatch, line, said):
    monkeypatch.setattr(environment, "requires", lambda name: ["numpy>=1.0", line])
    status, out, _ = run(capsys, "doctor")
    assert status == 1
    assert said in out


def test_requirements_follow_the_metadata(monkeypatch):
    lines = [
        "numpy>=1.0",
        'sys-tools>=1; sys_platform == "nowhere"',
        'no-such-package>=1; extra == "plot"',
        'pytest>=1; extra == "dev"',
    ]
    monkeypatch.setattr(environment, "requires", lambda name: lines)
    found = {requirement.name: requirement for requirement in environment.requirements()}
    assert set(found) == {"numpy", "no-such-package"}
    assert found["numpy"].is_met and found["numpy"].extra is None
    assert found["no-such-package"].extra == "plot"
    assert found["no-such-package"].installed is None and found["no-such-package"].is_met


def test_doctor_without_an_installed_package(capsys, monkeypatch):
    monkeypatch.setattr(environment, "DISTRIBUTION", "no-such-package")
    status, out, _ = run(capsys, "doctor")
    assert status == 0
    assert "the supported versions are not known" in out


def test_doctor_looks_at_a_configuration(capsys, tmp_path):
    folder = tmp_path / "some-model"
    tiny_config("gemma3_text").save_pretrained(folder)
    status, out, _ = run(capsys, "doctor", str(folder))
    assert status == 0
    assert "'gemma3_text': 4 layers, 2 with full and 2 with sliding-window attention." in out
    assert "Sparse layers: 3; exact: 0-2." in out
    assert "No published schedule" in out
    assert "--probe does that now" in out


def test_doctor_finds_the_preset(capsys, tmp_path):
    folder = tmp_path / "Qwen3-1.7B"
    tiny_config("qwen3", num_hidden_layers=6).save_pretrained(folder)
    status, out, _ = run(capsys, "doctor", str(folder))
    assert status == 0
    assert "published schedule qwen3-1.7b@0.86" in out
    assert "Sparse layers: 2-5; exact: 0-1." in out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_doctor_sizes_the_cache_as_the_pages_are(capsys, tmp_path, dtype):
    model = tiny_model("qwen2").to(dtype)
    model.save_pretrained(tmp_path)
    _, out, _ = run(capsys, "doctor", str(tmp_path))
    said = int(re.search(r"KV cache: ([\d,]+) bytes per token", out)[1].replace(",", ""))
    layers = prefill(model, [5] * 16, page_size=16).cache.layers.values()  # one page
    assert said == sum(tensor.numel() * tensor.element_size() for layer in layers for tensor in layer) / 16


@pytest.mark.parametrize(("model_type", "reason"), [("deepseek_v3", "multi-head latent"), ("qwen3_next", "linear")])
def test_doctor_refuses_a_configuration(capsys, tmp_path, model_type, reason):
    tiny_config(model_type).save_pretrained(tmp_path)
    status, out, _ = run(capsys, "doctor", str(tmp_path))
    assert status == 1
    assert f"do not support '{model_type}'" in out and reason in out


@pytest.mark.parametrize(
    ("model_type", "status", "said"),
    [
        ("llama", 0, "It is supported."),
        ("gpt_oss", 1, "attention sinks"),
        ("stablelm", 1, "do not support 'stablelm'"),
    ],
)
def test_doctor_probes_a_model(capsys, tmp_path, model_type, status, said):
    tiny_model(model_type).save_pretrained(tmp_path)
    found, out, _ = run(capsys, "doctor", str(tmp_path), "--probe")
    assert found == status
    assert said in out


@pytest.mark.parametrize("model", ["nobody/no-such-model", "/no/such/folder"])
def test_doctor_on_a_model_that_cannot_be_had(capsys, model):
    status, out, err = run(capsys, "doctor", model)
    assert status == 2
    assert "Its configuration could not be loaded: OSError" in out
    assert "Traceback" not in out + err


def test_doctor_probe_needs_a_model(capsys):
    status, out, _ = run(capsys, "doctor", "--probe")
    assert status == 2
    assert "--probe needs a MODEL" in out


@pytest.mark.parametrize("path", ["no/such/folder/x.json", "."])
@pytest.mark.parametrize("command", [["cost"], ["bench", "rollout"], ["eval", "model", "--suite", "offline"]])
def test_json_that_cannot_be_written_is_refused_at_once(capsys, monkeypatch, tmp_path, command, path):
    monkeypatch.chdir(tmp_path)
    status, _, err = run(capsys, *command, "--json", path)
    assert status == 2 and f"--json {path} is no file" in err


@pytest.mark.parametrize("name", ["abacus", "cuda:99"])
def test_device_that_does_not_exist(name):
    with pytest.raises(ValueError, match=f"--device '{name}' cannot be used here"):
        environment.find_device(name)
