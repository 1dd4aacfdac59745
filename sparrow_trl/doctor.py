"""`sparrow doctor`: what is installed, what runs here, and what a model supports."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from typing import Any

import torch
from huggingface_hub.utils import logging as hub_logging
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from . import __version__
from .attention import ATTENTION_NAME
from .environment import Requirement, hardware, requirements
from .rollout import RolloutEngine, UnsupportedModelError, check_model_config
from .sparsity import SparsitySchedule
from .sparsity.presets import preset_name


FINE, REFUSED, UNKNOWN = 0, 1, 2
EXAMPLE_LENGTHS = (8192, 32768)  # of the sequences whose cache is sized


def main(model: str | None = None, probe_model: bool = False, console: Console | None = None) -> int:
    """
    Print the findings.

    Args:
        model (`str`, *optional*): name or path of a model to look at. Only its configuration is loaded.
        probe_model (`bool`, *optional*, defaults to `False`):
            Load its weights too, and compare a short paged decode with its own forward.

    Returns:
        `int`: 0; 1 where a package or the model is refused; 2 where the model could not be looked at.
    """
    console = console or Console(width=None if sys.stdout.isatty() else 100)
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()  # retries of an unreachable Hub
    status = _packages(console)
    _machine(console)
    if model is not None:
        status = max(status, _model(model, probe_model, console))
    elif probe_model:
        console.print("--probe needs a MODEL.", style="bold red")
        status = UNKNOWN
    return status


def _packages(console: Console) -> int:
    console.print(f"[bold]sparrow-trl {__version__}")
    try:
        wanted = requirements()
    except PackageNotFoundError:
        console.print("Not installed as a package, so the supported versions are not known: pip install -e .")
        return FINE
    table = Table("package", "installed", "supported", "")
    for requirement in wanted:
        table.add_row(
            requirement.name, requirement.installed or "-", requirement.wanted or "any", _verdict(requirement)
        )
    console.print(table)
    unmet = [requirement for requirement in wanted if not requirement.is_met]
    for requirement in unmet:
        found = f"{requirement.installed} is installed" if requirement.installed else "it is not installed"
        console.print(
            f"{requirement.name}{requirement.wanted} is needed, and {found}: "
            f'pip install "{requirement.name}{requirement.wanted}"',
            style="bold red",
            highlight=False,
        )
    return REFUSED if unmet else FINE


def _verdict(requirement: Requirement) -> str:
    if requirement.installed is None:
        return "missing" if requirement.extra is None else f"only for the extra '{requirement.extra}'"
    return "ok" if requirement.is_met else "outside"


def _machine(console: Console) -> None:
    found = hardware()
    console.print(
        f"Processor: {found['cpu']} ({found['architecture']}, {found['instructions']}), {found['cores']} cores, "
        f"PyTorch uses {found['threads']} threads; {_gibibytes(found['memory_available'])} of "
        f"{_gibibytes(found['memory'])} memory are free.",
        highlight=False,
    )
    for index, gpu in enumerate(found["gpus"]):
        console.print(
            f"GPU {index}: {gpu['name']}, {_gibibytes(gpu['memory'])}, compute capability {gpu['capability']}",
            highlight=False,
        )
    if not found["gpus"]:
        built = torch.version.cuda or torch.version.hip
        console.print(f"GPU: none ({f'PyTorch is built for {built}' if built else 'PyTorch is built for the CPU'})")
    triton = "importable" if find_spec("triton") else "not installed"
    kernels = "found" if find_spec("sparrow_kernels") else "not found"
    console.print(f"Kernels: sparrow_kernels {kernels}, Triton {triton}, CUDA {_yes(torch.cuda.is_available())}")
    console.print(f"Backend of rollouts: [bold]{backend()}[/]")
    registered = ATTENTION_NAME in ALL_ATTENTION_FUNCTIONS.valid_keys()
    console.print(f"Attention implementation '{ATTENTION_NAME}' registered with transformers: {_yes(registered)}")


def backend() -> str:
    """What computes the attention of a rollout on this machine."""
    return f"PyTorch ops on {'cuda' if torch.cuda.is_available() else 'cpu'}"


def _model(name: str, probe_model: bool, console: Console) -> int:
    console.print(f"\n[bold]{name}")
    try:
        config = AutoConfig.from_pretrained(name)
    except Exception as error:  # an unreachable Hub, a missing file and an unknown type raise all sorts of things
        _refuse(console, f"Its configuration could not be loaded: {_first_line(error)}")
        return UNKNOWN
    try:
        check_model_config(config)
    except UnsupportedModelError as error:
        _refuse(console, str(error))
        return REFUSED
    _layers(name, config, console)
    if not probe_model:
        console.print(
            "Its configuration rules nothing out. The engine compares a short decode with the model's own forward when "
            "it is built; --probe does that now."
        )
        return FINE
    return _probe(name, console)


def _probe(name: str, console: Console) -> int:
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    except Exception as error:  # see above
        _refuse(console, f"It could not be loaded: {_first_line(error)}")
        return UNKNOWN
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    try:
        RolloutEngine(model, SparsitySchedule.dense())
    except UnsupportedModelError as error:
        _refuse(console, str(error))
        return REFUSED
    console.print(f"A short paged decode in {model.dtype} equals the model's own forward. [bold]It is supported.[/]")
    return FINE


def _layers(name: str, config: PretrainedConfig, console: Console) -> None:
    """Kinds of layers, the preset, and the size of the cache."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    full = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    console.print(
        f"'{config.model_type}': {len(kinds)} layers, {len(full)} with full and {len(kinds) - len(full)} with "
        "sliding-window attention.",
        highlight=False,
    )
    preset = preset_name(name)
    targets = SparsitySchedule.presets().get(preset)
    if targets is None:
        schedule = SparsitySchedule.dense()
        console.print(
            'No published schedule: sparse_schedule="auto" calibrates one on the first training prompts; `sparrow calibrate` '
            "does it beforehand."
        )
    else:
        schedule = SparsitySchedule.from_preset(preset)
        listed = ", ".join(map(str, targets))
        console.print(
            f'sparse_schedule="auto" takes the published schedule {preset}@{schedule.target} (targets {listed}).'
        )
    sparse = [index for index in full if index not in schedule.dense_layers]
    console.print(f"Sparse layers: {_ranges(sparse)}; exact: {_ranges(sorted(set(range(len(kinds))) - set(sparse)))}.")
    _cache_size(text, schedule.page_size, console)


def _cache_size(config: PretrainedConfig, page_size: int, console: Console) -> None:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype = config.dtype or torch.float32
    values = config.num_hidden_layers * heads * head_dim
    per_token = 2 * values * dtype.itemsize + -(-values * dtype.itemsize // page_size)
    console.print(
        f"KV cache: {per_token:,} bytes per token in {str(dtype).removeprefix('torch.')} ({config.num_hidden_layers} "
        f"layers x {heads} KV heads x {head_dim} x keys and values, and landmarks); "
        + ", ".join(f"{_gibibytes(per_token * length)} for {length:,} tokens" for length in EXAMPLE_LENGTHS)
        + ".",
        highlight=False,
    )


def _refuse(console: Console, text: str) -> None:
    console.print(text, style="bold red", highlight=False, markup=False)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _ranges(numbers: list[int]) -> str:
    """`[0, 1, 2, 5]` -> `"0-2, 5"`."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(str(g[0]) if len(g) == 1 else f"{g[0]}-{g[-1]}" for g in groups) or "none"


def _gibibytes(size: Any) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"
