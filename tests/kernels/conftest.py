"""Triton's interpreter, where there is no GPU, is made to compute in bfloat16."""

import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels" / "benchmarks"))

if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreter

    interpreter.repair_bfloat16()
