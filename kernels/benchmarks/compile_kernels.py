"""
Compile what the ops would launch, for GPUs that need not be there.

[`record_launches`] catches the launches of an op called on `meta` tensors, with the very arguments and options it would
use; [`compile_launch`] compiles one for a target, specialised as Triton's launcher would. Not in the interpreter:
`TRITON_INTERPRET` must be unset.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparrow_kernels import checks


TARGETS = {
    "sm_75": GPUTarget("cuda", 75, 32),
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


@dataclass
class Launch:
    """A launch that an op asked for."""

    kernel: triton.runtime.JITFunction
    grid: tuple[int, ...]
    arguments: dict  # by name, constexprs included
    options: dict  # num_warps, num_stages

    @property
    def name(self) -> str:
        return self.kernel.__name__


@contextmanager
def record_launches(capability: int | None = 90) -> Iterator[list[Launch]]:
    """Ops called inside launch nothing; the list holds what they would have launched on a GPU of that compute capability
    (`None`: an AMD one)."""
    launches: list[Launch] = []
    original, original_capability = triton.runtime.JITFunction.run, checks.compute_capability

    def run(self, *args, grid, warmup, **kwargs):
        names = self.arg_names
        arguments = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
        options = {k: v for k, v in kwargs.items() if k not in names}
        launches.append(Launch(self, grid, arguments, options))

    triton.runtime.JITFunction.run = run
    checks.compute_capability = lambda device: capability
    try:
        yield launches
    finally:
        triton.runtime.JITFunction.run = original
        checks.compute_capability = original_capability


def source(launch: Launch) -> ASTSource:
    """The launch's kernel, specialised: pointers are aligned to 16 bytes, so are integers that are multiples of 16, and
    an integer of 1 is a constant."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or (special and isinstance(value, int) and value == 1):
            signature[name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if special and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def compile_launch(launch: Launch, target: GPUTarget) -> triton.compiler.CompiledKernel:
    """The compiled kernel of a launch."""
    return triton.compile(source(launch), target=target, options=dict(launch.options))


@dataclass
class Machine:
    """What the machine code of a kernel says."""

    registers: int  # of a thread
    spills: int  # bytes of a thread
    shared: int  # bytes of a program
    global_loads: dict[int, int]  # load instructions of each width in bits, asynchronous copies included

    @property
    def widest_share(self) -> float:
        """Share of the load instructions that are 128 bits wide."""
        return self.global_loads.get(128, 0) / max(1, sum(self.global_loads.values()))


def inspect(compiled: triton.compiler.CompiledKernel) -> Machine:
    """Read registers, spills and the widths of loads from the machine code for NVIDIA or AMD."""
    if "cubin" in compiled.asm:
        return _inspect_cubin(compiled)
    text = compiled.asm["amdgcn"]
    widths = {"dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128, "ushort": 16, "ubyte": 8, "short_d16": 16}
    loads: dict[int, int] = {}
    for name in re.findall(r"(?:global|buffer)_load_([a-z0-9_]+)", text):
        width = widths.get(name, widths.get(name.removesuffix("_hi"), 32))
        loads[width] = loads.get(width, 0) + 1
    registers = int(_first(r"\.vgpr_count:\s*(\d+)", text))
    return Machine(registers, 4 * int(_first(r"\.vgpr_spill_count:\s*(\d+)", text)), compiled.metadata.shared, loads)


@cache
def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _inspect_cubin(compiled: triton.compiler.CompiledKernel) -> Machine:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([_tool("cuobjdump"), "-res-usage", file.name], capture_output=True, text=True).stdout
        code = subprocess.run([_tool("nvdisasm"), "-c", file.name], capture_output=True, text=True).stdout
    loads: dict[int, int] = {}
    for suffixes in re.findall(r"\b(?:LDGSTS|LDG)((?:\.[A-Z0-9]+)*)", code):
        width = next((int(part) for part in suffixes.split(".") if part in ("64", "128")), 32)
        width = 16 if ".U16" in suffixes else width
        loads[width] = loads.get(width, 0) + 1
    spills = len(re.findall(r"\b(?:STL|LDL)\b", code))
    return Machine(int(_first(r"REG:(\d+)", usage)), spills, compiled.metadata.shared, loads)


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found.group(1) if found else "0"
