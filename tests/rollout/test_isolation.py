"""A rollout leaves the model, the random generators and the memory as it found them, also when it is interrupted."""

import copy
import gc
import random
import threading
import weakref

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from rollouts import SPARSE, endless, engine_of, greedy, random_prompts, sampling
from sparrow_trl.rollout import RolloutEngine
from sparrow_trl.rollout import engine as engine_module
from sparrow_trl.rollout.cache import PagedKVCache
from sparrow_trl.rollout.isolation import rollout_mode
from sparrow_trl.rollout.runner import ModelRunner
from tiny import tiny_model


PROMPTS = random_prompts(30, 12, 30)
pytestmark = pytest.mark.filterwarnings("ignore:.*will be removed in v6:FutureWarning")


def lora(model, **options):
    torch.manual_seed(0)
    config = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **options}
    peft_model = get_peft_model(model, LoraConfig(**config), adapter_name="policy")
    peft_model.add_adapter("other", LoraConfig(**{**config, "r": 3}))
    return peft_model


def training():
    return endless(num_hidden_layers=2).train()


def mixed_flags():
    """Some modules train and some do not, some parameters are frozen, gradients are there."""
    model = endless(num_hidden_layers=2)
    model.model.layers[1].train()
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad_(False)
    model(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    return model


def eager():
    model = endless("gemma3_text", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    model.set_attn_implementation("eager")
    return model


def checkpointing():
    model = training()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    return model


def mixed_dtypes():
    model = endless(num_hidden_layers=2).bfloat16()
    model.lm_head.float()
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    return model


def adapters():
    return lora(training())


def second_adapter():
    model = lora(training())
    model.set_adapter("other")
    return model


MODELS = {
    "evaluation mode": lambda: endless(num_hidden_layers=2),
    "training mode": training,
    "mixed flags": mixed_flags,
    "eager attention": eager,
    "gradient checkpointing": checkpointing,
    "mixed dtypes": mixed_dtypes,
    "adapters": adapters,
    "second adapter": second_adapter,
}


def snapshot(model):
    """All that a rollout has no business to change."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    configs = {name: m.config for name, m in model.named_modules() if hasattr(m, "config")}
    return {
        "bytes": {name: tensor.detach().flatten().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()},
        "storage": {name: tensor.data_ptr() for name, tensor in tensors.items()},
        "dtypes": {name: tensor.dtype for name, tensor in tensors.items()},
        "requires_grad": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "gradients": {n: None if p.grad is None else p.grad.sum().item() for n, p in model.named_parameters()},
        "training": {name: module.training for name, module in model.named_modules()},
        "checkpointing": {n: getattr(m, "gradient_checkpointing", None) for n, m in model.named_modules()},
        "hooks": {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()},
        "attributes": {name: set(vars(module)) for name, module in model.named_modules()},
        "attention": {name: config._attn_implementation for name, config in configs.items() if hasattr(config, "to_dict")},
        "config": {name: copy.deepcopy(c.to_dict()) for name, c in configs.items() if hasattr(c, "to_dict")},
        "generation config": model.generation_config.to_dict(),
        "adapters": getattr(model, "active_adapters", None) if hasattr(model, "peft_config") else None,
        "grad mode": torch.is_grad_enabled(),
    }  # fmt: skip


def random_states():
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


def assert_unchanged(model, before):
    after = snapshot(model)
    for what, value in before.items():
        assert after[what] == value, what


class Interruption(Exception):
    pass


def interrupt(model, at, error=Interruption):
    """Let the `at`-th forward from now on raise, deep inside: in the last layer's MLP."""
    layers = [module for name, module in model.named_modules() if name.endswith("layers.1.mlp")]
    calls = []

    def hook(module, args):
        calls.append(1)
        if len(calls) == at:
            raise error()

    return layers[0].register_forward_pre_hook(hook)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_changes(name):
    model = MODELS[name]()
    before, randomness = snapshot(model), random_states()
    engine = engine_of(model, check_support=name != "mixed dtypes")
    assert_unchanged(model, before)
    engine.generate(PROMPTS, sampling(6))
    assert_unchanged(model, before)
    engine.logprobs([PROMPTS[0]], [10])
    assert_unchanged(model, before)
    assert random_states() == randomness


@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_changes_when_a_rollout_raises(name, at):
    """In the prefill, in the first decode step, and later; after it the engine works as before."""
    model = MODELS[name]()
    engine = engine_of(model)
    expected = engine.generate(PROMPTS, sampling(8))
    before = snapshot(model)
    hook = interrupt(model, at)
    with pytest.raises(Interruption):
        engine.generate(PROMPTS, sampling(8))
    hook.remove()
    assert_unchanged(model, before)
    assert engine.generate(PROMPTS, sampling(8)).completion_ids == expected.completion_ids
    assert_unchanged(model, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_nothing_changes_on_other_interruptions(error):
    model = training()
    engine = engine_of(model)
    before = snapshot(model)
    for call in (lambda: engine.generate(PROMPTS, sampling(8)), lambda: engine.logprobs([PROMPTS[0]], [10])):
        hook = interrupt(model, 1, error)
        with pytest.raises(error):
            call()
        hook.remove()
        assert_unchanged(model, before)


def test_nothing_changes_when_the_probe_raises():
    model = training()
    before = snapshot(model)
    hook = interrupt(model, 3)
    with pytest.raises(ValueError, match="a trial decode failed with Interruption"):
        RolloutEngine(model, SPARSE)
    hook.remove()
    assert_unchanged(model, before)


def test_nothing_changes_when_options_are_refused():
    model = training()
    engine = engine_of(model)
    before = snapshot(model)
    for prompts, config in (
        (PROMPTS, sampling(4, num_beams=3)),
        ([[]], sampling(4)),
        (PROMPTS, GenerationConfig(max_new_tokens=4, do_sample=True, max_time=1.0)),
    ):
        with pytest.raises(ValueError):
            engine.generate(prompts, config)
        assert_unchanged(model, before)


@pytest.mark.parametrize("raises", [False, True])
def test_autocast_with_frozen_weights(raises):
    """The base of a LoRA policy is marked as trainable inside, so that autocast keeps its casts; not outside."""
    model = lora(training())
    assert not model.base_model.model.lm_head.weight.requires_grad
    before = snapshot(model)
    with torch.autocast("cpu", torch.bfloat16):
        engine = engine_of(model)
        assert_unchanged(model, before)
        hook = interrupt(model, 3 if raises else -1)
        try:
            engine.generate(PROMPTS, sampling(6))
        except Interruption:
            assert raises
        hook.remove()
        assert_unchanged(model, before)
        loss = model(torch.tensor([[5, 6, 7, 8]]), labels=torch.tensor([[5, 6, 7, 8]])).loss
    loss.backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name, needs in before["requires_grad"].items() if needs}


def test_autocast_samples_in_the_lower_precision():
    model = endless(num_hidden_layers=2)
    engine = engine_of(model)
    dtypes = set()
    with pytest.MonkeyPatch.context() as patch:

        class Runner(ModelRunner):
            def run(self, *args, **kwargs):
                logits = super().run(*args, **kwargs)
                dtypes.update(tensor.dtype for layer in self.cache.layers.values() for tensor in layer)
                return logits

        patch.setattr(engine_module, "ModelRunner", Runner)
        plain = engine.generate(PROMPTS, greedy(12))
        assert dtypes == {torch.float32}
        dtypes.clear()
        with torch.autocast("cpu", torch.bfloat16):
            mixed = engine.generate(PROMPTS, greedy(12))
    assert dtypes == {torch.bfloat16}
    difference = torch.tensor(plain.logprobs)[:, 0] - torch.tensor(mixed.logprobs)[:, 0]
    assert 0 < difference.abs().max() < 0.2


def test_adapters_are_used():
    """A rollout of an adapter is the rollout of the merged model; of another adapter, another one."""
    model = lora(endless(num_hidden_layers=2))
    outputs = {}
    for name in ("policy", "other"):
        model.set_adapter(name)
        found = engine_of(model).generate(PROMPTS, greedy(12))
        merged = copy.deepcopy(model).merge_and_unload(adapter_names=[name])
        expected = engine_of(merged).generate(PROMPTS, greedy(12))
        assert found.completion_ids == expected.completion_ids
        torch.testing.assert_close(torch.tensor(found.logprobs), torch.tensor(expected.logprobs), atol=1e-3, rtol=0)
        outputs[name] = found.completion_ids
    with model.disable_adapter():
        base = engine_of(model).generate(PROMPTS, greedy(12))
    plain = engine_of(endless(num_hidden_layers=2)).generate(PROMPTS, greedy(12))
    assert base.completion_ids == plain.completion_ids
    assert outputs["policy"] != outputs["other"] != base.completion_ids


def test_dropout_is_off_in_a_rollout():
    expected = engine_of(endless(num_hidden_layers=2)).generate(PROMPTS, sampling(12))
    model = endless(num_hidden_layers=2, attention_dropout=0.5).train()
    assert engine_of(model).generate(PROMPTS, sampling(12)).completion_ids == expected.completion_ids


def test_rollout_mode_nests_and_restores_other_implementations():
    model = training()
    model.config._attn_implementation = "eager"
    with pytest.raises(Interruption), rollout_mode(model):
        assert model.config._attn_implementation == "sparrow"
        with rollout_mode(model, attention=None):
            assert model.config._attn_implementation == "sparrow"
            assert not model.training and not torch.is_grad_enabled()
        assert not model.training and not torch.is_grad_enabled()
        raise Interruption
    assert model.config._attn_implementation == "eager"
    assert model.training and torch.is_grad_enabled()


def test_a_model_left_in_sparrow_attention_says_what_to_do():
    model = endless(num_hidden_layers=2)
    model.set_attn_implementation("sparrow")
    with pytest.raises(ValueError, match="works only inside a rollout"):
        model(torch.tensor([[5, 6]]))


@pytest.fixture
def caches(monkeypatch):
    """Weak references to the caches of all rollouts and to their tensors."""
    references = []

    class Spy(PagedKVCache):
        def __init__(self, *args):
            super().__init__(*args)
            references.append(weakref.ref(self))

        def layer(self, index, key, value):
            is_new = index not in self.layers
            tensors = super().layer(index, key, value)
            if is_new:
                references.extend(weakref.ref(tensor) for tensor in tensors)
            return tensors

    monkeypatch.setattr(engine_module, "PagedKVCache", Spy)
    return references


def tensor_numbers():
    gc.collect()
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if type(t) in (torch.Tensor, torch.nn.Parameter)
    }
    return sum(storages.values())


@pytest.mark.parametrize("at", [None, 4])
def test_no_tensor_of_the_cache_outlives_a_rollout(caches, at):
    model = training()
    engine = engine_of(model)
    before = tensor_numbers()
    hook = interrupt(model, at)
    output = None
    try:
        output = engine.generate(PROMPTS, sampling(8), top_logprobs=4)
    except Interruption:
        assert at is not None
    hook.remove()
    assert len(caches) == 1 + 2 * 3
    after = tensor_numbers()
    assert [reference for reference in caches if reference() is not None] == []
    assert after == before
    assert (output is None) == (at is not None)


def test_memory_does_not_grow_from_rollout_to_rollout():
    engine = engine_of(training())
    sizes = set()
    for seed in range(4):
        engine.generate(random_prompts(20, 50, 3, seed=seed), sampling(10), seed=seed)
        sizes.add(tensor_numbers())
    assert len(sizes) == 1


def test_a_second_thread_waits_until_the_first_has_left():
    model = tiny_model("llama")
    before = model.config._attn_implementation
    order = []

    def second():
        with rollout_mode(model):
            order.append("second in")
        order.append("second out")

    thread = threading.Thread(target=second)
    with rollout_mode(model):
        thread.start()
        thread.join(0.2)
        order.append("first still in")
        assert model.config._attn_implementation == "sparrow"
    thread.join()
    assert order == ["first still in", "second in", "second out"]
    assert model.config._attn_implementation == before
