"""Loading what is to be evaluated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..embedded import MODEL_NAME, load_smollm2
from ..environment import find_device


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_model(
    name: str, dtype: str = "auto", device: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    A causal language model with its tokenizer, in evaluation mode.

    Args:
        name (`str`): repository on the Hub, folder, or `"SmolLM2-135M-Instruct"`, the embedded model.
        dtype (`str`, *optional*, defaults to `"auto"`): dtype of the weights.
        device (`str`, *optional*): by default a GPU if there is one.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if device is None and torch.accelerator.is_available():
        device = str(torch.accelerator.current_accelerator())
    found = find_device(device or "cpu")
    if name == MODEL_NAME:
        model, tokenizer = load_smollm2("float32" if dtype == "auto" else dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(name)
    return model.to(found).eval(), tokenizer
