"""What a compiled kernel is, read from its machine code: registers, spills, shared memory and the widths of its loads."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triton import knobs


# Bytes that a thread loads with one instruction from global memory, into registers or shared memory.
_NVIDIA_LOAD = re.compile(r"\b(?:LDG|LDGSTS)\.E((?:\.\w+)*)")
_NVIDIA_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
_AMD_LOAD = re.compile(r"\b(?:global|buffer|flat)_load_(\w+)")
_AMD_WIDTHS = {
    "ubyte": 1, "sbyte": 1, "ushort": 2, "sshort": 2, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16,
}  # fmt: skip


@dataclass(frozen=True)
class MachineCode:
    """
    Facts about one compiled kernel.

    Attributes:
        registers (`int`): of a thread; on AMD vector registers, those for matrices included.
        spills (`int`): loads and stores of registers that did not fit (NVIDIA), or such registers (AMD).
        shared_bytes (`int`): shared memory of a program.
        loads (`dict[int, int]`): instructions that load from global memory, by their bytes: those inside of loops, or all
            where no loop loads.
    """

    registers: int
    spills: int
    shared_bytes: int
    loads: dict[int, int] = field(default_factory=dict)

    @property
    def wide_share(self) -> float | None:
        """Part of the loaded bytes that come 16 or more at a time, `None` where nothing is loaded."""
        total = sum(width * count for width, count in self.loads.items())
        wide = sum(width * count for width, count in self.loads.items() if width >= 16)
        return wide / total if total else None


def read_machine_code(kernel: Any) -> MachineCode:
    """
    Read a kernel that Triton has compiled for an NVIDIA or AMD GPU, present or not.

    Args:
        kernel (`triton.compiler.CompiledKernel`): the kernel.
    """
    if "cubin" in kernel.asm:
        return _read_nvidia(kernel.asm["cubin"], kernel.metadata.shared)
    return _read_amd(kernel.asm["amdgcn"], kernel.metadata.shared)


def _read_nvidia(cubin: bytes, shared_bytes: int) -> MachineCode:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _run(knobs.nvidia.cuobjdump.path, "-res-usage", path)
        code = _run(knobs.nvidia.nvdisasm.path, "-c", path)
    [registers] = re.findall(r"REG:(\d+)", usage)
    return MachineCode(
        registers=int(registers),
        spills=len(re.findall(r"\b(?:LDL|STL)\b", code)),
        shared_bytes=shared_bytes,
        loads=nvidia_loads(code),
    )


def _run(*command: str | Path) -> str:
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout


def nvidia_loads(code: str) -> dict[int, int]:
    """Loads in what `nvdisasm -c` prints."""
    lines = code.splitlines()
    inside = _inside_loops(
        lines, label=re.compile(r"^(\.L\w+):"), branch=re.compile(r"\bBRA(?:\.\w+)*\b.*`\((\.L\w+)\)")
    )

    def width(line: str) -> int | None:
        if (match := _NVIDIA_LOAD.search(line)) is None:
            return None
        widths = [_NVIDIA_WIDTHS[part] for part in match[1].split(".") if part in _NVIDIA_WIDTHS]
        return widths[0] if widths else 4

    return _count(lines, inside, width)


def _read_amd(code: str, shared_bytes: int) -> MachineCode:
    def number(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s+(\d+)", code)[-1])

    return MachineCode(
        registers=number("vgpr_count"),
        spills=number("vgpr_spill_count") + number("private_segment_fixed_size"),
        shared_bytes=shared_bytes,
        loads=amd_loads(code),
    )


def amd_loads(code: str) -> dict[int, int]:
    """Loads in AMD's assembly."""
    lines = code.splitlines()
    inside = _inside_loops(
        lines, label=re.compile(r"^(\.LBB\w+):"), branch=re.compile(r"\bs_c?branch\w*\s+(\.LBB\w+)")
    )

    def width(line: str) -> int | None:
        match = _AMD_LOAD.search(line)
        return None if match is None else _AMD_WIDTHS[match[1].removesuffix("_d16_hi").removesuffix("_d16")]

    return _count(lines, inside, width)


def _count(lines: list[str], inside: set[int], width: Callable[[str], int | None]) -> dict[int, int]:
    """Loads by their width, of the lines inside of loops or else of all."""
    found = [(number in inside, bytes_loaded) for number, line in enumerate(lines) if (bytes_loaded := width(line))]
    some_in_loops = any(in_loop for in_loop, _ in found)
    counts = Counter(bytes_loaded for in_loop, bytes_loaded in found if in_loop or not some_in_loops)
    return dict(sorted(counts.items()))


def _inside_loops(lines: list[str], label: re.Pattern[str], branch: re.Pattern[str]) -> set[int]:
    """Numbers of the lines between a label and a branch back to it."""
    labels: dict[str, int] = {}
    inside: set[int] = set()
    for number, line in enumerate(lines):
        if match := label.search(line):
            labels[match[1]] = number
        elif (match := branch.search(line)) and match[1] in labels:
            inside.update(range(labels[match[1]], number + 1))
    return inside
