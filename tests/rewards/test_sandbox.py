"""Untrusted programs: what they print is had, what they may use is bounded, and what they try does not work."""

import os
import subprocess
import sys
import threading
import time

import psutil
import pytest
from adversarial import FUNCTION, STDIO

from sparrow_trl.rewards import AssertTests, CallTests, Limits, Sandbox, SandboxUnavailableError, StdioTests, run_tests
from sparrow_trl.rewards.sandbox import ISOLATIONS


LIMITS = Limits(cpu_seconds=1, wall_seconds=2.0, memory_bytes=128 * 2**20, file_bytes=2**16, output_bytes=2**16)


def _works(name):
    try:
        return Sandbox(isolation=name).isolation == name
    except SandboxUnavailableError:
        return False


AVAILABLE = [name for name in ISOLATIONS if _works(name)]
pytestmark = pytest.mark.skipif(not AVAILABLE, reason="nothing isolates programs on this machine")


@pytest.fixture(params=AVAILABLE)
def sandbox(request, tmp_path):
    """A sandbox of each kind that works here; its processes carry the name of a folder in their command lines."""
    marker = tmp_path / "marker"
    marker.mkdir()
    return Sandbox(LIMITS, request.param, import_paths=[str(marker)])


@pytest.fixture
def outside(tmp_path):
    """Files that a program must neither read nor change, which anyone may."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for name, text in (("sentinel", "here"), ("answer", "42")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o666)
    folder.chmod(0o777)
    return folder


def left_over(sandbox):
    """Processes that a sandbox has left, a moment after it said that it was done."""
    for _ in range(20):
        found = []
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if any(sandbox.import_paths[0] in part for part in command) and process.pid != os.getpid():
                found.append(process)
        if not found:
            return []
        time.sleep(0.05)
    return found


def harmless(sandbox, outside, before):
    assert (outside / "sentinel").read_text() == "here"
    assert sorted(os.listdir(outside)) == ["answer", "sentinel"]
    assert left_over(sandbox) == []
    assert threading.active_count() <= before
    return True


@pytest.mark.parametrize("name", STDIO)
def test_a_program_that_prints_no_answer_fails_and_does_no_harm(sandbox, outside, name):
    before, started = threading.active_count(), time.monotonic()
    program = STDIO[name].replace("{outside}", str(outside)).replace("{{", "{").replace("}}", "}")
    verdict = run_tests(sandbox, program, StdioTests(("",), ("42\n",)))
    assert not verdict.ok, verdict
    assert time.monotonic() - started < 30
    assert harmless(sandbox, outside, before)


@pytest.mark.parametrize("kind", ["asserts", "check", "calls"])
@pytest.mark.parametrize("name", FUNCTION)
def test_a_function_without_the_answer_fails_and_does_no_harm(sandbox, outside, name, kind):
    before, started = threading.active_count(), time.monotonic()
    tests = {
        "asserts": AssertTests("expected = 42\nassert double(21) == expected\nassert double(-4) == -8"),
        "check": AssertTests(
            "def check(candidate):\n    expected = 42\n    assert candidate(21) == expected", "double"
        ),
        "calls": CallTests("double", ((21,), (-4,)), (42, -8)),
    }[kind]
    program = FUNCTION[name].replace("{{", "{").replace("}}", "}")
    verdict = run_tests(sandbox, program, tests)
    assert not verdict.ok, verdict
    assert time.monotonic() - started < 30
    assert harmless(sandbox, outside, before)


def test_there_are_more_than_forty_of_them():
    assert len(STDIO) + len(FUNCTION) >= 40


@pytest.mark.parametrize(
    "tests",
    [
        AssertTests("expected = 42\nassert double(21) == expected\nassert double(-4) == -8"),
        AssertTests("def check(candidate):\n    assert candidate(21) == 42", "double"),
        CallTests("double", ((21,), (-4,)), (42, -8)),
    ],
)
def test_a_function_with_the_answer_passes(sandbox, tests):
    assert run_tests(sandbox, "def double(x):\n    return 2 * x", tests).ok
    assert run_tests(
        sandbox, "class Solution:\n    def double(self, x):\n        return 2 * x", tests
    ).ok or not isinstance(tests, CallTests)


def test_a_program_with_the_answer_passes(sandbox):
    program = (
        "import sys, math, threading, collections\nsys.setrecursionlimit(10**6)\ndef main(): print(int(input()) * 2)\n"
    )
    no_threads = sandbox.isolation == "rlimits" and os.geteuid() == 0  # root's threads are not counted
    program += "main()" if no_threads else "t = threading.Thread(target=main)\nt.start()\nt.join()\n"
    assert run_tests(sandbox, program, StdioTests(("21\n", "3"), ("42", "6\n"))).ok


def test_input_and_output_of_a_program(sandbox):
    text = "äöü 漢字\n" * 1000
    outcome = sandbox.run(
        "import sys; data = sys.stdin.read(); print(data[::-1], end=''); sys.stderr.write('e')", text
    )
    assert (outcome.status, outcome.returncode, outcome.stderr) == ("ok", 0, "e")
    assert outcome.stdout == text[::-1]


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("print(1)", "ok"),
        ("raise SystemExit(3)", "error"),
        ("import os; os.abort()", "error"),
        ("while True: pass", "time"),
        ("import time; time.sleep(60)", "time"),
        ("import os, time; os.close(1); os.close(2); time.sleep(60)", "time"),
        ("x = bytearray(2**29)", "memory"),
        ("print('x' * 2**20)", "output"),
    ],
)
def test_how_a_program_ended(sandbox, program, status):
    outcome = sandbox.run(program)
    assert outcome.status == status, outcome
    assert outcome.ok == (status == "ok")
    assert outcome.seconds < 10
    assert len(outcome.stdout) <= LIMITS.output_bytes


def test_a_program_sees_its_limits_and_nothing_else(sandbox, monkeypatch):
    monkeypatch.setenv("SECRET", "word")
    program = (
        "import os, resource as r\nprint(r.getrlimit(r.RLIMIT_AS)[1], r.getrlimit(r.RLIMIT_FSIZE)[1], "
        "r.getrlimit(r.RLIMIT_CPU)[0], 'SECRET' in os.environ, os.getcwd() in ('/', '/tmp'))"
    )
    values = sandbox.run(program).stdout.split()
    assert values == [str(LIMITS.memory_bytes), str(LIMITS.file_bytes), "1", "False", "True"]


def test_several_programs_at_a_time(sandbox):
    outcomes = {}

    def run(number):
        outcomes[number] = sandbox.run("print(int(input()) ** 2)", str(number)).stdout

    threads = [threading.Thread(target=run, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {number: f"{number**2}\n" for number in range(12)}
    assert left_over(sandbox) == []


def test_more_processes_where_they_are_allowed(tmp_path):
    sandbox = Sandbox(LIMITS)
    program = (
        "import os\npid = os.fork()\nif pid == 0: os._exit(7)\nprint(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert sandbox.run(program).status == "error"
    if sandbox.isolation == "rlimits" and os.getuid() == 0:
        pytest.skip("root's processes cannot be counted")
    assert sandbox.run(program, limits=Limits(processes=2)).stdout == "7\n"


def test_a_program_dies_with_the_process_that_started_it(sandbox):
    """The parent is killed while a program sleeps: nothing stays."""
    code = (
        "import sys; from sparrow_trl.rewards import Sandbox, Limits\n"
        f"sandbox = Sandbox(Limits(wall_seconds=60), {sandbox.isolation!r}, {sandbox.import_paths!r})\n"
        "process = sandbox.start('import time; print(1, flush=True); time.sleep(60)')\nprint('up', flush=True)\nprocess.wait()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}
    )
    assert parent.stdout.readline() == b"up\n"
    time.sleep(0.3)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert left_over(sandbox) == []


def test_packages_are_there_where_they_are_named(tmp_path):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "helper.py").write_text("value = 5\n")
    program = "import helper; print(helper.value)"
    assert Sandbox(LIMITS).run(program).status == "error"
    assert Sandbox(LIMITS, import_paths=[str(tmp_path / "packages")]).run(program).stdout == "5\n"


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: Sandbox(isolation="jail"), ValueError, "isolation='jail' is unknown"),
        (lambda: Sandbox(import_paths=["/no/such"]), ValueError, "'/no/such' is not a folder"),
        (lambda: Limits(cpu_seconds=0), ValueError, "cpu_seconds=0 must be at least 1"),
        (lambda: Limits(cpu_seconds=1.5), ValueError, "cpu_seconds=1.5 must be a whole number"),
        (lambda: Limits(cpu_seconds=4.0), ValueError, "cpu_seconds=4.0 must be a whole number"),
        (lambda: Limits(threads=float("inf")), ValueError, "threads=inf must be a whole number"),
        (lambda: Limits(wall_seconds=0), ValueError, "wall_seconds=0 must be above 0"),
        (lambda: Limits(wall_seconds=float("inf")), ValueError, "wall_seconds=inf must be above 0, and finite"),
        (lambda: Limits(memory_bytes=1000), ValueError, "memory_bytes=1000 must be at least"),
        (lambda: Limits(processes="many"), TypeError, "processes='many' is not a number"),
    ],
)
def test_mistakes(make, error, said):
    with pytest.raises(error, match=said):
        make()


def test_no_isolation_is_an_error_and_not_a_reward(monkeypatch):
    monkeypatch.setattr("sparrow_trl.rewards.sandbox.LAUNCHER", "/no/such/file.py")
    with pytest.raises(SandboxUnavailableError, match="cannot be isolated.*namespaces: .*rlimits: "):
        Sandbox().run("print(1)")
