"""Metrics and suites, loaded by `evaluate` without a network."""

import json
import socket

import pytest

from sparrow_trl.evaluation import BENCHMARKS, Sampling, metric_path, pass_at_k, suite_path
from tiny import tiny_model, tiny_tokenizer


evaluate = pytest.importorskip("evaluate")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6):
            raise AssertionError(f"a connection to {address}")
        return connect(self, address)

    connect = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_pass_at_k():
    metric = evaluate.load(metric_path("pass_at_k"))
    found = metric.compute(predictions=[[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1]], k=[1, 2, 3])
    assert found == {f"pass@{k}": pytest.approx((pass_at_k(4, 1, k) + 1) / 3) for k in (1, 2, 3)}
    with pytest.raises(ValueError, match="k=5 must be from 1 to the number of samples, 4"):
        metric.compute(predictions=[[1, 0, 0, 0]], k=[5])


def test_answer_accuracy():
    metric = evaluate.load(metric_path("answer_accuracy"))
    texts = [
        r"\boxed{0.5}",
        r"\boxed{\frac12}",
        r"\boxed{3}",
        "<think>4",
        r"\boxed{ \text{East} }",
        r"\boxed{9^{9^{9^{9}}}}",
    ]
    answers = [r"\frac{1}{2}", r"\frac{1}{2}", "4", "4", "east", "5"]
    found = metric.compute(predictions=[*texts, "5"], references=[*answers, ""])
    assert found == {
        "accuracy": pytest.approx(3 / 6),
        "exact_match": pytest.approx(1 / 6),
        "timeouts": 1,
        "unreadable": 1,
    }


def test_code_execution():
    metric = evaluate.load(metric_path("code_execution"))
    tests = json.dumps({"inputs": ["4"], "outputs": ["8"]})
    programs = ["print(int(input()) * 2)", "print(9)", "import os; os._exit(0)"]
    found = metric.compute(predictions=programs, references=[tests] * 3, workers=2)
    assert found["accuracy"] == pytest.approx(1 / 3) and found["timeouts"] == 0
    assert found["isolation"] in ("bubblewrap", "namespaces", "rlimits")
    with pytest.raises(ValueError, match="index 1 holds no tests"):
        metric.compute(predictions=programs[:2], references=[tests, ""])


def test_there_are_no_other_metrics():
    with pytest.raises(ValueError, match="no metric 'bleu'; there are answer_accuracy, code_execution, pass_at_k"):
        metric_path("bleu")
    with pytest.raises(ValueError, match="no suite 'glue'; there are aime24"):
        suite_path("glue")


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != "offline_code"])
def test_every_suite_loads(name):
    suite = evaluate.EvaluationSuite.load(suite_path(name))
    assert name in suite.benchmarks
    assert [task.data for task in suite.suite] == [BENCHMARKS[one].dataset_id for one in suite.benchmarks]
    assert BENCHMARKS[name].dataset_id in repr(suite)


def test_the_offline_suite_runs():
    suite = evaluate.EvaluationSuite.load(suite_path("offline"))
    model, tokenizer = tiny_model(), tiny_tokenizer()
    sampling = Sampling(num_samples=2, max_new_tokens=4)
    results = suite.run(model, tokenizer, sampling=sampling, limit=2)
    assert [result["task_name"] for result in results] == ["offline", "offline_code"]
    for result in results:
        assert result["accuracy"] == result["dense"]["mean"] == 0.0
        assert result["dense"]["num_problems"] == 2 and result["dense"]["num_samples"] == 2
    with pytest.raises(TypeError, match="comes without a tokenizer"):
        suite.run(model)
