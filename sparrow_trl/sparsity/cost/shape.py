"""What the cost model needs to know of a model, from its configuration alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class ModelShape:
    """
    Sizes of a causal language model.

    Attributes:
        name (`str`): as it is shown.
        windows (`tuple[int | None, ...]`): of each layer its sliding window, `None` for full attention.
        heads, kv_heads, head_dim (`int`): of every layer.
        weights (`int`): parameters that a step reads whatever the batch; an input embedding of its own excluded.
        embedding (`int`): parameters of the input embedding; 0 where it is tied to the output matrix, which is read anyway.
        embedding_row (`int`): those of a row of it, which is read for each sequence.
        expert_weights (`int`): parameters of all experts.
        experts, active_experts (`int`): in a layer, and how many of them a token uses; 1 and 1 without experts.
        longest (`int`, *optional*): positions of the model.
    """

    name: str
    windows: tuple[int | None, ...]
    heads: int
    kv_heads: int
    head_dim: int
    weights: int
    embedding: int = 0
    embedding_row: int = 0
    expert_weights: int = 0
    experts: int = 1
    active_experts: int = 1
    longest: int | None = None

    @classmethod
    def from_config(cls, config: PretrainedConfig, name: str = "") -> ModelShape:
        """
        The shape of the model that a configuration describes. Its parameters are counted on a model without memory
        (PyTorch's meta device), so any architecture of transformers is counted right.

        Raises:
            UnsupportedModelError: for models that sparse rollouts do not support.
        """
        import torch
        from transformers import AutoModelForCausalLM

        from ...rollout.support import check_model_config

        check_model_config(config)
        text = config.get_text_config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        total = experts = 0
        for parameter_name, parameter in model.named_parameters():  # tied parameters come once
            total += parameter.numel()
            if ".experts." in parameter_name:
                experts += parameter.numel()
        embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings()
        is_tied = output is not None and (config.tie_word_embeddings or output.weight is embedding)
        if is_tied and output is not None and output.weight is not embedding:
            total -= output.weight.numel()  # not tied on the meta device
        kinds = getattr(text, "layer_types", None)
        window = getattr(text, "sliding_window", None)
        slides = getattr(text, "use_sliding_window", True)
        layers = text.num_hidden_layers
        windows = [
            window if (kinds[layer] == "sliding_attention" if kinds else bool(window) and slides) else None
            for layer in range(layers)
        ]
        heads = text.num_attention_heads
        count = _first_of(text, ("num_experts", "num_local_experts", "n_routed_experts"), 1)
        return cls(
            name=name or config.model_type,
            windows=tuple(windows),
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            weights=total - experts - (0 if is_tied else embedding.numel()),
            embedding=0 if is_tied else embedding.numel(),
            embedding_row=0 if is_tied else embedding.shape[1],
            expert_weights=experts,
            experts=count if experts else 1,
            active_experts=_first_of(text, ("num_experts_per_tok",), 1) if experts else 1,
            longest=getattr(text, "max_position_embeddings", None),
        )

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str]) -> ModelShape:
        """
        The shape of a model named by a `config.json`-like file (its suffix may be left out), a folder or a Hub name.

        Raises:
            OSError: there is no such configuration.
            UnsupportedModelError: for models that sparse rollouts do not support.
        """
        from transformers import AutoConfig

        text = os.fspath(name_or_path)
        path = Path(text)
        with_suffix = path.with_name(path.name + ".json")
        if not path.exists() and with_suffix.is_file():
            path = with_suffix
        name = path.stem if path.is_file() else path.name
        return cls.from_config(AutoConfig.from_pretrained(str(path) if path.exists() else text), name)

    def read_parameters(self, batch: int) -> float:
        """
        Parameters that a step of `batch` sequences reads. Of experts those that at least one token is expected to use
        if the router spread tokens evenly.
        """
        used = 1 - (1 - self.active_experts / self.experts) ** batch
        return self.weights + batch * self.embedding_row + used * self.expert_weights

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.weights + self.embedding + self.expert_weights

    @property
    def active_parameters(self) -> float:
        """Parameters that one token multiplies with."""
        return self.weights + self.expert_weights * self.active_experts / self.experts


def _first_of(config: PretrainedConfig, names: tuple[str, ...], default: int) -> int:
    for name in names:
        if getattr(config, name, None):
            return int(getattr(config, name))
    return default
