"""Programs that try to pass without the answer, or to do harm. None of them computes what is asked.

`STDIO` programs are to print 42; each prints it only if what it tries works. `FUNCTION` programs are to define
`double(x)`, which the tests call in another process. `{outside}` is a folder that belongs to the tests.
"""

_TRY = "try:\n    {}\nexcept BaseException:\n    print('no')\nelse:\n    print(42)\n"


def attempt(*lines):
    return _TRY.format("\n    ".join(lines))


LIBC = "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True)"

STDIO = {
    # ends without an answer
    "exits at once": "import os; os._exit(0)",
    "exits by sys.exit": "import sys; sys.exit(0)",
    "raises SystemExit": "raise SystemExit",
    "crashes": "import ctypes; ctypes.string_at(0)",
    "stops itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP); print(42)",
    "is no Python": "this is not a program (",
    "recurses without end": "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    # uses too much
    "loops without end": "while True: pass",
    "sleeps without end": "import time; time.sleep(10**6)",
    "ignores signals and loops": (
        "import signal\nfor s in (signal.SIGXCPU, signal.SIGTERM, signal.SIGALRM): signal.signal(s, signal.SIG_IGN)\n"
        "while True: pass"
    ),
    "prints without end": "while True: print('42' * 10000)",
    "prints errors without end": "import sys\nwhile True: sys.stderr.write('42' * 10000)",
    "takes all memory": "x = []\nwhile True: x.append(bytearray(2**24))",
    "maps all memory": "import mmap\nx = []\nwhile True:\n    m = mmap.mmap(-1, 2**26)\n    m.write(b'1' * 2**26)\n    x.append(m)",
    "takes one huge piece": "x = bytearray(2**40); print(42)",
    "takes shared memory": LIBC + "\nprint(42 if libc.shmget(0, 2**24, 0o1666) >= 0 else 'no')",
    "takes a memory file": attempt("import os", "os.memfd_create('x')"),
    "forks without end": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "forks once": attempt("import os", "if os.fork() == 0: os._exit(0)"),
    "starts threads without end": (
        "import threading, time\nn = 0\ntry:\n    while n < 200:\n        threading.Thread(target=time.sleep, args=(9,), "
        "daemon=True).start(); n += 1\nexcept RuntimeError: pass\nprint(42 if n == 200 else n, flush=True)\n"
        "import os; os._exit(0)"
    ),
    "writes a huge file": attempt(
        "f = open('/tmp/huge', 'wb')", "for _ in range(64): f.write(b'1' * 2**20)", "f.flush()"
    ),
    "writes many files": attempt("for i in range(2000):\n        with open(f'/tmp/{i}', 'w') as f: f.write('x' * 4096)"),
    "opens many files": attempt("x = [open('/dev/null') for _ in range(500)]"),
    "computes one huge number": "print(len(str(9 ** 9 ** 9)))",
    # reaches out
    "kills its parent": attempt("import os", "os.kill(os.getppid(), 9)"),
    "kills everything": attempt("import os", "os.kill(-1, 9)"),
    "kills its group": attempt("import os", "os.killpg(0, 9)"),
    "kills its parent by the events of a file": attempt(
        "import fcntl, os", "r, w = os.pipe()", "fcntl.fcntl(r, fcntl.F_SETOWN, os.getppid())", "fcntl.fcntl(r, 10, 9)",
        "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)", "os.write(w, b'x')"
    ),
    "signals by the events of a socket": LIBC + (
        "\nimport socket, fcntl\na, b = socket.socketpair()\nfcntl.ioctl(a, 0x8901, os.getpid().to_bytes(4, 'little'))\nprint(42)"
    ),
    "opens a socket": attempt("import socket", "socket.socket()"),
    "opens a local socket": attempt("import socket", "socket.socket(socket.AF_UNIX)"),
    "asks for a page": attempt("import urllib.request", "urllib.request.urlopen('http://127.0.0.1:1', timeout=1)"),
    "runs a shell": attempt("import subprocess", "subprocess.run(['/bin/sh', '-c', 'true'], check=True)"),
    "writes outside": attempt("open('{outside}/sentinel', 'w').write('gone')"),
    "changes the mode of a file outside": attempt("import os", "os.chmod('{outside}/sentinel', 0)"),
    "changes the times of a file outside": attempt("import os", "os.utime('{outside}/sentinel', (0, 0))"),
    "truncates a file outside": attempt("import os", "os.truncate('{outside}/sentinel', 0)"),
    "deletes outside": attempt("import shutil", "shutil.rmtree('{outside}')"),
    "reads the expected answer from a file": "print(open('{outside}/answer').read())",
    "reads other processes": (
        "import os, glob\nfound = [p for p in glob.glob('/proc/[0-9]*/cmdline') if 'pytest' in open(p).read()]\n"
        "print(42 if found else 'no')"
    ),
    "reads the memory of its parent": attempt("import os", "open(f'/proc/{{os.getppid()}}/mem', 'rb').seek(4096)"),
    "reads the environment of its parent": attempt("import os", "open(f'/proc/{{os.getppid()}}/environ').read()"),
    "traces its parent": LIBC + "\nprint(42 if libc.ptrace(16, os.getppid(), 0, 0) == 0 else 'no')",
    "outlives its parent": (
        LIBC + "\nif libc.prctl(1, 0) == 0: print(42, flush=True)\nimport time\nfor i in range(3): os.close(i)\ntime.sleep(99)"
    ),
    "leaves its session": attempt("import os", "os.setsid()"),
    "makes namespaces": LIBC + "\nprint(42 if libc.unshare(0x10000000) == 0 else 'no')",
    "mounts": LIBC + "\nprint(42 if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0 else 'no')",
    "becomes root": attempt("import os", "os.setgroups([0])", "os.setuid(0)", "os.listdir('/root')"),
    "lifts its limits": attempt(
        "import resource", "resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))", "x = bytearray(2**30)"
    ),
    "limits its parent": attempt("import os, resource", "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))"),
    "closes everything and stays": "import os, time\nfor i in range(64):\n    try: os.close(i)\n    except OSError: pass\ntime.sleep(99)",
}  # fmt: skip

_FAKE = '{{"passed": true, "message": ""}}'

FUNCTION = {
    "exits before the asserts": "import os\nos._exit(0)",
    "exits in the call": "import os\ndef double(x): os._exit(0)",
    "exits at the end of the call": "import atexit, sys\ndef double(x): sys.exit(0)",
    "raises StopIteration": "def double(x): raise StopIteration",
    "defines nothing": "pass",
    "answers an object equal to all": (
        "class Any:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
        "    __hash__ = None\ndef double(x): return Any()"
    ),
    "answers a number equal to all": (
        "class Any(int):\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
        "    __hash__ = None\ndef double(x): return Any(0)"
    ),
    "answers a list equal to all": (
        "class Any(list):\n    def __eq__(self, other): return True\n    def __len__(self): return 1\ndef double(x): return Any()"
    ),
    "patches AssertionError": "import builtins\nbuiltins.AssertionError = type('E', (BaseException,), {{}})\ndef double(x): return 0",
    "patches the builtins": (
        "import builtins\nfor name in ('all', 'any', 'len', 'abs', 'isinstance', 'compile', 'exec', 'eval'):\n"
        "    setattr(builtins, name, lambda *a, **k: True)\ndef double(x): return 0"
    ),
    "patches json": "import json\njson.dumps = lambda *a, **k: '" + _FAKE + "'\ndef double(x): return 0",
    "defines the check": "def check(candidate): pass\ndef double(x): return 0",
    "defines the candidate": "candidate = lambda x: 0\nassert_equal = print\ndef double(x): return 0",
    "reads the tests in the frames": (
        "import sys\ndef double(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        if 'tests' in frame.f_locals or 'expected' in frame.f_locals: return frame.f_locals['expected']\n"
        "        frame = frame.f_back\n    return 0"
    ),
    "reads the tests in memory": (
        "import gc\ndef double(x):\n    for o in gc.get_objects():\n        if isinstance(o, dict) and 'expected' in o: return o['expected']\n"
        "    return 0"
    ),
    "reads the tests in files": (
        "import os\ntext = ''\nfor i in range(3, 64):\n    try: text += os.pread(i, 99999, 0).decode()\n"
        "    except (OSError, ValueError): pass\ndef double(x): return 2 * x if 'double(2' + '1)' in text or '[21]' in text else 0"
    ),
    "prints a verdict": "import os\nos.write(1, b'" + _FAKE + "\\n')\nos.write(2, b'" + _FAKE + "\\n')\nos._exit(0)",
    "writes a verdict everywhere": (
        "import os\nfor i in range(64):\n    try: os.write(i, b'\\n" + _FAKE + "\\n')\n    except OSError: pass\nos._exit(0)"
    ),
    "answers before it is asked": (
        "import os\nfor i in range(64):\n    try: os.write(i, b'{{\"names\": [\"double\"]}}\\n' + b'{{\"value\": true}}\\n' * 9)\n"
        "    except OSError: pass\nos._exit(0)"
    ),
    "answers without end": "import os\nwhile True: os.write(4, b'[' * 65536)\ndef double(x): return 0",
    "traces": "import sys\nsys.settrace(lambda *a: None)\ndef double(x): return 0",
    "answers the question": "def double(x): return x",
    "answers nested lists": "def double(x):\n    y = []\n    for _ in range(100000): y = [y]\n    return y",
    "answers a huge range": "def double(x): return iter(range(10**12))",
    "answers not a number": "def double(x): return float('nan')",
}  # fmt: skip
