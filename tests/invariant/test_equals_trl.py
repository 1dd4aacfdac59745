"""Sparsity off is TRL, and exact attention with TRL's own samples is TRL up to rounding."""

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from sparrow_trl import SparrowGRPOConfig, SparrowGRPOTrainer
from tiny import tiny_model
from training import logged, make_config, make_trainer, plain_logprobs


STEPS = 10

RUNS = {
    "one update a batch": {},
    "batches reused, with a KL term": {
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 4,
        "num_iterations": 2,
        "beta": 0.04,
    },
    "batches larger than a step": {"per_device_train_batch_size": 4, "steps_per_generation": 4, "loss_type": "grpo"},
    "another temperature": {"temperature": 0.7, "loss_type": "bnpo"},
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A folder, because TRL loads the reference model of the KL term from where the policy came from."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    return str(folder)


def build(tmp_path, model_folder, trainer_class, config_class, **options):
    # SGD: Adam would blow the rounding error of a vanishing gradient up to the learning rate
    options = {"optim": "sgd", "learning_rate": 0.1, "max_steps": STEPS, **options}
    config = make_config(tmp_path, config_class, **options)
    return make_trainer(tmp_path, trainer_class, config, arguments={"model": model_folder})


def parameters(trainer):
    return {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS.keys())
def test_sparsity_off_is_exactly_trl(tmp_path, model_folder, options):
    # One after the other: building a trainer seeds the generator that its training draws from
    theirs = build(tmp_path / "trl", model_folder, GRPOTrainer, GRPOConfig, **options)
    theirs.train()
    ours = build(
        tmp_path / "ours", model_folder, SparrowGRPOTrainer, SparrowGRPOConfig, sparse_schedule=None, **options
    )
    ours.train()

    untimed = [
        [
            {name: value for name, value in entry.items() if "time" not in name and "per_second" not in name}
            for entry in t
        ]
        for t in (theirs.state.log_history, ours.state.log_history)
    ]
    assert len(logged(theirs, "loss")) == STEPS
    assert untimed[1] == untimed[0]  # the loss and gradient norm of each step, and every other metric
    for name, parameter in parameters(theirs).items():
        assert torch.equal(parameters(ours)[name], parameter), name


class RecordingGRPOTrainer(GRPOTrainer):
    """TRL's trainer, which keeps what it sampled and the random state that it left."""

    def _generate_single_turn(self, *args, **kwargs):
        completion_ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        self.recorded.append((args[0], completion_ids, torch.get_rng_state()))
        return completion_ids, logprobs


class ReplayingTrainer(SparrowGRPOTrainer):
    """Our trainer with the samples of another, and their log-probabilities from a plain forward of the model."""

    def rollout(self, prompt_ids, num_generations=1):
        expected_prompts, completion_ids, random_state = self.recorded.pop(0)
        assert prompt_ids == expected_prompts
        super().rollout(prompt_ids[:1])  # so that the engine has run, as in any rollout
        logprobs = [
            plain_logprobs(self.model, prompt, completion, self.args.temperature).tolist()
            for prompt, completion in zip(prompt_ids, completion_ids, strict=True)
        ]
        torch.set_rng_state(random_state)
        return completion_ids, logprobs


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS.keys())
def test_exact_attention_with_trls_samples_is_trl_up_to_rounding(tmp_path, model_folder, options):
    theirs = build(tmp_path / "trl", model_folder, RecordingGRPOTrainer, GRPOConfig, **options)
    theirs.recorded = []
    ours = build(
        tmp_path / "ours", model_folder, ReplayingTrainer, SparrowGRPOConfig, sparse_schedule="dense", **options
    )
    theirs.train()
    ours.recorded = list(theirs.recorded)
    ours.train()

    assert not ours.recorded
    for name in ("loss", "grad_norm", "reward", "completions/mean_length", "entropy", "clip_ratio/region_mean"):
        assert logged(ours, name) == pytest.approx(logged(theirs, name), rel=1e-4, abs=2e-6), name
    assert logged(ours, "sparrow/importance_ratio/min") == pytest.approx([1.0] * len(theirs.recorded), abs=1e-4)
    assert logged(ours, "sparrow/importance_ratio/max") == pytest.approx([1.0] * len(theirs.recorded), abs=1e-4)
    moved = 0.0
    for name, initial in tiny_model("llama").named_parameters():
        ours_now, theirs_now = parameters(ours)[name], parameters(theirs)[name]
        torch.testing.assert_close(ours_now, theirs_now, rtol=1e-4, atol=1e-5)
        moved = max(moved, (theirs_now - initial).abs().max().item())
    assert moved > 5e-3  # the ten steps went somewhere
