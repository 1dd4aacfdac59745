"""The update of the LoRA: its gradient against plain autograd, what it leaves alone, and that it goes on after a stop."""

import copy
import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model

from adapters import policy, randomise
from rollouts import SPARSE, endless, engine_of, random_prompts, sampling
from sparrow_trl.attention import TeacherForced
from sparrow_trl.distill import DistillLoss, DistillUpdate, Sample, SparrowAdapter, samples_of
from sparrow_trl.distill.samples import micro_batches, within_tokens
from sparrow_trl.rollout.isolation import rollout_mode
from sparrow_trl.sparsity import SparsitySchedule
from sparrow_trl.split_forward import SplitForward
from tiny import tiny_model


TEMPERATURE = 0.7


def sampled(model, adapter, seed=0, count=3, new=20):
    """Samples of the sparse actor with the LoRA on, and advantages that differ."""
    prompts = random_prompts(*range(20, 20 + 7 * count, 7), seed=seed)
    with adapter.active():
        out = engine_of(model).generate(prompts, sampling(new, temperature=TEMPERATURE), seed=seed)
    return [
        Sample(prompt, completion, torch.tensor(logprobs), advantage=0.5 - index)
        for index, (prompt, completion, logprobs) in enumerate(
            zip(prompts, out.completion_ids, out.logprobs, strict=True)
        )
    ]


def make_update(model, adapter, loss=None, **options):
    return DistillUpdate(model, adapter, loss, **{"temperature": TEMPERATURE, "warmup_steps": 1, **options})


def gradients_of(model, adapter, samples, loss, schedule=SPARSE, **options):
    """What an update accumulates, before it is clipped."""
    update = make_update(model, adapter, loss, **options)
    found = []
    update.optimizer.register_step_pre_hook(
        lambda *args: found.extend(p.grad.clone() for p in adapter.parameters()) or None
    )
    weights = copy.deepcopy(adapter.state_dict())
    stats = update.update(samples, schedule)
    adapter.load_state_dict(weights)
    return found, stats


def plain_loss(model, adapter, samples, loss):
    """The same loss of whole sequences, one at a time, with the update added to the weights, and its terms."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    weights = dict(base.named_parameters())
    for name, update in zip(adapter.names, adapter.updates, strict=True):
        own = f"{name}.weight" if f"{name}.weight" in weights else f"{name}.base_layer.weight"
        weights[own] = weights[own].detach() + update.scaling * update.B @ update.A
    terms = []
    for sample in samples:
        ids = torch.tensor([sample.context_ids + sample.sampled_ids])
        start = len(sample.context_ids)
        rows = []
        for parameters, schedule in ((weights, SPARSE), ({}, SparsitySchedule.dense())):
            with rollout_mode(model), torch.enable_grad():
                state = TeacherForced(schedule, [ids.shape[1]], [start])
                arguments = {"input_ids": ids, "use_cache": False, "sparrow": state}
                logits = torch.func.functional_call(base, parameters, (), arguments, tie_weights=False).logits
            rows.append((logits[0, start - 1 : -1] / TEMPERATURE).log_softmax(-1))
        student, teacher = rows[0], rows[1].detach()
        chosen = student[torch.arange(len(student)), sample.sampled_ids]
        known = teacher[torch.arange(len(student)), sample.sampled_ids]
        ratio = (chosen - sample.actor_logprobs).exp()
        ppo = -torch.minimum(ratio * sample.advantage, ratio.clamp(0.8, 1.2) * sample.advantage)
        if loss.kl == "full":
            kl = (teacher.exp() * (teacher - student)).sum(-1)
        else:
            kl = (known - chosen).exp() - 1 - (known - chosen)
        terms.append((ppo, kl))
    ppo, kl = (torch.cat(parts) for parts in zip(*terms, strict=True))
    return (loss.ppo_coef * ppo + loss.kl_coef * kl).mean(), ppo.mean(), kl.mean()


LOSSES = {"full": DistillLoss(kl_coef=3.0), "k3": DistillLoss(kl="k3", direction="reverse", ppo_coef=0.5)}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
@pytest.mark.parametrize("kind", ["plain", "lora", "tied"])
def test_gradient_is_that_of_plain_autograd(kind, loss):
    model = policy(kind)
    adapter = randomise(SparrowAdapter(model, rank=3))
    samples = sampled(model, adapter)
    for sample in samples:  # or the ratio is 1 everywhere, and nothing is clipped
        sample.actor_logprobs += 0.3 * torch.randn(len(sample.sampled_ids), generator=torch.Generator().manual_seed(2))
    found, stats = gradients_of(model, adapter, samples, loss, max_grad_norm=0.0)
    expected, ppo, kl = plain_loss(model, adapter, samples, loss)
    gradients = torch.autograd.grad(expected, list(adapter.parameters()))
    for name, one, other in zip(dict(adapter.named_parameters()), found, gradients, strict=True):
        torch.testing.assert_close(one, other, atol=3e-5, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
    assert stats.tokens == 60
    assert (stats.loss, stats.ppo, stats.kl) == pytest.approx((expected.item(), ppo.item(), kl.item()), abs=1e-5)
    norm = sum(gradient.square().sum() for gradient in gradients).sqrt().item()
    assert stats.grad_norm == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("model_type", ["gemma2", "granite", "cohere2", "gpt2", "opt", "qwen3_moe"])
def test_head_of_other_architectures(model_type):
    """Soft-capped and scaled logits, and bodies under other names."""
    model = tiny_model(model_type)
    ids = torch.randint(5, 200, (1, 12), generator=torch.Generator().manual_seed(0))
    split = SplitForward(model)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with torch.no_grad():
        expected = model(input_ids=ids).logits[0]
        hidden = split.hidden(input_ids=ids)[0]
        torch.testing.assert_close(split.logits(hidden), expected)
        torch.testing.assert_close(split.logits(hidden[3:5]), expected[3:5])
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


def checkpointed(model, reentrant):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model.train()


VARIANTS = {
    "one sample a forward": {"micro_tokens": 1},
    "two samples a forward": {"micro_tokens": 70},
    "few logits at a time": {"logit_bytes": 6 * 4 * 261 * 7},
    "checkpointing": {"checkpointing": False},
    "reentrant checkpointing": {"checkpointing": True},
    "training mode": {"training": True},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_gradient_does_not_depend_on_how_it_is_computed(monkeypatch, variant):
    variant = dict(variant)
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, lora_dropout=0.5)
    model = get_peft_model(endless(), config).eval()
    adapter = randomise(SparrowAdapter(model, rank=3))
    samples = sampled(model, adapter)
    expected, _ = gradients_of(model, adapter, samples, DistillLoss(), max_grad_norm=0.0)
    if "checkpointing" in variant:
        checkpointed(model, variant.pop("checkpointing"))
    if variant.pop("training", False):
        model.train()
    if "logit_bytes" in variant:
        monkeypatch.setattr("sparrow_trl.distill.update.LOGIT_BYTES", variant.pop("logit_bytes"))
    flags = [(p.requires_grad, p.grad) for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    found, _ = gradients_of(model, adapter, samples, DistillLoss(), max_grad_norm=0.0, **variant)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
    assert [(p.requires_grad, p.grad) for p in model.parameters()] == flags
    assert [module.training for module in model.modules()] == modes


def test_gradient_under_autocast():
    model = policy("plain")
    adapter = randomise(SparrowAdapter(model, rank=3))
    samples = sampled(model, adapter)
    # All pages, or rounding tips the choice between them
    options = {"schedule": SparsitySchedule.fixed(100, page_size=4), "max_grad_norm": 0.0}
    expected, _ = gradients_of(model, adapter, samples, DistillLoss(), **options)
    autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    found, stats = gradients_of(model, adapter, samples, DistillLoss(), autocast=autocast, **options)
    exact, rounded = (torch.cat([g.flatten() for g in gradients]) for gradients in (expected, found))
    assert stats.steps == 1 and rounded.dtype == torch.float32
    assert torch.cosine_similarity(exact, rounded, dim=0) > 0.98
    assert not torch.equal(exact, rounded)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_under_autocast_with_checkpointing(reentrant):
    model = policy("plain")
    adapter = randomise(SparrowAdapter(model, rank=3))
    samples = sampled(model, adapter)
    options = {"max_grad_norm": 0.0, "autocast": functools.partial(torch.autocast, "cpu", torch.bfloat16)}
    expected, _ = gradients_of(model, adapter, samples, DistillLoss(), **options)
    checkpointed(model, reentrant)
    found, _ = gradients_of(model, adapter, samples, DistillLoss(), **options)
    for one, other in zip(found, expected, strict=True):
        assert other.any()
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_head_as_a_target_is_off_for_the_teacher():
    model = policy("tied")
    adapter = randomise(SparrowAdapter(model, rank=3, target_modules=["lm_head", "q_proj"]))
    samples = sampled(model, adapter, count=1)
    found, _ = gradients_of(model, adapter, samples, LOSSES["full"], max_grad_norm=0.0)
    # Untied, or the plain implementation would add the update to the embedding as well
    untied = endless()
    untied.load_state_dict({**model.state_dict(), "lm_head.weight": model.lm_head.weight.detach().clone()})
    expected, *_ = plain_loss(untied, adapter, samples, LOSSES["full"])
    for one, other in zip(found, torch.autograd.grad(expected, list(adapter.parameters())), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)


def test_update_leaves_the_policy_alone_and_lowers_the_loss():
    model = policy("lora").train()
    before = copy.deepcopy(model.state_dict())
    flags = [p.requires_grad for p in model.parameters()]
    adapter = SparrowAdapter(model)
    update = make_update(model, adapter, DistillLoss(ppo_coef=0.0), learning_rate=2e-3)
    samples = sampled(model, adapter)
    losses = [update.update(samples, SPARSE) for _ in range(12)]
    assert losses[-1].kl < 0.7 * losses[0].kl
    assert losses[-1].acceptance > losses[0].acceptance
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in after)
    assert [p.requires_grad for p in model.parameters()] == flags and model.training
    assert all(p.grad is None for p in model.parameters())


def test_acceptance_is_that_of_both_distributions():
    model = policy("plain")
    adapter = randomise(SparrowAdapter(model))
    samples = sampled(model, adapter, count=1)
    stats = make_update(model, adapter).update(samples, SPARSE)
    (sample,) = samples
    ids = torch.tensor([sample.context_ids + sample.sampled_ids])
    rows = slice(len(sample.context_ids) - 1, -1)
    adapter = randomise(SparrowAdapter(model))
    with torch.no_grad():
        dense = (model(input_ids=ids).logits[0, rows] / TEMPERATURE).softmax(-1)
        with adapter.active(), rollout_mode(model):
            state = TeacherForced(SPARSE, [ids.shape[1]], [len(sample.context_ids)])
            sparse = (model(input_ids=ids, sparrow=state).logits[0, rows] / TEMPERATURE).softmax(-1)
    assert stats.acceptance == pytest.approx((1 - (dense - sparse).abs().sum(-1) / 2).mean().item(), abs=1e-5)


def test_ratio_is_one_where_nothing_has_changed_since_sampling():
    model = policy("plain")
    adapter = randomise(SparrowAdapter(model))
    samples = sampled(model, adapter)
    stats = make_update(model, adapter).update(samples, SPARSE)
    mean = -sum(s.advantage * len(s.sampled_ids) for s in samples) / sum(len(s.sampled_ids) for s in samples)
    assert stats.ppo == pytest.approx(mean, abs=1e-4)


def test_known_teacher_needs_no_forward(monkeypatch):
    model = policy("plain")
    adapter = randomise(SparrowAdapter(model))
    samples = sampled(model, adapter)
    loss = DistillLoss(kl="k2", direction="reverse")
    expected, stats = gradients_of(model, adapter, samples, loss)
    engine = engine_of(model, SparsitySchedule.dense())
    for sample in samples:
        (sample.teacher_logprobs,) = engine.logprobs(
            [sample.context_ids + sample.sampled_ids], [len(sample.context_ids)], TEMPERATURE
        )
    calls = []
    hidden = SplitForward.hidden
    monkeypatch.setattr(SplitForward, "hidden", lambda *args, **kw: calls.append(None) or hidden(*args, **kw))
    found, other = gradients_of(model, adapter, samples, loss)
    assert len(calls) == 1 and other.acceptance is None and stats.acceptance is not None
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-3)


def test_clipping_bounds_the_norm():
    model = policy("plain")
    adapter = randomise(SparrowAdapter(model))
    samples = sampled(model, adapter)
    found, stats = gradients_of(model, adapter, samples, DistillLoss(), max_grad_norm=0.01)
    assert stats.grad_norm > 0.02
    assert sum(g.square().sum() for g in found).sqrt().item() == pytest.approx(0.01, rel=1e-3)


def test_non_finite_gradient_skips_the_step():
    model = policy("plain")
    adapter = SparrowAdapter(model)
    update = make_update(model, adapter)
    samples = sampled(model, adapter)
    update.update(samples, SPARSE)
    before = copy.deepcopy((adapter.state_dict(), update.optimizer.state_dict(), update.scheduler.state_dict()))
    broken = copy.deepcopy(samples)
    broken[0].advantage = float("inf")
    stats = update.update(broken, SPARSE)
    assert (stats.skipped, stats.steps, update.skipped_steps) == (1, 0, 1)
    torch.testing.assert_close(
        (adapter.state_dict(), update.optimizer.state_dict(), update.scheduler.state_dict()), before, rtol=0, atol=0
    )
    assert update.update(samples, SPARSE).steps == 1 and update.skipped_steps == 1


def test_float16_scales_the_loss_and_skips_what_overflows():
    model = policy("plain")
    adapter = SparrowAdapter(model)
    update = make_update(model, adapter, fp16=True, max_grad_norm=0.0)
    samples = sampled(model, adapter)
    scale = update.scaler.get_scale()
    broken = copy.deepcopy(samples)
    broken[0].advantage = float("inf")
    assert update.update(broken, SPARSE).skipped == 1
    assert update.scaler.get_scale() == scale / 2
    expected, _ = gradients_of(model, adapter, samples, DistillLoss(), max_grad_norm=0.0)
    norm = sum(g.square().sum() for g in expected).sqrt().item()
    assert update.update(samples, SPARSE).grad_norm == pytest.approx(norm, rel=1e-3)


def test_learning_rate_rises_over_the_warmup():
    model = policy("plain")
    adapter = SparrowAdapter(model)
    update = make_update(model, adapter, learning_rate=1e-3, warmup_steps=4, num_steps=3)
    samples = sampled(model, adapter)
    stats = update.update(samples, SPARSE)  # three steps on one sample each
    assert stats.steps == 3 and stats.tokens == 60
    assert stats.learning_rate == pytest.approx(1e-3)
    assert update.update(samples, SPARSE).learning_rate == pytest.approx(1e-3)


def test_update_goes_on_from_its_state_bit_for_bit():
    model = policy("plain")

    def start():
        adapter = SparrowAdapter(model)
        return adapter, make_update(model, adapter, num_steps=2, max_tokens=70, warmup_steps=5)

    adapter, update = start()
    samples = sampled(model, adapter)
    for _ in range(3):
        update.update(samples, SPARSE)
    weights, state = copy.deepcopy((adapter.state_dict(), update.state_dict()))
    for _ in range(3):
        update.update(samples, SPARSE)
    other, resumed = start()
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    torch.manual_seed(99)
    for _ in range(3):
        resumed.update(samples, SPARSE)
    for found, expected in zip(other.parameters(), adapter.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_processes_sum_their_gradients():
    """Two processes with a part of the samples each, one after the other, against one with all."""
    model = policy("plain")
    adapter = randomise(SparrowAdapter(model))
    samples = sampled(model, adapter)
    expected, stats = gradients_of(model, adapter, samples, DistillLoss(), max_grad_norm=0.0)
    shares = [samples[:1], samples[1:]]
    sent = []
    for share in shares:
        mine = []
        sent.append(mine)
        update = make_update(model, adapter, max_grad_norm=0.0)
        update.reduce_sum = lambda tensor, mine=mine: (
            mine.append(tensor.clone()) or tensor * 0 + 60
            if (tensor.dim() == 0)
            else mine.append(tensor.clone()) or tensor
        )
        update.optimizer.step = lambda *args, **kwargs: None
        update.update(share, SPARSE)
    total = sent[0][1] + sent[1][1]
    torch.testing.assert_close(total, torch.cat([g.flatten() for g in expected]), atol=1e-6, rtol=1e-4)
    assert sent[0][0] + sent[1][0] == stats.tokens


def test_process_without_samples_takes_part():
    model = policy("plain")
    adapter = randomise(SparrowAdapter(model))
    update = make_update(model, adapter, warmup_steps=0)
    update.reduce_sum = lambda tensor: tensor + 1
    assert update.update([], SPARSE).steps == 1
    alone = make_update(model, adapter)
    stats = alone.update([], SPARSE)
    assert (stats.steps, stats.skipped, stats.tokens) == (0, 0, 0)


# --- samples ---


def test_samples_of_a_batch():
    nan = float("nan")
    samples = samples_of(
        prompt_ids=torch.tensor([[0, 5, 6], [7, 8, 9], [0, 0, 3]]),
        prompt_mask=torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1]]),
        completion_ids=torch.tensor([[11, 12, 13, 14, 15], [21, 22, 0, 0, 0], [31, 32, 33, 0, 0]]),
        mask=torch.tensor([[1, 1, 0, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 0, 0]], dtype=torch.bool),
        advantages=torch.tensor([1.0, 2.0, 3.0]),
        actor_logprobs=torch.tensor([[-1.0, -2.0, 0.0, 0.0, -3.0], [-1.0] * 5, [-4.0, nan, -5.0, 0.0, 0.0]]),
        teacher_logprobs=torch.tensor([[-1.5, -2.5, 0.0, 0.0, -3.5], [-1.0] * 5, [-4.5, -6.0, -5.5, 0.0, 0.0]]),
    )
    found = [
        (s.context_ids, s.sampled_ids, s.actor_logprobs.tolist(), s.teacher_logprobs.tolist(), s.advantage)
        for s in samples
    ]
    assert found == [
        ([5, 6], [11, 12], [-1.0, -2.0], [-1.5, -2.5], 1.0),
        ([5, 6, 11, 12, 13, 14], [15], [-3.0], [-3.5], 1.0),  # the turn after a tool's result
        ([3], [31], [-4.0], [-4.5], 3.0),
        ([3, 31, 32], [33], [-5.0], [-5.5], 3.0),
    ]


def some_samples(*lengths):
    return [Sample([0] * (length - 1), [1], torch.zeros(1)) for length in lengths]


def test_tokens_of_an_update_are_bounded():
    samples = some_samples(5, 6, 7, 8)
    for seed in range(10):
        chosen = within_tokens(samples, 14, torch.Generator().manual_seed(seed))
        assert len(chosen) >= 1 and sum(len(s) for s in chosen) <= 14
    assert len(within_tokens(samples, 2, torch.Generator())) == 1
    assert len(within_tokens(samples, None, torch.Generator())) == 4
    picks = {id(within_tokens(samples, 2, torch.Generator().manual_seed(seed))[0]) for seed in range(40)}
    assert len(picks) == 4


def test_micro_batches():
    samples = some_samples(5, 6, 20, 3, 4, 5)
    assert [[len(s) for s in batch] for batch in micro_batches(samples, 11)] == [[5, 6], [20], [3, 4], [5]]
