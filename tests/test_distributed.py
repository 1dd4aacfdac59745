"""Two processes under `accelerate launch`, on CPU: they train in step, and do not wait for each other in a rollout."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch


TESTS = Path(__file__).parent
CONFIGS = TESTS.parent / "examples" / "accelerate_configs"
TIME_LIMIT = 120


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launch(folder, options, script, *arguments, **environment):
    """Run a script of these tests on two processes, in `folder`."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
    command += ["--main_process_port", str(free_port()), *options]
    command += [str(TESTS / script), str(folder), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    result = subprocess.run(
        command, cwd=folder, env=environment, timeout=TIME_LIMIT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The run of `distributed_run.py`, in which one process samples far longer completions than the other."""
    folder = tmp_path_factory.mktemp("distributed")
    # With `--cpu`, accelerate starts one process, or leaves it to mpirun. `--multi_gpu` starts them with torchrun, and
    # the script's `use_cpu=True` keeps them on the CPU, where they talk over gloo.
    options = ["--multi_gpu", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launch(folder, options, "distributed_run.py")
    return json.loads((folder / "report.json").read_text())


def logs_with(report, name):
    return [entry for entry in report["log_history"] if name in entry]


def test_processes_end_with_the_same_parameters(report):
    assert report["trained"]
    assert report["equal"]
    assert report["digests"][0] == report["digests"][1]


def test_processes_end_with_the_same_lora(report):
    assert report["trained_lora"]
    assert report["equal_loras"]
    step = logs_with(report, "sparrow/distill/tokens")[0]
    assert step["sparrow/distill/tokens"] == sum(len(c) for of_process in report["completion_ids"] for c in of_process)


def test_completions_differ_in_length_and_content(report):
    first, second = report["completion_ids"]
    assert len(first) == len(second) == 4
    assert max(map(len, first)) == 3
    assert max(map(len, second)) > 3
    # Both sample for the same prompts, from different random streams
    assert [c[:3] for c in first] != [c[:3] for c in second]
    assert logs_with(report, "completions/mean_length")[0]["completions/max_length"] == max(map(len, second))


def test_metrics_are_over_both_processes(report):
    ratios = [ratio for of_process in report["ratios"] for ratio in of_process]
    assert len(report["ratios"][0]) < len(report["ratios"][1])
    step = logs_with(report, "sparrow/importance_ratio/mean")[0]
    assert step["sparrow/importance_ratio/mean"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-5)
    assert step["sparrow/importance_ratio/min"] == pytest.approx(min(ratios), rel=1e-5)
    assert step["sparrow/importance_ratio/max"] == pytest.approx(max(ratios), rel=1e-5)
    assert 0 < step["sparrow/kv_share"] < 1


def test_acceptance_rates_are_pooled_over_both_processes(report):
    first, second = report["monitors"]
    assert first == second
    (first_own, first_all), (second_own, second_all) = report["counts"]
    sampled = [sum(map(len, completions)) for completions in report["completion_ids"]]
    assert [first_own, second_own] == sampled  # the rollout that no batch holds does not count
    assert first_all == second_all == sum(sampled)
    step = logs_with(report, "sparrow/tail_tokens")[0]
    assert step["sparrow/tail_tokens"] == sum(sampled)
    assert 0 < step["sparrow/tail"] <= step["sparrow/tail_upper"] <= 1


def test_evaluation_and_saving_finish_too(report):
    evaluations = logs_with(report, "eval_loss")
    assert [entry["step"] for entry in evaluations] == [2, 3]
    # The run has a LoRA of DistillSparse, so its evaluations sample densely
    assert all(entry["eval_sparrow/kv_share"] == 1 for entry in evaluations)
    assert report["log_history"][-1]["step"] == 3


@pytest.mark.slow
def test_zero_2_trains_as_ddp_does(tmp_path):
    pytest.importorskip("deepspeed")
    ends = []
    for name in ("cpu_2_processes", "zero2"):
        folder = tmp_path / name
        folder.mkdir()
        launch(folder, ["--config_file", str(CONFIGS / f"{name}.yaml")], "zero_run.py", DS_ACCELERATOR="cpu")
        ends.append(torch.load(folder / "end.pt"))
    ddp, zero = ends
    assert [ddp["type"], zero["type"]] == ["MULTI_CPU", "DEEPSPEED"]
    assert ddp["completion_ids"] == zero["completion_ids"]
    for name in ("policy", "lora"):
        assert (ddp[name] - ddp[f"initial_{name}"]).norm() > 1e-2
        torch.testing.assert_close(zero[name], ddp[name], rtol=0, atol=1e-5)
