"""CUDA graphs: a decode step is recorded once and replayed, without the cost of launching its parts one by one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from transformers.utils import logging


logger = logging.get_logger(__name__)


class GraphedStep:
    """
    Calls `step`. On a CUDA device its first call runs as it is, which compiles kernels and allocates what they need; the
    second one is recorded, and replayed from then on. Where recording fails (a forward that looks at a value), every
    call runs as it is, with one warning.

    Args:
        step (`Callable[[], None]`): works on tensors with fixed addresses, and keeps no result but in them.
        device (`torch.device`): where.
        memory_pool: what `torch.cuda.graph_pool_handle()` returns, shared by graphs that never run at the same time.
        records (`bool`, *optional*, defaults to `True`): whether to try.
    """

    def __init__(self, step: Callable[[], None], device: torch.device, memory_pool=None, records: bool = True):
        self.step, self.device, self.memory_pool = step, device, memory_pool
        self.graph: torch.cuda.CUDAGraph | None = None
        self._is_warm = False
        self._records = records and device.type == "cuda"

    @property
    def has_failed(self) -> bool:
        """Whether it could not be recorded."""
        return self._is_warm and not self._records

    def __call__(self) -> None:
        if self._records and self._is_warm and self.graph is None:
            self.graph = self._record()
            self._records = self.graph is not None
        if self.graph is not None:
            self.graph.replay()
        else:
            self._is_warm = True
            self.step()

    def _record(self) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self.device)
        try:
            # Other threads (data loaders) may use CUDA meanwhile. Nothing runs while it is recorded.
            with (
                torch.cuda.device(self.device),
                torch.cuda.graph(graph, pool=self.memory_pool, capture_error_mode="thread_local"),
            ):
                self.step()
        except torch.OutOfMemoryError:
            self._abandon(stream)
            raise
        except Exception as error:  # whatever a model's forward does that a graph cannot hold
            self._abandon(stream)
            lines = str(error).strip().splitlines()
            logger.warning_once(
                f"The decode step could not be recorded as a CUDA graph ({type(error).__name__}: "
                f"{lines[0] if lines else 'no message'}); its parts are launched one by one, which is slower."
            )
            return None
        return graph

    def _abandon(self, stream: torch.cuda.Stream) -> None:
        """
        Leave a recording that failed: where it cannot be ended, `torch.cuda.graph` keeps its own stream as the current
        one, and before PyTorch 2.13 the allocator goes on allocating for the graph, which the next `empty_cache` refuses.
        """
        torch.cuda.set_stream(stream)
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end is not None and self.memory_pool is not None:
            with suppress(RuntimeError):  # it has ended
                end(self.device.index or 0, self.memory_pool)
