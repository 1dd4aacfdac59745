"""
The attention processor: one function, registered with transformers under the name `"sparrow"`.

Models hand their queries, keys and values to it in every attention layer, and pass on the keyword argument `sparrow`
of their `forward`. That argument carries the state: [`~sparrow_trl.rollout.step.PagedStep`] while decoding,
[`TeacherForced`] for a whole sequence in one differentiable forward. No model-specific code is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Protocol, cast

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import logging

from sparrow_kernels import torch_ops

from .sparsity import SparsitySchedule


logger = logging.get_logger(__name__)

ATTENTION_NAME = "sparrow"


class AttentionState(Protocol):
    """What the keyword argument `sparrow` of a model's forward has to offer."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """
        Attention of one layer over the tokens of this forward.

        Args:
            layer (`int`): index of the layer.
            query (`torch.Tensor`): `(num_tokens, num_heads, head_dim)`, after the rotary embedding.
            key, value (`torch.Tensor`): `(num_tokens, num_kv_heads, head_dim)`.

        Returns:
            `torch.Tensor`: `(num_tokens, num_heads, head_dim)`.
        """
        ...


def sparrow_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sparrow: AttentionState | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """
    See [`~transformers.AttentionInterface`]. The tokens of all sequences lie one after the other in one row:
    `query` is `(1, num_heads, num_tokens, head_dim)`, the result `(1, num_tokens, num_heads, head_dim)`.

    Raises:
        ValueError: without the `sparrow` argument, or with attention sinks or a position bias, which sparse
            attention does not know.
    """
    if sparrow is None:
        raise ValueError(
            "The attention implementation 'sparrow' works only inside a rollout: the model's forward did not receive "
            "the keyword argument `sparrow`. Set another `attn_implementation` (for example 'sdpa') on the model."
        )
    for name, argument in (("attention sinks (`s_aux`)", s_aux), ("a position bias", position_bias)):
        if argument is not None:
            raise ValueError(f"{type(module).__name__} uses {name}, which sparse rollouts do not support.")
    if query.shape[0] != 1:
        raise ValueError(f"'sparrow' attention expects one row of packed tokens, got a batch of {query.shape[0]}.")
    out = sparrow.attend(
        cast(int, module.layer_idx),
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    return out[None], None


_mask_windows: ContextVar[set[int | None] | None] = ContextVar("mask_windows", default=None)


def no_mask(*args, local_size: int | None = None, **kwargs) -> None:
    """The mask function of `"sparrow"`: what a query sees is up to the attention state."""
    if (windows := _mask_windows.get()) is not None:
        windows.add(local_size)


@contextmanager
def recorded_mask_windows() -> Iterator[set[int | None]]:
    """The sliding windows (`None`: the whole past) of the masks that a model asks for meanwhile."""
    windows: set[int | None] = set()
    token = _mask_windows.set(windows)
    try:
        yield windows
    finally:
        _mask_windows.reset(token)


AttentionInterface.register(ATTENTION_NAME, sparrow_attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, no_mask)


TEACHER_FORCED_BACKENDS = ("auto", "torch", "triton")


@dataclass
class TeacherForced:
    """
    Attention state that scores whole sequences, packed one after the other in a single forward, with the attention that
    decoding them would have used: prompts dense, completions sparse by the schedule. Differentiable.

    Args:
        schedule (`SparsitySchedule`): the schedule that decoded the completions.
        lengths (`list[int]`): tokens of each sequence, prompt and completion.
        prompt_lengths (`list[int]`): how many of them are the prompt.
        backend (`str`, *optional*, defaults to `"auto"`): `"triton"`, `"torch"`, or `"auto"`: Triton for CUDA tensors
            where it is installed and knows the shapes. Under autocast Triton computes in the autocast dtype, as PyTorch
            does.
    """

    schedule: SparsitySchedule
    lengths: list[int]
    prompt_lengths: list[int]
    backend: str = "auto"
    _packed: dict[torch.device, tuple[torch.Tensor, ...]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self):
        if self.backend not in TEACHER_FORCED_BACKENDS:
            raise ValueError(f"backend={self.backend!r} is not one of {', '.join(TEACHER_FORCED_BACKENDS)}.")

    def attend(self, layer, query, key, value, *, scaling, sliding_window, softcap):
        exact = self.schedule.is_dense or layer in self.schedule.dense_layers or sliding_window is not None
        options = {
            "page_size": self.schedule.page_size,
            "sink_pages": self.schedule.sink_pages,
            "recent_pages": self.schedule.recent_pages,
            "scaling": scaling,
            "sliding_window": sliding_window,
            "softcap": softcap,
        }
        if self._uses_triton(query, key, value):
            return self._attend_triton(query, key, value, exact, options)
        outputs, start = [], 0
        for length, prompt_length in zip(self.lengths, self.prompt_lengths, strict=True):
            rows = slice(start, start + length)
            budgets = None
            if not exact:
                budgets = self.schedule.budgets_at(torch.arange(length, device=query.device))
            outputs.append(
                torch_ops.teacher_forced_attention(
                    query[rows], key[rows], value[rows], prompt_length, budgets, **options
                )
            )
            start += length
        return torch.cat(outputs)

    def _uses_triton(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
        if self.backend != "auto" or query.device.type != "cuda":
            return self.backend == "triton"
        reason = "Triton is not installed"
        if find_spec("triton") is not None:
            from sparrow_kernels import teacher_forced

            found = teacher_forced.why_unsupported(query, key, value, self.schedule.page_size)
            if found is None:
                return True
            reason = found
        logger.warning_once(f"Teacher-forced attention runs on PyTorch operations, which is slower: {reason}.")
        return False

    def _attend_triton(self, query, key, value, exact: bool, options: dict) -> torch.Tensor:
        from sparrow_kernels import teacher_forced

        device = query.device
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if device not in self._packed:
            positions = torch.cat([torch.arange(length) for length in self.lengths]).to(device)
            ends = torch.tensor([0, *self.lengths]).cumsum(0)
            self._packed[device] = (
                ends.to(device, torch.int32),
                torch.tensor(self.prompt_lengths).to(device, torch.int32),
                self.schedule.budgets_at(positions).to(torch.int32),
            )
        cu_seqlens, prompt_lengths, budgets = self._packed[device]
        return teacher_forced.teacher_forced_attention(
            query,
            key,
            value,
            cu_seqlens,
            prompt_lengths,
            None if exact else budgets,
            max_seqlen=max(self.lengths),
            **options,
        )
