"""From rows as the benchmarks have them to prompts and judgements."""

import base64
import json
import pickle
import zlib

import pytest

from sparrow_trl.evaluation.benchmarks import BENCHMARKS, find_benchmarks
from sparrow_trl.evaluation.judge import judge
from sparrow_trl.evaluation.problems import load_problems
from sparrow_trl.rewards.recipes import load_bundled


def problems_of(name, rows, tmp_path, **options):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_problems(BENCHMARKS[name], data=path, **options)


def verdicts(name, problems, texts):
    return [judgement.right for judgement in judge(BENCHMARKS[name], problems, texts)]


def block(code):
    return f"```python\n{code}\n```"


@pytest.mark.parametrize("name", ["aime24", "aime25", "aime26", "amc", "math500"])
def test_maths(name, tmp_path):
    rows = [{"problem": "What is 1+1?", "answer": "2"}, {"problem": "What is 71+71?", "answer": 142.0}]
    problems = problems_of(name, rows, tmp_path)
    assert [problem.answer for problem in problems] == ["2", "142"]
    assert problems[0].prompt.startswith("What is 1+1?") and problems[0].prompt.endswith("\\boxed{}.")
    assert verdicts(name, problems, [r"\boxed{2}", r"\boxed{14}"]) == [True, False]


def test_gsm8k(tmp_path):
    rows = [{"question": "How much?", "answer": "He adds them.\n#### 1,250"}]
    (problem,) = problems_of("gsm8k", rows, tmp_path)
    assert problem.answer == "1250"


HUMANEVAL = {
    "task_id": "HumanEval/900",
    "prompt": 'import math\n\ndef helper(x):\n    return x + 1\n\n\ndef area(r):\n    """Area of a circle."""\n',
    "entry_point": "area",
    "test": "import numpy as np\n\ndef check(candidate):\n    assert np.allclose(candidate(2), 4 * np.pi)\n"
    "    assert helper(1) == 2\n",
}


def test_humaneval(tmp_path):
    rows = [{**HUMANEVAL, "task_id": f"HumanEval/{number}"} for number in (900, 901, 902)]
    problems = problems_of("humaneval_plus", rows, tmp_path)
    assert problems[0].name == "HumanEval/900"
    assert "def area(r):" in problems[0].prompt and "helper" in problems[0].preamble
    right = block("def area(r):\n    return math.pi * r * r")  # the import and the helper come from the problem
    wrong = block("def area(r):\n    return 3 * r * r")
    assert verdicts("humaneval_plus", problems, [right, wrong, "no code"]) == [True, False, False]


def test_mbpp(tmp_path):
    row = {
        "task_id": 900,
        "prompt": "Write a function to double a number.",
        "test_list": ["assert double(2) == 4"],
        "test_imports": ["import math"],
        "test": "inputs = [[2], [3.5]]\nresults = [4, 7.0]\nfor i, o in zip(inputs, results):\n"
        "    assert math.isclose(double(*i), o)\n",
    }
    problems = problems_of("mbpp_plus", [row] * 2, tmp_path)
    assert "assert double(2) == 4" in problems[0].prompt and "3.5" not in problems[0].prompt
    assert verdicts(
        "mbpp_plus", problems, [block("def double(x): return x + x"), block("def double(x): return 4")]
    ) == [
        True,
        False,
    ]


def test_livecodebench(tmp_path):
    hidden = [{"input": "3\n", "output": "6\n", "testtype": "stdin"}]
    packed = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(hidden)))).decode()
    stdio = {
        "question_id": "a1",
        "question_content": "Double it.",
        "starter_code": "",
        "public_test_cases": json.dumps([{"input": "2\n", "output": "4\n", "testtype": "stdin"}]),
        "private_test_cases": packed,
        "metadata": "{}",
    }
    function = {
        **stdio,
        "question_id": "a2",
        "starter_code": "class Solution:\n    def add(self, a: List[int], b: int) -> int:",
        "public_test_cases": json.dumps([{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]),
        "private_test_cases": "[]",
        "metadata": json.dumps({"func_name": "add"}),
    }
    problems = problems_of("livecodebench", [stdio, {**stdio, "question_id": "a0"}, function], tmp_path)
    assert [problem.name for problem in problems] == ["a1", "a0", "a2"]
    assert [len(problem.tests) for problem in problems] == [2, 2, 1]
    texts = [
        block("print(2 * int(input()))"),
        block("print(4)"),  # passes what is public
        block(
            "from typing import List\nclass Solution:\n    def add(self, a: List[int], b: int) -> int:\n        return sum(a) + b"
        ),
    ]
    assert verdicts("livecodebench", problems, texts) == [True, False, True]


def test_livecodebench_unpickles_texts_alone(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("harm",))

    packed = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    row = {
        "question_content": "?",
        "public_test_cases": "[]",
        "private_test_cases": packed,
        "metadata": "{}",
    }
    with pytest.raises(ValueError, match=r"tests hold builtins\.print"):
        problems_of("livecodebench", [row], tmp_path)


def test_the_offline_problems_are_right_and_not_those_to_train_on():
    problems = load_problems(BENCHMARKS["offline"])
    assert len(problems) == 16
    computed = [8 + 5, 9 * 7, 100 - 36, 84 // 7, 3 * 6, 45, "3/8", 30, 4, 81, 32, 8, 8, 12, 162, 5]
    assert verdicts("offline", problems, [rf"\boxed{{{value}}}" for value in computed]) == [True] * 16
    trained = {row["prompt"][0]["content"] for kind in ("maths", "code") for row in load_bundled(kind)}
    code = load_problems(BENCHMARKS["offline_code"])
    assert not trained & {problem.prompt for problem in [*problems, *code]}
    right = [
        "print(sum(map(int, input().split())))",
        "print(input().upper())",
        "def largest(values): return max(values)",
        "def is_even(n): return n % 2 == 0",
    ]
    assert verdicts("offline_code", code, [block(program) for program in right]) == [True] * 4
    assert verdicts("offline_code", code, [block("def largest(v): return v[0]")] * 4) == [False] * 4


def test_exact_match_is_a_second_opinion():
    problems = load_problems(BENCHMARKS["offline"], limit=3)
    judged = judge(BENCHMARKS["offline"], problems, [r"\boxed{13}", r"\boxed{63.0}", "It is 64."])
    assert [(judgement.right, judgement.exact) for judgement in judged] == [(True, True), (True, False), (True, False)]


def test_limits_and_mistakes(tmp_path):
    assert len(load_problems(BENCHMARKS["offline"], limit=5)) == 5
    with pytest.raises(ValueError, match="limit=0 must be at least 1"):
        load_problems(BENCHMARKS["offline"], limit=0)
    with pytest.raises(ValueError, match="'/no/such' for the suite 'aime24' does not exist"):
        load_problems(BENCHMARKS["aime24"], data="/no/such")
    with pytest.raises(ValueError, match=r"needs the column 'problem'; .* has \['question'\]"):
        problems_of("aime24", [{"question": "?"}], tmp_path)
    with pytest.raises(ValueError, match="has no problems in"):
        problems_of("aime24", [], tmp_path)
    for names, said in (
        ("aime23", "no suite 'aime23'; there are aime24"),
        (" , ", "No suite"),
        ("amc,amc", "named twice"),
    ):
        with pytest.raises(ValueError, match=said):
            find_benchmarks(names)


def test_every_benchmark_of_the_paper_is_declared_with_what_is_known():
    wanted = [
        "aime24",
        "aime25",
        "aime26",
        "amc",
        "math500",
        "gsm8k",
        "humaneval_plus",
        "mbpp_plus",
        "livecodebench",
        "offline",
    ]
    assert set(wanted) <= set(BENCHMARKS)
    for benchmark in BENCHMARKS.values():
        assert benchmark.known and (benchmark.unknown or benchmark.dataset_id == "bundled")
        assert benchmark.pass_at[-1] == benchmark.num_samples
        assert "{problem}" in benchmark.prompt


def test_problems_with_equal_or_missing_names_stay_apart(tmp_path):
    rows = [{"id": name, "problem": f"{n} + 1?", "answer": n + 1} for n, name in enumerate((None, 7, 7))]
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [problem.name for problem in load_problems(BENCHMARKS["aime24"], data=file)] == ["0", "1", "2"]


def test_a_missing_answer_is_no_answer(tmp_path):
    file = tmp_path / "problems.jsonl"
    file.write_text('{"problem": "1 + 1?", "answer": null}\n')
    assert load_problems(BENCHMARKS["aime24"], data=file)[0].answer == ""
