"""The co-resident LoRA: on in rollouts and in its own update, and nowhere else."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..low_rank import LowRankUpdate, UpdatedForward
from ..rollout.isolation import model_lock


ADAPTER_NAME = "sparrow"
"""What the LoRA is called; no adapter of the policy may be."""

ADAPTER_FOLDER = "sparrow/adapter"
"""Where the adapter is stored in the folder of a checkpoint."""

ALL_LINEAR = "all-linear"
ATTENTION = "attention"

_WEIGHTS_FILE = "adapter_model.safetensors"
_CONFIG_FILE = "adapter_config.json"
_EXTRAS = (
    "use_dora",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
)  # of PEFT's configuration, that change the update
_PREFIX = "base_model.model."  # of PEFT's parameter names


class SparrowAdapter(nn.Module):
    """
    A LoRA beside a model, on only inside [`active`].

    PEFT would put its own modules in the place of the model's layers, which renames the policy's parameters and makes
    every other part (optimizer, checkpoints, reference model, other adapters) see the LoRA. Here its parameters live
    in this module alone, and the layers' `forward` is exchanged for as long as it is on; outside, the model is as if
    there were no LoRA. It works beside whatever adapters the model has: their updates and this one add up. It is
    stored in PEFT's format.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The policy. Its parameters are never changed.
        rank (`int`, *optional*, defaults to `16`):
            Rank of the LoRA.
        alpha (`float`, *optional*):
            The update is scaled by `alpha / rank`. By default twice the rank.
        target_modules (`str` or `list[str]`, *optional*, defaults to `"attention"`):
            The layers to adapt: `"attention"` (linear layers inside the attention), or as in PEFT: `"all-linear"` (all
            linear layers but the head), the last parts of their
            names, or a regular expression for the whole name.
        seed (`int`, *optional*, defaults to `0`):
            Of the initial weights. The global random state is not touched.

    Raises:
        ValueError: the rank is below 1 or alpha not above 0, a target does not exist or is not a linear layer, or the model has an adapter
            of that name.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rank: int = 16,
        alpha: float | None = None,
        target_modules: str | Sequence[str] = ATTENTION,
        seed: int = 0,
    ):
        super().__init__()
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ValueError(f"rank={rank!r} must be at least 1 (see `distill_rank`).")
        if alpha is not None and not 0 < alpha < float("inf"):
            raise ValueError(f"alpha={alpha!r} must be above 0, and finite (see `distill_alpha`).")
        self.rank, self.alpha = rank, float(2 * rank if alpha is None else alpha)
        self.target_modules = target_modules if isinstance(target_modules, str) else list(target_modules)
        if self.target_modules in ([ALL_LINEAR], [ATTENTION]):  # an option that is a list
            (self.target_modules,) = self.target_modules
        self.base_name = model.config.name_or_path
        base = _base_of(model)
        layers = find_layers(base, self.target_modules)
        generator = torch.Generator().manual_seed(seed)
        updates = {}
        for name, layer in layers.items():
            in_features, out_features = _features(name, layer)
            device = next(layer.parameters()).device
            updates[name] = LowRankUpdate(in_features, out_features, rank, self.alpha / rank, generator, device)
        # In lists, because the names of layers contain dots, and so that the layers are not modules of the adapter
        self.names = list(updates)
        self.updates: Iterable[LowRankUpdate] = nn.ModuleList(updates.values())  # type: ignore[assignment]
        self._layers = tuple(layers.values())
        self._model = (base,)
        self._is_conv1d = any(isinstance(layer, Conv1D) for layer in self._layers)
        self._active = False

    @property
    def is_active(self) -> bool:
        """Whether the LoRA is on."""
        return self._active

    @contextmanager
    def active(self) -> Iterator[None]:
        """
        The LoRA is on inside the context, beside the model's own adapters. Contexts may be nested. A backward pass
        with gradient checkpointing recomputes the forward, so it has to be inside too.

        Raises:
            RuntimeError: something inside changed which parameters are trainable.
        """
        (base,) = self._model
        with model_lock(base):
            if self._active:
                yield
                return
            trainable = _trainable(base)
            forwards = [
                UpdatedForward(layer, update) for layer, update in zip(self._layers, self.updates, strict=True)
            ]
            for layer, forward in zip(self._layers, forwards, strict=True):
                layer.forward = forward
            self._active = True
            try:
                yield
            finally:
                self._active = False
                for layer, forward in zip(self._layers, forwards, strict=True):
                    if forward.replaced is None:
                        del layer.forward
                    else:
                        layer.forward = forward.replaced
            if _trainable(base) != trainable or not all(p.requires_grad for p in self.parameters()):
                raise RuntimeError(
                    "Which parameters of the policy or of the LoRA are trainable has changed while the LoRA was on; "
                    "adapters must not be switched in a rollout or in the LoRA's update."
                )

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The LoRA is off inside the context, which lies in one where it is on."""
        try:
            for update in self.updates:
                update.suspended = True
            yield
        finally:
            for update in self.updates:
                update.suspended = False

    def save_pretrained(self, folder: str | Path) -> None:
        """Store the LoRA in PEFT's format: `PeftModel.from_pretrained(base, folder)` loads it."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_name,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": self._is_conv1d,
            # PEFT does not know the word, and last parts of names may occur outside the attention too
            "target_modules": self.names if self.target_modules == ATTENTION else self.target_modules,
            "inference_mode": True,
        }
        (folder / _CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        weights = {}
        for name, update in zip(self.names, self.updates, strict=True):
            weights[f"{_PREFIX}{name}.lora_A.weight"] = update.A.detach().cpu().contiguous()
            weights[f"{_PREFIX}{name}.lora_B.weight"] = update.B.detach().cpu().contiguous()
        save_file(weights, folder / _WEIGHTS_FILE, metadata={"format": "pt"})

    def fingerprint(self) -> str:
        """A short hash of the weights."""
        digest = hashlib.sha256()
        for name, update in zip(self.names, self.updates, strict=True):
            digest.update(f"{name} {update.scaling}".encode())
            for tensor in (update.A, update.B):
                digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def load_weights(self, folder: str | Path) -> None:
        """
        Read the weights from a folder that [`save_pretrained`] or PEFT wrote.

        Raises:
            FileNotFoundError: there is no adapter in the folder.
            ValueError: it adapts other layers, or has another rank or scaling.
        """
        config, weights = _read(folder)
        if (config["r"], float(config["lora_alpha"])) != (self.rank, self.alpha):
            raise ValueError(
                f"The adapter in {folder} has rank {config['r']} and alpha {config['lora_alpha']}, but this one has "
                f"rank {self.rank} and alpha {self.alpha}; set distill_rank and distill_alpha to the stored values."
            )
        expected = {f"{_PREFIX}{name}.lora_{side}.weight" for name in self.names for side in "AB"}
        if set(weights) != expected:
            odd = sorted(set(weights) ^ expected)[0]
            raise ValueError(
                f"The adapter in {folder} adapts other layers than this one, for example {odd}; set "
                "distill_target_modules to the stored value."
            )
        for name, update in zip(self.names, self.updates, strict=True):
            for side, tensor in (("A", update.A), ("B", update.B)):
                stored = weights[f"{_PREFIX}{name}.lora_{side}.weight"]
                if stored.shape != tensor.shape:
                    raise ValueError(
                        f"The adapter in {folder} is for a model of another size: lora_{side} of {name} is "
                        f"{tuple(stored.shape)} there, and {tuple(tensor.shape)} here."
                    )
        with torch.no_grad():
            for name, update in zip(self.names, self.updates, strict=True):
                update.A.copy_(weights[f"{_PREFIX}{name}.lora_A.weight"])
                update.B.copy_(weights[f"{_PREFIX}{name}.lora_B.weight"])

    @classmethod
    def from_pretrained(cls, model: PreTrainedModel, folder: str | Path) -> SparrowAdapter:
        """
        The LoRA that is stored in `folder`, beside `model`.

        Raises:
            FileNotFoundError: there is no adapter in the folder.
            ValueError: it does not fit the model, or is not a plain LoRA.
        """
        config, _ = _read(folder)
        extras = [name for name in _EXTRAS if config.get(name)]
        if config.get("peft_type") != "LORA" or extras:
            said = ", ".join([f"peft_type={config.get('peft_type')!r}", *(f"{n}={config[n]!r}" for n in extras)])
            raise ValueError(f"The adapter in {folder} is not a plain LoRA ({said}).")
        try:
            adapter = cls(model, config["r"], config["lora_alpha"], config["target_modules"])
        except ValueError as error:
            raise ValueError(f"The adapter in {folder} does not fit the model. {error}") from error
        adapter.load_weights(folder)
        return adapter


def find_layers(model: PreTrainedModel, target_modules: str | Sequence[str]) -> dict[str, nn.Module]:
    """
    The layers that `target_modules` names, by name. Layers inside another adapter do not count: it is the layer with
    its other adapters that is adapted.

    Raises:
        ValueError: a target is not there.
    """
    candidates = {}
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if _is_peft_layer(module):
            inside = (*inside, f"{name}.")
            if ADAPTER_NAME in getattr(module, "lora_A", {}):
                raise ValueError(
                    f"The model already has an adapter named {ADAPTER_NAME!r}, which is the name of the LoRA of "
                    "distill_sparse. Load it under another name."
                )
        candidates[name] = module
    if target_modules in (ALL_LINEAR, ATTENTION):
        head = model.get_output_embeddings()
        found = {
            name: module
            for name, module in candidates.items()
            if module is not head and isinstance(getattr(module, "base_layer", module), (nn.Linear, Conv1D))
        }
        if target_modules == ATTENTION:
            found = {name: module for name, module in found.items() if _is_in_attention(model, name)}
    elif isinstance(target_modules, str):
        pattern = re.compile(target_modules)
        found = {name: module for name, module in candidates.items() if pattern.fullmatch(name)}
    else:
        found = {}
        for target in target_modules:
            matching = {
                name: module for name, module in candidates.items() if name == target or name.endswith(f".{target}")
            }
            if not matching:
                raise _no_such_target(target, candidates)
            found.update(matching)
        found = {name: found[name] for name in candidates if name in found}
    if not found:
        raise _no_such_target(target_modules, candidates)
    return found


def _is_in_attention(model: nn.Module, name: str) -> bool:
    """Whether a module around it is called attention, as the classes of transformers are."""
    parts = name.split(".")[:-1]
    around = (model.get_submodule(".".join(parts[: end + 1])) for end in range(len(parts)))
    return any("attention" in type(module).__name__.lower() for module in around)


def _no_such_target(target: object, candidates: dict[str, nn.Module]) -> ValueError:
    linear = {
        name.rpartition(".")[2]
        for name, module in candidates.items()
        if isinstance(getattr(module, "base_layer", module), (nn.Linear, Conv1D))
    }
    return ValueError(
        f"distill_target_modules: the model has no layer {target!r}. Its linear layers are {', '.join(sorted(linear))}; "
        f"{ALL_LINEAR!r} takes them all."
    )


def _features(name: str, layer: nn.Module) -> tuple[int, int]:
    plain: Any = layer.base_layer if _is_peft_layer(layer) else layer
    if isinstance(plain, Conv1D):
        return plain.weight.shape[0], plain.weight.shape[1]
    if isinstance(plain, nn.Embedding) or not (hasattr(plain, "in_features") and hasattr(plain, "out_features")):
        raise ValueError(
            f"distill_target_modules: {name} is a {type(plain).__name__}, not a linear layer, so no LoRA can be put "
            "beside it. Name other layers."
        )
    return plain.in_features, plain.out_features


def _is_peft_layer(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "active_adapters")


def _base_of(model: Any) -> PreTrainedModel:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _trainable(model: nn.Module) -> list[bool]:
    return [parameter.requires_grad for parameter in model.parameters()]


def _read(folder: str | Path) -> tuple[dict, dict[str, torch.Tensor]]:
    folder = Path(folder)
    for name in (_CONFIG_FILE, _WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} holds no adapter: {name} is missing.")
    config = json.loads((folder / _CONFIG_FILE).read_text(encoding="utf-8"))
    return config, load_file(folder / _WEIGHTS_FILE)
