"""Which models sparse rollouts support: known misfits are refused by name, all others are tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..attention import recorded_mask_windows
from ..sparsity import SparsitySchedule
from .cache import PageAllocator, PagedKVCache, PageTable
from .isolation import rollout_mode
from .runner import ModelRunner
from .step import Piece


if TYPE_CHECKING:
    from peft import PeftConfig


logger = logging.get_logger(__name__)

PROBE_LENGTH = 40  # tokens of the probe, more where a sliding window is short enough to be crossed
PROBE_PAGE_SIZE = 16
PROBE_DECODED = 6  # of them decoded one by one
LONGEST_PROBED_WINDOW = 512
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}

KNOWN_LAYERS = {"full_attention", "sliding_attention"}
WITHOUT_SPARSITY = "Set `sparse_schedule=None` to train without sparse rollouts, as TRL does."


class UnsupportedModelError(ValueError):
    """The model cannot be run with sparse paged attention."""


def check_model_config(model_or_config: PreTrainedModel | PretrainedConfig) -> None:
    """
    Refuse models whose config says that paged attention would run them wrongly, before anything is loaded or run.

    Raises:
        UnsupportedModelError: names the model type and the reason.
    """
    config = getattr(model_or_config, "config", model_or_config)
    if isinstance(config, dict):  # PEFT exposes the config of models that are not PreTrainedModel as a dict
        return
    text_config = config.get_text_config()

    def refuse(reason: str):
        raise UnsupportedModelError(
            f"Sparse rollouts do not support '{config.model_type}' models: {reason}. {WITHOUT_SPARSITY}"
        )

    if config.is_encoder_decoder:
        refuse("it is an encoder-decoder model")
    if getattr(config, "vision_config", None) is not None or getattr(config, "audio_config", None) is not None:
        refuse("it takes images or audio; load its text model alone")
    if getattr(text_config, "kv_lora_rank", None):
        refuse(f"it uses multi-head latent attention (kv_lora_rank={text_config.kv_lora_rank})")
    unknown = sorted(set(getattr(text_config, "layer_types", None) or ()) - KNOWN_LAYERS)
    if unknown:
        refuse(f"its layers include {', '.join(unknown)}, and only full and sliding attention have paged forms")
    peft_configs = getattr(model_or_config, "peft_config", None)
    for name, peft_config in (peft_configs or {}).items():
        check_peft_config(peft_config, name)
    rope = getattr(text_config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or getattr(
        text_config, "original_max_position_embeddings", None
    )
    longest = getattr(text_config, "max_position_embeddings", None)
    if rope.get("rope_type") == "longrope" and original and longest and longest > original:
        refuse(
            f"its rotary embedding (longrope) turns all keys differently once a sequence of the batch is longer than "
            f"{original} tokens; with max_position_embeddings={original} it is supported"
        )
    if not getattr(text_config, "is_moe", True):
        return
    for attribute in ("num_experts", "num_local_experts", "n_routed_experts"):
        if (getattr(text_config, attribute, None) or 0) > 1:
            logger.warning_once(
                f"'{config.model_type}' is a mixture of experts: its routing may differ between rollout and training, "
                "which the importance-sampling correction sees but cannot undo."
            )


def check_peft_config(peft_config: PeftConfig, name: str = "default") -> None:
    """
    Refuse PEFT methods that put virtual tokens before the prompt.

    Raises:
        UnsupportedModelError: names the adapter and the method.
    """
    if peft_config.is_prompt_learning:
        raise UnsupportedModelError(
            f"Sparse rollouts do not support prompt learning: the PEFT adapter '{name}' "
            f"(peft_type={peft_config.peft_type}) puts virtual tokens before the prompt. Use LoRA. {WITHOUT_SPARSITY}"
        )


def check_layers(schedule: SparsitySchedule, num_layers: int) -> None:
    """
    Refuse schedules that name dense layers which the model does not have. The default, layers 0 and 1, is for all.

    Raises:
        ValueError: names them, and the number of layers.
    """
    missing = [layer for layer in schedule.dense_layers if layer >= max(num_layers, 2)]
    if missing and not schedule.is_dense:
        raise ValueError(
            f"The schedule's dense_layers={schedule.dense_layers} name {', '.join(map(str, missing))}, but the model has "
            f"{num_layers} layers, 0 to {num_layers - 1}; it was made for another model. Change dense_layers "
            "(`dataclasses.replace`), or the option sparse_schedule."
        )


def _check_windows(config: PretrainedConfig, found: dict[int, int | None], masked: set[int | None]) -> None:
    """
    Refuse models whose layers slide by their config, but do not tell the attention function so (only the mask they make
    does), or the other way round, where the window is too long for the comparison of logits to notice.

    Args:
        found (`dict[int, int | None]`): the window that each layer passes to its attention function.
        masked (`set[int | None]`): the windows of the masks that the model makes.
    """
    window = getattr(config, "sliding_window", None)
    if not window or window <= LONGEST_PROBED_WINDOW:
        return
    slides = getattr(config, "use_sliding_window", True)
    kinds = getattr(config, "layer_types", None)
    for layer, passed in sorted(found.items()):
        expected = window if (kinds[layer] == "sliding_attention" if kinds else slides) else None
        if passed is not None and passed not in masked:
            raise UnsupportedModelError(
                f"Sparse rollouts do not support '{config.model_type}' models with sliding_window={window}: layer {layer} "
                f"passes sliding_window={passed} to its attention function, but the masks of the model do not slide. Set "
                f"sliding_window=None in its config. {WITHOUT_SPARSITY}"
            )
        if passed != expected:
            raise UnsupportedModelError(
                f"Sparse rollouts do not support '{config.model_type}' models with sliding_window={window}: layer {layer} "
                f"passes sliding_window={passed} to its attention function, where its config says {expected}. {WITHOUT_SPARSITY}"
            )


def probe(model: PreTrainedModel, compare: bool = True) -> tuple[int, int, torch.dtype]:
    """
    Run a short random prompt through the paged path (prefill, then single tokens, dense schedule) and compare its
    logits with the model's own forward.

    Args:
        compare (`bool`, *optional*, defaults to `True`): whether to compare; without, only shapes are learnt.

    Returns:
        `tuple[int, int, torch.dtype]`: numbers that the KV cache keeps over all layers for one token, and for one page
        on top (its landmarks), and the dtype of the keys.

    Raises:
        UnsupportedModelError: where attention layers are not reached or the logits differ.
    """
    config = model.config.get_text_config()
    length = PROBE_LENGTH
    window = getattr(config, "sliding_window", None)
    if compare and window and window <= LONGEST_PROBED_WINDOW:
        length += window
    limit = getattr(config, "max_position_embeddings", None)
    if limit:
        length = min(length, limit)
    decoded = min(PROBE_DECODED, length - 1)
    parameter = next(model.parameters())
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(model.get_input_embeddings().num_embeddings, (length,), generator=generator).tolist()
    dtype = None
    if torch.is_autocast_enabled(parameter.device.type):
        dtype = torch.get_autocast_dtype(parameter.device.type)

    cache = PagedKVCache(-(-length // PROBE_PAGE_SIZE), PROBE_PAGE_SIZE, dtype)
    allocator, table = PageAllocator(cache.num_pages), PageTable()
    for _ in range(cache.num_pages):
        table.append(allocator.allocate())
    try:
        with rollout_mode(model), recorded_mask_windows() as masked:
            runner = ModelRunner(model, SparsitySchedule.dense(page_size=PROBE_PAGE_SIZE), cache)
            rows = [runner.run([Piece(table, 0, token_ids[: length - decoded])], [length - decoded - 1], False)]
            if compare:
                for place in range(length - decoded, length):
                    rows.append(runner.run([Piece(table, place, [token_ids[place]])], [0], True))
    except (UnsupportedModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"Sparse rollouts do not support '{config.model_type}' models ({type(model).__name__}): a trial decode "
            f"failed with {type(error).__name__}: {str(error).rstrip('.')}. {WITHOUT_SPARSITY}"
        ) from error
    _check_windows(config, runner.windows, masked)
    layers = config.num_hidden_layers
    if len(cache.layers) < layers:
        raise UnsupportedModelError(
            f"Sparse rollouts do not support '{config.model_type}' models: {layers - len(cache.layers)} of {layers} "
            f"attention layers do not go through transformers' AttentionInterface. {WITHOUT_SPARSITY}"
        )
    if compare:
        with rollout_mode(model, attention=None):
            expected = model(input_ids=torch.tensor([token_ids], device=parameter.device), use_cache=False).logits
        expected = expected[0, length - decoded - 1 :].float()
        found = torch.cat(rows)
        difference = ((found - expected).norm() / expected.norm()).item()
        tolerance = TOLERANCE.get(dtype or cache.layers[0][0].dtype, 1e-1)
        if not difference <= tolerance:
            kinds = sorted(set(getattr(config, "layer_types", None) or ["attention"]))
            raise UnsupportedModelError(
                f"Sparse rollouts do not support '{config.model_type}' models ({', '.join(kinds)}): logits of a trial "
                f"decode differ from the model's own forward by {difference:.2g} (relative norm; limit {tolerance:g}). "
                f"{WITHOUT_SPARSITY}"
            )
    return *cache.numel, cache.layers[0][0].dtype
