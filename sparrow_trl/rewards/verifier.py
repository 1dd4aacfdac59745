"""Comparing mathematical answers in worker processes, which are ended when they take too long."""

from __future__ import annotations

import json
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ..environment import usable_cores


_START = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from sparrow_trl.rewards.maths_worker import main; main()"
START_SECONDS = 120.0
"""How long a worker may take to import math-verify, on a busy machine."""


@dataclass(frozen=True)
class Comparison:
    """
    Result of comparing an answer with the reference.

    Args:
        status (`str`): `"right"`, `"wrong"`, `"timeout"` (the answer took too long, or too much memory), or
            `"unreadable"` (the reference itself could not be read, or not in time).
        detail (`str`): what happened, where there is more to say.
    """

    status: str
    detail: str = ""


class MathVerifier:
    """
    Compares answers by math-verify in worker processes. Works from any thread, several at a time; what hangs ends at
    its limit, is counted, and the next comparison has a new worker.

    Args:
        timeout (`float`, *optional*, defaults to `5.0`): seconds for one comparison.
        workers (`int`, *optional*): worker processes, at most; by default one a core, and no more than 8.
        memory_bytes (`int`, *optional*, defaults to 4 GiB): address space of a worker.

    Attributes:
        timeouts (`int`): comparisons that ran into the limit of time so far.
        crashes (`int`): comparisons in which a worker died so far.
    """

    def __init__(self, timeout: float = 5.0, workers: int | None = None, memory_bytes: int = 4 * 2**30):
        if not timeout > 0:
            raise ValueError(f"timeout={timeout} must be above 0 seconds.")
        if workers is not None and workers < 1:
            raise ValueError(f"workers={workers} must be at least 1.")
        if memory_bytes < 2**29:
            raise ValueError(f"memory_bytes={memory_bytes} must be at least {2**29}: SymPy alone takes most of that.")
        self.timeout, self.memory_bytes = timeout, memory_bytes
        self.workers = workers or min(8, usable_cores())
        self.timeouts = self.crashes = 0
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(self.workers):
            self._idle.put(None)  # a place for a worker, started when needed
        self._count = threading.Lock()
        self._started: weakref.WeakSet[_Worker] = weakref.WeakSet()
        self._owner = os.getpid()
        weakref.finalize(self, _end_all, self._started, self._owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.timeout, self.workers, self.memory_bytes))

    def compare(self, gold: str, answer: str, boxed: bool = True) -> Comparison:
        """
        Compare one answer.

        Args:
            gold (`str`): reference answer: LaTeX, with or without dollars or a box, or a number.
            answer (`str`): the answer found.
            boxed (`bool`, *optional*, defaults to `True`): whether `answer` is the answer itself; otherwise it is a
                text in which math-verify looks for it.

        Raises:
            ImportError: math-verify is not installed.
        """
        if os.getpid() != self._owner:  # after a fork: the workers belong to the parent
            self.__init__(self.timeout, self.workers, self.memory_bytes)  # type: ignore[misc]
        worker = self._idle.get()
        try:
            if worker is None or not worker.is_alive():
                worker = _Worker(self.memory_bytes, self.timeout)
                self._started.add(worker)
            found = worker.compare({"gold": gold, "answer": answer, "boxed": boxed}, self.timeout)
        finally:
            self._idle.put(worker)
        if found.detail in ("timeout", "crash"):
            with self._count:
                self.timeouts += found.detail == "timeout"
                self.crashes += found.detail == "crash"
        return found

    def compare_all(self, pairs: Sequence[tuple[str, str, bool]]) -> list[Comparison]:
        """Compare many `(gold, answer, boxed)`, in parallel; the results keep the order."""
        if len(pairs) < 2:
            return [self.compare(*pair) for pair in pairs]
        with ThreadPoolExecutor(min(self.workers, len(pairs))) as pool:
            return list(pool.map(lambda pair: self.compare(*pair), pairs))

    def close(self) -> None:
        """End the workers. A later comparison starts new ones."""
        _end_all(self._started, self._owner)


class _Worker:
    """One process, used by one thread at a time."""

    def __init__(self, memory_bytes: int, timeout: float):
        path = json.dumps([os.path.abspath(entry) for entry in sys.path])
        self._popen = subprocess.Popen(
            [sys.executable, "-c", _START, path, str(memory_bytes), str(int(timeout) + 60)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._buffer = b""
        hello = self._line(time.monotonic() + START_SECONDS)
        if hello is None or "ready" not in hello:
            self.end()
            assert self._popen.stderr is not None
            said = self._popen.stderr.read().decode(errors="replace").strip()
            raise ImportError(
                f"The process that compares answers did not start: {said.rpartition(chr(10))[2] or 'no reason given'}. It "
                "needs math-verify: pip install math-verify."
            )
        threading.Thread(target=_drain, args=(self._popen.stderr,), daemon=True).start()

    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def compare(self, request: dict[str, Any], timeout: float) -> Comparison:
        deadline = time.monotonic() + timeout
        try:
            assert self._popen.stdin is not None
            self._popen.stdin.write((json.dumps(request) + "\n").encode())
            self._popen.stdin.flush()
        except OSError:
            self.end()
            return Comparison("wrong", "crash")
        gold = self._line(deadline)
        if gold is None:
            return Comparison("unreadable", self._lost(deadline))
        if not gold["gold"]:
            return Comparison("unreadable")
        result = self._line(deadline)
        if result is None:
            return Comparison("timeout", self._lost(deadline))
        if result["error"]:
            return Comparison("wrong", result["error"])
        return Comparison("right" if result["equal"] else "wrong")

    def _lost(self, deadline: float) -> str:
        reason = "timeout" if time.monotonic() >= deadline else "crash"
        self.end()
        return reason

    def _line(self, deadline: float) -> dict[str, Any] | None:
        """The next message; `None` at the deadline or when the process is gone."""
        assert self._popen.stdout is not None
        descriptor = self._popen.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                chunk = os.read(descriptor, 65536)
                if not chunk:
                    return None
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait()
        for stream in (self._popen.stdin, self._popen.stdout):
            try:
                if stream is not None:
                    stream.close()
            except OSError:
                continue  # what was still in the buffer has no reader


def _drain(stream: Any) -> None:
    with stream:
        while stream.read(65536):
            pass


def _end_all(workers: weakref.WeakSet[_Worker], owner: int) -> None:
    if os.getpid() != owner:  # a fork: they are its parent's
        return
    for worker in list(workers):
        if worker.is_alive():
            worker.end()
