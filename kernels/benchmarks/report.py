"""
Compile every Triton kernel for GPUs that need not be there, and say what its machine code is and how many bytes it reads:
`make kernels-report`.

    python kernels/benchmarks/report.py --write docs/_generated/kernels.md

Triton keeps what it has compiled: a run that was stopped goes on where it was, and `--target sm_80` alone, then another,
prepares the whole report in pieces.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "kernels" / "torch-ext" / "sparrow_kernels"
sys.path[:0] = [str(SOURCES.parent), str(Path(__file__).parent)]
if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported

from launches import OPS, SHAPES, TARGETS, Shape, Target, compiled_launches, sample_cases  # noqa: E402
from machine_code import MachineCode, read_machine_code  # noqa: E402


@dataclass(frozen=True)
class Variant:
    """One compiled form of a kernel, and the models in whose launches it came first."""

    code: MachineCode
    shape: str
    options: str


@dataclass(frozen=True)
class Row:
    """One kernel on one GPU: the largest of everything over the shapes."""

    op: str
    kernel: str
    target: Target
    variants: int
    registers: int
    spills: int
    spilling: tuple[str, ...]
    shared_bytes: int
    wide_share: float | None
    loads: str


def compile_all(cases: Iterable[tuple[Callable, Target, Shape]]) -> dict[tuple[str, str, Target], list[Variant]]:
    """
    Compile the launches of each op for a GPU at a shape.

    Returns:
        By op, kernel and GPU, its different variants.
    """
    found: dict[tuple[str, str, Target], dict[bytes | str, Variant]] = defaultdict(dict)
    for op, target, shape in cases:
        with compiled_launches(target) as kernels:
            for dtype in (shape.dtype,) if shape.dtype else target.dtypes:
                op(shape, dtype)
        for kernel in kernels:
            code = kernel.asm["cubin" if "cubin" in kernel.asm else "amdgcn"]
            variants = found[op.__name__, kernel.metadata.name, target]
            if code not in variants:
                options = f"{kernel.metadata.num_warps} warps, {kernel.metadata.num_stages} stages"
                variants[code] = Variant(read_machine_code(kernel), shape.names, options)
    return {key: list(variants.values()) for key, variants in found.items()}


def summarise(found: dict[tuple[str, str, Target], list[Variant]]) -> list[Row]:
    """The worst of the variants of each kernel."""
    rows = []
    for (op, kernel, target), variants in found.items():
        codes = [variant.code for variant in variants]
        loading = [code for code in codes if code.wide_share is not None]
        narrowest = min(loading, key=lambda code: code.wide_share or 0.0, default=None)
        loads = {} if narrowest is None else narrowest.loads
        rows.append(
            Row(
                op=op,
                kernel=kernel,
                target=target,
                variants=len(variants),
                registers=max(code.registers for code in codes),
                spills=max(code.spills for code in codes),
                spilling=tuple(f"{v.shape} ({v.code.spills}; {v.options})" for v in variants if v.code.spills),
                shared_bytes=max(code.shared_bytes for code in codes),
                wide_share=None if narrowest is None else narrowest.wide_share,
                loads=", ".join(f"{count} x {8 * width}" for width, count in loads.items()),
            )
        )
    return rows


def count_bytes(shapes: Iterable[Shape]) -> list[dict[str, Any]]:
    """What `bytes_read.py` prints for the shapes."""
    command = [sys.executable, str(Path(__file__).with_name("bytes_read.py")), "--shape"]
    run = subprocess.run([*command, *(shape.names for shape in shapes)], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(run.stdout)


def source_digest() -> str:
    """Of what the machine code depends on: the kernels and their launches, without docstrings and comments."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "@triton.jit" in text or path.name == "launch.py":
            lines = text.splitlines()
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(node):
                    for number in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1):
                        lines[number - 1] = ""
            kept = (line.strip() for line in lines)
            digest.update("\n".join(line for line in kept if line and not line.startswith("#")).encode())
    return digest.hexdigest()[:16]


def to_markdown(rows: list[Row], readings: list[dict[str, Any]]) -> str:
    """The report."""
    shapes = "; ".join(shape.names for shape in SHAPES)
    lines = [
        "Written by `make kernels-report`. Every Triton kernel is compiled with the options, the shapes and the alignment of",
        f"its launches, for {shapes}: pages of 16 tokens, a context of",
        "32,768, a batch of 32. What stands here is read from the machine code, and is the largest of a kernel's variants. No GPU",
        "was asked.",
        "",
        f"Triton {version('triton')}, sources {source_digest()}.",
        "",
        "- **spills**: instructions that move registers to memory and back (NVIDIA), registers that lie in memory (AMD).",
        "- **shared**: shared memory of a program. sm_86 and sm_120 have 99 KiB of it, as consumer GPUs do.",
        "- **wide**: part of the bytes that are loaded from global memory with instructions of 128 bits, in the variant where it is",
        "  the smallest, and its loads by their bits: those in loops, or all where no loop loads.",
    ]
    for target in dict.fromkeys(row.target for row in rows):
        limit = target.shared_bytes >> 10
        lines += [
            "",
            f"### {target.name}",
            "",
            f"In {' and '.join(str(dtype).removeprefix('torch.') for dtype in target.dtypes)}.",
            "",
            f"| op | kernel | variants | registers | spills | shared (of {limit} KiB) | wide | loads |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            if row.target is target:
                wide = "-" if row.wide_share is None else f"{row.wide_share:.0%}"
                lines.append(
                    f"| {row.op} | `{row.kernel}` | {row.variants} | {row.registers} | {row.spills} | "
                    f"{row.shared_bytes / 1024:.1f} | {wide} | {row.loads or '-'} |"
                )
    lines += [
        "",
        "### Bytes read",
        "",
        "Counted in Triton's interpreter, in bfloat16 and for two KV heads: a decode step of two sequences with 2,003 and 4,096",
        "tokens that score their pages and keep 29 and 61, a forward of two packed sequences with 300 and 217, two rows of",
        "float32 logits with the 20 most likely tokens. What caches save does not count. The least is every number that the",
        "result depends on, once; in teacher forcing once for each block of queries.",
        "",
        "| op | kernel | shape | bytes read | least | ratio |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {reading['op']} | `{reading['kernel']}` | {reading['shape']} | {reading['read']:,} | {reading['least']:,} | "
        f"{reading['read'] / reading['least']:.3f} |"
        for reading in readings
    ]
    return "\n".join(lines) + "\n"


def problems(rows: list[Row], readings: list[dict[str, Any]]) -> list[str]:
    """What would make a kernel slow or not start, in words."""
    found = []
    for row in rows:
        where = f"{row.kernel} on {row.target.name}"
        if row.spills:
            found.append(f"{where} spills at {', '.join(row.spilling)}.")
        if row.shared_bytes > row.target.shared_bytes:
            found.append(f"{where} needs {row.shared_bytes} bytes of shared memory, of {row.target.shared_bytes}.")
    for reading in readings:
        limit = 1.1 if reading["op"] in ("select_pages", "store_kv") else 1.05
        if reading["read"] > limit * reading["least"]:
            found.append(
                f"{reading['op']} reads {reading['read']} bytes of {reading['shape']}, least {reading['least']}."
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the Triton kernels and report their machine code.")
    parser.add_argument("--write", type=Path, metavar="FILE", help="where to write the report (default: print it)")
    parser.add_argument("--op", nargs="+", choices=[op.__name__ for op in OPS], help="of these ops alone")
    parser.add_argument("--target", nargs="+", choices=[target.name for target in TARGETS], help="for these alone")
    parser.add_argument("--shape", nargs="+", choices=[shape.names for shape in SHAPES], help="of these models alone")
    parser.add_argument("--sample", action="store_true", help="instead of models, a sample of other shapes")
    parser.add_argument("--json", action="store_true", help="print what was compiled as JSON instead")
    args = parser.parse_args()
    ops = [op for op in OPS if args.op is None or op.__name__ in args.op]
    targets = [target for target in TARGETS if args.target is None or target.name in args.target]
    shapes = [shape for shape in SHAPES if args.shape is None or shape.names in args.shape]
    cases = sample_cases() if args.sample else itertools.product(ops, targets, shapes)
    rows = summarise(
        compile_all((op, target, shape) for op, target, shape in cases if op in ops and target in targets)
    )
    readings = [] if args.json else count_bytes(shapes)
    text = to_markdown(rows, readings)
    if args.json:
        json.dump([{**vars(row), "target": row.target.name} for row in rows], sys.stdout)
    elif args.write is None:
        sys.stdout.write(text)
    else:
        args.write.write_text(text, encoding="utf-8")
    found = problems(rows, readings)
    for problem in found:
        print(problem, file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
