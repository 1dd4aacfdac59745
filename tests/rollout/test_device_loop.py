"""Bursts of steps that stay on the device sample, token for token, what steps planned on the host sample."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts import SPARSE, endless, engine_of, greedy, random_prompts, sampling
from sparrow_trl.rollout import device_loop
from sparrow_trl.rollout import engine as engine_module
from sparrow_trl.rollout.host_loop import HostLoop
from sparrow_trl.sparsity import SparsitySchedule
from tiny import tiny_model


STOPS = range(5, 12)  # about one token in forty: completions of many lengths
LENGTHS = (1, 15, 16, 17, 31, 33, 48, 90)


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=2)


def same(found, expected):
    assert found.completion_ids == expected.completion_ids
    assert found.finish_reasons == expected.finish_reasons
    assert found.top_ids == expected.top_ids
    for a, b in zip(found.logprobs, expected.logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=1e-4, rtol=0)
    for a, b in zip(found.top_logprobs or [], expected.top_logprobs or [], strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=1e-4, rtol=0)


def on_both(model, schedule, prompts, config, options=None, **call):
    """The outputs of the host's loop and of the device's."""
    engines = [engine_of(model, schedule, decode_backend=b, **(options or {})) for b in ("host", "torch")]
    return [engine.generate(prompts, config, **call) for engine in engines]


MODELS = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 24},  # every layer slides
    "gemma2": {},  # soft-capping, and every second layer slides
    "gemma3_text": {},
    "gpt2": {},
}


@pytest.mark.parametrize("model_type", MODELS)
def test_models_at_ragged_lengths(model_type):
    """Dense, sliding and sparse layers, budgets that change and begin to leave pages out in the middle of a burst."""
    model = tiny_model(model_type, **MODELS[model_type])
    schedule = SparsitySchedule((0, 1, 3, 2), bin_tokens=32, page_size=8)
    expected, found = on_both(
        model, schedule, random_prompts(*LENGTHS), sampling(45, temperature=1.2), {"stop_token_ids": STOPS}, seed=1
    )
    same(found, expected)
    assert set(found.finish_reasons) == {"stop", "length"}


@pytest.mark.parametrize(
    "schedule",
    [
        SparsitySchedule.dense(page_size=4),
        SparsitySchedule.fixed(0, page_size=4, dense_layers=()),
        SparsitySchedule.fixed(2, page_size=1, sink_pages=0, recent_pages=3, dense_layers=(1,)),
        SparsitySchedule.fixed(10**6, page_size=16),
        SparsitySchedule((2, 1), bin_tokens=37, page_size=64, sink_pages=2, recent_pages=1, dense_layers=()),
    ],
    ids=lambda schedule: f"{schedule.budgets}x{schedule.page_size}",
)
def test_decode_equals_teacher_forced(schedule):
    model, prompts = endless(num_hidden_layers=2), random_prompts(*LENGTHS, 150)
    engine = engine_of(model, schedule, decode_backend="torch")
    output = engine.generate(prompts, sampling(34), seed=3)
    sequences = [prompt + completion for prompt, completion in zip(prompts, output.completion_ids, strict=True)]
    forced = engine.logprobs(sequences, [len(prompt) for prompt in prompts])
    torch.testing.assert_close([torch.tensor(row) for row in output.logprobs], forced, atol=1e-4, rtol=0)
    same(output, engine_of(model, schedule).generate(prompts, sampling(34), seed=3))


OPTIONS = {
    "greedy": greedy(30),
    "temperature": sampling(30, temperature=0.4),
    "top-k and top-p": sampling(30, top_k=9, top_p=0.8, temperature=1.5),
    "min-p and typical": sampling(30, min_p=0.05, typical_p=0.9),
    "cutoffs": sampling(30, epsilon_cutoff=0.02, eta_cutoff=0.01),
    "suppressed": sampling(30, suppress_tokens=[7, 9, 200], remove_invalid_values=True),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_sampling_options(model, name):
    expected, found = on_both(
        model, SPARSE, random_prompts(30, 5, 30), OPTIONS[name], {"stop_token_ids": STOPS}, top_logprobs=20
    )
    same(found, expected)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=9),
    st.lists(st.integers(1, 40), min_size=9, max_size=9),
    st.integers(0, 25),
    st.integers(1, 5),
    st.integers(1, 11),
)
def test_any_schedule_of_work(model, groups, limits, spare_pages, max_num_seqs, burst):
    """Groups that share prompts, few pages and preemptions, few rows, limits and stops anywhere in a burst."""
    kinds = random_prompts(21, 8, 40, 1, 12)
    prompts, limits = [kinds[group] for group in groups], limits[: len(groups)]
    wanted = set(range(0, len(prompts), 2))
    call = {"max_new_tokens": limits, "seed": 4, "top_logprobs": 3, "top_logprobs_for": wanted}
    expected = engine_of(model, stop_token_ids=STOPS).generate(prompts, sampling(9), **call)
    options = {"stop_token_ids": STOPS, "max_pages": 22 + spare_pages, "max_num_seqs": max_num_seqs}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_loop, "BURST_STEPS", burst)
        found = engine_of(model, decode_backend="torch", **options).generate(prompts, sampling(9), **call)
    same(found, expected)
    assert [bool(rows) for rows in found.top_ids] == [i in wanted for i in range(len(prompts))]
    assert found.stats.completion_tokens == sum(map(len, expected.completion_ids))
    assert found.stats.pages_peak <= found.stats.pages_total <= options["max_pages"]


def test_preempted_sequences_catch_up(model):
    prompts = random_prompts(10, 11, 12)
    options = {"max_pages": 26}
    expected, found = on_both(endless(num_hidden_layers=2), SPARSE, prompts, sampling(60), options)
    same(found, expected)
    assert found.stats.preemptions > 0 and found.stats.recomputed_tokens > 0


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_bytes_read_are_those_that_the_host_counts(model_type):
    schedule = SparsitySchedule((1, 3), bin_tokens=50, page_size=4, sink_pages=2, recent_pages=2, dense_layers=(1,))
    expected, found = on_both(endless(model_type), schedule, random_prompts(30, 45, 70), sampling(40))
    assert 0 < found.stats.kv_bytes_read < found.stats.kv_bytes_dense
    for name in ("kv_bytes_read", "kv_bytes_dense", "decode_steps", "completion_tokens", "prefill_tokens"):
        assert getattr(found.stats, name) == getattr(expected.stats, name), name


def test_a_burst_counts_and_a_look_at_the_device_ends_it(model, monkeypatch):
    """39 steps, in bursts of 8: what comes back comes back five times."""
    bursts = []

    class Spy(device_loop.DecodeBurst):
        def __call__(self, sequences, num_steps, prunes):
            bursts.append((len(sequences), num_steps))
            return super().__call__(sequences, num_steps, prunes)

    monkeypatch.setattr(device_loop, "DecodeBurst", Spy)
    engine_of(endless(num_hidden_layers=2), decode_backend="torch").generate(random_prompts(9, 9, 4), sampling(40))
    assert bursts == [(3, 8)] * 4 + [(3, 7)]


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.3}, {"min_new_tokens": 9}, {"no_repeat_ngram_size": 2}], ids=str
)
def test_options_that_look_at_the_past_are_applied_on_the_host(model, options, monkeypatch):
    monkeypatch.setattr(engine_module, "DeviceLoop", None)
    expected, found = on_both(model, SPARSE, random_prompts(20, 9), sampling(30, **options))
    same(found, expected)


def test_automatic_choice_on_a_cpu_is_the_host(model, monkeypatch):
    loops = []
    monkeypatch.setattr(engine_module, "DeviceLoop", None)
    monkeypatch.setattr(engine_module, "HostLoop", lambda *args, **kw: loops.append(1) or HostLoop(*args, **kw))
    engine_of(model).generate(random_prompts(4), sampling(3))
    assert loops == [1]
    with pytest.raises(ValueError, match="decode_backend='cuda' must be one of 'auto', 'host', 'torch', 'triton'"):
        engine_of(model, decode_backend="cuda")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_name_the_prompt(value):
    broken = endless(num_hidden_layers=2)
    calls = []

    def hook(module, args, output):
        calls.append(1)
        if len(calls) > 3:
            output.logits[:, 1] = value

    broken.register_forward_hook(hook)
    with pytest.raises(FloatingPointError, match=r"not finite for the prompts at \[1"):
        engine_of(broken, decode_backend="torch").generate(random_prompts(4, 6, 5), sampling(20))


@pytest.mark.slow
def test_smollm2():
    """A real model, whose attention makes the choice of pages matter."""
    from sparrow_trl.embedded import load_smollm2

    model, tokenizer = load_smollm2()
    text = "The sea is wide. " * 40
    prompts = tokenizer([text + "Why?", "Count: one, two,", text + "Why?", "Name a colour."])["input_ids"]
    schedule = SparsitySchedule.fixed(8)
    expected, found = on_both(model.float(), schedule, prompts, sampling(40), top_logprobs=20, top_logprobs_for=[1])
    assert found.completion_ids == expected.completion_ids
    for a, b in zip(found.logprobs, expected.logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=1e-3, rtol=0)
