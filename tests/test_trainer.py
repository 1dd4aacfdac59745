"""`SparrowGRPOTrainer` in short runs of tiny models: what TRL's trainer can do, and what a rollout must not do."""

import functools
import gc
import json
import math
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, TaskType, get_peft_model
from transformers import AutoTokenizer, ProcessorMixin
from trl import GRPOConfig, GRPOTrainer

from sparrow_trl import SparrowGRPOConfig, SparrowGRPOTrainer, SparsitySchedule
from sparrow_trl.rollout import UnsupportedModelError
from sparrow_trl.rollout.cache import PagedKVCache
from sparrow_trl.rollout.sampler import Sampler
from sparrow_trl.rollout.support import probe
from tiny import tiny_config, tiny_model, tiny_tokenizer
from training import (
    SPARSE,
    RecordingTrainer,
    count_letters,
    logged,
    make_config,
    make_trainer,
    plain_logprobs,
    prompts,
)


def completions(trainer) -> list[list[int]]:
    return [completion for _, completion_ids, _ in trainer.rollouts for completion in completion_ids]


def weights(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def changed(before: dict[str, torch.Tensor], model) -> list[str]:
    return [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])]


# --- a sparse run and its metrics ---


@pytest.fixture(scope="module")
def sparse_run(tmp_path_factory):
    model = tiny_model()
    trainer = make_trainer(tmp_path_factory.mktemp("run"), RecordingTrainer, arguments={"model": model}, max_steps=2)
    trainer.train()
    return trainer


def test_training_changes_the_model_and_reads_a_part_of_the_cache(sparse_run):
    assert changed(weights(tiny_model()), sparse_run.model)
    for share in logged(sparse_run, "sparrow/kv_share"):
        assert 0 < share < 0.95
    assert logged(sparse_run, "sparrow/budget") == [2.0, 2.0]
    assert all(rate > 0 for rate in logged(sparse_run, "sparrow/rollout_tokens_per_second"))
    assert all(seconds > 0 for seconds in logged(sparse_run, "sparrow/rollout_seconds"))


def test_importance_ratios_are_those_of_a_plain_forward(sparse_run):
    """The first step's ratios, worked out with the initial weights and one plain forward a completion."""
    policy = tiny_model()
    ratios = torch.cat(
        [
            (plain_logprobs(policy, prompt, completion) - torch.tensor(actor)).exp()
            for prompt, completion, actor in zip(*sparse_run.rollouts[0], strict=True)
        ]
    )
    assert ratios.max() > 1.05  # sparse: the actor is not the policy
    step = next(entry for entry in sparse_run.state.log_history if "sparrow/importance_ratio/mean" in entry)
    assert step["sparrow/importance_ratio/mean"] == pytest.approx(ratios.mean().item(), rel=1e-4)
    assert step["sparrow/importance_ratio/min"] == pytest.approx(ratios.min().item(), rel=1e-4)
    assert step["sparrow/importance_ratio/max"] == pytest.approx(ratios.max().item(), rel=1e-4)
    assert step["sparrow/clipped_fraction"] == pytest.approx((ratios > 2.0).float().mean().item(), abs=1e-6)
    # TRL's own metric is of the truncated ratios, with the default C = 2
    assert step["sampling/importance_sampling_ratio/mean"] == pytest.approx(
        ratios.clamp(max=2).mean().item(), rel=1e-4
    )


def test_metrics_are_plain_numbers(sparse_run):
    found = {name for entry in sparse_run.state.log_history for name in entry if name.startswith("sparrow/")}
    assert found == {
        "sparrow/importance_ratio/mean",
        "sparrow/importance_ratio/min",
        "sparrow/importance_ratio/max",
        "sparrow/clipped_fraction",
        "sparrow/kv_share",
        "sparrow/budget",
        "sparrow/rollout_seconds",
        "sparrow/rollout_tokens_per_second",
        "sparrow/preemptions",
        "sparrow/pages_peak",
        "sparrow/budget/bin_0",
    }
    for entry in sparse_run.state.log_history:
        for name in found & set(entry):
            assert type(entry[name]) is float
            assert math.isfinite(entry[name])


def test_loss_is_weighted_with_the_truncated_ratio(tmp_path):
    """The gradient of the first step, against the policy gradient written out: sum of w * A * grad log p."""
    model = tiny_model()
    trainer = make_trainer(
        tmp_path,
        RecordingTrainer,
        arguments={"model": model},
        max_steps=1,
        optim="sgd",
        learning_rate=1.0,
        max_grad_norm=0.0,
    )
    advantages = []
    score = trainer.after_rollout_scored
    trainer.after_rollout_scored = lambda scored: (advantages.append(scored.advantages), score(scored))
    trainer.train()

    policy = tiny_model()
    (prompt_ids, completion_ids, logprobs), total = trainer.rollouts[0], 0.0
    for prompt, completion, actor, advantage in zip(prompt_ids, completion_ids, logprobs, advantages[0], strict=True):
        logits = policy(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logp = logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
        weight = (logp.detach() - torch.tensor(actor)).exp().clamp(max=2.0)
        total = total - (weight * advantage * logp).sum()
    (total / sum(map(len, completion_ids))).backward()
    for (name, parameter), trained in zip(policy.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(trained, parameter - parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_warns_once_where_most_tokens_are_out_of_bounds(tmp_path):
    with pytest.warns(UserWarning, match="importance ratio of 100% of the tokens") as caught:
        trainer = make_trainer(tmp_path, vllm_importance_sampling_clip_max=0.01, max_steps=2)
        trainer.train()
    assert len([warning for warning in caught if "importance ratio of" in str(warning.message)]) == 1
    assert logged(trainer, "sparrow/clipped_fraction") == [1.0, 1.0]


def test_without_correction_there_are_no_ratios(tmp_path):
    trainer = make_trainer(tmp_path, sparse_schedule="dense", vllm_importance_sampling_correction=False, max_steps=1)
    trainer.train()
    assert logged(trainer, "sparrow/kv_share") == [1.0]
    assert not logged(trainer, "sparrow/importance_ratio/mean")
    assert not logged(trainer, "sampling/importance_sampling_ratio/mean")


# --- what TRL's trainer can do ---


async def async_count_letters(completions, **kwargs):
    return count_letters(completions)


RUNS = {
    "conversational": ({"train_dataset": prompts(conversational=True)}, {}),
    "streaming": ({"train_dataset": prompts().to_iterable_dataset()}, {}),
    "async reward": ({"reward_funcs": [async_count_letters, count_letters]}, {}),
    "gradient checkpointing": ({}, {"gradient_checkpointing": True}),
    "reentrant checkpointing": (
        {},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ),
    "several iterations": ({}, {"num_iterations": 2, "max_steps": 4}),
    "large generation batch": ({}, {"per_device_train_batch_size": 4, "steps_per_generation": 4, "max_steps": 4}),
    "gradient accumulation": ({}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}),
    "one token": ({}, {"max_completion_length": 1}),
    "bf16": ({}, {"bf16": True}),
    "temperature and truncation": ({}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01}),
    "repetition penalty": ({}, {"repetition_penalty": 1.2}),
    "generation_kwargs": ({}, {"generation_kwargs": {"suppress_tokens": [7], "min_new_tokens": 3}}),
    "padding to a multiple": ({}, {"pad_to_multiple_of": 16}),
    "masked, not truncated": ({}, {"vllm_importance_sampling_mode": "token_mask"}),
    "vespo": ({}, {"loss_type": "vespo"}),
    "off-policy mask": ({}, {"off_policy_mask_threshold": 0.5}),
    "fp32 head": ({}, {"cast_lm_head_to_fp32": True, "bf16": True}),
    "dropout off": ({}, {"disable_dropout": True}),
}


@pytest.mark.parametrize(("arguments", "options"), RUNS.values(), ids=RUNS.keys())
def test_runs(tmp_path, arguments, options):
    model = tiny_model()
    trainer = make_trainer(tmp_path, RecordingTrainer, arguments={"model": model, **arguments}, **options)
    before = weights(model)
    trainer.train()
    assert changed(before, model)
    assert all(math.isfinite(loss) for loss in logged(trainer, "loss"))
    assert all(norm > 0 and math.isfinite(norm) for norm in logged(trainer, "grad_norm"))
    assert len(logged(trainer, "loss")) == trainer.args.max_steps

    steps_of_a_batch = trainer.args.steps_per_generation * trainer.args.num_iterations
    accumulation = trainer.args.gradient_accumulation_steps
    assert len(trainer.rollouts) == math.ceil(trainer.args.max_steps * accumulation / steps_of_a_batch)
    assert logged(trainer, "sparrow/kv_share")
    limit = trainer.args.max_completion_length
    for _, completion_ids, logprobs in trainer.rollouts:
        assert len(completion_ids) == trainer.args.generation_batch_size
        for completion, of_completion in zip(completion_ids, logprobs, strict=True):
            assert 1 <= len(completion) <= limit
            assert len(of_completion) == len(completion)
            if len(completion) < limit:
                assert completion[-1] in trainer.eos_token_ids


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"temperature": 0.7}], ids=["fp32", "bf16", "temperature"])
@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
def test_exact_attention_has_ratios_of_one(tmp_path, options, peft):
    """Both sides of the ratio agree: on the temperature, the dtype, the adapter that has been trained."""
    arguments = {"peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")} if peft else {}
    trainer = make_trainer(tmp_path, arguments=arguments, sparse_schedule="dense", max_steps=3, **options)
    trainer.train()
    tolerance = 0.2 if options.get("bf16") else 1e-4
    assert len(logged(trainer, "sparrow/importance_ratio/min")) == 3
    assert logged(trainer, "sparrow/importance_ratio/min") == pytest.approx([1.0] * 3, abs=tolerance)
    assert logged(trainer, "sparrow/importance_ratio/max") == pytest.approx([1.0] * 3, abs=tolerance)
    assert logged(trainer, "sparrow/importance_ratio/mean") == pytest.approx([1.0] * 3, abs=tolerance / 10)


def test_model_in_bf16(tmp_path):
    model = tiny_model().to(torch.bfloat16)
    trainer = make_trainer(tmp_path, arguments={"model": model}, sparse_schedule="dense", bf16=True)
    before = weights(model)
    trainer.train()
    assert changed(before, model)
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert logged(trainer, "sparrow/importance_ratio/mean") == pytest.approx([1.0, 1.0], abs=0.03)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_one_autocast_context_spans_a_rollout(tmp_path, monkeypatch, bf16):
    """Autocast drops its casts of the weights when the outermost context ends, which must not be at each token."""
    trainer = make_trainer(tmp_path, bf16=bf16, max_steps=1)
    generate, contexts = trainer.rollout_engine.generate, []

    def watched(*args, **kwargs):
        contexts.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return generate(*args, **kwargs)

    monkeypatch.setattr(trainer.rollout_engine, "generate", watched)
    trainer.train()
    assert contexts == [(bf16, False)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="accelerate trains in fp16 on a GPU alone")
def test_fp16(tmp_path):
    trainer = make_trainer(tmp_path, sparse_schedule="dense", fp16=True, use_cpu=False)
    trainer.train()
    assert logged(trainer, "sparrow/importance_ratio/mean") == pytest.approx([1.0, 1.0], abs=0.03)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_lora_policy_trains_its_adapter_alone(tmp_path, checkpointing):
    model = tiny_model()
    before = weights(model)
    trainer = make_trainer(
        tmp_path,
        arguments={"model": model, "peft_config": LoraConfig(r=4, task_type="CAUSAL_LM")},
        gradient_checkpointing=checkpointing,
        save_strategy="steps",
        save_steps=2,
    )
    adapter = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    assert adapter
    assert all("lora_" in name for name in adapter)
    assert [name for name, p in trainer.model.named_parameters() if p.requires_grad] == list(adapter)
    assert any(not torch.equal(trainer.model.get_parameter(name), value) for name, value in adapter.items())
    for name, value in before.items():
        base = name.replace(".weight", ".base_layer.weight")
        names = dict(trainer.model.base_model.model.named_parameters())
        assert torch.equal(names[base if base in names else name], value)
    assert (Path(trainer.args.output_dir) / "checkpoint-2" / "adapter_model.safetensors").exists()


def test_peft_model_as_policy(tmp_path):
    model = get_peft_model(tiny_model(), LoraConfig(r=4, task_type="CAUSAL_LM"))
    trainer = make_trainer(tmp_path, arguments={"model": model}, max_steps=1)
    trainer.train()
    assert logged(trainer, "sparrow/kv_share")[0] < 1


def test_evaluation_with_its_own_number_of_generations(tmp_path):
    trainer = make_trainer(
        tmp_path,
        RecordingTrainer,
        arguments={"eval_dataset": prompts(3)},
        num_generations_eval=2,
        per_device_eval_batch_size=6,
        eval_strategy="steps",
        eval_steps=1,
        max_steps=1,
    )
    trainer.train()
    (_, trained, _), (evaluated_prompts, evaluated, _) = trainer.rollouts
    assert len(trained) == 8
    assert len(evaluated) == 6
    assert sorted(evaluated_prompts.count(prompt) for prompt in evaluated_prompts) == [2] * 6
    (entry,) = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert 0 < entry["eval_sparrow/kv_share"] < 1
    assert entry["eval_sparrow/importance_ratio/max"] >= entry["eval_sparrow/importance_ratio/min"]
    assert not [name for name in entry if name.startswith("sparrow/")]
    # Nothing of the evaluation is in the metrics of the training
    assert len(logged(trainer, "sparrow/kv_share")) == 1


def test_evaluation_alone(tmp_path):
    trainer = make_trainer(tmp_path, arguments={"eval_dataset": prompts(2)})
    before = weights(trainer.model)
    metrics = trainer.evaluate()
    assert math.isfinite(metrics["eval_loss"])
    assert not changed(before, trainer.model)


def test_truncated_completions_can_be_masked(tmp_path):
    """All completions are truncated, so nothing is learnt: loss 0, gradients 0, the weights stay."""
    tokenizer = tiny_tokenizer()
    trainer = make_trainer(
        tmp_path,
        RecordingTrainer,
        arguments={"processing_class": tokenizer},
        mask_truncated_completions=True,
        # TRL takes a completion that ends in padding for a finished one
        generation_kwargs={"suppress_tokens": [tokenizer.eos_token_id, tokenizer.pad_token_id]},
    )
    before = weights(trainer.model)
    trainer.train()
    assert logged(trainer, "completions/clipped_ratio") == [1.0, 1.0]
    assert logged(trainer, "loss") == [0.0, 0.0]
    assert logged(trainer, "grad_norm") == [0.0, 0.0]
    assert not changed(before, trainer.model)
    assert not logged(trainer, "sparrow/importance_ratio/mean")  # there are no tokens to take the mean of
    assert all(0 < share < 1 for share in logged(trainer, "sparrow/kv_share"))


def test_masked_completions_count_in_no_metric(tmp_path):
    """Some completions are truncated: the metrics are those of the others."""
    model = tiny_model()
    model.generation_config.eos_token_id = list(range(100, 120))
    trainer = make_trainer(
        tmp_path,
        RecordingTrainer,
        arguments={"model": model},
        mask_truncated_completions=True,
        max_steps=1,
        max_completion_length=6,
    )
    trainer.train()
    ratios, policy = [], tiny_model()
    for prompt, completion, actor in zip(*trainer.rollouts[0], strict=True):
        if completion[-1] in (*trainer.eos_token_ids, trainer.processing_class.pad_token_id):
            ratios.append((plain_logprobs(policy, prompt, completion) - torch.tensor(actor)).exp())
    assert 0 < len(ratios) < 8
    ratios = torch.cat(ratios)
    assert logged(trainer, "sparrow/importance_ratio/mean") == pytest.approx([ratios.mean().item()], rel=1e-4)
    assert logged(trainer, "sparrow/importance_ratio/max") == pytest.approx([ratios.max().item()], rel=1e-4)


# --- tools and environments ---


def multiply(a: int, b: int) -> int:
    """
    Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        The product.
    """
    return a * b


class Calculator:
    """An environment that owns its reward."""

    def reset(self, **kwargs) -> str:
        self.calls = 0
        return " Use the tool."

    def multiply(self, a: int, b: int) -> int:
        """
        Multiply two numbers.

        Args:
            a: The first number.
            b: The second number.

        Returns:
            The product.
        """
        self.calls += 1
        return a * b

    def get_reward(self) -> float:
        return float(self.calls)


CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call><|im_end|>'


class ToolCallingTrainer(RecordingTrainer):
    """A tiny random model calls no tools, so in half of the completions the first turn is a call, whatever it sampled."""

    def rollout(self, prompt_ids, num_generations=1):
        completion_ids, logprobs = super().rollout(prompt_ids, num_generations)
        if len(self.rollouts) % 2:
            call = self.processing_class(CALL)["input_ids"]
            for i in range(0, len(prompt_ids), 2):
                completion_ids[i] = list(call)
                logprobs[i] = plain_logprobs(self.model, prompt_ids[i], call).tolist()
        return completion_ids, logprobs


TOOL_RUNS = {
    "tools": {"tools": [multiply], "train_dataset": prompts(conversational=True)},
    "environment": {"environment_factory": Calculator, "train_dataset": prompts(conversational=True)},
    "environment without a dataset": {"environment_factory": Calculator, "train_dataset": None, "reward_funcs": None},
}


@pytest.mark.parametrize("arguments", TOOL_RUNS.values(), ids=TOOL_RUNS.keys())
def test_tools_and_environments(tmp_path, arguments):
    tokenizer = tiny_tokenizer(tools=True)
    trainer = make_trainer(
        tmp_path,
        ToolCallingTrainer,
        arguments={"processing_class": tokenizer, **arguments},
        sparse_schedule="dense",
        max_steps=1,
        max_completion_length=160,
        per_device_train_batch_size=4,
    )
    scored = []
    after = trainer.after_rollout_scored
    trainer.after_rollout_scored = lambda batch: (scored.append(batch), after(batch))
    trainer.train()

    first, second = trainer.rollouts
    assert len(second[0]) == 2  # the completions with a call go on
    for prompt, continued in zip(first[0][::2], second[0], strict=True):
        text = tokenizer.decode(continued[len(prompt) :])
        assert text.startswith(CALL)
        assert "42" in text.removeprefix(CALL)
    if "environment_factory" in arguments:
        assert logged(trainer, "rewards/Calculator/mean") == [0.5]

    # What the tool said was not sampled: it counts in no metric. Its placeholder log-probability of 0 would show.
    assert logged(trainer, "tools/call_frequency") == [0.5]
    assert logged(trainer, "sparrow/importance_ratio/min") == pytest.approx([1.0], abs=1e-3)
    assert logged(trainer, "sparrow/importance_ratio/max") == pytest.approx([1.0], abs=1e-3)
    sampled = sum(len(c) for c in first[1]) + sum(len(c) for c in second[1])
    assert scored[0].mask.sum() <= sampled  # less where a completion would have become too long
    assert scored[0].mask.sum() > len(tokenizer(CALL)["input_ids"])
    assert trainer.sampled_since_last_batch() is False


# --- rollout functions ---


def rollout_func_with(sparse: bool):
    def rollout_func(batch_prompts, trainer):
        prompt_ids = trainer.processing_class(batch_prompts)["input_ids"]
        if sparse:
            completion_ids, logprobs = trainer.rollout(prompt_ids)
        else:
            completion_ids, logprobs = [[20, 21, 2]] * len(prompt_ids), [[-50.0] * 3] * len(prompt_ids)
        trainer.seen = (prompt_ids, completion_ids, logprobs)
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

    return rollout_func


def test_rollout_func_that_samples_with_the_engine_is_corrected(tmp_path):
    with pytest.warns(UserWarning, match=r"trainer\.rollout\(prompt_ids\)"):
        trainer = make_trainer(tmp_path, arguments={"rollout_func": rollout_func_with(sparse=True)}, max_steps=1)
    trainer.train()
    ratios = torch.cat(
        [
            (plain_logprobs(tiny_model(), prompt, completion) - torch.tensor(actor)).exp()
            for prompt, completion, actor in zip(*trainer.seen, strict=True)
        ]
    )
    assert logged(trainer, "sparrow/importance_ratio/mean") == pytest.approx([ratios.mean().item()], rel=1e-4)
    assert logged(trainer, "sampling/importance_sampling_ratio/mean")


def test_rollout_func_that_samples_otherwise_is_left_alone(tmp_path):
    with pytest.warns(UserWarning, match="not sparse"):
        trainer = make_trainer(tmp_path, arguments={"rollout_func": rollout_func_with(sparse=False)}, max_steps=1)
    trainer.train()
    assert not [name for entry in trainer.state.log_history for name in entry if name.startswith("s") and "/" in name]
    assert trainer.rollout_engine.schedule.budgets == (2,)  # there for the asking


def test_rollout_func_may_decide_anew_for_each_batch(tmp_path):
    """A batch keeps its weights when another one, here of an evaluation, was generated in between."""
    calls = []

    def rollout_func(batch_prompts, trainer):
        calls.append(trainer.model.training)
        return rollout_func_with(sparse=trainer.model.training)(batch_prompts, trainer)

    with pytest.warns(UserWarning, match="not sparse"):
        trainer = make_trainer(
            tmp_path,
            arguments={"rollout_func": rollout_func, "eval_dataset": prompts(2)},
            num_iterations=2,
            eval_strategy="steps",
            eval_steps=1,
            max_steps=2,
        )
    weighted = []
    compute_loss = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: (
        compute_loss(model, inputs),
        weighted.append((model.training, trainer.use_vllm)),
    )[0]
    trainer.train()
    assert calls == [True, False, False]
    assert weighted == [(True, True), (False, False), (True, True), (False, False)]


# --- stop tokens and the model's generation config ---


def test_stop_tokens_are_the_union_of_all_that_declare_one(tmp_path):
    model = tiny_model()
    model.config.eos_token_id = [101, 102]
    model.generation_config.eos_token_id = [103]
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    trainer = make_trainer(
        tmp_path,
        RecordingTrainer,
        arguments={"model": model, "processing_class": tokenizer},
        generation_kwargs={"eos_token_id": list(range(104, 160))},
        max_completion_length=20,
        max_steps=1,
    )
    stop = {0, *range(101, 160)}
    assert set(trainer.eos_token_ids) == stop
    assert len(trainer.eos_token_ids) == len(stop)
    trainer.train()
    ended = 0
    for completion in completions(trainer):
        assert not stop & set(completion[:-1])
        ended += completion[-1] in stop
        assert completion[-1] in stop or len(completion) == 20
    assert ended
    assert logged(trainer, "completions/clipped_ratio") == pytest.approx([1 - ended / 8])


def test_generation_config_of_the_model_is_not_used(tmp_path):
    runs = []
    for number, options in enumerate(({}, {"top_k": 20, "temperature": 0.3, "top_p": 0.5, "do_sample": True})):
        model = tiny_model()
        for name, value in options.items():
            setattr(model.generation_config, name, value)
        trainer = make_trainer(tmp_path / str(number), RecordingTrainer, arguments={"model": model}, max_steps=1)
        trainer.train()
        runs.append(trainer.rollouts)
        assert model.generation_config.top_k == options.get("top_k", model.generation_config.top_k)
    assert runs[0] == runs[1]


# --- randomness and resuming ---


def test_seed_decides_the_completions(tmp_path):
    def run(seed):
        trainer = make_trainer(tmp_path, RecordingTrainer, seed=seed, max_steps=1, shuffle_dataset=False)
        trainer.train()
        return completions(trainer)

    first, other = run(0), run(1)
    assert run(0) == first
    assert other != first
    assert len({tuple(completion) for completion in first}) > 4  # a group is not one completion several times


def test_two_batches_draw_different_seeds(tmp_path):
    trainer = make_trainer(
        tmp_path, RecordingTrainer, learning_rate=0.0, max_steps=2, arguments={"train_dataset": prompts(2)}
    )
    trainer.train()
    (_, first, _), (_, second, _) = trainer.rollouts
    assert first != second


@pytest.mark.parametrize(
    "options",
    [
        {"save_steps": 3},
        {"save_steps": 4, "max_steps": 8, "num_iterations": 2},
        {"save_steps": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "peft": True},
    ],
    ids=["", "num_iterations", "accumulation, LoRA"],
)
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, options):
    options = {"max_steps": 6, "save_strategy": "steps", "optim": "adamw_torch", **options}
    arguments = {"peft_config": LoraConfig(r=4, task_type="CAUSAL_LM")} if options.pop("peft", False) else {}
    whole = make_trainer(tmp_path, RecordingTrainer, arguments=arguments, **options)
    whole.train()
    torch.manual_seed(1234)  # whatever happened in between
    resumed = make_trainer(tmp_path, RecordingTrainer, arguments=arguments, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{options['save_steps']}"))

    assert len(whole.rollouts) == 2 * len(resumed.rollouts) > 0
    assert resumed.rollouts == whole.rollouts[len(resumed.rollouts) :]  # token for token, and their log-probabilities
    for (name, expected), found in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(found, expected), name


# --- the model is left as it was ---


def state_of(model):
    return {
        "attention": model.config._attn_implementation,
        "training": [module.training for module in model.modules()],
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "dtypes": [parameter.dtype for parameter in model.parameters()],
        "checkpointing": [getattr(module, "gradient_checkpointing", None) for module in model.modules()],
        "forward": model.forward,
    }


@pytest.mark.parametrize("options", [{}, {"bf16": True, "gradient_checkpointing": True}], ids=["", "bf16"])
def test_model_is_untouched_by_a_rollout_that_raised(tmp_path, monkeypatch, options):
    model = tiny_model()
    trainer = make_trainer(tmp_path, RecordingTrainer, arguments={"model": model}, max_steps=2, **options)
    trainer.train()
    before, bytes_before = state_of(model), weights(model)
    prompt_ids = trainer.rollouts[0][0]

    calls = []

    def fail(self, *args, **kwargs):
        calls.append(None)
        if len(calls) == 4:
            raise RuntimeError("in the middle of a rollout")
        return sample(self, *args, **kwargs)

    sample = Sampler.__call__
    monkeypatch.setattr(Sampler, "__call__", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.rollout(prompt_ids)
    assert state_of(model) == before
    assert not changed(bytes_before, model)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()

    monkeypatch.undo()
    trainer.rollout(prompt_ids)
    assert state_of(model) == before


def test_cache_of_a_rollout_is_gone_before_the_rewards_and_the_backward(tmp_path):
    alive = []

    def reward(completions, **kwargs):
        alive.append(sum(type(thing) is PagedKVCache for thing in gc.get_objects()))
        return count_letters(completions)

    trainer = make_trainer(tmp_path, arguments={"reward_funcs": reward})
    gc.collect()
    trainer.train()
    assert alive == [0, 0]


# --- schedules and engine options ---


def test_options_arrive_at_the_engine(tmp_path):
    options = {
        "rollout_memory_fraction": 0.125,
        "rollout_max_num_seqs": 3,
        "rollout_prefill_chunk_size": 48,
        "rollout_progress_bar": True,
    }
    engine = make_trainer(tmp_path, **options).rollout_engine
    assert engine.memory_fraction == 0.125
    assert engine.max_num_seqs == 3
    assert engine.prefill_chunk_size == 48
    assert engine.progress_bar is True
    assert make_trainer(tmp_path, disable_tqdm=False).rollout_engine.progress_bar is None
    assert make_trainer(tmp_path, disable_tqdm=True).rollout_engine.progress_bar is False


def test_support_check_can_be_left_out(tmp_path, monkeypatch):
    compared = []

    def counting_probe(model, compare):
        compared.append(compare)
        return probe(model, compare)

    monkeypatch.setattr("sparrow_trl.rollout.engine.probe", counting_probe)
    make_trainer(tmp_path)
    make_trainer(tmp_path, rollout_check_support=False)
    assert compared == [True, False]


def test_decode_backends_train_alike(tmp_path):
    runs = []
    for backend in ("host", "torch"):
        trainer = make_trainer(tmp_path / backend, RecordingTrainer, max_steps=2, rollout_decode_backend=backend)
        trainer.train()
        assert trainer.rollout_engine.decode_backend == backend
        runs.append(completions(trainer))
    assert runs[0] == runs[1]


def test_auto_takes_the_published_schedule_of_the_model(tmp_path):
    folder = tmp_path / "Qwen3-1.7B"
    tiny_model("qwen3").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    arguments = {"model": str(folder), "processing_class": None}
    trainer = make_trainer(tmp_path / "run", arguments=arguments, sparse_schedule="auto")
    assert trainer.rollout_engine.schedule == SparsitySchedule.from_preset("qwen3-1.7b", 0.86)
    stricter = make_trainer(tmp_path / "run", arguments=arguments, sparse_schedule="auto", sparse_target=0.92)
    assert stricter.rollout_engine.schedule == SparsitySchedule.from_preset("qwen3-1.7b", 0.92)


def test_auto_is_dense_and_says_so_for_other_models(tmp_path):
    with pytest.warns(UserWarning, match="no published schedule"):
        trainer = make_trainer(tmp_path, sparse_schedule="auto")
    assert trainer.rollout_engine.schedule.is_dense


def test_auto_calibrates_other_models_on_the_training_prompts(tmp_path, monkeypatch):
    """What it is given, and that what it finds is used. The calibration itself has tests of its own."""
    found, given = SparsitySchedule((3, 5)), {}

    def calibrate(model, tokenizer, dataset, output_dir, **settings):
        given.update(settings, model=model, rows=list(dataset), output_dir=output_dir)
        return found

    monkeypatch.setattr("sparrow_trl.trainer.calibrate_for_training", calibrate)
    trainer = make_trainer(tmp_path, sparse_schedule="auto", sparse_target=0.9, temperature=0.7)
    assert trainer.rollout_engine.schedule == found
    assert given["model"] is trainer.model and given["output_dir"] == trainer.args.output_dir
    assert given["rows"] == list(trainer.train_dataset)
    assert (given["options"].target, given["options"].temperature) == (0.9, 0.7)
    assert given["max_completion_length"] == trainer.args.max_completion_length


def test_a_schedule_of_another_model_is_refused(tmp_path):
    made_for = {"name": "other", "architecture": {"layers": 99}}
    schedule = SparsitySchedule((3, 5), provenance={"model": made_for})
    with pytest.raises(ValueError, match=r"calibrated for another model \(other\): layers 99 against 4"):
        make_trainer(tmp_path, sparse_schedule=schedule)


@pytest.mark.parametrize("main", [True, False])
def test_warnings_come_from_the_main_process_alone(tmp_path, monkeypatch, recwarn, main):
    """`auto` without a published schedule, a rollout function and dropout, each once a run."""
    monkeypatch.setattr("sparrow_trl.processes.is_main_process", lambda: main)
    arguments = {"model": tiny_model(attention_dropout=0.1), "rollout_func": lambda prompts, trainer: {}}
    make_trainer(tmp_path, arguments=arguments, sparse_schedule="auto")
    ours = [w for w in recwarn if re.search("no published schedule|not sparse|has dropout", str(w.message))]
    assert len(ours) == (3 if main else 0)


def test_dropout_is_warned_about_by_name(tmp_path):
    """The rollout has none: its log-probabilities are those of the model in evaluation mode."""
    config = LoraConfig(r=4, lora_dropout=0.2, task_type="CAUSAL_LM")
    with pytest.warns(UserWarning, match=r"dropout \(attention_dropout=0.1, torch.nn.Dropout=0.2\)") as caught:
        trainer = make_trainer(
            tmp_path,
            RecordingTrainer,
            arguments={"model": tiny_model(attention_dropout=0.1), "peft_config": config},
            sparse_schedule="dense",
        )
    assert any("Set disable_dropout=True" in str(warning.message) for warning in caught)
    prompt = [10, 11, 12, 13]
    trainer.model.train()
    [completion], [found] = trainer.rollout([prompt])
    expected = plain_logprobs(trainer.model.eval(), prompt, completion)
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=0)


def test_without_dropout_there_is_no_warning(tmp_path, recwarn):
    config = LoraConfig(r=4, lora_dropout=0.2, task_type="CAUSAL_LM")
    make_trainer(tmp_path / "a")
    make_trainer(tmp_path / "b", arguments={"peft_config": config}, disable_dropout=True)
    assert not [warning for warning in recwarn if "dropout" in str(warning.message)]


def test_schedule_object(tmp_path):
    schedule = SparsitySchedule(budgets=(1, 2), bin_tokens=32, page_size=4)
    trainer = make_trainer(tmp_path, sparse_schedule=schedule)
    assert trainer.rollout_engine.schedule == schedule


# --- arguments ---


def test_positional_arguments_as_in_trl(tmp_path):
    """Every argument by position, in TRL's order; each arrives where TRL would have put it."""
    eval_dataset, callbacks = prompts(2), []
    config, tokenizer = make_config(tmp_path), tiny_tokenizer()
    values = (tiny_model(), count_letters, config, prompts(), eval_dataset, tokenizer, None, callbacks, (None, None))
    trainer = SparrowGRPOTrainer(*values, None, LoraConfig(r=2, task_type="CAUSAL_LM"), None, None, None)
    assert trainer.args is config
    assert trainer.eval_dataset is eval_dataset
    assert trainer.processing_class is tokenizer
    assert trainer.reward_funcs == [count_letters]
    assert trainer.model.peft_config["default"].r == 2
    assert isinstance(trainer, GRPOTrainer)


def test_default_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # TRL's defaults need a GPU
    on_cpu = functools.partialmethod(SparrowGRPOConfig.__init__, use_cpu=True, report_to="none")
    monkeypatch.setattr(SparrowGRPOConfig, "__init__", on_cpu)
    folder = tmp_path / "tiny-llama"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    with pytest.warns(UserWarning, match="no published schedule"):
        trainer = SparrowGRPOTrainer(str(folder), count_letters, train_dataset=prompts())
    assert isinstance(trainer.args, SparrowGRPOConfig)
    assert trainer.args.output_dir == "tiny-llama-GRPO"  # as TRL names it


def test_configuration_of_trl_is_refused_with_the_import_to_change(tmp_path):
    config = make_config(tmp_path, GRPOConfig)
    with pytest.raises(TypeError, match="from sparrow_trl import SparrowGRPOConfig as GRPOConfig"):
        make_trainer(tmp_path, config=config)


def test_no_engine_without_sparsity(tmp_path):
    trainer = make_trainer(tmp_path, sparse_schedule=None)
    with pytest.raises(ValueError, match="sparse_schedule=None"):
        _ = trainer.rollout_engine


# --- what is refused when the trainer is built ---


@pytest.mark.parametrize("model_type", ["falcon_h1", "deepseek_v3", "mamba", "qwen3_next"])
def test_unsupported_architecture_is_refused_before_it_is_loaded(tmp_path, model_type):
    folder = tmp_path / model_type
    tiny_config(model_type).save_pretrained(folder)  # there are no weights to load
    with pytest.raises(UnsupportedModelError) as caught:
        make_trainer(tmp_path, arguments={"model": str(folder)})
    assert model_type in str(caught.value)
    assert "sparse_schedule=None" in str(caught.value)


def test_unsupported_model_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="gpt_oss"):
        make_trainer(tmp_path, arguments={"model": tiny_model("gpt_oss")})


def test_unsupported_model_trains_without_sparsity(tmp_path):
    trainer = make_trainer(tmp_path, arguments={"model": tiny_model("gpt_oss")}, sparse_schedule=None, max_steps=1)
    trainer.train()
    assert len(logged(trainer, "loss")) == 1


class Images(ProcessorMixin):
    def __init__(self):
        self.tokenizer = tiny_tokenizer()


def test_images_are_refused(tmp_path):
    with pytest.raises(ValueError, match="Images.*sparse_schedule=None"):
        make_trainer(tmp_path, arguments={"processing_class": Images()})


def test_images_in_a_prompt_are_refused(tmp_path):
    content = [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "What is it?"}]
    trainer = make_trainer(tmp_path)
    with pytest.raises(ValueError, match="images.*sparse_schedule=None"):
        trainer._generate_single_turn([[1, 2]], [content[:1]], {}, 2)


def test_prompt_learning_is_refused(tmp_path):
    config = PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4)
    with pytest.raises(ValueError, match="PREFIX_TUNING.*LoRA.*sparse_schedule=None"):
        make_trainer(tmp_path, arguments={"peft_config": config})
    with pytest.raises(ValueError, match="PREFIX_TUNING"):
        make_trainer(tmp_path, arguments={"model": get_peft_model(tiny_model(), config)})


def test_fsdp_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="FSDP.*DDP.*ZeRO-2.*sparse_schedule=None"):
        make_trainer(tmp_path)


class DeepSpeed:
    def __init__(self, stage):
        self.zero_stage = stage


def test_zero_3_is_refused(tmp_path):
    config = make_config(tmp_path)
    config.deepspeed_plugin = DeepSpeed(3)
    with pytest.raises(ValueError, match="ZeRO-3.*DDP.*ZeRO-2.*sparse_schedule=None"):
        make_trainer(tmp_path, config=config)


def test_sharded_parameters_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sparrow_trl.trainer.DTensor", torch.nn.Parameter)  # as if the model came in shards
    with pytest.raises(ValueError, match="sharded.*DDP.*sparse_schedule=None"):
        make_trainer(tmp_path)


def test_model_on_several_devices_is_refused(tmp_path):
    model = tiny_model()
    model.lm_head.to("meta")
    model.hf_device_map = {"model": "cpu", "lm_head": "meta"}
    with pytest.raises(ValueError, match="one device.*cpu, meta.*device_map"):
        make_trainer(tmp_path, arguments={"model": model})


def test_prompt_that_cannot_fit_is_named(tmp_path):
    long = Dataset.from_dict({"prompt": ["short", "x" * 5000]})
    trainer = make_trainer(
        tmp_path, arguments={"train_dataset": long}, num_generations=2, per_device_train_batch_size=4
    )
    with pytest.raises(ValueError, match="5000 tokens.*4096"):
        trainer.train()


# --- saving ---


def test_checkpoint_loads_with_transformers_and_holds_the_configuration(tmp_path):
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=1)
    trainer.train()
    folder = tmp_path / "checkpoint-1"
    model = type(trainer.model).from_pretrained(folder)
    for (name, saved), parameter in zip(model.named_parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(saved, parameter), name
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == trainer.processing_class.eos_token_id
    assert json.loads((folder / "config.json").read_text()).get("_attn_implementation") != "sparrow"
    config = torch.load(folder / "training_args.bin", weights_only=False)
    assert config.sparse_schedule == SPARSE
