"""The engine's log-probabilities are the model's: dense against a plain forward, sparse against two other paths."""

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

import oracle
from rollouts import distributions, endless, engine_of, logprobs, random_prompts, sampling
from sparrow_trl.sparsity import SparsitySchedule


LENGTHS = (1, 15, 16, 17, 31, 32, 33, 47, 48, 49)

# What the layers are like, as the test knows it: page selection happens in full layers only.
MODELS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 24},  # every layer slides
    "gemma2": {},  # soft-capping, and every second layer slides
    "gemma3_text": {},
    "gpt2": {},
}


@pytest.mark.parametrize("model_type", MODELS)
def test_dense_schedule_equals_a_plain_forward(model_type):
    """At ragged lengths, sliding windows crossed in the prompt, in the completion, and not at all."""
    model = endless(model_type, **MODELS[model_type])
    prompts = random_prompts(1, 5, 15, 16, 17, 33, 90)
    for schedule in (SparsitySchedule.dense(), SparsitySchedule.dense(page_size=4)):
        engine = engine_of(model, schedule, prefill_chunk_size=40)
        output = engine.generate(prompts, sampling(20, temperature=0.7))
        for prompt, completion, found in zip(prompts, output.completion_ids, output.logprobs, strict=True):
            expected = logprobs(model, prompt, completion, temperature=0.7)
            torch.testing.assert_close(torch.tensor(found).double(), expected, atol=1e-4, rtol=0)


def test_dense_schedule_over_segments_that_are_split():
    """Contexts long enough that dense attention cuts them in parts, of groups that share their prompt."""
    model = endless(num_hidden_layers=2)
    long, other = random_prompts(1100, 523)
    prompts = [long, other, long, long]
    output = engine_of(model, SparsitySchedule.dense()).generate(prompts, sampling(20))
    for prompt, completion, found in zip(prompts, output.completion_ids, output.logprobs, strict=True):
        torch.testing.assert_close(
            torch.tensor(found).double(), logprobs(model, prompt, completion), atol=1e-4, rtol=0
        )


def assert_decode_equals_teacher_forced(model, schedule, prompts, new_tokens, temperature=1.0, **options):
    engine = engine_of(model, schedule, **options)
    output = engine.generate(prompts, sampling(new_tokens, temperature=temperature), seed=3)
    sequences = [prompt + completion for prompt, completion in zip(prompts, output.completion_ids, strict=True)]
    forced = engine.logprobs(sequences, [len(prompt) for prompt in prompts], temperature)
    torch.testing.assert_close([torch.tensor(row) for row in output.logprobs], forced, atol=1e-4, rtol=0)
    return output


@pytest.mark.parametrize("sink", [0, 1, 2])
@pytest.mark.parametrize("page_size", [8, 16, 32])
def test_decode_equals_teacher_forced_at_every_boundary(page_size, sink):
    model = endless(num_hidden_layers=2)
    prompts = random_prompts(*LENGTHS, 129)
    last_pages = (129 + 32) // page_size + 1
    for recent in (1, 2, 3):
        for budget in (0, 1, 2, 3):
            schedule = SparsitySchedule.fixed(
                budget, page_size=page_size, sink_pages=sink, recent_pages=recent, dense_layers=()
            )
            output = assert_decode_equals_teacher_forced(model, schedule, prompts, 34)
            assert (output.stats.kv_share < 1) == (last_pages > sink + budget + recent)


@pytest.mark.parametrize("model_type", MODELS)
def test_decode_equals_teacher_forced_over_models_and_rising_budgets(model_type):
    schedule = SparsitySchedule((0, 1, 3, 2), bin_tokens=32, page_size=8)
    prompts = random_prompts(*LENGTHS, 100)
    assert_decode_equals_teacher_forced(endless(model_type, **MODELS[model_type]), schedule, prompts, 60, 1.3)


@pytest.mark.parametrize("page_size", [1, 2, 64])
def test_decode_equals_teacher_forced_at_extreme_page_sizes(page_size):
    schedule = SparsitySchedule((2, 1), bin_tokens=100, page_size=page_size, dense_layers=(1,))
    assert_decode_equals_teacher_forced(endless(num_hidden_layers=2), schedule, random_prompts(1, 63, 64, 65, 300), 70)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (8, 1)], ids=str)
def test_decode_equals_teacher_forced_over_head_groups(heads):
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "hidden_size": 8 * heads[0]}
    model = endless(**sizes, num_hidden_layers=2)
    schedule = SparsitySchedule.fixed(2, page_size=4, dense_layers=())
    assert_decode_equals_teacher_forced(model, schedule, random_prompts(3, 30, 61), 20)


def oracle_attention(module, query, key, value, attention_mask, scaling, softcap=None, sparrow=None, **kwargs):
    """Eager attention in float64 with the mask that transformers makes, and the pages of the definition on top."""
    schedule, prompt_length, full_layers = sparrow
    num_heads, num_tokens = query.shape[1:3]
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    visible = (attention_mask[0, 0] == 0).expand(num_heads, -1, -1).clone()
    if module.layer_idx in full_layers and module.layer_idx not in schedule.dense_layers:
        for head in range(num_kv_heads):
            heads = slice(head * group, (head + 1) * group)
            for position in range(prompt_length, num_tokens):
                pages = oracle.choose_pages(
                    query[0, heads, position].numpy(),
                    key[0, head].numpy(),
                    position,
                    schedule.budget_at(position),
                    page_size=schedule.page_size,
                    sink=schedule.sink_pages,
                    recent=schedule.recent_pages,
                )
                kept = torch.zeros(num_tokens, dtype=torch.bool)
                kept[oracle.visible_tokens(position, pages, page_size=schedule.page_size)] = True
                visible[heads, position] &= kept
    key, value = (tensor.double().repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = query.double() @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return (weights @ value).transpose(1, 2).to(query.dtype), None


@pytest.fixture
def oracle_logprobs():
    """Log-probabilities from a plain forward whose attention is `oracle_attention`."""
    AttentionInterface.register("oracle", oracle_attention)
    AttentionMaskInterface.register("oracle", AttentionMaskInterface()["eager"])

    def compute(model, schedule, prompt, completion, temperature=1.0):
        kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
        full = {layer for layer, kind in enumerate(kinds) if kind == "full_attention"}
        if model.config.model_type == "mistral" and model.config.sliding_window:
            full = set()
        before = model.config._attn_implementation
        model.config._attn_implementation = "oracle"
        try:
            return logprobs(model, prompt, completion, temperature, sparrow=(schedule, len(prompt), full))
        finally:
            model.config._attn_implementation = before

    yield compute
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop("oracle", None)


ORACLE_CASES = {
    "published layout": (16, {"budgets": (1,)}, (1, 17, 80)),
    "no sink": (4, {"budgets": (2,), "sink_pages": 0, "dense_layers": ()}, (5, 16, 33)),
    "rising": (4, {"budgets": (0, 1, 4), "bin_tokens": 24, "sink_pages": 2, "recent_pages": 1}, (3, 23, 50)),
    "recents": (8, {"budgets": (1, 0), "bin_tokens": 40, "recent_pages": 3, "dense_layers": (3,)}, (8, 47)),
    "dense": (4, {"budgets": ()}, (6, 30)),
}


@pytest.mark.parametrize("case", ORACLE_CASES)
@pytest.mark.parametrize("model_type", MODELS)
def test_teacher_forced_and_decode_equal_the_definition(model_type, case, oracle_logprobs):
    page_size, fields, lengths = ORACLE_CASES[case]
    schedule = SparsitySchedule(page_size=page_size, **fields)
    model = endless(model_type, **MODELS[model_type])
    prompts = random_prompts(*lengths)
    output = assert_decode_equals_teacher_forced(model, schedule, prompts, 24, 0.8)
    for prompt, completion, found in zip(prompts, output.completion_ids, output.logprobs, strict=True):
        expected = oracle_logprobs(model, schedule, prompt, completion, 0.8)
        torch.testing.assert_close(torch.tensor(found).double(), expected, atol=1e-4, rtol=0)


def test_sparsity_matters_on_these_models(oracle_logprobs):
    """The tests above would pass if all attention were flat; the choice of pages does change these models."""
    model = endless()
    (prompt,) = random_prompts(80)
    completion = engine_of(model).generate([prompt], sampling(24)).completion_ids[0]
    dense = logprobs(model, prompt, completion)
    by_budget = [oracle_logprobs(model, SparsitySchedule.fixed(n, page_size=4), prompt, completion) for n in (0, 2, 8)]
    distances = [(rows - dense).abs().max().item() for rows in by_budget]
    assert distances[0] > 0.5 and distances[1] > 0.1
    assert (by_budget[0] - by_budget[1]).abs().max() > 0.1


def test_first_completion_token_comes_from_the_dense_prefill():
    """It is sampled from the prompt's last token, whose attention is dense whatever the budget."""
    model = endless()
    (prompt,) = random_prompts(100)
    schedule = SparsitySchedule.fixed(0, page_size=4, dense_layers=())
    output = engine_of(model, schedule).generate([prompt], sampling(3))
    dense = logprobs(model, prompt, output.completion_ids[0])
    found = torch.tensor(output.logprobs[0]).double()
    torch.testing.assert_close(found[0], dense[0], atol=1e-4, rtol=0)
    assert (found[1:] - dense[1:]).abs().max() > 1e-2


def test_bfloat16_stays_close_to_a_plain_forward():
    model = endless().bfloat16()
    prompts = random_prompts(5, 60)
    output = engine_of(model, SparsitySchedule.dense()).generate(prompts, sampling(20), top_logprobs=5)
    for i, (prompt, completion) in enumerate(zip(prompts, output.completion_ids, strict=True)):
        expected = distributions(model, prompt, completion).gather(-1, torch.tensor(output.top_ids[i]))
        assert (torch.tensor(output.top_logprobs[i]) - expected).abs().median() < 0.05


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_logprobs_method_at_a_temperature(temperature):
    model = endless()
    engine = engine_of(model, SparsitySchedule.dense())
    prompts = random_prompts(4, 30)
    completions = random_prompts(9, 1, seed=5)
    sequences = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    found = engine.logprobs(sequences, [len(prompt) for prompt in prompts], temperature)
    for prompt, completion, row in zip(prompts, completions, found, strict=True):
        expected = logprobs(model, prompt, completion, temperature)
        torch.testing.assert_close(row.double(), expected, atol=1e-4, rtol=0)
