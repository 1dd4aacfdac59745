"""`make gpu-check`, proven without a GPU: its parts, its limits of time, and what it says of what was not measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "kernels" / "benchmarks"
sys.path.insert(0, str(FOLDER))


def test_a_part_ends_in_time_and_says_how():
    from gpu_check import run_part

    script = "import sys, time; print('begun', flush=True); time.sleep(float(sys.argv[1])); sys.exit(int(sys.argv[2]))"
    for seconds, status, expected in (
        ("0", "0", "ok"),
        ("0", "1", "failed"),
        ("0", "3", "wrong"),
        ("60", "0", "out of time"),
    ):
        command = [sys.executable, "-c", script, seconds, status]
        part, output = run_part("a part", command, 6.0, {})
        assert (part.status, output) == (expected, "begun\n")
        assert part.detail == {"ok": "", "out of time": "stopped after 6 s"}.get(expected, "begun")
        assert part.seconds < 20
    part, _ = run_part("a part", [sys.executable, "-c", script, "0", "0"], 1.0, {})
    assert (part.status, part.seconds, part.detail) == ("skipped", 0.0, "no time was left")


def test_what_was_not_measured_says_so():
    from gpu_check import to_markdown

    measures = [
        {"measure": "decode step", "target": 2.5, "value": 3.14159, "note": "of a test"},
        {"measure": "launch gaps", "target": 0.05, "value": None, "note": "not measured"},
    ]
    text = to_markdown({"device": "cpu", "driver": None, "versions": {"torch": "2"}, "measures": measures})
    assert "| decode step | 3.14 | >= 2.5 | of a test |" in text
    assert "| launch gaps | not measured | <= 0.05 | not measured |" in text


def test_gaps_are_what_no_kernel_covers():
    from gpu_measure import gaps

    assert gaps([(10, 20), (12, 15), (20, 30), (34, 40), (45, 50)]) == (4 + 5, 40)


def test_a_wrong_result_is_not_measured(tmp_path):
    """The attention of a kernel that forgets the last page: no speed is written."""
    code = f"""
import sys
sys.argv = ["gpu_measure.py", "attention", {str(tmp_path / "found.json")!r}, "--device", "cpu", "--tiny"]
sys.path[:0] = {[str(ROOT), str(FOLDER), str(ROOT / "kernels" / "torch-ext")]!r}
import gpu_measure
from sparrow_kernels import paged_attention
right = paged_attention.paged_attention
def wrong(query, key_pages, value_pages, page_table, positions, *args, **kwargs):
    return right(query, key_pages, value_pages, page_table, positions - 16, *args, **kwargs)
paged_attention.paged_attention = wrong
gpu_measure.main()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 3 and "dense attention is wrong" in run.stderr
    assert not (tmp_path / "found.json").exists()


@pytest.mark.slow
def test_the_whole_at_the_smallest_sizes(tmp_path):
    command = [sys.executable, str(FOLDER / "gpu_check.py"), "--device", "cpu", "--tiny"]
    run = subprocess.run([*command, "--json", str(tmp_path / "gpu.json")], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    results = json.loads((tmp_path / "gpu.json").read_text())
    statuses = {part["name"]: part["status"] for part in results["parts"]}
    # Whether continuous batching runs on a CPU depends on the release of transformers.
    others = ("continuous batching", "end to end")
    assert {name: status for name, status in statuses.items() if name not in others and status != "ok"} == {}
    values = {row["measure"]: row["value"] for row in results["measures"]}
    assert len(values) == 6
    for name in ("dense paged attention", "sparse attention", "decode step, sparse", "launch gaps"):
        [value] = [value for measure, value in values.items() if measure.startswith(name)]
        assert value is not None and value >= 0
    for row in results["measures"]:
        assert f"| {row['measure']} |" in run.stdout
    assert results["versions"]["torch"] and results["device"] == "cpu"
