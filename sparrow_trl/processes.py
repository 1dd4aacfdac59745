"""What this process knows of the others of the run."""

from __future__ import annotations

import os
import warnings

import torch


_LOCAL_WORLD_SIZE = (
    "LOCAL_WORLD_SIZE",
    "MPI_LOCALNRANKS",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)


def local_world_size() -> int:
    """Processes of the run on this machine, as the launcher has said (torchrun, `accelerate launch`, MPI)."""
    return next((int(os.environ[name]) for name in _LOCAL_WORLD_SIZE if os.environ.get(name, "").isdecimal()), 1)


def is_main_process() -> bool:
    """Whether this is the run's first process, or the only one."""
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized() and distributed.get_rank() > 0)


def warn(message: str, stacklevel: int = 2) -> None:
    """A `UserWarning` at the caller's `stacklevel`, as of `warnings.warn`, on the main process alone."""
    if is_main_process():
        warnings.warn(message, UserWarning, stacklevel=stacklevel + 1)
