"""The code reward: kinds of tests, how outputs and values are compared, and what TRL passes."""

import json
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow_trl.rewards import AssertTests, CallTests, CodeReward, Limits, StdioTests, code_reward, parse_tests
from sparrow_trl.rewards.code_child import decode, encode
from sparrow_trl.rewards.code_tests import _is_expected, same_output


def block(code):
    return f"Here it is:\n```python\n{code}\n```\n"


DOUBLE = '{"inputs": ["4", "5"], "outputs": ["8", "10"]}'

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(plain | st.sets(st.integers()) | st.frozensets(st.text()) | st.complex_numbers(allow_nan=False))
@settings(deadline=None)
def test_values_cross_between_processes_unchanged(value):
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value and type(back) is type(value)


def test_special_values_cross():
    assert math.isnan(decode(encode(float("nan"))))
    assert decode(encode(float("-inf"))) == float("-inf")
    assert decode(encode(range(2, 9, 3))) == range(2, 9, 3)
    assert decode(encode(10**5000)) == 10**5000
    assert decode(encode(map(str, [1, 2]))) == ["1", "2"]
    assert str(decode(encode(-0.0))) == "-0.0"
    with pytest.raises(TypeError, match="of type object cannot be handed over"):
        encode(object())


@pytest.mark.parametrize(
    "data",
    [
        1,
        1.5,
        {},
        {"int": 5},
        {"float": "x"},
        {"tuple": "ab"},
        {"set": [[1]]},
        {"dict": [[1]]},
        {"range": ["a"]},
        {"a": 1},
    ],
)
def test_what_no_program_of_ours_wrote_is_refused(data):
    with pytest.raises(ValueError):
        decode(data)


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("8\n", "8", True),
        ("8 \n\n", "8\n", True),
        ("8\n9", "8 9", False),
        ("0.3333333", "0.33333333", True),
        ("0.334", "0.333", False),
        ("8.0", "8", False),
        ("8", "8.0", True),
        ("a  b", "a b", True),
        ("yes", "Yes", False),
        ("", "", True),
        ("", "0", False),
        ("nan", "0.5", False),
    ],
)
def test_printed_texts_are_compared(found, expected, same):
    assert same_output(found, expected) is same


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        (3, 3, True),
        (3, [3], True),
        ((1, 2), [1, 2], True),
        ([(1, "a")], [[[1, "a"]]], True),
        (range(3), [0, 1, 2], True),
        (range(3), [[0, 1, 2]], True),
        (range(4), [0, 1, 2], False),
        (range(2), [0, 1, 2], False),
        (range(10**30), [0, 1, 2], False),
        (0.1 + 0.2, 0.3, True),
        (True, 1, False),
        (1, True, False),
        (None, None, True),
        (None, [], False),
        ({1: [2]}, {"1": [2]}, True),
        ({1: 2}, {"1": 3}, False),
        ("3", 3, False),
        (float("nan"), 0.5, False),
    ],
)
def test_values_are_compared(found, expected, same):
    assert _is_expected(found, expected) is same


def test_tests_are_read_from_columns():
    assert parse_tests(DOUBLE) == StdioTests(("4", "5"), ("8", "10"))
    assert parse_tests({"fn_name": "f", "inputs": [[1]], "outputs": [2]}) == CallTests("f", ([1],), (2,))
    assert parse_tests('{"code": "assert f(1)", "entry_point": "f"}') == AssertTests("assert f(1)", "f")
    assert parse_tests({"inputs": [["1", "2"]], "outputs": [["3"]]}) == StdioTests(("1\n2",), ("3",))
    called = "def check(f):\n    assert f(1)\ncheck(double)"
    assert parse_tests({"code": called}) == AssertTests(called)
    for nothing in ("", None, {"inputs": [], "outputs": []}, {"code": " "}):
        assert parse_tests(nothing) is None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("not json", "are not JSON"),
        ("[1]", "are a list, not an object"),
        ({"inputs": ["1"]}, r"have the keys \['inputs'\]; they need"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": "12", "outputs": ["1", "2"]}, "inputs that are a str; they must be a list"),
        ({"inputs": ["1"], "outputs": 5}, "outputs that are a int; they must be a list"),
        ({"code": "def check(candidate):\n    assert candidate(1)"}, "nothing calls it"),
    ],
)
def test_tests_that_cannot_be_read(value, said):
    with pytest.raises(ValueError, match=said):
        parse_tests(value)


def test_programs_find_what_they_are_used_to():
    huge = "9" * 6000
    stdio = [
        ("n = input()\nprint(n)\nexit()\nprint('more')", "7", "7"),
        ("print(int(input()) + 1)", huge, "1" + "0" * 6000),
        ("print(open(0).read()[::-1])", "abc", "cba"),
        (
            "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: 'int' = 3\nprint(A().x, __name__)",
            "",
            "3 __main__",
        ),
    ]
    for program, text, expected in stdio:
        tests = json.dumps({"inputs": [text], "outputs": [expected]})
        assert code_reward(completions=[block(program)], tests=[tests]) == [1.0], program
    for unknown in ("print(os.sep)", "print(sys.maxsize)", "print(file)"):
        assert code_reward(completions=[block(unknown)], tests=['{"inputs": [""], "outputs": ["/"]}']) == [0.0]
    function = "class Solution:\n    def top(self, values: List[int]) -> Optional[int]:\n        return Counter(values).most_common(1)[0][0]"
    assert code_reward(
        completions=[block(function)], tests=[json.dumps({"fn_name": "top", "inputs": [[[3, 1, 3]]], "outputs": [3]})]
    ) == [1.0]
    record = "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\ndef f(x): return A(x).x"
    assert code_reward(completions=[block(record)], tests=['{"code": "assert f(3) == 3"}']) == [1.0]


def test_numbers_of_many_digits_are_read():
    digits = "7" * 5000
    tests = parse_tests('{"fn_name": "f", "inputs": [[1]], "outputs": [' + digits + "]}")
    assert tests.outputs[0] == sum(7 * 10**n for n in range(5000))
    assert code_reward(
        completions=[block(f"def f(x): return {digits[:4000]} * 10**1000 + {digits[:1000]}")], tests=[tests]
    ) == [1.0]


def test_rewards_as_the_trainer_calls_them():
    logged, metrics = {}, {}
    messages = [{"role": "assistant", "content": block("print(int(input()) * 2)")}]
    completions = [messages, block("print(8)"), "no code", block("while True: pass"), messages]
    rewards = CodeReward(limits=Limits(cpu_seconds=1, wall_seconds=3))(
        prompts=["?"] * 5,
        completions=completions,
        completion_ids=[[1]] * 5,
        tests=[DOUBLE] * 4 + [""],
        trainer_state=None,
        log_extra=logged.__setitem__,
        log_metric=metrics.__setitem__,
    )
    assert rewards == [1.0, 0.0, 0.0, 0.0, None]
    assert metrics == {"code_timeouts": 1.0}
    assert logged["code_tests"][0] == "2 of 2 passed."
    assert logged["code_tests"][1].startswith("1 of 2 passed. test 1: another output")
    assert logged["code_tests"][2] == "0 of 2 passed. no program"
    assert logged["code_tests"][4] == "no tests"


def test_partial_rewards_and_fewer_tests():
    half = [block("print(8)")]
    assert CodeReward(partial=True)(completions=half, tests=[DOUBLE]) == [0.5]
    assert CodeReward(partial=True, max_tests=1)(completions=half, tests=[DOUBLE]) == [1.0]
    calls = json.dumps({"fn_name": "f", "inputs": [[1], [2], [3], [4]], "outputs": [1, 2, 3, 5]})
    assert CodeReward(partial=True)(completions=[block("def f(x): return x")], tests=[calls]) == [0.75]


def test_the_limit_of_time_is_that_of_a_single_call():
    program = "import time\ndef f(x):\n    t = time.process_time()\n    while time.process_time() < t + 0.6: pass\n    return x"
    reward = CodeReward(limits=Limits(cpu_seconds=1, wall_seconds=10))
    calls = json.dumps({"fn_name": "f", "inputs": [[1], [2], [3], [4]], "outputs": [1, 2, 3, 4]})
    assert reward(completions=[block(program)], tests=[calls]) == [1.0]
    slow = "def f(x):\n    while x == 2: pass\n    return x"
    partial = CodeReward(limits=Limits(cpu_seconds=1, wall_seconds=10), partial=True)
    metrics = {}
    assert partial(completions=[block(slow)], tests=[calls], log_metric=metrics.__setitem__) == [0.75]
    assert metrics == {"code_timeouts": 1.0}


def test_reasoning_that_does_not_end_has_no_program():
    text = block("print(int(input()) * 2)")
    assert code_reward(prompts=["?<think>"] * 2, completions=[text, "a</think>" + text], tests=[DOUBLE] * 2) == [
        0.0,
        1.0,
    ]


def test_it_can_be_pickled():
    reward = pickle.loads(pickle.dumps(CodeReward("cases", partial=True)))
    assert reward(completions=[block("print(8)")], cases=[DOUBLE]) == [0.5]


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: code_reward(completions=["a"], cases=[DOUBLE]), KeyError, r"'tests'.*\['cases'\].*tests_column"),
        (lambda: code_reward(completions=["a"], tests=["{"]), ValueError, "are not JSON"),
        (lambda: CodeReward(workers=0), ValueError, "workers=0 must be at least 1"),
        (lambda: CodeReward(max_tests=0), ValueError, "max_tests=0 must be at least 1"),
    ],
)
def test_mistakes(call, error, said):
    with pytest.raises(error, match=said):
        call()
