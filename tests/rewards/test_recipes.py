"""Recipes for datasets, and the tiny datasets that ship with the package."""

import json
import math
from dataclasses import replace
from fractions import Fraction
from itertools import permutations, product

import pytest
from datasets import Dataset, IterableDataset, load_dataset

from sparrow_trl.rewards import code_reward, get_recipe, load_bundled, maths_reward
from sparrow_trl.rewards.recipes import RECIPES


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def is_prime(n):
    return divisors(n) == [1, n]


ARITHMETIC_STEP = Fraction(46 - 11, 7)
DICE = [sum(throw) >= 9 for throw in product(range(1, 7), repeat=2)]
MARBLES = [a == b == "r" for a, b in permutations("rrrrrggg", 2)]
COMMITTEES = [c for c in product((0, 1), repeat=10) if sum(c) == 3 and 0 < sum(c[:6]) < 3]

# Each answer of the tiny maths dataset, computed another way: a value, or texts for what is no number.
ANSWERS = {
    "bakery": sum(24 for _ in range(18)) - 37,
    "fence": 14 + 9 + 14 + 9,
    "change": "26.20" if 5000 - 7 * 340 == 2620 else None,
    "mean": next(x for x in range(100) if (7 + 10 + 15 + 16 + x) / 5 == 12),
    "ratio": next(b for b in range(97) if 5 * (96 - b) == 3 * b),
    "discount": "61.20" if 8000 * 85 * 90 == 6120 * 10000 else None,
    "linear": next(x for x in range(100) if 7 * x - 11 == 3 * x + 29),
    "quadratic": sum(x * x for x in range(50) if x * x - 9 * x + 14 == 0),
    "remainder": 3**100 % 7,
    "divisors": len(divisors(360)),
    "primes": sum(n for n in range(21, 50) if is_prime(n)),
    "gcd": max(set(divisors(1001)) & set(divisors(1547))),
    "lcm": next(n for n in range(1, 999) if n % 12 == n % 18 == n % 20 == 0),
    "digits": sum(map(int, str(2**20))),
    "zeros": len(str(math.factorial(50))) - len(str(math.factorial(50)).rstrip("0")),
    "arithmetic": sum(11 + (n - 3) * ARITHMETIC_STEP for n in range(1, 21)),
    "geometric": Fraction(1, 3) / (1 - Fraction(1, 3)),
    "fraction": Fraction(5, 6) - Fraction(3, 8) + Fraction(1, 4),
    "committee": len(COMMITTEES),
    "letters": len(set(permutations("LEVEL"))),
    "dice": Fraction(sum(DICE), len(DICE)),
    "marbles": Fraction(sum(MARBLES), len(MARBLES)),
    "paths": math.comb(8, 3),
    "triangle": math.isqrt(20**2 + 21**2),
    "heron": math.isqrt(21 * (21 - 13) * (21 - 14) * (21 - 15)),
    "circle": r"\pi \cdot 5^2",
    "diagonal": math.isqrt(4 + 9 + 36),
    "root": r"5\sqrt{3} - 2\sqrt{3}",
    "expand": "x^2 + 5x - 2x - 10",
    "log": 2**5 - 3,
}


def test_the_answers_of_the_maths_problems_are_right():
    data = load_bundled("maths", prepare=False)
    assert len(data) == len(ANSWERS) == 30
    completions = [rf"\boxed{{{ANSWERS[name]}}}" for name in data["id"]]
    assert maths_reward(completions=completions, solution=data["answer"]) == [1.0] * 30


def test_the_solutions_of_the_code_problems_pass_and_nothing_else_does():
    data = load_bundled("code", prepare=False)
    assert len(data) == 20
    right = [f"```python\n{solution}\n```" for solution in data["solution"]]
    assert code_reward(completions=right, tests=data["tests"]) == [1.0] * 20
    shifted = [*right[1:10], right[0], *right[11:], right[10]]
    for program in ("pass", "def f(*a): return None"):
        assert code_reward(completions=[f"```python\n{program}\n```"] * 20, tests=data["tests"]) == [0.0] * 20
    assert code_reward(completions=shifted, tests=data["tests"]) == [0.0] * 20


@pytest.mark.parametrize("kind", ["maths", "code"])
def test_bundled_data_is_ready_to_train_on(kind):
    data = load_bundled(kind)
    assert set(data.column_names) == {"prompt", "solution" if kind == "maths" else "tests"}
    for row in data:
        assert [message["role"] for message in row["prompt"]] == ["user"]
        content = row["prompt"][0]["content"]
        assert ("\\boxed{}" if kind == "maths" else "```python") in content
    assert data.to_list() == get_recipe(f"tiny-{kind}").load().to_list()


def test_columns_of_polaris_and_taco():
    polaris = Dataset.from_list(
        [{"problem": "1+1?", "answer": "2", "difficulty": "3/8"}, {"problem": "?", "answer": "", "difficulty": "0/8"}]
    )
    (row,) = get_recipe("polaris").prepare(polaris).to_list()
    assert row["solution"] == "2" and row["prompt"][0]["content"].startswith("1+1?\n\n")
    stdio = json.dumps({"inputs": ["4"], "outputs": ["8"]})
    calls = json.dumps({"fn_name": "f", "inputs": [[4]], "outputs": [[8]]})
    empty = json.dumps({"inputs": [], "outputs": []})
    taco = Dataset.from_list(
        [
            {
                "question": "Double it.",
                "input_output": stdio,
                "starter_code": "",
                "solutions": "[]",
                "difficulty": "EASY",
            },
            {
                "question": "Double it.",
                "input_output": calls,
                "starter_code": "def f(x):",
                "solutions": "",
                "difficulty": "",
            },
            {"question": "?", "input_output": empty, "starter_code": "", "solutions": "", "difficulty": ""},
        ]
    )
    rows = get_recipe("taco").prepare(taco).to_list()
    assert [row["tests"] for row in rows] == [stdio, calls]
    assert "standard input" in rows[0]["prompt"][0]["content"]
    assert "def f(x):" in rows[1]["prompt"][0]["content"] and "standard input" not in rows[1]["prompt"][0]["content"]
    programs = ["```python\nprint(int(input()) * 2)\n```", "```python\ndef f(x): return 2 * x\n```"]
    assert code_reward(completions=programs, tests=[row["tests"] for row in rows]) == [1.0, 1.0]


def test_taco_is_read_from_its_parquet_files(tmp_path, monkeypatch):
    """`load_dataset("BAAI/TACO")` fails: the repository has a loading script. Its files can be loaded."""
    stdio = json.dumps({"inputs": ["4"], "outputs": ["8"]})
    (tmp_path / "ALL").mkdir()
    for place, name in enumerate(("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001")):
        row = {"question": f"Question {place}", "input_output": stdio, "starter_code": "", "difficulty": "EASY"}
        Dataset.from_list([row]).to_parquet(tmp_path / "ALL" / f"{name}.parquet")

    def load_from_disk(path, *, data_files, **options):
        found = {split: name.replace("hf://datasets/BAAI/TACO", str(tmp_path)) for split, name in data_files.items()}
        assert found != data_files
        return load_dataset(path, data_files=found, cache_dir=str(tmp_path / "cache"), **options)

    monkeypatch.setattr("datasets.load_dataset", load_from_disk)
    kept = replace(get_recipe("taco"), keep=("difficulty",))
    for options, questions in (({}, [0, 1]), ({"split": "train[:1]"}, [0]), ({"split": "test"}, [2])):
        rows = kept.load(**options).to_list()
        assert [row["prompt"][0]["content"].split("\n")[0] for row in rows] == [f"Question {n}" for n in questions]
        assert {row["difficulty"] for row in rows} == {"EASY"}
    assert [row["tests"] for row in get_recipe("taco").load(streaming=True)] == [stdio, stdio]


def test_tests_that_cannot_be_read_are_left_out_with_a_warning():
    rows = [
        {"question": "?", "input_output": '{"inputs": ["1"], "outputs": []}', "starter_code": ""},
        {"question": "?", "input_output": '{"inputs": ["1"], "outputs": ["1"]}', "starter_code": ""},
    ]
    with pytest.warns(UserWarning, match="A problem of BAAI/TACO is left out: The tests have 1 inputs and 0 outputs"):
        assert len(get_recipe("taco").prepare(Dataset.from_list(rows))) == 1


def test_other_columns_and_streams():
    def rows():
        yield {"question": "1+1?", "final": 2, "more": "x"}

    recipe = get_recipe("polaris").with_columns(problem="question", answer="final")
    (row,) = list(recipe.prepare(IterableDataset.from_generator(rows)))
    assert row["solution"] == "2" and set(row) == {"prompt", "solution"}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: get_recipe("gsm"), "no recipe 'gsm'; there are polaris, taco"),
        (lambda: load_bundled("art"), "kind='art' is unknown"),
        (lambda: get_recipe("polaris").with_columns(tests="x"), "Unknown column tests for maths"),
        (
            lambda: get_recipe("polaris").prepare(Dataset.from_list([{"question": "?"}])),
            r"needs the column 'problem' \(problem\), and the dataset has \['question'\].*with_columns\(problem=",
        ),
    ],
)
def test_mistakes(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_every_recipe_says_where_it_is_from_and_what_judges_it():
    for recipe in RECIPES.values():
        assert len(recipe.source) > 20
        (reward,) = recipe.reward_funcs()
        assert reward.__name__ == f"{recipe.kind}_reward"
