"""What a calibrated schedule remembers of its model, and whether it was made for another one."""

from __future__ import annotations

import hashlib
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from ..schedule import SparsitySchedule


def architecture(config: PretrainedConfig) -> dict[str, Any]:
    """The sizes on which page choice depends."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    return {
        "type": text.model_type,
        "layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "heads": heads,
        "kv_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
    }


def weights_fingerprint(model: PreTrainedModel) -> str:
    """A hash of a few numbers of every parameter: other weights, other results."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        few = parameter.detach().flatten()[:16].float().cpu().numpy()
        digest.update(name.encode() + few.tobytes())
    return digest.hexdigest()[:16]


def check_made_for(schedule: SparsitySchedule, config: PretrainedConfig) -> None:
    """
    Refuse a calibrated schedule that was made for a model of another shape. Schedules that do not say pass.

    Raises:
        ValueError: names what differs.
    """
    made_for = (schedule.provenance.get("model") or {}) if isinstance(schedule.provenance, dict) else {}
    known = made_for.get("architecture") if isinstance(made_for, dict) else None
    if not isinstance(known, dict):
        return
    here = architecture(config)
    differing = [
        f"{name} {known[name]} against {here[name]}" for name in here if known.get(name, here[name]) != here[name]
    ]
    if differing:
        raise ValueError(
            f"The schedule was calibrated for another model ({made_for.get('name')}): {', '.join(differing)}. A schedule "
            "says nothing about another model: run `sparrow calibrate` for this one."
        )
