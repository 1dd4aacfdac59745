"""Copies of the weights for a rollout compute what autocast computes, and leave the model as it was."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from rollouts import engine_of, greedy, random_prompts
from sparrow_trl.low_rank import LowRankUpdate, UpdatedForward
from sparrow_trl.rollout import isolation
from sparrow_trl.rollout.isolation import rollout_mode
from sparrow_trl.rollout.weights import copied_bytes, rollout_weights
from tiny import tiny_model


class Interruption(Exception):
    pass


def lora():
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(tiny_model(num_hidden_layers=2), config)


MODELS = {
    "plain": lambda: tiny_model(num_hidden_layers=2),
    "tied": lambda: tiny_model(num_hidden_layers=2, tie_word_embeddings=True),
    "biases": lambda: tiny_model("qwen2", num_hidden_layers=2),
    "Conv1D": lambda: tiny_model("gpt2", n_layer=2),
    "LoRA": lora,
}


def forward(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([[5, 9, 17, 200, 31]]), use_cache=False).logits


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_copies_equal_autocast_and_leave_the_model_as_it_was(name, raises):
    model = MODELS[name]()
    before = dict(model.named_parameters())
    flags = {key: (parameter.requires_grad, parameter.dtype) for key, parameter in before.items()}
    values = {key: parameter.detach().clone() for key, parameter in before.items()}
    with torch.autocast("cpu", torch.bfloat16):
        expected = forward(model)
        try:
            with rollout_weights(model, torch.bfloat16) as count:
                linear = [m for m in model.modules() if type(m) is nn.Linear or type(m).__name__ == "Conv1D"]
                assert linear and all(module.weight.dtype == torch.bfloat16 for module in linear)
                assert model.get_input_embeddings().weight.dtype == torch.float32
                wanted = {id(p) for module in linear for p in module.parameters()}
                assert count == len(wanted)
                found = forward(model)
                copies = [weakref.ref(module.weight) for module in linear]
                del linear
                if raises:
                    raise Interruption
        except Interruption:
            assert raises
    assert torch.equal(found, expected)
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[key] is before[key] for key in before)
    assert {key: (parameter.requires_grad, parameter.dtype) for key, parameter in after.items()} == flags
    assert all(torch.equal(values[key], parameter) for key, parameter in after.items())
    gc.collect()
    assert not any(reference() for reference in copies)


def test_bytes_are_those_of_the_copies():
    shared = nn.Parameter(torch.randn(4, 6))
    layers = nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4, bias=False), nn.Linear(6, 4).half(), nn.LayerNorm(6)])
    layers[0].weight = layers[1].weight = shared
    with rollout_weights(layers, torch.bfloat16) as count:
        copied = {id(p): p for p in layers.parameters() if p.dtype == torch.bfloat16}
        assert layers[0].weight is layers[1].weight and layers[2].weight.dtype == torch.float16
    assert count == len(copied) == 2
    assert copied_bytes(layers, torch.bfloat16) == sum(p.nbytes for p in copied.values()) == 56
    assert layers[0].weight is layers[1].weight is shared


def test_nothing_is_copied_without_autocast_nor_where_the_forward_is_somebody_elses():
    model = tiny_model(num_hidden_layers=2)
    with rollout_weights(model, None) as count:
        assert count == 0
    updated = model.model.layers[1].mlp.up_proj
    update = LowRankUpdate(64, 128, 2, 1.0, torch.Generator().manual_seed(0), torch.device("cpu"))
    updated.forward = UpdatedForward(updated, update)
    own = model.lm_head
    own.forward = lambda rows: torch.nn.functional.linear(rows, own.weight)
    with rollout_weights(model, torch.bfloat16):
        assert own.weight.dtype == torch.float32
        assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
        assert updated.weight.dtype == torch.bfloat16 and update.A.dtype == torch.float32
    assert updated.weight.dtype == torch.float32
    assert copied_bytes(model, None) == 0


def test_a_rollout_with_copies_samples_what_one_without_does(monkeypatch):
    """Where linear layers are not packed, as on a device that is no CPU."""
    model = lora()
    prompts = random_prompts(20, 7)
    outputs = []
    with torch.autocast("cpu", torch.bfloat16):
        for copies in (lambda *args: nullcontext(), rollout_weights):
            monkeypatch.setattr(isolation, "packed_linears", copies)
            outputs.append(engine_of(model).generate(prompts, greedy(12)))
        with pytest.raises(Interruption), rollout_mode(model, packed=True):
            assert model.get_output_embeddings().weight.dtype == torch.bfloat16
            raise Interruption
    assert model.get_output_embeddings().weight.dtype == torch.float32
    assert outputs[0].completion_ids == outputs[1].completion_ids
