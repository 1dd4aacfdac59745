"""
A child process for programs that nobody has read: bounded in CPU, memory, time, processes, files, network and output.

The program never runs in the calling process, and nothing of it is trusted: not its exit status alone, not its output's
length, not that it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any


LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
ISOLATIONS = ("bubblewrap", "namespaces", "rlimits")
SETUP_SECONDS = 60.0
"""How long the isolation itself may take, on a busy machine."""

# Runs the program that is read from file descriptor 3, as `python program.py` would.
_RUN_PROGRAM = """\
def _program():
    import builtins, os, sys
    with os.fdopen(3, "rb") as file:
        source = file.read()
    sys.argv[:] = ["program.py"]
    builtins.exit = builtins.quit = sys.exit  # which the module site would bring
    return compile(source, "program.py", "exec")
exec(_program())
"""


class SandboxUnavailableError(RuntimeError):
    """This machine cannot isolate a program in the way that was asked for."""


@dataclass(frozen=True)
class Limits:
    """
    What one program may use.

    Args:
        cpu_seconds (`int`, *optional*, defaults to `4`): CPU time of each process.
        wall_seconds (`float`, *optional*, defaults to `8.0`): time from start to end.
        memory_bytes (`int`, *optional*, defaults to 512 MiB): address space of each process.
        processes (`int`, *optional*, defaults to `1`): processes at a time; with 1 the program can start no other.
        threads (`int`, *optional*, defaults to `16`): threads at a time, for each process.
        file_bytes (`int`, *optional*, defaults to 1 MiB): size of a file, and of all files together where the program
            has a /tmp of its own (elsewhere it can write none).
        output_bytes (`int`, *optional*, defaults to 1 MiB): what is read of its standard output, and of its errors.
    """

    cpu_seconds: int = 4
    wall_seconds: float = 8.0
    memory_bytes: int = 512 * 2**20
    processes: int = 1
    threads: int = 16
    file_bytes: int = 2**20
    output_bytes: int = 2**20

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{field.name}={value!r} is not a number.")
            if field.name != "wall_seconds" and not isinstance(value, int):
                raise ValueError(f"{field.name}={value} must be a whole number.")
            lowest = {"file_bytes": 0, "memory_bytes": 64 * 2**20}.get(field.name, 1)
            if field.name == "wall_seconds" and not 0 < value < float("inf"):
                raise ValueError(f"wall_seconds={value} must be above 0, and finite.")
            if field.name != "wall_seconds" and value < lowest:
                raise ValueError(f"{field.name}={value} must be at least {lowest}.")


@dataclass(frozen=True)
class Outcome:
    """
    How a program ended.

    Args:
        status (`str`): `"ok"` (exit status 0), `"error"` (another one, or a signal), `"time"`, `"memory"` or
            `"output"` (a limit was reached).
        returncode (`int`): exit status; negative: the signal.
        stdout (`str`): standard output, as far as the limit.
        stderr (`str`): standard error, as far as the limit.
        seconds (`float`): time from start to end.
    """

    status: str
    returncode: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the program ended by itself with exit status 0."""
        return self.status == "ok"


class Sandbox:
    """
    Runs Python programs in isolated child processes. Any number of threads may use one sandbox at a time.

    What isolates is the first of these that works here: `"bubblewrap"` (where it is installed), `"namespaces"` (the
    kernel's: own processes, network, files, users) and `"rlimits"` (without namespaces: Landlock or another user).
    Limits of resources and a filter of system calls come on top in each of them. Linux only.

    Args:
        limits (`Limits`, *optional*): what a program may use.
        isolation (`str`, *optional*, defaults to `"auto"`): one of the names above, or `"auto"`.
        import_paths (`Sequence[str]`, *optional*): folders of packages that programs may import; by default they have
            the standard library alone.

    Raises:
        ValueError: for an unknown isolation or an import path that does not exist.

    Example:

    ```python
    >>> sandbox = Sandbox(Limits(cpu_seconds=2))
    >>> sandbox.run("print(int(input()) + 1)", stdin="41").stdout
    '42\\n'
    >>> sandbox.isolation
    'namespaces'
    ```
    """

    def __init__(self, limits: Limits | None = None, isolation: str = "auto", import_paths: Sequence[str] = ()):
        if isolation not in ("auto", *ISOLATIONS):
            raise ValueError(f"isolation={isolation!r} is unknown; use 'auto' or one of {', '.join(ISOLATIONS)}.")
        for path in import_paths:
            if not os.path.isdir(path):
                raise ValueError(f"import_paths: {path!r} is not a folder.")
        self.limits = limits or Limits()
        self.import_paths = [os.path.realpath(path) for path in import_paths]
        self._asked = isolation
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.limits, self._asked, self.import_paths))

    @cached_property
    def isolation(self) -> str:
        """
        What isolates the programs here.

        Raises:
            SandboxUnavailableError: nothing does, or not what was asked for; with each reason.
        """
        with self._lock:
            return self._find_isolation()

    def _find_isolation(self) -> str:
        if sys.platform != "linux":
            raise SandboxUnavailableError(f"Programs can be isolated on Linux only, and this is {sys.platform}.")
        reasons = []
        for name in ISOLATIONS if self._asked == "auto" else (self._asked,):
            try:
                outcome = self._start(name, "print('isolated')", b"", self.limits).wait()
            except SandboxUnavailableError as error:
                reasons.append(f"{name}: {error}")
                continue
            if outcome.stdout == "isolated\n":
                return name
            reasons.append(
                f"{name}: a program that prints a word ended with {outcome.status!r}: {outcome.stderr[-300:]}"
            )
        raise SandboxUnavailableError(
            "Untrusted programs cannot be isolated on this machine. "
            + "; ".join(reasons)
            + ". Install bubblewrap, or "
            "allow user namespaces (in a container: the security options seccomp and apparmor)."
        )

    def run(self, program: str, stdin: str | bytes = "", limits: Limits | None = None) -> Outcome:
        """
        Run a program to its end or to a limit.

        Args:
            program (`str`): Python source.
            stdin (`str` or `bytes`, *optional*): its standard input.
            limits (`Limits`, *optional*): by default those of the sandbox.

        Raises:
            SandboxUnavailableError: this machine cannot isolate it.
        """
        return self.start(program, stdin, limits).wait()

    def start(
        self,
        program: str,
        stdin: str | bytes | int = "",
        limits: Limits | None = None,
        stdout: int | None = None,
        runner: str | None = None,
    ) -> SandboxProcess:
        """
        Start a program.

        Args:
            program (`str`): Python source.
            stdin (`str`, `bytes` or `int`, *optional*): its standard input, or a file descriptor.
            limits (`Limits`, *optional*): by default those of the sandbox.
            stdout (`int`, *optional*): file descriptor that takes its standard output; by default it is collected.
            runner (`str`, *optional*): Python source that reads the program from file descriptor 3 and runs it.

        Returns:
            `SandboxProcess`: to be waited for.
        """
        data = stdin.encode("utf-8", "surrogatepass") if isinstance(stdin, str) else stdin
        return self._start(self.isolation, program, data, limits or self.limits, stdout, runner)

    def _start(
        self,
        isolation: str,
        program: str,
        stdin: bytes | int,
        limits: Limits,
        stdout: int | None = None,
        runner: str | None = None,
    ) -> SandboxProcess:
        source = _memory_file(program.encode("utf-8", "surrogatepass"))
        own_stdin = stdin if isinstance(stdin, int) else _memory_file(stdin)
        ready_read, ready_write = os.pipe()
        try:
            read_paths = [*_system_paths(), *self.import_paths]
            runner = f"__import__('sys').path.extend({self.import_paths!r})\n{runner or _RUN_PROGRAM}"
            executable = os.path.realpath(sys.executable)
            wrapper = _wrapper(isolation, read_paths, limits)
            spec = {
                **asdict(limits),
                "mode": "wrapper" if wrapper else isolation,
                "wrapper": wrapper,
                "parent": os.getpid(),
                "launcher": str(LAUNCHER),
                "ready": ready_write,
                "read_paths": read_paths,
                "must_read": [executable, sysconfig.get_path("stdlib"), os.__file__],
                "command": [executable, "-I", "-S", "-B", "-X", "utf8", "-X", "int_max_str_digits=0", "-c", runner],
                "environment": {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"},
            }
            for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
                spec["environment"][name] = "1"
            if "LD_LIBRARY_PATH" in os.environ:
                spec["environment"]["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
            popen = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", str(LAUNCHER), json.dumps({**spec, "source": source})],
                stdin=own_stdin,
                stdout=subprocess.PIPE if stdout is None else stdout,
                stderr=subprocess.PIPE,
                pass_fds=(source, ready_write),
                start_new_session=True,
            )
        except BaseException:
            os.close(ready_read)
            raise
        finally:
            os.close(source)
            os.close(ready_write)
            if own_stdin is not stdin:
                os.close(own_stdin)
        return SandboxProcess(popen, ready_read, limits)


class SandboxProcess:
    """A running program. `wait` gives its `Outcome`; `kill` may be called from another thread meanwhile."""

    def __init__(self, popen: subprocess.Popen[bytes], ready: int, limits: Limits):
        self._popen, self._ready, self._limits = popen, ready, limits

    def kill(self) -> None:
        """End the program and everything that it started."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)

    def wait(self) -> Outcome:
        """
        Wait for the end, at most for the limit of time, and read the output.

        Raises:
            SandboxUnavailableError: the isolation failed; the program did not run.
        """
        try:
            return self._wait()
        finally:
            self.kill()
            self._popen.wait()
            for stream in (self._popen.stdout, self._popen.stderr):
                if stream is not None:
                    stream.close()
            os.close(self._ready)

    def _wait(self) -> Outcome:
        outputs: dict[str, bytearray] = {"ready": bytearray(), "stdout": bytearray(), "stderr": bytearray()}
        status = ""
        started = time.monotonic()
        deadline = started + SETUP_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self._ready, selectors.EVENT_READ, "ready")
            for name in ("stdout", "stderr"):
                stream = getattr(self._popen, name)
                if stream is not None:
                    selector.register(stream, selectors.EVENT_READ, name)
            while selector.get_map() and not status:
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events and time.monotonic() >= deadline:
                    status = "time"
                for key, _ in events:
                    output = outputs[key.data]
                    chunk = os.read(key.fd, 65536)
                    output += chunk
                    if not chunk:
                        selector.unregister(key.fileobj)
                    elif key.data == "ready" and output == b"R":
                        selector.unregister(key.fileobj)
                        started = time.monotonic()
                        deadline = started + self._limits.wall_seconds
                    elif key.data != "ready" and len(output) > self._limits.output_bytes:
                        del output[self._limits.output_bytes :]
                        status = "output"
        if outputs["ready"] != b"R":
            said = outputs["ready"] + b" " + outputs["stderr"][-500:]
            raise SandboxUnavailableError(
                said.decode(errors="replace").strip() or "its launcher ended, or took too long"
            )
        if not status:  # the outputs are closed, which the program may have done and live on
            try:
                self._popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                status = "time"
        seconds = time.monotonic() - started
        if status:
            self.kill()
        code = self._popen.wait()
        if code > 128:
            code = 128 - code  # a stage in between passes a signal on like a shell
        stderr = outputs["stderr"].decode(errors="replace")
        if not status:
            status = _status(code, stderr)
        return Outcome(status, code, outputs["stdout"].decode(errors="replace"), stderr, seconds)


def _status(code: int, stderr: str) -> str:
    if code == 0:
        return "ok"
    if code == -signal.SIGXCPU:
        return "time"
    last = stderr.rstrip().rpartition("\n")[2]
    return "memory" if last.startswith("MemoryError") else "error"


def _memory_file(data: bytes) -> int:
    """File descriptor of a file in memory that holds `data`, at its start."""
    descriptor = os.memfd_create("sparrow")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _system_paths() -> list[str]:
    """What a Python interpreter needs to start."""
    paths = ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", sys.base_prefix, sys.base_exec_prefix]
    paths.append(os.path.dirname(os.path.realpath(sys.executable)))
    unique: list[str] = []
    for path in paths:
        inside = any(path == other or path.startswith(other + "/") for other in unique)
        if not inside and os.path.exists(path):
            unique.append(path)
    return unique


def _wrapper(isolation: str, read_paths: list[str], limits: Limits) -> list[str]:
    """Command line of bubblewrap, up to the program's; empty for what does without."""
    if isolation != "bubblewrap":
        return []
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxUnavailableError("bwrap is not installed")
    command = [program, "--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--clearenv", "--dev", "/dev"]
    command += ["--size", str(max(limits.file_bytes, 4096)), "--tmpfs", "/tmp"]
    for path in read_paths:
        command += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    return [*command, "--chdir", "/tmp"]
