"""The maths reward: answers with known truth, hostile answers, threads, and what TRL passes."""

import os
import pickle
import threading
import time

import pytest
from answer_pairs import PAIRS

from sparrow_trl.rewards import MathsReward, MathVerifier, extract_answer, grade_answers, maths_reward
from sparrow_trl.rewards.verifier import _Worker


HANGS = r"9^{9^{9^{9}}}"


@pytest.fixture(scope="module")
def verifier():
    verifier = MathVerifier(timeout=20, workers=2)
    yield verifier
    verifier.close()


@pytest.fixture(scope="module")
def graded(verifier):
    return grade_answers([answer for _, answer, _ in PAIRS], [gold for gold, _, _ in PAIRS], verifier=verifier)


def test_there_are_sixty_pairs_and_as_many_right_as_wrong_roughly():
    assert len(PAIRS) >= 60
    assert sum(truth for _, _, truth in PAIRS) >= 25
    assert sum(not truth for _, _, truth in PAIRS) >= 25


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=lambda n: f"{PAIRS[n][0]}~{PAIRS[n][1]}")
def test_a_pair_with_known_truth(graded, number):
    result = graded[number]
    assert result.status == ("right" if PAIRS[number][2] else "wrong"), result


@pytest.mark.parametrize("answer", [HANGS, r"(1+x)^{99999999}", r"\sum_{k=1}^{10^{9}} \frac{1}{k^{2.5}}"])
def test_a_comparison_that_hangs_ends_is_counted_and_the_next_works(answer):
    verifier = MathVerifier(timeout=1.0, workers=1)
    assert verifier.compare("7", "7").status == "right"
    started = time.monotonic()
    assert verifier.compare("7", answer).status == "timeout"
    assert time.monotonic() - started < 10
    assert (verifier.timeouts, verifier.crashes) == (1, 0)
    assert verifier.compare("7", "7").status == "right"
    verifier.close()


def test_a_worker_that_dies_is_counted_and_replaced(verifier, monkeypatch):
    assert verifier.compare("7", "7").status == "right"
    crashes = verifier.crashes
    for worker in list(verifier._started):
        worker._popen.kill()
        worker._popen.wait()
    assert verifier.compare("7", "7").status == "right"  # a dead one is seen, and not used
    monkeypatch.setattr(_Worker, "is_alive", lambda self: True)
    for worker in list(verifier._started):
        worker._popen.kill()
        worker._popen.wait()
    assert verifier.compare("7", "7").detail == "crash"
    assert verifier.crashes == crashes + 1


def test_it_works_from_threads(verifier):
    found = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: verifier.compare(str(n), str(n % 3)).status}))
        for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: "right" if n == n % 3 else "wrong" for n in range(6)}


def test_a_hanging_answer_in_a_batch_costs_the_others_nothing():
    reward = MathsReward(timeout=1.5, workers=2)
    logged, metrics = {}, {}
    rewards = reward(
        prompts=["?"] * 4,
        completions=[r"\boxed{1}", rf"\boxed{{{HANGS}}}", r"\boxed{2}", r"\boxed{3}"],
        solution=["1", "2", "2", "2"],
        log_extra=logged.__setitem__,
        log_metric=metrics.__setitem__,
    )
    assert rewards == [1.0, 0.0, 1.0, 0.0]
    assert metrics == {"maths_timeouts": 1.0}
    assert logged["maths_comparison"][1].startswith("timeout")
    assert reward.verifier.timeouts == 1


def test_an_unreadable_reference_is_not_counted():
    assert maths_reward(completions=[r"\boxed{1}", r"\boxed{1}"], solution=["", "1"]) == [None, 1.0]
    # As a dataset writes it that has no answer in some rows
    boxes = [r"\boxed{None}", r"\boxed{nan}"]
    assert maths_reward(completions=boxes, solution=[None, float("nan")]) == [None, None]


def test_messages_texts_and_missing_reasoning():
    message = [{"role": "assistant", "content": r"<think>2+2</think> \boxed{4}"}]
    open_ended = [{"role": "assistant", "content": r"<think>it may be \boxed{4}"}]
    assert maths_reward(completions=[message, open_ended], solution=["4", "4"]) == [1.0, 0.0]
    # the chat template has written <think>: a text prompt shows it, and for messages it can be said
    assert maths_reward(prompts=["2+2?<think>\n"], completions=[r"maybe \boxed{4}"], solution=["4"]) == [0.0]
    assert maths_reward(prompts=["2+2?<think>\n"], completions=[r"so</think>\boxed{4}"], solution=["4"]) == [1.0]
    strict = MathsReward(thinking_opened=True)
    assert strict(completions=[r"maybe \boxed{4}", r"so</think>\boxed{4}"], solution=["4", "4"]) == [0.0, 1.0]


def test_a_box_may_be_required():
    texts = ["The answer is 17.", r"\boxed{17}"]
    assert maths_reward(completions=texts, solution=["17", "17"]) == [1.0, 1.0]
    assert MathsReward(require_boxed=True)(completions=texts, solution=["17", "17"]) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} and \boxed{2}", ("2", True)),
        (r"\boxed{\frac{1}{2}} then \boxed{oops", (r"\frac{1}{2}", True)),
        (r"\boxed {a\}b}", (r"a\}b", True)),
        (r"\fbox{3}", ("3", True)),
        ("", None),
        ("<think>a</think>", None),
        ("<think>a", None),
        ("it is 3", ("it is 3", False)),
        (r"\boxed{" + "1" * 5000 + "}", None),
    ],
)
def test_the_answer_of_a_completion(text, answer):
    assert extract_answer(text) == answer


def test_it_survives_pickling_and_a_fork(verifier):
    assert pickle.loads(pickle.dumps(verifier)).workers == verifier.workers
    reward = pickle.loads(pickle.dumps(MathsReward("answer", workers=1)))
    assert reward(completions=[r"\boxed{2}"], answer=["2"]) == [1.0]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, verifier.compare("3", "3").status.encode())
        verifier.close()
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"right"
    os.close(read)
    assert verifier.compare("3", "3").status == "right"


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: MathVerifier(timeout=0), ValueError, "timeout=0 must be above 0"),
        (lambda: MathVerifier(workers=0), ValueError, "workers=0 must be at least 1"),
        (lambda: MathVerifier(memory_bytes=10), ValueError, "memory_bytes=10 must be at least"),
        (
            lambda: maths_reward(completions=["1"], answer=["1"]),
            KeyError,
            r"'solution'.*\['answer'\].*solution_column",
        ),
        (lambda: maths_reward(completions=["1", "2"], solution=["1"]), ValueError, "shorter"),
    ],
)
def test_mistakes(call, error, said):
    with pytest.raises(error, match=said):
        call()


def test_without_math_verify_there_is_an_error_and_no_reward(monkeypatch):
    start = "import sys; sys.stderr.write('ModuleNotFoundError: no math_verify\\n'); sys.exit(1)"
    monkeypatch.setattr("sparrow_trl.rewards.verifier._START", start)
    with pytest.raises(ImportError, match="no math_verify.*pip install math-verify"):
        MathVerifier(workers=1).compare("1", "1")
