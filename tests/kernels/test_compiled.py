"""The kernels, compiled for GPUs that are not there: registers, shared memory and loads of their machine code."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "kernels" / "benchmarks" / "report.py"
PAGE = ROOT / "docs" / "_generated" / "kernels.md"
TARGETS = ("sm_86", "sm_90", "gfx942")
# What reads keys, values, landmarks or logits; the others read lists, bits or a few numbers.
STREAMING = {
    "paged_attention_kernel",
    "score_pages_kernel",
    "teacher_forced_forward_kernel",
    "token_logprobs_split_kernel",
}
sys.path.insert(0, str(REPORT.parent))


@pytest.fixture(scope="module")
def rows():
    """The report of one model's shapes."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(REPORT), "--json", "--shape", "Qwen3-1.7B", "--target", *TARGETS]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.stdout, run.stderr
    return json.loads(run.stdout)


@pytest.mark.slow
def test_no_kernel_spills_registers(rows):
    assert [(row["kernel"], row["target"], row["spilling"]) for row in rows if row["spills"]] == []


@pytest.mark.slow
def test_shared_memory_is_within_the_limit_of_the_chip(rows):
    limits = {"sm_86": 99 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}
    assert {row["target"] for row in rows} == set(limits)
    assert [row for row in rows if row["shared_bytes"] > limits[row["target"]]] == []


@pytest.mark.slow
def test_large_reads_are_128_bits_wide(rows):
    """Nearly all bytes: masks and page numbers are read between them."""
    found = {(row["kernel"], row["target"]): row["wide_share"] for row in rows if row["kernel"] in STREAMING}
    assert {kernel for kernel, _ in found} == STREAMING
    assert {key: share for key, share in found.items() if share < 0.75} == {}


@pytest.mark.slow
def test_page_of_the_docs_lists_the_kernels(rows):
    text = PAGE.read_text()
    for target in TARGETS:
        [section] = re.findall(rf"### {target}\n(.*?)(?:\n### |\Z)", text, re.DOTALL)
        assert set(re.findall(r"`(\w+)`", section)) == {row["kernel"] for row in rows if row["target"] == target}


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
    from machine_code import amd_loads, nvidia_loads

    assert nvidia_loads(NVIDIA) == {2: 1, 4: 1, 16: 2}
    assert amd_loads(AMD) == {2: 2, 16: 1}


def test_without_loops_all_loads_count():
    from machine_code import nvidia_loads

    straight = "\n".join(line for line in NVIDIA.splitlines() if "BRA" not in line)
    assert nvidia_loads(straight) == {2: 1, 4: 2, 8: 1, 16: 2}


def test_part_of_the_bytes_that_is_wide():
    from machine_code import MachineCode

    assert MachineCode(1, 0, 0, {2: 4, 16: 1}).wide_share == 16 / 24
    assert MachineCode(1, 0, 0, {}).wide_share is None
