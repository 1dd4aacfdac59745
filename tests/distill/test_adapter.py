"""The co-resident LoRA: where it is on, what it computes, what it leaves alone, and its format."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from adapters import POLICIES, policy, randomise
from rollouts import SPARSE, endless, engine_of, random_prompts, sampling
from sparrow_trl.attention import TeacherForced
from sparrow_trl.distill import SparrowAdapter
from sparrow_trl.rollout.isolation import rollout_mode
from tiny import tiny_model


def logits(model, ids=((7, 8, 9, 10, 11),)):
    with torch.no_grad():
        return model(input_ids=torch.tensor(ids)).logits


def merged(model, adapter):
    """A copy of a plain model whose weights have the update added in."""
    other = endless(tie_word_embeddings=model.config.tie_word_embeddings)
    other.load_state_dict(model.state_dict())
    modules = dict(other.named_modules())
    with torch.no_grad():
        for name, update in zip(adapter.names, adapter.updates, strict=True):
            modules[name].weight += update.scaling * update.B @ update.A
    return other


@pytest.mark.parametrize("kind", POLICIES)
def test_no_effect_at_step_0(kind):
    model = policy(kind)
    adapter = SparrowAdapter(model, rank=3)
    expected = logits(model)
    with adapter.active():
        assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("kind", ["plain", "tied"])
def test_effect_is_that_of_the_merged_weights(kind):
    model = policy(kind)
    adapter = randomise(SparrowAdapter(model, rank=3, alpha=5))
    with adapter.active():
        found = logits(model)
    torch.testing.assert_close(found, logits(merged(model, adapter)))
    assert (found - logits(model)).abs().max() > 0.1


def test_updates_of_the_policys_own_adapters_add_up():
    model = policy("two loras")
    adapter = randomise(SparrowAdapter(model, rank=3, target_modules=["q_proj"]))
    layer = dict(model.get_base_model().named_modules())[adapter.names[1]]
    inputs = torch.randn(1, 4, 64)
    expected = layer.base_layer(inputs)
    for name in ("policy", "other"):
        expected = expected + layer.scaling[name] * inputs @ (layer.lora_B[name].weight @ layer.lora_A[name].weight).T
    update = adapter.updates[1]
    expected = expected + update.scaling * inputs @ (update.B @ update.A).T
    with torch.no_grad(), adapter.active():
        torch.testing.assert_close(layer(inputs), expected)


def test_head_of_a_model_with_tied_embeddings():
    model = policy("tied")
    adapter = randomise(SparrowAdapter(model, rank=3, target_modules=["lm_head"]))
    hidden = []
    model.lm_head.register_forward_pre_hook(lambda module, inputs: hidden.append(inputs[0]))
    plain = logits(model)
    with adapter.active():
        found = logits(model)
    assert torch.equal(hidden[0], hidden[1])  # the embedding has no part of it
    update = adapter.updates[0]
    torch.testing.assert_close(found, plain + update.scaling * hidden[0] @ (update.B @ update.A).T)


@pytest.mark.parametrize("kind", POLICIES)
def test_model_is_as_if_there_were_no_lora(kind):
    model = policy(kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    modules = [(name, type(module), set(vars(module))) for name, module in model.named_modules()]
    adapter = randomise(SparrowAdapter(model))
    expected = logits(model)
    with adapter.active(), adapter.active():
        logits(model)
        assert set(model.state_dict()) == set(before)
    with pytest.raises(ZeroDivisionError), adapter.active():
        _ = 1 / 0
    assert torch.equal(logits(model), expected)
    assert [(name, type(module), set(vars(module))) for name, module in model.named_modules()] == modules
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    own = {id(p) for p in model.parameters()}
    assert not any(id(p) in own for p in adapter.parameters())


def test_a_change_of_what_is_trainable_is_noticed():
    model = policy("two loras")
    adapter = SparrowAdapter(model)
    with pytest.raises(RuntimeError, match="trainable has changed"), adapter.active():
        model.set_adapter("policy")  # PEFT freezes the other one
    assert not adapter.is_active


def test_suspended_inside():
    model = policy("plain")
    adapter = randomise(SparrowAdapter(model))
    expected = logits(model)
    with adapter.active():
        with adapter.suspended():
            assert torch.equal(logits(model), expected)
        assert not torch.equal(logits(model), expected)


def test_seed_decides_the_weights_and_the_random_state_is_left_alone():
    model = policy("plain")
    state = torch.get_rng_state()
    first, second, other = (SparrowAdapter(model, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    for a, b, c in zip(first.updates, second.updates, other.updates, strict=True):
        assert torch.equal(a.A, b.A) and not torch.equal(a.A, c.A)
        assert a.A.abs().max() <= a.A.shape[1] ** -0.5 and a.A.std() > 0.4 * a.A.shape[1] ** -0.5
        assert not a.B.any()


# --- in the engine ---


@pytest.mark.parametrize("kind", POLICIES)
def test_decode_equals_the_teacher_forced_forward(kind):
    """Invariant 3 with the LoRA on. Completions cross pages and bring pages into competition."""
    model = policy(kind)
    adapter = randomise(SparrowAdapter(model))
    engine = engine_of(model)
    prompts = random_prompts(5, 17, 30)
    with adapter.active():
        out = engine.generate(prompts, sampling(24), seed=1)
        sequences = [prompt + completion for prompt, completion in zip(prompts, out.completion_ids, strict=True)]
        scored = engine.logprobs(sequences, [len(prompt) for prompt in prompts])
    without = engine.logprobs(sequences, [len(prompt) for prompt in prompts])
    for decoded, found, plain in zip(out.logprobs, scored, without, strict=True):
        torch.testing.assert_close(torch.tensor(decoded), found, atol=1e-4, rtol=0)
        assert (plain - found).abs().max() > 1e-2


def test_packed_layers_hold_the_update_unmerged():
    model = policy("plain")
    adapter = randomise(SparrowAdapter(model, target_modules="all-linear"))
    layer = model.model.layers[0].mlp.down_proj
    inputs = torch.randn(1, 3, layer.in_features)
    update = adapter.updates[adapter.names.index("model.layers.0.mlp.down_proj")]
    expected = inputs @ (layer.weight + update.scaling * update.B @ update.A).T
    with torch.no_grad(), adapter.active():
        active = layer.forward
        with rollout_mode(model, packed=True):
            assert layer.forward is not active
            layer(inputs)  # the first call is an ordinary product
            torch.testing.assert_close(layer(inputs), expected, atol=1e-5, rtol=1e-5)
            many = torch.randn(1, 100, layer.in_features)
            torch.testing.assert_close(
                layer(many), many @ (layer.weight + update.scaling * update.B @ update.A).T, atol=1e-5, rtol=1e-5
            )
        assert layer.forward is active
    assert "forward" not in vars(layer)


@pytest.mark.parametrize("model_type", ["gpt2", "gemma2", "qwen2", "qwen3_moe"])
def test_other_architectures(model_type):
    model = tiny_model(model_type)
    adapter = randomise(SparrowAdapter(model))
    ids = torch.randint(5, 200, (1, 40), generator=torch.Generator().manual_seed(0))
    state = TeacherForced(SPARSE, [40], [40])
    with torch.no_grad(), adapter.active(), rollout_mode(model):
        sparse = model(input_ids=ids, use_cache=False, sparrow=state).logits
    with torch.no_grad(), adapter.active():
        plain = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(sparse, plain, atol=1e-4, rtol=1e-4)  # a prompt is dense
    assert (plain - model(input_ids=ids, use_cache=False).logits).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("llama", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}),
        ("gpt2", {"attn.c_attn", "attn.c_proj"}),  # and not mlp.c_proj
        ("opt", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"}),
        ("qwen3_moe", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}),
    ],
)
def test_layers_of_the_attention_by_default(model_type, expected):
    model = tiny_model(model_type)
    adapter = SparrowAdapter(model)
    assert {".".join(name.split(".")[-2:]) for name in adapter.names} == expected
    assert len(adapter.names) == len(expected) * model.config.num_hidden_layers


def test_a_keyword_may_stand_in_a_list():
    model = tiny_model("llama")
    every = SparrowAdapter(model, target_modules="all-linear")
    assert SparrowAdapter(model, target_modules=["all-linear"]).names == every.names
    assert set(SparrowAdapter(model, target_modules=["attention"]).names) < set(every.names)


# --- its format ---


@pytest.mark.parametrize(
    "targets",
    ["attention", "all-linear", ["q_proj", "v_proj"], r".*layers\.[13]\..*\.up_proj"],
    ids=["attention", "all", "list", "regex"],
)
def test_peft_loads_what_is_saved(tmp_path, targets):
    model = policy("plain")
    adapter = randomise(SparrowAdapter(model, rank=3, alpha=5, target_modules=targets))
    adapter.save_pretrained(tmp_path)
    with adapter.active():
        expected = logits(model)
    loaded = PeftModel.from_pretrained(endless(), tmp_path)
    torch.testing.assert_close(logits(loaded), expected)


@pytest.mark.parametrize("targets", ["attention", ["c_attn"]], ids=["attention", "list"])
def test_conv1d_layers_are_loaded_by_peft(tmp_path, targets):
    model = tiny_model("gpt2")
    adapter = randomise(SparrowAdapter(model, rank=3, target_modules=targets))
    adapter.save_pretrained(tmp_path)
    with adapter.active():
        expected = logits(model)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(tiny_model("gpt2"), tmp_path)), expected)


def test_saved_and_loaded(tmp_path):
    model = policy("lora")
    adapter = randomise(SparrowAdapter(model, rank=3))
    adapter.save_pretrained(tmp_path)
    again = SparrowAdapter.from_pretrained(model, tmp_path)
    for found, expected in zip(again.parameters(), adapter.parameters(), strict=True):
        assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="set distill_rank and distill_alpha"):
        SparrowAdapter(model, rank=4).load_weights(tmp_path)
    with pytest.raises(ValueError, match="set distill_target_modules"):
        SparrowAdapter(model, rank=3, target_modules=["q_proj"]).load_weights(tmp_path)
    with pytest.raises(FileNotFoundError, match="adapter_config.json is missing"):
        again.load_weights(tmp_path / "nowhere")


def test_adapter_that_is_not_a_plain_lora_is_refused(tmp_path):
    adapter = SparrowAdapter(policy("plain"))
    adapter.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(ValueError, match="not a plain LoRA"):
        SparrowAdapter.from_pretrained(policy("plain"), tmp_path)


# --- bad input ---


@pytest.mark.parametrize("option", [{"alpha_pattern": {"q_proj": 64}}, {"rank_pattern": {"q_proj": 2}}])
def test_layers_with_a_scaling_of_their_own_are_refused(tmp_path, option):
    SparrowAdapter(policy("plain")).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **option}))
    with pytest.raises(ValueError, match=f"not a plain LoRA .*{next(iter(option))}"):
        SparrowAdapter.from_pretrained(policy("plain"), tmp_path)


def test_adapter_of_a_model_of_another_size_is_refused(tmp_path):
    SparrowAdapter(tiny_model(hidden_size=32)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="for a model of another size"):
        SparrowAdapter.from_pretrained(tiny_model(), tmp_path)


@pytest.mark.parametrize("alpha", [0, -1.0, float("nan"), float("inf")])
def test_alpha_not_above_0(alpha):
    with pytest.raises(ValueError, match="alpha="):
        SparrowAdapter(policy("plain"), alpha=alpha)


@pytest.mark.parametrize("rank", [0, -1, 1.5, True])
def test_ranks_below_1(rank):
    with pytest.raises(ValueError, match="must be at least 1 .*distill_rank"):
        SparrowAdapter(policy("plain"), rank=rank)


@pytest.mark.parametrize("targets", [["q_proj", "nowhere"], "nowhere"])
def test_target_that_does_not_exist(targets):
    with pytest.raises(ValueError, match=r"no layer 'nowhere'. Its linear layers are .*down_proj, .*q_proj"):
        SparrowAdapter(policy("plain"), target_modules=targets)


@pytest.mark.parametrize("target", ["embed_tokens", "norm", "self_attn"])
def test_target_that_is_not_linear(target):
    with pytest.raises(ValueError, match="not a linear layer"):
        SparrowAdapter(policy("plain"), target_modules=[target])


def test_adapter_of_that_name():
    model = get_peft_model(endless(), LoraConfig(r=2, target_modules=["q_proj"]), adapter_name="sparrow")
    with pytest.raises(ValueError, match="already has an adapter named 'sparrow'"):
        SparrowAdapter(model)


def test_quantised_layers_are_adapted_by_their_sizes():
    class Quantised(nn.Module):
        in_features, out_features = 64, 64

        def __init__(self):
            super().__init__()
            self.packed = nn.Parameter(torch.zeros(8, dtype=torch.int8), requires_grad=False)

        def forward(self, inputs):
            return inputs * 2

    model = policy("plain")
    model.model.layers[0].self_attn.q_proj = Quantised()
    adapter = randomise(SparrowAdapter(model, rank=2, target_modules=["q_proj"]))
    inputs, update = torch.randn(1, 2, 64), adapter.updates[0]
    with torch.no_grad(), adapter.active():
        found = model.model.layers[0].self_attn.q_proj(inputs)
    torch.testing.assert_close(found, inputs * 2 + update.scaling * inputs @ (update.B @ update.A).T)
