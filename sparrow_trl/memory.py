"""How much memory a process may still take."""

from __future__ import annotations

from pathlib import Path

import torch

from .processes import local_world_size


CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def free_memory(device: torch.device) -> int:
    """
    Bytes that this process may still take on `device`. On a GPU, those that are free there. On a CPU, what is available
    of the machine's memory or of the limit of the control group (the container) that it runs in, whichever is less,
    divided among the processes of the run on this machine.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory() // local_world_size()


def available_memory() -> int:
    """Bytes of main memory that are available to all processes of this control group together."""
    import psutil

    available = psutil.virtual_memory().available
    limit = _cgroup_available()
    return available if limit is None else min(available, limit)


def _cgroup_available() -> int | None:
    """What the tightest of the control groups around this process leaves; `None` where none has a limit."""
    if not OWN_CGROUPS.is_file():
        return None
    left = []
    for line in OWN_CGROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = CGROUPS / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be that of the host, of which only the root is mounted.
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(root) and (found := _left(group, *names)) is not None:
                left.append(found)
    return min(left, default=None)


def _left(group: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> int | None:
    """Limit less usage of one control group, where what the file cache holds and can give back does not count."""
    try:
        limit, usage = (group / limit_name).read_text().strip(), int((group / usage_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None  # not a group with the memory controller
    if not limit.isdecimal():  # "max"
        return None
    return max(0, int(limit) - usage + int(stat.get(reclaimable_name, 0)))
