"""Which process says something, and how many share a machine."""

import pytest
import torch

from sparrow_trl import processes
from sparrow_trl.processes import is_main_process, local_world_size, warn


def test_a_single_process_is_the_main_one(recwarn):
    assert is_main_process()
    warn("something")
    (caught,) = recwarn
    assert str(caught.message) == "something" and caught.category is UserWarning


def test_a_warning_points_at_the_callers_caller(recwarn):
    def called():
        warn("something")

    called()
    assert recwarn[0].filename == __file__


def test_processes_on_this_machine(monkeypatch):
    for name in processes._LOCAL_WORLD_SIZE:
        monkeypatch.delenv(name, raising=False)
    assert local_world_size() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert local_world_size() == 8


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_warns(monkeypatch, recwarn, rank):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    assert is_main_process() == (rank == 0)
    warn("something")
    assert len(recwarn) == (rank == 0)
