"""Running benchmarks: the numbers, continuing, what is refused, the command."""

import json
from dataclasses import replace

import pytest
import torch

from sparrow_trl import RolloutEngine, SparsitySchedule
from sparrow_trl.cli import main
from sparrow_trl.evaluation import Sampling, evaluate_model, pass_at_k
from sparrow_trl.evaluation.benchmarks import BENCHMARKS
from sparrow_trl.evaluation.judge import judge
from sparrow_trl.evaluation.problems import Problem
from sparrow_trl.hub.evidence import read_eval
from sparrow_trl.rewards import Limits, Sandbox, parse_tests
from sparrow_trl.rollout import RolloutOutput
from sparrow_trl.rollout.output import RolloutStats
from tiny import tiny_model, tiny_tokenizer


SAMPLING = Sampling(num_samples=2, max_new_tokens=6)
SPARSE = SparsitySchedule(budgets=(1,), page_size=4, dense_layers=())


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


class ScriptedEngine:
    """In the place of the engine: answers each prompt by what the test wrote, sparse ones by something else."""

    scripts: dict = {}
    calls: list = []

    def __init__(self, model, schedule, **options):
        self.schedule, self.tokenizer = schedule, tiny_tokenizer()

    def generate(self, prompts, config, seed):
        texts = [self.tokenizer.decode(ids) for ids in prompts]
        self.calls.append((len(prompts), seed, self.schedule.is_dense))
        seen: dict = {}
        answers = []
        for text in texts:
            key = next(key for key in self.scripts[self.schedule.is_dense] if key in text)
            place = seen[text] = seen.get(text, -1) + 1
            answers.append(self.scripts[self.schedule.is_dense][key][place])
        ids = [self.tokenizer(answer)["input_ids"] for answer in answers]
        stats = RolloutStats(seconds=2.0, kv_bytes_read=30, kv_bytes_dense=60)
        reasons = ["length" if "cut" in answer else "stop" for answer in answers]
        return RolloutOutput(ids, [[0.0] * len(row) for row in ids], reasons, stats)


@pytest.fixture
def scripted(monkeypatch):
    dense = {
        "8 + 5": [r"\boxed{13}", "13", r"\boxed{12}", "cut"],
        "9 times 7": [r"\boxed{63}"] * 4,
        "100 minus 36": ["cut"] * 4,
    }
    sparse = {**dense, "9 times 7": [r"\boxed{63}", "cut", "cut", "cut"]}
    monkeypatch.setattr(ScriptedEngine, "scripts", {True: dense, False: sparse})
    monkeypatch.setattr(ScriptedEngine, "calls", [])
    monkeypatch.setattr("sparrow_trl.rollout.RolloutEngine", ScriptedEngine)
    return ScriptedEngine


def test_the_numbers(model, tokenizer, scripted):
    evaluation = evaluate_model(
        model, tokenizer, "offline", decode=("dense", "sparse"), schedule=SPARSE, sampling=Sampling(seed=3), limit=3,
        batch_size=8,
    )  # fmt: skip
    dense, sparse = evaluation.results["offline"]["dense"], evaluation.results["offline"]["sparse"]
    assert dense["mean"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert sparse["mean"] == pytest.approx((0.5 + 0.25 + 0) / 3)
    assert dense["pass_at"]["1"]["value"] == pytest.approx(dense["mean"])
    assert dense["pass_at"]["4"]["value"] == pytest.approx((pass_at_k(4, 2, 4) + 1 + 0) / 3)
    assert dense["exact_match"] == pytest.approx((1 + 4) / 12)
    assert dense["unfinished"] == pytest.approx(5 / 12)
    assert dense["kv_share"] == pytest.approx(0.5)
    lengths = [len(t) for texts in scripted.scripts[True].values() for t in texts]
    assert dense["mean_tokens"] == pytest.approx(sum(lengths) / 12)
    assert dense["tokens_per_second"] == pytest.approx(sum(lengths) / 4.0)  # two batches of two seconds
    assert sparse["minus_dense"] == pytest.approx(-0.25)
    low, high = sparse["minus_dense_interval"]
    assert low == pytest.approx(-0.75) and high == 0.0
    assert dense["mean_interval"][0] <= dense["mean"] <= dense["mean_interval"][1]
    assert evaluation.to_dict()["judged_by"] == "dense"
    assert [(count, is_dense) for count, _, is_dense in scripted.calls] == [
        (8, True),
        (4, True),
        (8, False),
        (4, False),
    ]
    assert len({seed for _, seed, _ in scripted.calls[:2]}) == 2  # batches draw other numbers


def records(path):
    return [record for line in path.read_text().splitlines()[1:] for record in json.loads(line)["records"]]


def test_a_run_that_was_interrupted_continues_with_the_same_completions(model, tokenizer, tmp_path, monkeypatch):
    def run(folder):
        return evaluate_model(
            model, tokenizer, "offline", decode=("dense", "sparse"), schedule=SPARSE, out=folder, sampling=SAMPLING,
            limit=5, batch_size=4,
        )  # fmt: skip

    whole = run(tmp_path / "whole")
    generate, calls = RolloutEngine.generate, []

    def fail_the_third_time(self, *args, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return generate(self, *args, **options)

    monkeypatch.setattr(RolloutEngine, "generate", fail_the_third_time)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut")
    path = tmp_path / "cut" / "offline.dense.jsonl"
    assert len(records(path)) == 8
    with open(path, "a") as file:
        file.write('{"batch": 2, "rec')  # the machine went down while it was written
    again = run(tmp_path / "cut")
    assert len(calls) == 3 + 1 + 3  # one batch of the dense decode was left, and the sparse ones
    for kind in ("dense", "sparse"):
        name = f"offline.{kind}.jsonl"
        assert records(tmp_path / "cut" / name) == records(tmp_path / "whole" / name)
        assert again.results["offline"][kind]["mean"] == whole.results["offline"][kind]["mean"]
        assert again.results["offline"][kind]["mean_tokens"] == whole.results["offline"][kind]["mean_tokens"]
    run(tmp_path / "cut")
    assert len(calls) == 7  # nothing is left to do
    written = json.loads((tmp_path / "cut" / "results.json").read_text())
    assert written["details"]["offline"]["dense"]["settings"]["num_samples"] == 2
    assert not list((tmp_path / "cut").glob("*.part"))


def test_other_settings_do_not_continue(model, tokenizer, tmp_path):
    def run(**changes):
        options = {"sampling": SAMPLING, "limit": 1, **changes}
        return evaluate_model(model, tokenizer, "offline", out=tmp_path, **options)

    run()
    with pytest.raises(ValueError, match="made with temperature=1.0, and now it is 0.5. Use the same settings"):
        run(sampling=replace(SAMPLING, temperature=0.5))
    with pytest.raises(ValueError, match=r"made with limit=1, and now it is 2|made with problems=1"):
        run(limit=2)


def test_greedy_decode_draws_one_sample(model, tokenizer):
    evaluation = evaluate_model(
        model, tokenizer, "offline", sampling=Sampling(temperature=0, max_new_tokens=4), limit=2
    )
    assert evaluation.results["offline"]["dense"]["num_samples"] == 1


def test_two_seeds_draw_other_completions(model, tokenizer, tmp_path):
    for seed in (0, 1):
        evaluate_model(
            model, tokenizer, "offline", out=tmp_path / str(seed), sampling=replace(SAMPLING, seed=seed), limit=2
        )
    first, second = (records(tmp_path / str(seed) / "offline.dense.jsonl") for seed in (0, 1))
    assert [r["text"] for r in first] != [r["text"] for r in second]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"suites": "aime23"}, "no suite 'aime23'"),
        ({"decode": ("sparse",)}, "lacks 'dense'"),
        ({"decode": ("dense", "fast")}, "decode='fast' is unknown"),
        ({"decode": ("dense", "sparse")}, "needs a schedule"),
        ({"decode": ("dense", "sparse"), "schedule": "dense"}, "the sparse decode needs a sparse one"),
        ({"schedule": "fixed:4"}, "decode lacks 'sparse'"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"data": {"aime24": "x"}}, "data names aime24, which is not evaluated"),
    ],
)
def test_mistakes(model, tokenizer, options, said):
    with pytest.raises(ValueError, match=said):
        evaluate_model(model, tokenizer, **{"suites": "offline", **options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_samples": 0}, "num_samples=0 must be at least 1"),
        ({"temperature": -1.0}, "temperature=-1.0 must be finite and not negative"),
        ({"temperature": 0.0, "num_samples": 2}, "at temperature 0 would all be the same"),
        ({"top_p": 0.0}, r"top_p=0.0 is not in \(0, 1\]"),
        ({"top_k": -1}, "top_k=-1 must not be negative"),
        ({"seed": -1}, "seed=-1 must not be negative"),
    ],
)
def test_sampling_out_of_range(options, said):
    with pytest.raises(ValueError, match=said):
        Sampling(**options)


@pytest.fixture
def saved(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_the_command(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    command = ["eval", saved, "--suite", "offline,offline_code", "--limit", "2", "--num-samples", "2"]
    command += ["--max-new-tokens", "4", "--decode", "dense,sparse", "--out", str(tmp_path / "out")]
    schedule = SPARSE.save_pretrained(tmp_path / "schedule")
    status = main([*command, "--schedule", str(schedule), "--json", str(tmp_path / "results.json")])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    assert "Offline maths, 2 x 2" in captured.out and "0.000 to 0.000" in captured.out
    assert "minus dense" in captured.out and "@2: 0.000" in captured.out
    assert "offline_code, sparse: 2 of 2" in captured.err
    written = json.loads((tmp_path / "results.json").read_text())
    assert written == json.loads((tmp_path / "out" / "results.json").read_text())
    assert written["details"]["offline"]["sparse"]["settings"]["schedule"]["budgets"] == [1]
    assert main([*command, "--schedule", str(schedule), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == written


def test_numbers_lie_beside_the_model_for_its_card(saved, tmp_path, capsys):
    folder = tmp_path / "model" / "sparrow"
    command = ["eval", saved, "--limit", "1", "--num-samples", "2", "--max-new-tokens", "2", "--suite"]
    assert main([*command, "offline_code"]) == 0
    assert not folder.exists()  # nothing is put into the folder of a model that was not trained here
    folder.mkdir()
    for suite in ("offline_code", "offline", "offline"):
        assert main([*command, suite]) == 0
    assert "for the model card: " in capsys.readouterr().err
    rows = read_eval(tmp_path / "model")
    assert [(row.suite, row.metric, row.decode, row.value, row.problems) for row in rows] == [
        ("Offline code", "Mean@2", "dense", 0.0, 1),
        ("Offline code", "pass@2", "dense", 0.0, 1),
        ("Offline maths", "Mean@2", "dense", 0.0, 1),
        ("Offline maths", "pass@2", "dense", 0.0, 1),
    ]
    assert all(row.dataset is None and (row.low, row.high) == (0.0, 0.0) for row in rows)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--suite", "aime23"], "no suite 'aime23'"),
        (["--suite", "offline", "--decode", "sparse"], "lacks 'dense'"),
        (["--suite", "offline", "--decode", "dense,sparse"], "needs a schedule"),
        (["--suite", "offline", "--data", "offline"], "is not of the form SUITE=PATH"),
        (["--suite", "offline", "--chat-template-kwargs", "{"], "is not JSON"),
        (["--suite", "offline", "--temperature", "-1"], "temperature=-1.0 must be finite and not negative"),
        (["--suite", "offline"], "/no/such/model"),
        (["--suite", "aime24"], "aime_2024"),
    ],
)
def test_mistakes_of_the_command(arguments, said, capsys, saved):
    model = "/no/such/model" if said == "/no/such/model" else saved
    assert main(["eval", model, *arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == ""
    assert "Traceback" not in captured.err


def test_other_weights_or_problems_are_not_continued(tokenizer, tmp_path):
    file, options = tmp_path / "problems.jsonl", {"sampling": SAMPLING, "out": tmp_path / "out", "data": {}}
    file.write_text('{"problem": "1 + 1?", "answer": "2"}\n')
    options["data"] = {"math500": str(file)}
    first = tiny_model()
    evaluate_model(first, tokenizer, "math500", **options)
    other = tiny_model()
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(2)
    with pytest.raises(ValueError, match="made with weights="):
        evaluate_model(other, tokenizer, "math500", **options)
    file.write_text('{"problem": "1 + 2?", "answer": "3"}\n')
    with pytest.raises(ValueError, match="made with problems_fingerprint="):
        evaluate_model(first, tokenizer, "math500", **options)


@pytest.mark.parametrize("temperature", [float("nan"), float("inf"), -1.0])
def test_temperatures_that_are_none(temperature):
    with pytest.raises(ValueError, match="temperature="):
        Sampling(temperature=temperature)


@pytest.mark.parametrize("tests", [{"inputs": [""], "outputs": ["1"]}, {"code": "assert f() == 1"}])
def test_timeouts_of_programs_are_counted(monkeypatch, tests):
    monkeypatch.setattr("sparrow_trl.evaluation.judge._sandbox", lambda *args: Sandbox(Limits(wall_seconds=1.0)))
    problem = Problem("0", "", tests=parse_tests(tests))
    program = "```python\ndef f():\n    while True: pass\nimport sys\nif not sys.stdin.closed and %r: f()\n```"
    [judgement] = judge(BENCHMARKS["offline_code"], [problem], [program % ("inputs" in tests)])
    assert judgement.right is False and judgement.timed_out
