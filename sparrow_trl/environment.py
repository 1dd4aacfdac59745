"""What a result depends on beside the code: versions of packages, and the machine."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    import torch


DISTRIBUTION = "sparrow-trl"


@dataclass(frozen=True)
class Requirement:
    """A package that this one wants, and the one that is there."""

    name: str
    wanted: str  # version specifier, "" for any
    extra: str | None  # the extra that asks for it, `None` where it is always needed
    installed: str | None

    @property
    def is_met(self) -> bool:
        """Whether a fitting version is installed; a package of an extra may be missing."""
        from packaging.specifiers import SpecifierSet

        if self.installed is None:
            return self.extra is not None
        return SpecifierSet(self.wanted).contains(self.installed, prereleases=True)


def requirements() -> list[Requirement]:
    """
    What the metadata of the installed distribution asks for, extras last. A package is listed once, and the extras that
    only serve the development of this one are left out.

    Raises:
        `PackageNotFoundError`: sparrow-trl runs from a folder in which it was never installed.
    """
    from packaging.requirements import Requirement as Parsed

    found: dict[str, Requirement] = {}
    for line in requires(DISTRIBUTION) or ():
        parsed = Parsed(line)
        extra = _extra(parsed.marker)
        if extra in ("dev", "docs") or parsed.name in found:
            continue
        if parsed.marker is not None and not parsed.marker.evaluate({"extra": extra or ""}):
            continue
        found[parsed.name] = Requirement(parsed.name, str(parsed.specifier), extra, installed_version(parsed.name))
    return list(found.values())


def _extra(marker: Any) -> str | None:
    """The extra that a marker names."""
    if marker is None:
        return None
    _, equals, name = str(marker).partition('extra == "')
    return name.partition('"')[0] if equals else None


def installed_version(name: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Python and the packages that a measurement depends on, as far as they are installed."""
    names = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "triton", "numpy")
    installed = {name: installed_version(name) for name in (DISTRIBUTION, *names)}
    return {"python": platform.python_version(), **{name: text for name, text in installed.items() if text}}


def hardware() -> dict[str, Any]:
    """Processor, usable cores, threads of PyTorch, memory in bytes, and GPUs."""
    import psutil
    import torch

    from .memory import available_memory

    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": properties.name,
                "memory": properties.total_memory,
                "capability": f"{properties.major}.{properties.minor}",
            }
        )
    return {
        "cpu": _cpu_name(),
        "architecture": platform.machine(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "memory": psutil.virtual_memory().total,
        "memory_available": available_memory(),
        "gpus": gpus,
        "system": platform.system(),
    }


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def find_device(name: str | None) -> torch.device:
    """
    The device of an option `--device`; by default the GPU if there is one, else the CPU.

    Raises:
        ValueError: there is no such device.
    """
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"--device {name!r} cannot be used here: {reason}") from error
    return device
