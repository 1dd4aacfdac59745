"""
Every architecture of the support matrix, tried: what runs is exact, what is refused says why. The table in the docs,
`docs/_generated/support_matrix.md`, has to say the same. To write it anew:

    SPARROW_WRITE_SUPPORT_MATRIX=1 python -m pytest -n 0 tests/test_support_matrix.py
"""

import os
import re
from pathlib import Path

import pytest
import torch

from rollouts import endless, logprobs, random_prompts, sampling
from sparrow_trl.rollout import RolloutEngine, UnsupportedModelError
from sparrow_trl.sparsity import SparsitySchedule
from tiny import MODEL_TYPES


TABLE = Path(__file__).resolve().parents[1] / "docs" / "_generated" / "support_matrix.md"
HEADER = [
    "| model type | layers | sparse rollouts | dense decode against the model's forward | sparse decode against teacher forcing | why not |",
    "|---|---|---|---|---|---|",
]

# Model types that come with layers of more than one kind, and types that the tiny models do not list.
VARIANTS = {
    "mistral, sliding": ("mistral", {"sliding_window": 24}),
    "qwen2, sliding": ("qwen2", {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 2}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4_text": ("llama4_text", {"num_local_experts": 2, "intermediate_size_mlp": 128}),
}
CASES = {model_type: (model_type, {}) for model_type in MODEL_TYPES} | VARIANTS
REFUSED = {
    "deepseek_v3", "falcon_h1", "gpt_oss", "llama4_text", "mamba", "nemotron", "qwen3_next", "stablelm",
}  # fmt: skip

# Pages are left out in the full layers, and the sliding windows of 24 tokens are crossed.
SPARSE = SparsitySchedule((1, 2), bin_tokens=48, page_size=4, dense_layers=(0,))
LENGTHS = (1, 17, 40, 70)


def kinds_of_layers(config):
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        kinds = ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"]
    return ", ".join(sorted({kind.removesuffix("_attention") for kind in kinds}))


def bucket(difference):
    return next((f"< {limit:.0e}" for limit in (1e-4, 1e-3, 1e-2) if difference < limit), f"{difference:.0e}")


def reason(error):
    """The first sentence of a refusal, after the model's name."""
    text = str(error).partition(": ")[2]
    return re.split(r"\.? Set |\. ", text)[0].replace("|", "\\|")


def difference(found, expected):
    return max(
        (torch.tensor(a).double() - b.double()).abs().max().item() for a, b in zip(found, expected, strict=True)
    )


def try_model(model_type, overrides):
    """The cells of a row, after the name."""
    model = endless(model_type, **overrides)
    kinds = kinds_of_layers(model.config.get_text_config())
    prompts = random_prompts(*LENGTHS)
    try:
        engine = RolloutEngine(model, SparsitySchedule.dense(page_size=4), progress_bar=False)
    except UnsupportedModelError as error:
        return [kinds, "no", "", "", reason(error)]
    output = engine.generate(prompts, sampling(30))
    dense = difference(
        output.logprobs, [logprobs(model, p, c) for p, c in zip(prompts, output.completion_ids, strict=True)]
    )
    engine.schedule = SPARSE
    output = engine.generate(prompts, sampling(30))
    sequences = [prompt + completion for prompt, completion in zip(prompts, output.completion_ids, strict=True)]
    sparse = difference(output.logprobs, engine.logprobs(sequences, LENGTHS))
    assert (output.stats.kv_share < 1) == ("full" in kinds)
    return [kinds, "yes", bucket(dense), bucket(sparse), ""]


@pytest.fixture(scope="module")
def rows():
    """The rows tried so far, by name; at the end they are written if the environment says so."""
    found = {}
    yield found
    if os.environ.get("SPARROW_WRITE_SUPPORT_MATRIX") == "1" and set(found) == set(CASES):
        lines = [f"| `{name}` | {' | '.join(cells)} |" for name, cells in sorted(found.items())]
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text("\n".join([*HEADER, *lines]) + "\n", encoding="utf-8")


def committed():
    """The rows of the table in the docs, by name."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    assert lines[:2] == HEADER
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]
    return {name.strip("`"): rest for name, *rest in cells}


@pytest.mark.parametrize("name", CASES)
def test_row(name, rows):
    model_type, overrides = CASES[name]
    rows[name] = cells = try_model(model_type, overrides)
    if name in REFUSED:
        assert cells[1] == "no" and cells[4]
    else:
        assert cells[1:] == ["yes", "< 1e-04", "< 1e-04", ""]
    if os.environ.get("SPARROW_WRITE_SUPPORT_MATRIX") != "1":
        assert committed()[name] == cells, (
            "the table in the docs is out of date; the head of this file says how to write it"
        )


def test_table_has_these_rows_in_order():
    if os.environ.get("SPARROW_WRITE_SUPPORT_MATRIX") != "1":
        assert list(committed()) == sorted(CASES)
