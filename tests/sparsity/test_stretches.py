"""Stretches against brute force: plain dense forwards and teacher-forced sparse ones over the whole vocabulary."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from sparrow_trl import SparsitySchedule
from sparrow_trl.attention import TeacherForced
from sparrow_trl.rollout.isolation import rollout_mode
from sparrow_trl.sparsity.calibration import stretches as module
from sparrow_trl.sparsity.calibration.stretches import Stretch, StretchSampler
from tiny import tiny_model


SCHEDULE = SparsitySchedule((1, 2), bin_tokens=90, dense_layers=(0,))
PLAN = [
    Stretch(0, 63, 10, 0),
    Stretch(0, 64, 7, 1),
    Stretch(1, 95, 20, 2),
    Stretch(1, 40, 5, 3),
    Stretch(0, 100, 20, 4),
]


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(0)
    return [rng.integers(5, 200, 121).tolist(), rng.integers(5, 200, 130).tolist()]


@pytest.fixture
def branches(monkeypatch):
    """What was generated, for the sampler itself returns rates alone."""
    made = []
    original = StretchSampler._branch

    def keep(self, *args):
        made.append(original(self, *args))
        return made[-1]

    monkeypatch.setattr(StretchSampler, "_branch", keep)
    return made


def sampler_of(model, texts, plan=PLAN, **options):
    return StretchSampler(model, SCHEDULE, texts, StretchSampler.pages_for(plan, 16), **options)


def probabilities(model, token_ids, temperature, schedule=None, prompt_length=0):
    ids = torch.tensor([token_ids])
    if schedule is None:
        logits = model(input_ids=ids, use_cache=False).logits
    else:
        state = TeacherForced(schedule, [len(token_ids)], [prompt_length])
        with rollout_mode(model):
            logits = model(
                input_ids=ids, position_ids=torch.arange(len(token_ids))[None], use_cache=False, sparrow=state
            ).logits
    return (logits[0].double() / temperature).softmax(-1)


def expected(model, text, branch, temperature, schedule, prompt_length):
    start = branch.stretch.start
    token_ids = text[:start] + branch.tokens[:-1]
    with torch.no_grad():
        dense = probabilities(model, token_ids, temperature)[start:]
        sparse = probabilities(model, token_ids, temperature, schedule, prompt_length)[start:]
    return torch.minimum(dense, sparse).sum(-1).numpy()


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("block", [1 << 30, 4 * 261 * 12, 4])
def test_rates_equal_brute_force(model_type, temperature, block, texts, branches, monkeypatch):
    monkeypatch.setitem(module.LOGITS_BYTES, "cpu", block)  # all at once, a few tokens at a time, one by one
    model = tiny_model(model_type)
    with rollout_mode(model):
        found = sampler_of(model, texts).generate(PLAN, SCHEDULE, seed=3, temperature=temperature)
    assert [len(alphas) for alphas in found] == [10, 7, 20, 5, 20]
    assert min(alphas.min() for alphas in found) < 0.97  # something is left out
    for alphas, branch in zip(found, branches, strict=True):
        text = texts[branch.stretch.text]
        assert branch.tokens[0] == text[branch.stretch.start]
        brute = expected(model, text, branch, temperature, SCHEDULE, branch.stretch.start)
        np.testing.assert_allclose(alphas, brute, atol=2e-4)


@pytest.mark.parametrize("prompt_length", [1, 16, 37])
def test_own_pasts_equal_a_teacher_forced_completion(prompt_length, texts, branches):
    model = tiny_model("llama")
    with rollout_mode(model):
        sampler = sampler_of(model, texts, own_past_pages=20)
        pasts = {text: sampler.own_past(text, SCHEDULE, prompt_length, 101) for text in (0, 1)}
        found = sampler.generate(PLAN, SCHEDULE, seed=3, pasts=pasts)
    dense_past = []
    for alphas, branch in zip(found, branches, strict=True):
        text = texts[branch.stretch.text]
        np.testing.assert_allclose(alphas, expected(model, text, branch, 1.0, SCHEDULE, prompt_length), atol=2e-4)
        dense_past.append(expected(model, text, branch, 1.0, SCHEDULE, branch.stretch.start))
    assert max(np.abs(a - b).max() for a, b in zip(found, dense_past, strict=True)) > 0.01


def test_all_pages_come_back(texts):
    model = tiny_model("llama")
    with rollout_mode(model):
        sampler = sampler_of(model, texts, own_past_pages=20)
        free = sampler.allocator.num_free
        first = sampler.generate(PLAN, SCHEDULE, seed=3)
        past = sampler.own_past(0, SCHEDULE, 16, 101)
        sampler.release(past)
        assert sampler.allocator.num_free == free
        again = sampler.generate(PLAN, SCHEDULE, seed=3)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_is_generated_does_not_depend_on_the_batch(texts):
    model = tiny_model("llama")
    with rollout_mode(model):
        together = sampler_of(model, texts).generate(PLAN, SCHEDULE, seed=3)
        alone = [sampler_of(model, texts).generate([stretch], SCHEDULE, seed=3)[0] for stretch in PLAN]
        other = sampler_of(model, texts).generate(PLAN, SCHEDULE, seed=4)
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(together, other, strict=True))


def test_nothing_is_counted_behind_a_stop_token(texts, branches):
    model = tiny_model("llama")
    with rollout_mode(model):
        free = sampler_of(model, texts).generate(PLAN, SCHEDULE, seed=3)
        drawn = branches[2].tokens[1:]
        stop = drawn[5]
        found = sampler_of(model, texts).generate(PLAN, SCHEDULE, seed=3, stop_token_ids=[stop])
    np.testing.assert_allclose(found[2], free[2][: drawn.index(stop) + 1], atol=1e-5)


def test_a_budget_for_everything_is_dense(texts):
    model = tiny_model("llama")
    with rollout_mode(model):
        found = sampler_of(model, texts).generate(PLAN, SparsitySchedule.fixed(100), seed=0)
    assert min(alphas.min() for alphas in found) > 1 - 1e-5


def test_an_actor_runs_in_the_sparse_forwards_alone(texts, branches):
    """An actor that is the dense model with another bias on its logits: rates are those of the two distributions."""
    model = tiny_model("llama")
    bias = torch.linspace(0, 1, model.config.vocab_size)

    @contextmanager
    def actor():
        handle = model.lm_head.register_forward_hook(lambda module, args, output: output + bias)
        try:
            yield
        finally:
            handle.remove()

    everything = SparsitySchedule.fixed(100)
    with rollout_mode(model):
        sampler = sampler_of(model, texts, own_past_pages=20, actor=actor)
        pasts = {text: sampler.own_past(text, everything, 16, 101) for text in (0, 1)}
        found = sampler.generate(PLAN, everything, seed=0, pasts=pasts)
    for alphas, branch in zip(found, branches, strict=True):
        start = branch.stretch.start
        with torch.no_grad():
            ids = torch.tensor([texts[branch.stretch.text][:start] + branch.tokens[:-1]])
            logits = model(input_ids=ids, use_cache=False).logits[0, start:].double()
        pair = torch.minimum(logits.softmax(-1), (logits + bias).softmax(-1)).sum(-1)
        np.testing.assert_allclose(alphas, pair.numpy(), atol=1e-4)
