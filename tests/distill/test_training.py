"""DistillSparse in the trainer: where the LoRA is on, when it is updated, and what is saved."""

import hashlib
from collections.abc import Sequence

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from adapters import randomise
from sparrow_trl import SparrowGRPOConfig, SparsitySchedule
from sparrow_trl.distill import DistillUpdate
from tiny import tiny_model
from training import RecordingTrainer, logged, make_config, make_trainer, plain_logprobs, prompts


LORA = {"r": 4, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}


def distilling(tmp_path, trainer_class=RecordingTrainer, *, arguments=None, **options):
    options = {"distill_sparse": True, "distill_warmup_steps": 1, **options}
    return make_trainer(tmp_path, trainer_class, arguments=arguments, **options)


def adapter_of(trainer):
    return trainer.distill.adapter


def digest(module) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        found.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


class Replaying(RecordingTrainer):
    """Takes its completions from a list."""

    given: Sequence = ()

    def rollout(self, prompt_ids, num_generations=1):
        super().rollout(prompt_ids, num_generations)
        sampled, completion_ids, logprobs = self.given[len(self.rollouts) - 1]
        assert sampled == prompt_ids
        return completion_ids, logprobs


@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
def test_policy_of_a_run_with_a_frozen_lora_is_that_of_a_run_without(tmp_path, peft):
    """Invariant: after 20 steps on the same rollouts, bit for bit."""
    arguments = {"peft_config": LoraConfig(**LORA)} if peft else {}
    options = {"max_steps": 20, "optim": "adamw_torch"}
    plain = make_trainer(tmp_path / "plain", RecordingTrainer, arguments=arguments, **options)
    plain.train()
    Replaying.given = plain.rollouts
    other = distilling(
        tmp_path / "distilling", Replaying, arguments=arguments, distill_learning_rate=0.0, distill_steps=2, **options
    )
    other.train()
    assert len(logged(other, "sparrow/distill/kl")) == 20
    assert digest(other.model) == digest(plain.model)
    assert logged(other, "loss") == logged(plain, "loss")
    assert logged(other, "grad_norm") == logged(plain, "grad_norm")


RUNS = {
    "full": {},
    "one step in two batches": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "batches reused": {"num_iterations": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
    "lora": {"peft": True},
    "lora, checkpointing, bf16": {"peft": True, "gradient_checkpointing": True, "bf16": True},
    "lora with a reference": {"peft": True, "beta": 0.1},
    "sampled tokens": {"distill_kl": "k3", "distill_kl_direction": "reverse", "distill_reuse_teacher": True},
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS.keys())
def test_policy_and_lora_are_trained_apart(tmp_path, monkeypatch, options):
    options = {"max_steps": 4, **options}
    arguments = {"peft_config": LoraConfig(**LORA)} if options.pop("peft", False) else {}
    trainer = distilling(tmp_path, arguments=arguments, **options)
    adapter = adapter_of(trainer)
    # A policy's step leaves the LoRA's bytes, a LoRA's step the policy's
    digests = []
    update = DistillUpdate.update

    def watched(self, *args):
        policy, own = digest(trainer.model), digest(adapter)
        assert not digests or (digests[-1][0] != policy and digests[-1][1] == own)
        stats = update(self, *args)
        assert digest(trainer.model) == policy and digest(adapter) != own
        digests.append((policy, digest(adapter)))
        return stats

    monkeypatch.setattr(DistillUpdate, "update", watched)
    trainer.train()
    per_batch = trainer.args.num_iterations
    assert len(digests) == len(trainer.rollouts) == 4 // per_batch
    mine = {id(p) for p in adapter.parameters()}
    assert not mine & {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert not mine & {id(p) for p in trainer.model.parameters()}
    assert all(step > 0 for step in logged(trainer, "sparrow/distill/grad_norm"))


def test_lora_is_on_in_the_rollouts_of_the_training_alone(tmp_path):
    model = tiny_model()
    trainer = distilling(
        tmp_path, arguments={"model": model, "eval_dataset": prompts(4)}, max_steps=1, learning_rate=0.0
    )
    adapter = randomise(adapter_of(trainer))
    states, dense = [], []
    engine = trainer.rollout_engine
    generate = engine.generate

    def watched(*args, **kw):
        states.append(adapter.is_active)
        dense.append(engine.schedule.is_dense)
        return generate(*args, **kw)

    engine.generate = watched
    trainer.distill.updater.update = lambda *args: None
    trainer.train()
    trainer.evaluate()
    assert states[0] and len(states) > 1 and not any(states[1:])
    # What is evaluated is the policy as it is published
    assert not dense[0] and all(dense[1:]) and not engine.schedule.is_dense
    (evaluated,) = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluated["eval_sparrow/kv_share"] == 1 and "eval_sparrow/budget" not in evaluated
    prompt_ids, completion_ids, logprobs = trainer.rollouts[1]
    for prompt, completion, found in zip(prompt_ids, completion_ids, logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(found), plain_logprobs(model, prompt, completion), atol=1e-4, rtol=0)
    # The log-probabilities of the rollout are those of the LoRA's sparse forward, and TRL's those of the dense policy
    prompt_ids, completion_ids, logprobs = trainer.rollouts[0]
    sequences = [p + c for p, c in zip(prompt_ids, completion_ids, strict=True)]
    lengths = [len(p) for p in prompt_ids]
    with adapter.active():
        expected = trainer.rollout_engine.logprobs(sequences, lengths)
    for found, row in zip(logprobs, expected, strict=True):
        torch.testing.assert_close(torch.tensor(found), row, atol=1e-4, rtol=0)
    dense = torch.cat([plain_logprobs(model, p, c) for p, c in zip(prompt_ids, completion_ids, strict=True)])
    ratios = (dense - torch.cat([torch.tensor(row) for row in logprobs])).exp()
    assert logged(trainer, "sparrow/importance_ratio/mean")[0] == pytest.approx(ratios.mean().item(), rel=1e-4)
    assert logged(trainer, "sparrow/importance_ratio/max")[0] == pytest.approx(ratios.max().item(), rel=1e-4)


def test_update_comes_after_the_policys_and_sees_its_new_weights(tmp_path):
    trainer = distilling(tmp_path, max_steps=4, num_iterations=2, distill_every=2)
    events = []
    step, update = trainer.training_step, trainer.distill.updater.update
    trainer.training_step = lambda *args, **kw: events.append("policy") or step(*args, **kw)
    trainer.distill.updater.update = lambda *args: events.append("lora") or update(*args)
    trainer.train()
    # Two steps on each of two batches, and the LoRA after every second batch
    assert events == ["policy"] * 4 + ["lora"]


def test_steps_that_span_batches(tmp_path):
    """A generation batch may end within a step of the optimizer: the LoRA waits for that step."""
    trainer = distilling(
        tmp_path, max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=3, steps_per_generation=2
    )
    steps = []
    update = trainer.distill.updater.update
    trainer.distill.updater.update = lambda *args: steps.append(trainer.state.global_step) or update(*args)
    trainer.train()
    # Eight forwards, a batch every two, a step every three: the second batch ends in the middle of the second step
    assert len(trainer.rollouts) == 4
    assert steps == [1, 2, 2, 3]


def test_saved_model_is_the_dense_policy_and_the_lora_lies_beside_it(tmp_path):
    model = tiny_model()
    trainer = distilling(tmp_path, arguments={"model": model}, max_steps=2, save_strategy="steps", save_steps=2)
    trainer.train()
    trainer.save_model()
    ids = torch.tensor([[7, 8, 9, 10]])
    with torch.no_grad():
        dense = model(ids).logits
        with adapter_of(trainer).active():
            sparrow = model(ids).logits
        assert not torch.equal(dense, sparrow)
        for folder in (tmp_path, tmp_path / "checkpoint-2"):
            loaded = AutoModelForCausalLM.from_pretrained(folder)
            assert set(loaded.state_dict()) == set(tiny_model().state_dict())
            assert torch.equal(loaded(ids).logits, dense)
            beside = PeftModel.from_pretrained(loaded, folder / "sparrow" / "adapter")
            torch.testing.assert_close(beside(ids).logits, sparrow)
    assert not (tmp_path / "sparrow" / "distill.pt").exists()


def test_saved_lora_policy_is_its_own_adapter_alone(tmp_path):
    model = get_peft_model(tiny_model(), LoraConfig(**LORA))
    trainer = distilling(tmp_path, arguments={"model": model}, max_steps=2)
    trainer.train()
    trainer.save_model()
    ids = torch.tensor([[7, 8, 9, 10]])
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path)
    assert list(loaded.peft_config) == ["default"]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        loaded.load_adapter(tmp_path / "sparrow" / "adapter", "sparrow")
        loaded.base_model.set_adapter(["default", "sparrow"])
        found = loaded(ids).logits
        with adapter_of(trainer).active():
            torch.testing.assert_close(found, model(ids).logits)


@pytest.mark.parametrize(
    "options",
    [
        {"save_steps": 3},
        {"save_steps": 3, "peft": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        {"save_steps": 3, "distill_every": 2, "distill_steps": 2, "distill_tokens": 120},
    ],
    ids=["full", "lora", "every second batch"],
)
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, options):
    options = {"max_steps": 6, "save_strategy": "steps", "optim": "adamw_torch", **options}
    peft = options.pop("peft", False)

    def start():
        # An own configuration for each, because PEFT writes to it
        return distilling(tmp_path, arguments={"peft_config": LoraConfig(**LORA)} if peft else {}, **options)

    whole = start()
    whole.train()
    torch.manual_seed(1234)  # whatever happened in between
    resumed = start()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert len(resumed.rollouts) == 3
    assert resumed.rollouts == whole.rollouts[3:]
    assert digest(resumed.model) == digest(whole.model)
    assert digest(adapter_of(resumed)) == digest(adapter_of(whole))
    states = [trainer.distill.updater.state_dict() for trainer in (resumed, whole)]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


def test_checkpoint_of_a_run_without_a_lora(tmp_path):
    make_trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    with pytest.raises(FileNotFoundError, match="had distill_sparse=False"):
        distilling(tmp_path).train(resume_from_checkpoint=True)


def test_reference_of_a_lora_policy_is_the_base_model(tmp_path, monkeypatch):
    """With a policy that has not been trained yet the KL term is 0, whatever the LoRA does."""
    trainer = distilling(
        tmp_path, arguments={"peft_config": LoraConfig(**LORA)}, max_steps=1, beta=0.1, learning_rate=0.0
    )
    randomise(adapter_of(trainer))
    trainer.train()
    assert logged(trainer, "kl") == [pytest.approx(0.0, abs=1e-6)]


# --- options ---


def test_dense_schedule_has_nothing_to_learn(tmp_path):
    with pytest.warns(UserWarning, match="distill_sparse=True has no effect: the schedule is dense"):
        trainer = distilling(tmp_path, sparse_schedule="dense")
    assert trainer.distill is None
    trainer.train()
    assert not logged(trainer, "sparrow/distill/loss")


def test_dense_rollouts_are_sampled_without_the_lora(tmp_path):
    """Where the schedule turns dense in the middle of a run."""
    trainer = distilling(tmp_path, max_steps=1)
    states = []
    generate = trainer.rollout_engine.generate
    adapter = adapter_of(trainer)
    trainer.rollout_engine.generate = lambda *args, **kw: states.append(adapter.is_active) or generate(*args, **kw)
    trainer.rollout_engine.schedule = SparsitySchedule.dense()
    trainer.train()
    assert states == [False]
    assert not logged(trainer, "sparrow/distill/loss")


def test_options_arrive(tmp_path):
    trainer = distilling(
        tmp_path,
        distill_rank=3,
        distill_alpha=5.0,
        distill_target_modules=["q_proj"],
        distill_learning_rate=2e-4,
        distill_max_grad_norm=0.5,
        distill_kl="top_k",
        distill_kl_direction="reverse",
        distill_kl_coef=2.0,
        distill_ppo_coef=0.5,
        distill_top_k=7,
        distill_every=3,
        distill_tokens=500,
        distill_steps=4,
        distill_micro_tokens=300,
        temperature=0.8,
        epsilon_high=0.28,
    )
    adapter, update = trainer.distill.adapter, trainer.distill.updater
    assert (adapter.rank, adapter.alpha, len(adapter.names)) == (3, 5.0, 4)
    loss = update.loss
    assert (loss.kl, loss.direction, loss.kl_coef, loss.ppo_coef, loss.top_k) == ("top_k", "reverse", 2.0, 0.5, 7)
    assert (loss.epsilon_low, loss.epsilon_high) == (0.2, 0.28)
    assert (update.max_grad_norm, update.num_steps, update.max_tokens, update.micro_tokens) == (0.5, 4, 500, 300)
    assert update.temperature == 0.8 and update.optimizer.param_groups[0]["lr"] == pytest.approx(2e-4)
    assert trainer.distill.every == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distill_rank": 0}, "distill_rank=0 is not a positive integer"),
        ({"distill_every": 0}, "distill_every=0"),
        ({"distill_steps": 1.5}, "distill_steps=1.5"),
        ({"distill_micro_tokens": 0}, "distill_micro_tokens=0"),
        ({"distill_tokens": 0}, "distill_tokens=0 is below 1"),
        ({"distill_alpha": 0}, "distill_alpha=0 is not a finite number above 0"),
        ({"distill_alpha": float("nan")}, "distill_alpha=nan"),
        ({"distill_alpha": "32"}, "distill_alpha='32'"),
        ({"distill_alpha": [32]}, r"distill_alpha=\[32\]"),
        ({"distill_learning_rate": "5e-4"}, "distill_learning_rate='5e-4' is not a finite number"),
        ({"distill_learning_rate": -1.0}, "distill_learning_rate=-1.0"),
        ({"distill_kl_coef": float("inf")}, "distill_kl_coef=inf"),
        ({"distill_kl": "k4"}, "distill_kl='k4' is not one of full, top_k, k1, k2, k3"),
        ({"distill_kl_direction": "both"}, "distill_kl_direction='both'"),
        ({"distill_reuse_teacher": True}, "needs distill_kl to be one of k1, k2, k3, not 'full'"),
        ({"distill_target_modules": []}, "names no layer"),
        ({"sparse_schedule": None}, r"sparsity is off \(sparse_schedule=None\)"),
    ],
)
def test_bad_options(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, SparrowGRPOConfig, distill_sparse=True, **options)
    if "sparse_schedule" not in options:
        make_config(tmp_path, SparrowGRPOConfig, **options)  # not looked at


def test_target_that_does_not_exist_is_refused_when_the_trainer_is_built(tmp_path):
    with pytest.raises(ValueError, match="no layer 'nowhere'"):
        distilling(tmp_path, distill_target_modules=["nowhere"])


def test_policy_with_an_adapter_of_that_name_is_refused(tmp_path):
    model = get_peft_model(tiny_model(), LoraConfig(**LORA), adapter_name="sparrow")
    with pytest.raises(ValueError, match="already has an adapter named 'sparrow'"):
        distilling(tmp_path, arguments={"model": model})


def test_without_the_switch_there_is_no_lora(tmp_path):
    trainer = make_trainer(tmp_path, RecordingTrainer)
    assert trainer.distill is None
    trainer.save_model()
    assert not (tmp_path / "sparrow" / "adapter").exists()
