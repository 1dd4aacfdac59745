"""Every kernel compiles for GPUs that are not there, and the machine code is what a fast kernel's has to be."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[2]
SHARED_LIMIT = {"sm_75": 64 << 10, "sm_80": 99 << 10, "sm_90": 99 << 10, "sm_100": 99 << 10, "gfx942": 64 << 10}


def compile_matrix(name):
    """In a process without the interpreter, and with a cache of its own."""
    paths = [ROOT / "kernels" / "torch-ext", ROOT / "kernels" / "benchmarks"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("compile_matrix.py")
    result = subprocess.run([sys.executable, script, name], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["sm_75:float16", "sm_80:bfloat16", "sm_90:bfloat16", "sm_90:float16", "sm_100:bfloat16", "gfx942:bfloat16"],
)
def test_models(name):
    """At the shapes of the models: no spills, shared memory also within consumer chips, 128-bit loads of pages."""
    kernels = set()
    for found in compile_matrix(name):
        kernels.add(found["kernel"])
        assert found["spills"] == 0, found
        assert found["shared"] <= SHARED_LIMIT[found["target"]], found
        if found["kernel"] in ("score_pages_kernel", "paged_attention_kernel"):
            # A tile has 16 KiB at least, and four warps copy it 16 bytes at a time.
            threads = 4 * (64 if found["target"] == "gfx942" else 32)
            assert found["loads"].get("128", 0) >= (16 << 10) // (16 * threads), found
    assert kernels == {
        "store_kv_kernel", "score_pages_kernel", "select_pages_kernel", "paged_attention_kernel", "merge_splits_kernel"
    }  # fmt: skip


@pytest.mark.slow
def test_sample_of_shapes():
    """All head dims, page sizes, dtypes and options, over all targets: compiles, and fits in shared memory."""
    found = compile_matrix("sample")
    assert len(found) >= 15 * 8
    for one in found:
        assert one["shared"] <= SHARED_LIMIT[one["target"]], one
