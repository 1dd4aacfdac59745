"""Triton's interpreter, where there is no GPU, is made to compute in bfloat16."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels" / "benchmarks"))

WITHOUT_TRITON = ("test_reference.py", "test_static_ops.py", "test_teacher_forced.py", "test_torch_ops.py")

if find_spec("triton") is None:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name not in WITHOUT_TRITON]
elif os.environ.get("TRITON_INTERPRET") == "1":
    import interpreter

    interpreter.repair_bfloat16()
