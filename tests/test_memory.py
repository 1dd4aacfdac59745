"""Memory that a rollout may take: the machine's, a container's, and a process's share of it."""

from types import SimpleNamespace

import pytest
import torch

from sparrow_trl import memory, processes
from sparrow_trl.memory import available_memory, free_memory


MACHINE = 1_000_000


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """A machine with 1 MB free; the test writes control groups into the folder, and the file of this process's."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=MACHINE))
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "OWN_CGROUPS", tmp_path / "self")
    for name in processes._LOCAL_WORLD_SIZE:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def v2(folder, limit, used, inactive=0):
    write(
        folder, memory__max=limit, memory__current=used, memory__stat=f"anon {used}\ninactive_file {inactive}\nfile 5"
    )


def test_without_control_groups_the_machine_counts(cgroups):
    assert available_memory() == MACHINE


def test_limit_of_a_container_v2(cgroups):
    (cgroups / "self").write_text("0::/\n")
    v2(cgroups / "cgroup", limit=400_000, used=150_000, inactive=30_000)
    assert available_memory() == 400_000 - 150_000 + 30_000


def test_the_tightest_group_of_the_path_counts(cgroups):
    (cgroups / "self").write_text("0::/user/job/step\n")
    v2(cgroups / "cgroup" / "user", limit="max", used=900_000)
    v2(cgroups / "cgroup" / "user" / "job", limit=300_000, used=290_000)
    v2(cgroups / "cgroup" / "user" / "job" / "step", limit=200_000, used=50_000)
    assert available_memory() == 10_000


def test_no_limit_and_a_limit_above_the_machine(cgroups):
    (cgroups / "self").write_text("0::/\n")
    v2(cgroups / "cgroup", limit="max", used=10)
    assert available_memory() == MACHINE
    v2(cgroups / "cgroup", limit=10 * MACHINE, used=10)
    assert available_memory() == MACHINE


def test_a_group_that_is_over_its_limit_leaves_nothing(cgroups):
    (cgroups / "self").write_text("0::/\n")
    v2(cgroups / "cgroup", limit=100, used=150)
    assert available_memory() == 0


def test_limit_of_a_container_v1(cgroups):
    """The path is the host's, and only its own group is mounted, at the root."""
    (cgroups / "self").write_text("11:cpu,cpuacct:/docker/1a2b\n5:memory:/docker/1a2b\n0::/docker/1a2b\n")
    write(
        cgroups / "cgroup" / "memory",
        memory__limit_in_bytes=500_000,
        memory__usage_in_bytes=200_000,
        memory__stat="inactive_file 1\ntotal_inactive_file 50000",
    )
    assert available_memory() == 500_000 - 200_000 + 50_000


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"])
def test_processes_of_a_machine_share_its_memory(cgroups, monkeypatch, name):
    assert free_memory(torch.device("cpu")) == MACHINE
    monkeypatch.setenv(name, "4")
    assert free_memory(torch.device("cpu")) == MACHINE // 4
    assert available_memory() == MACHINE
