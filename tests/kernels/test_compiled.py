"""The kernels, compiled for GPUs that are not there: registers, shared memory and loads of their machine code."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launches import SHAPES, TARGETS
from machine_code import MachineCode, amd_loads, nvidia_loads
from report import source_digest


ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "kernels" / "benchmarks" / "report.py"
PAGE = ROOT / "docs" / "_generated" / "kernels.md"
KERNELS = {
    name
    for path in (ROOT / "kernels" / "torch-ext" / "sparrow_kernels").glob("*.py")
    for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
}
# What reads keys, values, landmarks or logits; the others read lists, bits or a few numbers.
STREAMING = {
    "paged_attention_kernel",
    "score_pages_kernel",
    "teacher_forced_forward_kernel",
    "teacher_forced_backward_query_kernel",
    "token_logprobs_split_kernel",
}


def table(heading):
    """Cells of the table under a heading of the page."""
    [section] = re.findall(rf"^### {heading}\n(.*?)(?=^### |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_page_is_of_the_present_kernels():
    """Otherwise `make kernels-report` writes it again."""
    assert f"sources {source_digest()}." in PAGE.read_text()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_page_lists_every_kernel_and_none_spills(target):
    rows = table(target.name)
    assert {row[1] for row in rows} == KERNELS
    for op, kernel, variants, registers, spills, shared, wide, _ in rows:
        assert int(variants) >= 1 and int(registers) > 0
        assert (kernel, int(spills)) == (kernel, 0)
        assert float(shared) * 1024 <= target.shared_bytes
        # Masks and page numbers are read between the rows of keys and values.
        narrow = target.family == "turing" and op == "teacher_forced"  # tiles of 16 keys, without matrix units
        assert narrow or kernel not in STREAMING or float(wide.rstrip("%")) >= 50, (kernel, wide)
    assert KERNELS > STREAMING


def test_page_is_of_every_model():
    header = PAGE.read_text().partition("###")[0]
    read = {name for row in table("Bytes read") for name in row[2].split(", ")}
    for shape in SHAPES:
        assert shape.names in header
        assert set(shape.names.split(", ")) <= read


def test_page_counts_hardly_more_bytes_than_needed():
    """At most 5 % more for attention, 10 % for scoring and storing; none less than the least."""
    rows = table("Bytes read")
    assert {row[1] for row in rows} >= {"paged_attention_kernel", "score_pages_kernel"}
    for op, _, _, read, least, _ in rows:
        ratio = int(read.replace(",", "")) / int(least.replace(",", ""))
        assert 1 <= ratio <= (1.1 if op in ("select_pages", "store_kv") else 1.05), (op, ratio)


@pytest.mark.slow
def test_sample_of_shapes():
    """All head dims, page sizes, dtypes and options, over all GPUs: compiles and fits, and spills at no model's shape."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(REPORT), "--json", "--sample"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.stdout, run.stderr
    rows = json.loads(run.stdout)
    limits = {target.name: target.shared_bytes for target in TARGETS}
    assert {row["target"] for row in rows} == set(limits)
    assert {row["kernel"] for row in rows} == KERNELS
    assert [row for row in rows if row["shared_bytes"] > limits[row["target"]]] == []
    models = tuple(shape.names for shape in SHAPES)
    spilling = [(row["kernel"], row["target"], where) for row in rows for where in row["spilling"]]
    assert [found for found in spilling if found[2].startswith(models)] == []


NVIDIA = """
        /*0000*/                   LDG.E.64 R2, desc[UR4][R2.64] ;
.L_x_1:
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/              @!P0 LDG.E.U16 R9, desc[UR4][R2.64] ;
        /*0030*/                   LDGSTS.E.BYPASS.128 [R61], desc[UR4][R56.64], P0 ;
        /*0040*/                   LDG.E R10, desc[UR4][R2.64] ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
        /*0060*/                   LDG.E.CONSTANT R2, desc[UR4][R2.64] ;
.L_x_2:
        /*0070*/                   BRA `(.L_x_2);
"""
AMD = """
	global_load_dword v1, v[2:3], off
.LBB0_1:
	buffer_load_dwordx4 v[4:7], v3, s[20:23], 0 offen
	buffer_load_ushort v8, v3, s[20:23], 0 offen
	global_load_short_d16_hi v8, v[2:3], off
	s_cbranch_scc1 .LBB0_1
"""


def test_loads_are_those_inside_of_loops():
    assert nvidia_loads(NVIDIA) == {2: 1, 4: 1, 16: 2}
    assert amd_loads(AMD) == {2: 2, 16: 1}


def test_without_loops_all_loads_count():
    straight = "\n".join(line for line in NVIDIA.splitlines() if "BRA" not in line)
    assert nvidia_loads(straight) == {2: 1, 4: 2, 8: 1, 16: 2}


def test_part_of_the_bytes_that_is_wide():
    assert MachineCode(1, 0, 0, {2: 4, 16: 1}).wide_share == 16 / 24
    assert MachineCode(1, 0, 0, {}).wide_share is None
