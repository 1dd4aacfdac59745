"""
Everything that needs a GPU, in one run of at most eight minutes: `make gpu-check`.

All tests of the kernels and of the engine on the device, then the measurements; the results as JSON, with device, driver and
versions. It needs one GPU and no network, and takes random weights. Every part runs in a process of its own with a limit
of time, so that one that fails or hangs costs only itself; what was not measured says so.

    python kernels/benchmarks/gpu_check.py --json gpu.json
    python kernels/benchmarks/gpu_check.py --device cpu --tiny      # proves the script, without a GPU
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT, ROOT / "kernels" / "torch-ext", ROOT / "kernels" / "benchmarks", ROOT / "tests")
sys.path[:0] = [str(folder) for folder in FOLDERS if str(folder) not in sys.path]

WRONG = 3  # exit status of `gpu_measure.py`
TESTS = {
    "kernel tests": (["tests/kernels", "-m", "not slow"], 130),
    "engine tests": (["tests/rollout/test_on_a_gpu.py", "tests/rollout/test_engine_device.py"], 80),
}
MOST_TEST_PROCESSES = 12  # each compiles its kernels, and has a CUDA context
TINY_TESTS = {
    "kernel tests": (["tests/kernels/test_store_kv.py", "-k", "empty or padding"], 110),
    "engine tests": (["tests/rollout/test_engine_device.py", "-k", "llama"], 110),
}
MEASUREMENTS = {"attention": 40, "launch gaps": 60, "decode step": 130, "continuous batching": 60, "end to end": 100}
TARGETS = {
    "dense paged attention, part of the copy bandwidth": 0.85,
    "sparse attention with scoring and selection, part of the copy bandwidth": 0.70,
    "decode step, sparse against dense": 2.5,
    "dense decode step, against continuous batching": 1.0,
    "end to end, against continuous batching": 2.0,
    "launch gaps, part of a decode step": 0.05,
}


@dataclass
class Part:
    """How one process ended: `status` is `ok`, `failed`, `wrong` (a result that was checked), `out of time`, `skipped`."""

    name: str
    status: str
    seconds: float
    detail: str = ""


def run_part(name: str, command: list[str], limit: float, environment: dict[str, str]) -> tuple[Part, str]:
    """Run a command for at most `limit` seconds; returns how it ended, and what it printed."""
    if limit < 5:
        return Part(name, "skipped", 0.0, "no time was left"), ""
    started = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with what it has started: it would disturb the next part
        output, _ = process.communicate()
        return Part(name, "out of time", time.perf_counter() - started, f"stopped after {limit:.0f} s"), output
    status = {0: "ok", WRONG: "wrong"}.get(process.returncode, "failed")
    lines = [line for line in output.splitlines() if line.strip()]
    detail = lines[-1][:300] if lines and (status != "ok" or name in TESTS) else ""
    return Part(name, status, time.perf_counter() - started, detail), output


def run(device: str, tiny: bool, limit: float) -> dict[str, Any]:
    """Run all parts."""
    deadline = time.perf_counter() + limit
    parts: list[Part] = []
    values: dict[str, dict[str, Any]] = {}
    outputs: dict[str, str] = {}
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, FOLDERS)),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name, (arguments, own_limit) in (TINY_TESTS if tiny else TESTS).items():
        command = [sys.executable, "-m", "pytest", "-q", "--maxfail=20", "-p", "no:cacheprovider", *arguments]
        if not tiny and find_spec("xdist") is not None:
            command += ["-n", str(min(MOST_TEST_PROCESSES, os.cpu_count() or 1))]
        part, outputs[name] = run_part(name, command, min(own_limit, deadline - time.perf_counter()), environment)
        report(part)
        parts.append(part)
    for name, own_limit in MEASUREMENTS.items():
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [
                sys.executable,
                str(Path(__file__).with_name("gpu_measure.py")),
                name,
                file.name,
                "--device",
                device,
            ]
            command += ["--tiny"] if tiny else []
            remaining = min(own_limit, deadline - time.perf_counter())
            command += ["--seconds", f"{max(remaining - 10, 1):.0f}"]
            part, outputs[name] = run_part(name, command, remaining, environment)
            # What it had measured before it ran out of time counts.
            text = Path(file.name).read_text()
        values |= json.loads(text) if text else {}
        report(part)
        parts.append(part)
    measures = []
    for name, target in TARGETS.items():
        found = values.get(name)
        measures.append({"measure": name, "target": target, **(found or {"value": None, "note": "not measured"})})
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "tiny": tiny,
        "seconds": limit - (deadline - time.perf_counter()),
        **describe_machine(device),
        "parts": [asdict(part) for part in parts],
        "measures": measures,
        "output": {name: text[-4000:] for name, text in outputs.items() if _status(parts, name) != "ok"},
    }


def _status(parts: list[Part], name: str) -> str:
    return next(part.status for part in parts if part.name == name)


def report(part: Part) -> None:
    """Say on the error stream how a part ended."""
    print(f"{part.name}: {part.status} ({part.seconds:.0f} s) {part.detail}", file=sys.stderr, flush=True)


def describe_machine(device: str) -> dict[str, Any]:
    """Device, driver and versions."""
    import torch

    from sparrow_trl.environment import versions

    machine: dict[str, Any] = {"device": device, "driver": None, "versions": versions()}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        machine["device"] = properties.name
        machine["memory"] = properties.total_memory
        machine["capability"] = f"{properties.major}.{properties.minor}"
        machine["cuda"] = torch.version.cuda or torch.version.hip
        machine["driver"] = _driver()
    return machine


def _driver() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def to_markdown(results: dict[str, Any]) -> str:
    """The table of the measurements; what was not measured says so."""
    lines = [
        f"{results['device']}, driver {results['driver'] or '-'}, "
        + ", ".join(f"{name} {version}" for name, version in results["versions"].items()),
        "",
        "| measure | found | target | |",
        "|---|---|---|---|",
    ]
    for row in results["measures"]:
        found = "not measured" if row["value"] is None else f"{row['value']:.3g}"
        below = "gaps" in row["measure"]
        lines.append(
            f"| {row['measure']} | {found} | {'<=' if below else '>='} {row['target']:g} | {row.get('note', '')} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Tests and measurements that need a GPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to prove the script")
    parser.add_argument("--limit", type=float, default=480, metavar="SECONDS", help="for all parts (default: 480)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the results")
    args = parser.parse_args()
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error("there is no CUDA device; --device cpu --tiny proves the script without one")
    results = run(args.device, args.tiny, args.limit)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(to_markdown(results))
    # A measurement may not be available: of continuous batching, for one. A test may not fail.
    return any(
        part["status"] == "wrong" or (part["status"] != "ok" and part["name"] in TESTS) for part in results["parts"]
    )


if __name__ == "__main__":
    raise SystemExit(main())
