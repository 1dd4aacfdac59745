"""Tokens are drawn from the distribution that transformers' own processors give; log-probabilities are before them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from transformers import GenerationConfig

from rollouts import distributions, endless, engine_of, greedy, logprobs, random_prompts, sampling
from sparrow_trl.rollout.sampler import BLOCK, Sampler, inverse_cdf
from sparrow_trl.rollout.sequence import Prompt, Sequence, random_stream
from sparrow_trl.sparsity import SparsitySchedule
from tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer


DRAWS = 4000
STOP = 3
PROMPT = [7, 8, 9, 7, 8, 11, 40]


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=2)


def make_sequence(uniforms=(0.5,), prompt=PROMPT, completion=(), max_new_tokens=10, index=0):
    values = np.zeros(max_new_tokens)
    values[len(completion) : len(completion) + len(uniforms)] = uniforms
    return Sequence(index, Prompt(list(prompt)), max_new_tokens, values, completion_ids=list(completion))


def drawn_distribution(logits, config, completion=()):
    """Frequencies of the tokens that `DRAWS` evenly spaced random numbers give: each within 1 / DRAWS of its
    probability, whatever the order in which the sampler lays out the tokens."""
    sequences = [make_sequence([(i + 0.5) / DRAWS], completion=completion) for i in range(DRAWS)]
    tokens, _, _ = Sampler(config, [STOP])(logits.expand(DRAWS, -1), sequences)
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)) / DRAWS


# Options, and the completion so far.
OPTIONS = {
    "plain": ({}, []),
    "temperature": ({"temperature": 0.4}, []),
    "high temperature": ({"temperature": 3.0}, []),
    "top_k": ({"top_k": 5}, []),
    "top_k larger than the vocabulary": ({"top_k": 999}, []),
    "top_p": ({"top_p": 0.6}, []),
    "min_p": ({"min_p": 0.2}, []),
    "typical_p": ({"typical_p": 0.5}, []),
    "epsilon_cutoff": ({"epsilon_cutoff": 0.02}, []),
    "eta_cutoff": ({"eta_cutoff": 0.02}, []),
    "truncations together": ({"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.02}, []),
    "repetition_penalty": ({"repetition_penalty": 1.8}, [12, 13]),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 2}, [12, 7]),
    "bad_words_ids": ({"bad_words_ids": [[20], [12, 21], [9, 22]]}, [12]),
    "min_length": ({"min_length": 9}, [12]),
    "min_length reached": ({"min_length": 8}, [12]),
    "min_new_tokens": ({"min_new_tokens": 2}, [12]),
    "min_new_tokens reached": ({"min_new_tokens": 2}, [12, 13]),
    "suppress_tokens": ({"suppress_tokens": list(range(100))}, []),
    "begin_suppress_tokens": ({"begin_suppress_tokens": list(range(100))}, []),
    "begin_suppress_tokens later": ({"begin_suppress_tokens": list(range(100))}, [12]),
    "sequence_bias": ({"sequence_bias": [[[20], 3.0], [[12, 21], 5.0], [[9, 22], 5.0]]}, [12]),
    "exponential_decay_length_penalty": ({"exponential_decay_length_penalty": (1, 1.6)}, [12, 13, 14]),
    "forced_eos_token_id at the end": ({"forced_eos_token_id": 30}, [12] * 9),
    "forced_eos_token_id before": ({"forced_eos_token_id": 30}, [12] * 8),
    "remove_invalid_values": ({"remove_invalid_values": True}, []),
    "renormalize_logits": ({"renormalize_logits": True, "top_k": 4}, []),
    "history and truncation": ({"repetition_penalty": 1.5, "temperature": 0.7, "top_p": 0.8}, [12, 13]),
}


@pytest.mark.parametrize("options, completion", OPTIONS.values(), ids=OPTIONS)
def test_distribution_is_that_of_transformers_processors(model, options, completion):
    logits = 2 * torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    logits[[STOP, 7, 8, 12, 20, 21, 22]] += 4.0
    config = GenerationConfig(do_sample=True, **options)

    theirs = GenerationConfig(do_sample=True, max_length=len(PROMPT) + 10, **options)
    theirs._eos_token_tensor = torch.tensor([STOP])
    processors = model._get_logits_processor(theirs, input_ids_seq_length=len(PROMPT), device="cpu")
    expected = processors(torch.tensor([PROMPT + completion]), logits[None].clone())[0].double().softmax(-1)

    found = drawn_distribution(logits, config, completion)
    assert (found - expected).abs().max() <= 1.01 / DRAWS
    assert found[expected == 0].sum() == 0


GREEDY = {
    "plain": {},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[i] for i in range(5, 200)]},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": list(range(5, 130))},
    "suppress_tokens": {"suppress_tokens": list(range(5, 130))},
    "sampling options do not matter": {"top_k": 1, "temperature": 0.1, "top_p": 0.1},
}


@pytest.mark.parametrize("options", GREEDY.values(), ids=GREEDY)
def test_greedy_completions_equal_generate(options):
    model = endless(num_hidden_layers=2)
    prompts = random_prompts(5, 17, 40)
    found = engine_of(model, SparsitySchedule.dense()).generate(prompts, greedy(24, **options))
    for prompt, completion in zip(prompts, found.completion_ids, strict=True):
        config = greedy(24, pad_token_id=0, **options)
        expected = model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :]
        assert completion == expected.tolist()


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_samples_of_the_engine_follow_the_softmax(temperature):
    """3000 first tokens, and second tokens after each frequent first one: chi-squared against a plain forward."""
    model = endless(num_hidden_layers=2)
    engine = engine_of(model, SparsitySchedule.dense(), max_num_seqs=3000)
    completions = engine.generate([PROMPT] * 3000, sampling(2, temperature=temperature), seed=11).completion_ids
    samples = {(): [first for first, _ in completions]}
    for first, second in completions:
        samples.setdefault((first,), []).append(second)
    frequent = {prefix: tokens for prefix, tokens in samples.items() if len(tokens) >= 200}
    assert len(frequent) >= 3
    for prefix, tokens in frequent.items():
        probabilities = distributions(model, PROMPT, [*prefix, 0], temperature)[-1].exp().numpy()
        assert_distributed(tokens, probabilities)


def assert_distributed(tokens, probabilities):
    """Chi-squared, cells of less than five expected samples taken together; four standard deviations allowed."""
    expected = probabilities * len(tokens)
    counts = np.bincount(tokens, minlength=len(expected))
    small = expected < 5
    expected = np.append(expected[~small], expected[small].sum())
    counts = np.append(counts[~small], counts[small].sum())
    cells = expected > 0
    statistic = ((counts - expected)[cells] ** 2 / expected[cells]).sum()
    freedom = cells.sum() - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 4


def test_samples_of_different_places_are_independent():
    """Pairs of neighbours, and of consecutive tokens, fill the unit square evenly."""
    streams = np.stack([random_stream(5, index, 50) for index in range(400)])
    for x, y in ((streams[:-1], streams[1:]), (streams[:, :-1], streams[:, 1:])):
        cells = np.histogram2d(x.ravel(), y.ravel(), bins=8, range=[[0, 1]] * 2)[0].ravel()
        expected = x.size / 64
        assert ((cells - expected) ** 2 / expected).sum() < 63 + 4 * np.sqrt(126)


weights = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])),
    elements=st.sampled_from([0.0, 0.0, 1e-30, 1e-6, 0.25, 1.0, 3.5]),
    fill=st.just(0.0),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(weights, st.lists(st.sampled_from([0.0, 1e-12, 0.25, 0.5, 0.75, 1 - 2**-53]) | st.floats(0, 0.999), min_size=4))
def test_inverse_cdf_equals_a_cumulative_sum(weights, uniforms):
    weights[:, weights.shape[1] // 2] = 1.0  # every row has a positive entry
    uniforms = np.array(uniforms[: len(weights)])
    found = inverse_cdf(torch.tensor(weights), torch.tensor(uniforms)).tolist()
    for row, uniform, index in zip(weights.astype(np.float64), uniforms, found, strict=True):
        cumulative = np.cumsum(row)
        target = uniform * cumulative[-1]
        assert row[index] > 0
        slack = 1e-12 * cumulative[-1]
        assert cumulative[index] >= target - slack
        assert cumulative[index] - row[index] <= target + slack


def test_inverse_cdf_at_exact_boundaries():
    """Of weights 1, 0, 2, 1 the first takes [0, 1/4), the third [1/4, 3/4), the last the rest."""
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.5, 0.7499, 0.75, 0.99], dtype=torch.float64)
    found = inverse_cdf(torch.tensor([[1.0, 0.0, 2.0, 1.0]]).expand(7, -1), uniforms)
    assert found.tolist() == [0, 0, 2, 2, 2, 3, 3]


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}, {"typical_p": 0.5}, {"temperature": 0.1}, {"do_sample": False}],
)
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_one_hot_logits(options, uniform):
    """All other tokens at minus infinity: that token, with log-probability 0."""
    logits = torch.full((3, VOCAB_SIZE), float("-inf"))
    for row, (token, value) in enumerate([(0, 0.0), (100, -80.0), (VOCAB_SIZE - 1, 1e4)]):
        logits[row, token] = value
    config = GenerationConfig(**{"do_sample": True, **options})
    sequences = [make_sequence([uniform]) for _ in range(3)]
    for sequence in sequences[:2]:
        sequence.keep_top = True
    tokens, found, top = Sampler(config, [STOP])(logits, sequences, 2)
    assert tokens == [0, 100, VOCAB_SIZE - 1]
    assert found == [0.0] * 3
    assert sorted(top) == [0, 1]  # of the sequences that ask
    for row, (ids, values) in top.items():
        assert len(ids) == len(values) == 2 and (ids[0], values[0]) == (tokens[row], 0.0)


TRUNCATED = [
    {"top_k": 3},
    {"top_p": 0.5},
    {"min_p": 0.2},
    {"repetition_penalty": 1.7},
    {"suppress_tokens": list(range(130))},
    {"top_k": 8, "top_p": 0.7, "no_repeat_ngram_size": 2},
]


@pytest.mark.parametrize("options", TRUNCATED, ids=lambda options: "+".join(options))
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_logprobs_are_of_the_full_distribution_at_the_temperature(options, temperature):
    model = endless(num_hidden_layers=2)
    prompts = random_prompts(4, 20)
    config = sampling(15, temperature=temperature, **options)
    output = engine_of(model, SparsitySchedule.dense()).generate(prompts, config)
    for prompt, completion, found in zip(prompts, output.completion_ids, output.logprobs, strict=True):
        expected = logprobs(model, prompt, completion, temperature)
        torch.testing.assert_close(torch.tensor(found).double(), expected, atol=1e-4, rtol=0)


def test_top_logprobs(model):
    prompts = random_prompts(4, 20, 9)
    engine = engine_of(model, SparsitySchedule.dense())
    config = sampling(10, temperature=0.7, top_k=5)
    output = engine.generate(prompts, config, top_logprobs=20)
    for i, (prompt, completion) in enumerate(zip(prompts, output.completion_ids, strict=True)):
        expected = distributions(model, prompt, completion, 0.7).topk(20)
        assert output.top_ids[i] == expected.indices.tolist()
        torch.testing.assert_close(torch.tensor(output.top_logprobs[i]).double(), expected.values, atol=1e-4, rtol=0)
    some = engine.generate(prompts, config, top_logprobs=3, top_logprobs_for=[1])
    assert some.completion_ids == output.completion_ids
    assert (some.top_ids[0], some.top_ids[2]) == ([], [])
    assert some.top_ids[1] == [row[:3] for row in output.top_ids[1]]
    assert engine.generate(prompts, config).top_ids is None
    whole = engine.generate(prompts, config, top_logprobs=10**6)
    assert {len(row) for rows in whole.top_ids for row in rows} == {VOCAB_SIZE}


def stop_routes(tokens):
    """Every way to say that a completion stops at `tokens`: what to change on the model, engine options, call options."""
    many = list(tokens)
    return {
        "model config, int": ({"eos_token_id": many[0]}, {}, {}, {}),
        "model config, list": ({"eos_token_id": many}, {}, {}, {}),
        "generation config of the model, int": ({}, {"eos_token_id": many[0]}, {}, {}),
        "generation config of the model, list": ({}, {"eos_token_id": many}, {}, {}),
        "engine": ({}, {}, {"stop_token_ids": many}, {}),
        "engine, generator": ({}, {}, {"stop_token_ids": iter(many)}, {}),
        "call, int": ({}, {}, {}, {"eos_token_id": many[0]}),
        "call, list": ({}, {}, {}, {"eos_token_id": many}),
        "union": ({"eos_token_id": 1}, {"eos_token_id": [2, many[0]]}, {"stop_token_ids": [3]}, {"eos_token_id": 4}),
    }


@pytest.mark.parametrize("route", stop_routes([0]))
def test_stop_ids(route):
    prompts = random_prompts(6, 20)
    free = engine_of(endless(num_hidden_layers=2)).generate(prompts, sampling(20))
    stop = next(token for token in free.completion_ids[0][5:] if token not in [1, 2, 3, 4])
    assert free.finish_reasons == ["length"] * 2

    config, model_generation, engine_options, call = stop_routes([stop])[route]
    model = endless(num_hidden_layers=2)
    for target, changes in ((model.config, config), (model.generation_config, model_generation)):
        for name, value in changes.items():
            setattr(target, name, value)
    output = engine_of(model, **engine_options).generate(prompts, sampling(20, **call))

    every = {stop, 1, 2, 3, 4} if route == "union" else {stop}
    for found, whole, reason in zip(output.completion_ids, free.completion_ids, output.finish_reasons, strict=True):
        ends = [place for place, token in enumerate(whole) if token in every]
        assert found == whole[: ends[0] + 1 if ends else None]  # the stop token is part of the completion
        assert reason == ("stop" if ends else "length")
    assert output.finish_reasons[0] == "stop"
    assert [len(row) for row in output.logprobs] == [len(ids) for ids in output.completion_ids]


def test_changed_eos_of_the_tokenizer():
    """Padding and eos changed on the tokenizer alone, as chat templates make people do."""
    tokenizer = tiny_tokenizer()
    prompts = random_prompts(6)
    free = engine_of(endless(num_hidden_layers=2)).generate(prompts, sampling(40)).completion_ids[0]
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(free[7])
    engine = engine_of(endless(num_hidden_layers=2), stop_token_ids=[tokenizer.eos_token_id])
    assert engine.generate(prompts, sampling(40)).completion_ids[0] == free[: free.index(free[7]) + 1]


def test_generation_config_of_the_model_does_not_leak():
    """Only its stop ids count: `generate` would take top_k, the temperature and all the rest from it."""
    prompts = random_prompts(6, 20, 20)
    plain = engine_of(endless(num_hidden_layers=2)).generate(prompts, sampling(20))
    model = endless(num_hidden_layers=2)
    model.generation_config = GenerationConfig(
        top_k=20, top_p=0.5, temperature=0.1, do_sample=False, max_new_tokens=3, repetition_penalty=2.0, min_p=0.5,
        suppress_tokens=list(range(200)), num_beams=4,
    )  # fmt: skip
    output = engine_of(model).generate(prompts, sampling(20))
    assert output.completion_ids == plain.completion_ids
    assert output.logprobs == plain.logprobs


def test_defaults_without_a_generation_config(model):
    """Sampling at temperature 1 from the full distribution: no top_k of 50."""
    prompts = random_prompts(6, 20)
    engine = engine_of(endless(num_hidden_layers=1))
    found = engine.generate(prompts, seed=2)
    assert [len(completion) for completion in found.completion_ids] == [512] * 2
    assert found.completion_ids == engine.generate(prompts, sampling(512), seed=2).completion_ids
    ranks = engine.generate([PROMPT] * 300, sampling(1), top_logprobs=VOCAB_SIZE)
    assert max(ids[0].index(tokens[0]) for ids, tokens in zip(ranks.top_ids, ranks.completion_ids, strict=True)) > 50


UNSUPPORTED = {
    "num_beams": 2,
    "num_return_sequences": 3,
    "guidance_scale": 1.5,
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "constraints": ["x"],
    "force_words_ids": [[5]],
    "forced_bos_token_id": 5,
    "encoder_repetition_penalty": 1.2,
    "encoder_no_repeat_ngram_size": 2,
    "prompt_lookup_num_tokens": 4,
    "assistant_early_exit": 2,
    "use_mtp": True,
    "token_healing": True,
    "top_h": 0.4,
    "stop_strings": ["end"],
    "max_time": 5.0,
    "cache_implementation": "static",
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_options_are_refused_by_name(model, name):
    config = sampling(4)
    setattr(config, name, UNSUPPORTED[name])
    with pytest.raises(ValueError, match=f"`{name}="):
        engine_of(model).generate([PROMPT], config)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf")])
def test_temperature_that_is_not_positive_and_finite(model, temperature):
    config = sampling(4)
    config.temperature = temperature
    with pytest.raises(ValueError, match=f"temperature={temperature}.*do_sample=False"):
        engine_of(model).generate([PROMPT], config)


@pytest.mark.parametrize("name", ["temperature", "top_k", "min_length", "no_repeat_ngram_size"])
@pytest.mark.parametrize("value", ["1", True])
def test_numbers_that_are_none(model, name, value):
    config = sampling(4)
    setattr(config, name, value)
    with pytest.raises(TypeError, match=f"{name}={value!r} is not a number"):
        engine_of(model).generate([PROMPT], config)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_name_the_prompts(value):
    model = endless(num_hidden_layers=2)
    with torch.no_grad():
        model.get_input_embeddings().weight[200] = value
    prompts = [[5, 6], [7, 200, 8], [9], [200]]
    for max_num_seqs in (1, 4):
        with pytest.raises(FloatingPointError, match=r"\[1, 3\]" if max_num_seqs == 4 else r"\[1\]"):
            engine_of(model, max_num_seqs=max_num_seqs).generate(prompts, sampling(4))
