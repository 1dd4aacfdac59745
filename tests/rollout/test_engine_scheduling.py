"""What is sampled depends on the seed and the place in the list alone; pages are shared, counted and given back."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts import SPARSE, endless, engine_of, greedy, random_prompts, sampling
from sparrow_trl import memory
from sparrow_trl.rollout import engine as engine_module
from sparrow_trl.rollout import stop_ids
from sparrow_trl.rollout.cache import PageAllocator
from sparrow_trl.rollout.runner import ModelRunner
from sparrow_trl.rollout.sequence import random_stream
from sparrow_trl.sparsity import SparsitySchedule
from tiny import tiny_model


STOPS = range(5, 12)  # about one token in forty: completions of many lengths


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=2)


@pytest.fixture
def allocators(monkeypatch):
    """The allocators of all rollouts; a page is only handed out, shared and given back as its owners allow."""
    made = []

    class Spy(PageAllocator):
        def __init__(self, num_pages):
            super().__init__(num_pages)
            self.most = 0
            made.append(self)

        def allocate(self, after=None):
            free = self.owners == 0
            page = super().allocate(after)
            assert free[page]
            self.most = max(self.most, int((self.owners > 0).sum()))
            return page

        def share(self, page):
            assert self.owners[page] > 0
            super().share(page)

        def release(self, page):
            assert self.owners[page] > 0
            super().release(page)

    monkeypatch.setattr(engine_module, "PageAllocator", Spy)
    return made


@pytest.fixture
def no_shared_page_is_written(monkeypatch, allocators):
    """Every page that keys are stored in has exactly one owner at that moment. Holds how many pages were looked at."""
    looked_at = []

    class Runner(ModelRunner):
        def run(self, pieces, keep, decoding):
            for piece in pieces:
                pages = [piece.table.array[p // self.cache.page_size] for p in range(piece.first, piece.stop)]
                assert (allocators[-1].owners[pages] == 1).all()
                looked_at.append(len(pages))
            return super().run(pieces, keep, decoding)

    monkeypatch.setattr(engine_module, "ModelRunner", Runner)
    return looked_at


def same(found, expected):
    assert found.completion_ids == expected.completion_ids
    assert found.finish_reasons == expected.finish_reasons
    for a, b in zip(found.logprobs, expected.logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=1e-4, rtol=0)


def grouped_prompts():
    """Three groups, their members apart, and a prompt of its own."""
    a, b, c, d = random_prompts(21, 8, 40, 1)
    return [a, b, a, c, d, b, a, c]


WORK = {
    "one at a time": {"max_num_seqs": 1},
    "two at a time": {"max_num_seqs": 2},
    "prefill token by token": {"prefill_chunk_size": 1},
    "prefill in pieces": {"prefill_chunk_size": 7},
    "prefill in pages": {"prefill_chunk_size": 4, "max_num_seqs": 3},
    "few pages": {"max_pages": 36},
    "few pages, in pieces": {"max_pages": 27, "prefill_chunk_size": 9},
    "as few pages as it takes": {"max_pages": 23},
    "few pages, few sequences": {"max_pages": 27, "max_num_seqs": 2},
}


@pytest.mark.parametrize("options", WORK.values(), ids=WORK)
def test_completions_do_not_depend_on_how_they_are_scheduled(model, options, allocators, no_shared_page_is_written):
    prompts, config = grouped_prompts(), sampling(50)
    expected = engine_of(model, stop_token_ids=STOPS).generate(prompts, config, seed=4)
    assert expected.stats.preemptions == 0
    assert set(expected.finish_reasons) == {"stop", "length"}
    found = engine_of(model, stop_token_ids=STOPS, **options).generate(prompts, config, seed=4)
    same(found, expected)
    if options.get("max_pages") in (23, 27, 36) and "max_num_seqs" not in options:
        assert found.stats.preemptions > 0
        assert found.stats.pages_peak <= found.stats.pages_total == options["max_pages"]
    assert len(allocators) == 2 and no_shared_page_is_written
    for allocator, output in zip(allocators, (expected, found), strict=True):
        assert allocator.num_free == allocator.num_pages == output.stats.pages_total
        assert not allocator.owners.any()
        assert output.stats.pages_peak == allocator.most


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=8),
    st.integers(0, 30),
    st.integers(1, 6),
    st.sampled_from([1, 3, 16, 64]),
    st.sampled_from([(), (0,), (1, 3)]),
    st.integers(1, 40),
    st.integers(0, 9),
)
def test_scheduling_property(model, picks, spare_pages, max_num_seqs, chunk, budgets, new_tokens, seed):
    pool = random_prompts(1, 4, 9, 22, 35)
    prompts = [pool[pick] for pick in picks]
    schedule = SparsitySchedule(budgets, bin_tokens=30, page_size=4, dense_layers=(0,))
    config = sampling(new_tokens)
    expected = engine_of(model, schedule, stop_token_ids=STOPS).generate(prompts, config, seed=seed)
    fewest = max(-(-(len(prompt) + new_tokens) // 4) + 1 for prompt in prompts)
    options = {"max_pages": fewest + spare_pages, "max_num_seqs": max_num_seqs, "prefill_chunk_size": chunk}
    same(engine_of(model, schedule, stop_token_ids=STOPS, **options).generate(prompts, config, seed=seed), expected)


def test_a_prompt_keeps_its_completion_whatever_the_others_are(model):
    prompts, config = grouped_prompts(), sampling(30)
    engine = engine_of(model, stop_token_ids=STOPS)
    output = engine.generate(prompts, config, seed=1)
    for i, prompt in enumerate(prompts):  # alone but for short prompts that keep its place
        alone = engine.generate([[9]] * i + [prompt], config, seed=1)
        assert alone.completion_ids[i] == output.completion_ids[i]
    others = random_prompts(*(3 * i + 1 for i in range(len(prompts))), seed=8)
    for place in (0, 3, 7):
        mixed = engine.generate([*others[:place], prompts[place], *others[place + 1 :]], config, seed=1)
        assert mixed.completion_ids[place] == output.completion_ids[place]


def test_greedy_completions_equal_one_by_one_runs(model):
    prompts = random_prompts(1, 15, 16, 17, 40)
    engine = engine_of(model, SparsitySchedule.fixed(1, page_size=4))
    together = engine.generate(prompts, greedy(30))
    for i, prompt in enumerate(prompts):
        alone = engine.generate([prompt], greedy(30))
        assert alone.completion_ids[0] == together.completion_ids[i]
        torch.testing.assert_close(
            torch.tensor(alone.logprobs[0]), torch.tensor(together.logprobs[i]), atol=1e-4, rtol=0
        )


def test_seed_and_place_make_the_stream(model):
    engine = engine_of(model)
    (prompt,) = random_prompts(12)
    runs = {seed: engine.generate([prompt] * 3, sampling(12), seed=seed).completion_ids for seed in (0, 1)}
    distinct = {tuple(completion) for run in runs.values() for completion in run}
    assert len(distinct) == 6
    assert engine.generate([prompt] * 3, sampling(12), seed=1).completion_ids == runs[1]
    assert [c[:5] for c in engine.generate([prompt] * 3, sampling(5), seed=1).completion_ids] == [
        c[:5] for c in runs[1]
    ]  # a longer limit does not change what comes first


def test_random_streams_are_uniform_and_unlike():
    streams = np.stack([random_stream(seed, index, 500) for seed in range(4) for index in range(10)])
    assert ((streams >= 0) & (streams < 1)).all()
    assert abs(streams.mean() - 0.5) < 0.01
    correlations = np.corrcoef(streams) - np.eye(len(streams))
    assert np.abs(correlations).max() < 0.25


def test_duplicates_apart_are_computed_once_and_share_pages(model, allocators, no_shared_page_is_written):
    a, b, c = random_prompts(41, 18, 7)
    prompts = [a, b, a, c, b, a]
    output = engine_of(endless(num_hidden_layers=2)).generate(prompts, sampling(9))
    assert output.stats.prefill_tokens == len(a) + len(b) + len(c)
    assert output.stats.prompt_tokens == 3 * len(a) + 2 * len(b) + len(c)
    assert len({tuple(completion) for completion in output.completion_ids}) == 6
    # 4 tokens a page. The prompts' pages, and what each completion (9 tokens, 8 of them stored) has beyond full pages.
    own = {41: 49 // 4 + 1 - 10, 18: 26 // 4 + 1 - 4, 7: 15 // 4 + 1 - 1}
    assert output.stats.pages_peak == (11 + 5 + 2) + sum(own[len(prompt)] for prompt in prompts)
    assert allocators[0].num_free == allocators[0].num_pages


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_stats_of_a_group(length):
    """Counts, and pages at the peak, of completions that all have the same length; 4 tokens a page."""
    (prompt,) = random_prompts(length)
    stats = engine_of(endless(num_hidden_layers=2)).generate([prompt] * 3, sampling(10)).stats
    assert (stats.prompt_tokens, stats.prefill_tokens, stats.completion_tokens) == (3 * length, length, 30)
    assert (stats.decode_steps, stats.recomputed_tokens, stats.preemptions) == (9, 0, 0)
    prompt_pages, last_pages = (length + 3) // 4, (length + 9 + 3) // 4  # the last token's keys are never needed
    assert stats.pages_peak == prompt_pages + 3 * (last_pages - length // 4)
    assert stats.pages_peak <= stats.pages_total
    assert stats.seconds >= stats.seconds_prefill + stats.seconds_decode + stats.seconds_sampling > 0
    assert stats.tokens_per_second == pytest.approx(30 / stats.seconds)
    assert stats.to_dict()["kv_share"] == stats.kv_share


def test_recomputed_tokens_are_counted(model):
    """Every token goes through the model once, and again if its sequence was preempted."""
    fed = []

    class Runner(ModelRunner):
        def run(self, pieces, keep, decoding):
            fed.append((decoding, sum(len(piece.token_ids) for piece in pieces)))
            return super().run(pieces, keep, decoding)

    prompts = random_prompts(10, 11, 12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "ModelRunner", Runner)
        stats = engine_of(endless(num_hidden_layers=2), max_pages=26).generate(prompts, sampling(60)).stats
    assert stats.preemptions > 0 and stats.recomputed_tokens > 0
    assert stats.prefill_tokens == sum(count for decoding, count in fed if not decoding) >= 33
    decoded = sum(count for decoding, count in fed if decoding)
    assert decoded == 3 * 59 + stats.recomputed_tokens
    assert stats.decode_steps == sum(decoding for decoding, _ in fed)
    assert stats.completion_tokens == 180


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_kv_bytes_of_a_sequence(model_type):
    """Bytes by the cost formula: keys and values of the tokens kept, and the landmarks of the pages that are scored."""
    prompt_length, new_tokens, window = 30, 40, 24
    model = endless(model_type)
    schedule = SparsitySchedule((1, 3), bin_tokens=50, page_size=4, sink_pages=2, recent_pages=2, dense_layers=(1,))
    stats = engine_of(model, schedule).generate(random_prompts(prompt_length), sampling(new_tokens)).stats
    head_bytes, kv_heads = 16 * 4, 2
    dense = sparse = 0
    for position in range(prompt_length, prompt_length + new_tokens - 1):
        for layer in range(4):
            seen = position + 1
            slides = model_type == "gemma3_text" and layer % 2 == 0
            if slides:
                seen = min(seen, window)
            dense += kv_heads * 2 * seen * head_bytes
            scored = position // 4 + 1 - 4
            left_out = max(0, scored - schedule.budget_at(position))
            if slides or layer == 1 or left_out == 0:
                sparse += kv_heads * 2 * seen * head_bytes
            else:
                sparse += kv_heads * (2 * (seen - 4 * left_out) + scored) * head_bytes
    assert (stats.kv_bytes_dense, stats.kv_bytes_read) == (dense, sparse)
    assert stats.kv_share == sparse / dense < 1


def test_one_new_token():
    prompts = random_prompts(1, 16, 17, 17)
    output = engine_of(endless(num_hidden_layers=2), max_num_seqs=2).generate(prompts, sampling(1))
    assert [len(completion) for completion in output.completion_ids] == [1] * 4
    assert output.finish_reasons == ["length"] * 4
    stats = output.stats
    assert (stats.decode_steps, stats.completion_tokens, stats.kv_bytes_read, stats.kv_share) == (0, 4, 0, 1.0)


def test_no_prompts(model):
    output = engine_of(model).generate([], sampling(4))
    assert (output.completion_ids, output.logprobs, output.finish_reasons) == ([], [], [])
    assert output.stats.completion_tokens == 0 and output.stats.tokens_per_second >= 0


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8])
def test_max_num_seqs_bounds_what_runs_together(max_num_seqs, monkeypatch):
    together = []

    class Runner(ModelRunner):
        def run(self, pieces, keep, decoding):
            if decoding:
                together.append(len(pieces))
            return super().run(pieces, keep, decoding)

    monkeypatch.setattr(engine_module, "ModelRunner", Runner)
    model = endless(num_hidden_layers=1, max_position_embeddings=64)
    # Of the first three, one ends after 4 tokens; the next one takes its place in the following step.
    engine_of(model, max_num_seqs=max_num_seqs).generate(random_prompts(60, *[6] * 7), sampling(10))
    by_hand = {1: [1] * (3 + 7 * 9), 3: [3] * 22, 8: [8] * 3 + [7] * 6}
    if max_num_seqs == 3:  # 66 tokens to decode, the last sequences alone at the end
        assert together[:18] == [3] * 18 and sum(together) == 3 + 7 * 9 and max(together) == 3
    else:
        assert together == by_hand[max_num_seqs]


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_prefill_chunk_size_bounds_a_forward(model, chunk, monkeypatch):
    sizes = []

    class Runner(ModelRunner):
        def run(self, pieces, keep, decoding):
            if not decoding:
                sizes.append(sum(len(piece.token_ids) for piece in pieces))
            return super().run(pieces, keep, decoding)

    monkeypatch.setattr(engine_module, "ModelRunner", Runner)
    engine_of(model, prefill_chunk_size=chunk).generate(random_prompts(23, 4, 8), sampling(2))
    assert sizes == [chunk] * (35 // chunk) + [35 % chunk] * bool(35 % chunk)


def test_weights_changed_between_rollouts(model):
    """Nothing of the cache outlives a rollout."""
    changing = tiny_model(num_hidden_layers=2, seed=1)
    engine = engine_of(changing)
    prompts = random_prompts(30, 30, 12)
    first = engine.generate(prompts, sampling(20))
    changing.load_state_dict(model.state_dict())
    second = engine.generate(prompts, sampling(20))
    same(second, engine_of(model).generate(prompts, sampling(20)))
    assert second.completion_ids != first.completion_ids


def test_schedule_replaced_between_rollouts(model):
    engine = engine_of(model)
    prompts = random_prompts(60, 33)
    before = engine.generate(prompts, sampling(20))
    for schedule in (SparsitySchedule.fixed(0, page_size=8, dense_layers=()), SparsitySchedule.dense()):
        engine.schedule = schedule
        same(engine.generate(prompts, sampling(20)), engine_of(model, schedule).generate(prompts, sampling(20)))
    engine.schedule = SPARSE
    same(engine.generate(prompts, sampling(20)), before)


def test_a_sequence_that_cannot_fit_is_refused_before_anything_runs(model, monkeypatch):
    monkeypatch.setattr(engine_module, "ModelRunner", None)
    prompts = random_prompts(4, 30, 4)
    with pytest.raises(ValueError, match=r"index 1 .* 30 prompt tokens .* 20 new .* 14 pages .* has 13") as error:
        engine_of(model, max_pages=13).generate(prompts, sampling(20))
    for option in ("rollout_memory_fraction", "max_completion_length"):
        assert option in str(error.value)


def test_the_fewest_pages_that_fit_are_enough():
    model = endless(num_hidden_layers=2)
    for length in range(1, 13):
        prompts = random_prompts(length) * 3
        fewest = -(-(length + 20) // 4) + bool(length % 4)
        output = engine_of(model, max_pages=fewest).generate(prompts, sampling(20))
        assert [len(completion) for completion in output.completion_ids] == [20] * 3
        assert output.stats.prefill_tokens == length  # the prompt is not dropped for its own completions
        with pytest.raises(ValueError, match="cannot fit"):
            engine_of(model, max_pages=fewest - 1).generate(prompts, sampling(20))


def test_memory_fraction_bounds_the_pool(model, monkeypatch):
    class Memory:
        available = 400_000

    monkeypatch.setattr("psutil.virtual_memory", Memory)
    monkeypatch.setattr(memory, "OWN_CGROUPS", Path("/nowhere"))
    output = engine_of(model, memory_fraction=0.25).generate(random_prompts(*[20] * 12), sampling(40))
    # 2 layers, 2 KV heads, keys and values of 4 tokens and a landmark, 16 wide, 4 bytes
    bytes_per_page = 2 * 2 * (4 + 4 + 1) * 16 * 4
    assert 0.5 * 100_000 < output.stats.pages_total * bytes_per_page <= 100_000
    assert output.stats.preemptions > 0


@pytest.mark.parametrize(
    "prompts, message",
    [
        ([[5], []], "index 1 is empty"),
        ([[5], [6, 261]], "index 1 holds token id 261, outside the model's vocabulary of 261"),
        ([[-1, 7]], "index 0 holds token id -1"),
        ([[5], [5] * 64], "index 1 has 64 tokens.*64 positions"),
    ],
)
def test_bad_prompts(prompts, message):
    engine = engine_of(tiny_model(num_hidden_layers=1, max_position_embeddings=64))
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts, sampling(4))


def test_completions_end_where_the_positions_do():
    engine = engine_of(endless(num_hidden_layers=1, max_position_embeddings=64))
    output = engine.generate(random_prompts(60, 63, 20), sampling(10))
    assert [len(completion) for completion in output.completion_ids] == [4, 1, 10]
    assert output.finish_reasons == ["length"] * 3


@pytest.mark.parametrize(
    "options, message",
    [
        ({"memory_fraction": 0.0}, "memory_fraction=0.0"),
        ({"memory_fraction": 1.5}, "memory_fraction=1.5"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"prefill_chunk_size": -3}, "prefill_chunk_size=-3"),
    ],
)
def test_bad_engine_options(model, options, message):
    with pytest.raises(ValueError, match=message):
        engine_of(model, **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"memory_fraction": "0.5"}, "memory_fraction='0.5' is not a number"),
        ({"max_num_seqs": 2.0}, "max_num_seqs=2.0 is not an integer"),
        ({"max_pages": True}, "max_pages=True is a bool"),
        ({"progress_bar": "no"}, "progress_bar='no' is not True or False or None"),
        ({"check_support": None}, "check_support=None is not True or False"),
    ],
)
def test_engine_options_of_the_wrong_type(model, options, message):
    with pytest.raises(TypeError, match=message):
        engine_of(model, **options)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (([[5]], {"max_new_tokens": 4}), TypeError, "generation_config is a dict, not a GenerationConfig"),
        (("a prompt",), TypeError, "prompts is a str, not a list of prompts"),
        ((7,), TypeError, "prompts is a int, not a list of prompts"),
        (([5, 6],), TypeError, "prompt at index 0 is a int, not a list of token ids"),
        (([[5], "a prompt"],), TypeError, "prompt at index 1 is a str, not a list of token ids; tokenize it first"),
        (([[5, 6.0]],), TypeError, "prompt at index 0 holds 6.0, a float, where token ids are integers"),
        (([[5, "6"]],), TypeError, "prompt at index 0 holds '6', a str"),
    ],
)
def test_arguments_of_the_wrong_type(model, arguments, error, message):
    with pytest.raises(error, match=message):
        engine_of(model).generate(*arguments)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"top_logprobs": -1}, ValueError, "top_logprobs=-1 is below 0"),
        ({"top_logprobs": 1.5}, TypeError, "top_logprobs=1.5 is not an integer"),
        ({"top_logprobs": True}, TypeError, "top_logprobs=True is a bool"),
        ({"seed": -1}, ValueError, "seed=-1 is below 0"),
        ({"seed": "0"}, TypeError, "seed='0' is not an integer"),
        ({"max_new_tokens": [3.0]}, TypeError, r"max_new_tokens\[0\]=3.0 is not an integer"),
    ],
)
def test_bad_options_of_a_call(model, options, error, message):
    with pytest.raises(error, match=message):
        engine_of(model).generate([[5]], sampling(4), **options)


def test_prompts_may_be_tensors_and_arrays(model):
    (prompt,) = random_prompts(9)
    output = engine_of(model).generate([prompt, torch.tensor(prompt), np.array(prompt)], sampling(5))
    assert output.stats.prefill_tokens == 9  # the three are one prompt
    assert output.completion_ids[0] == engine_of(model).generate([prompt], sampling(5)).completion_ids[0]


@pytest.mark.parametrize("temperature", [0, 0.0, -1.0, float("nan"), float("inf"), "1", True])
def test_logprobs_at_a_bad_temperature(model, temperature):
    with pytest.raises(ValueError, match=re.escape(f"temperature={temperature!r} must be a number above 0")):
        engine_of(model).logprobs([[5, 6, 7]], [2], temperature=temperature)


def test_logprobs_of_bad_tokens(model):
    with pytest.raises(ValueError, match="sequence at index 1 holds token id 261, outside the model's vocabulary"):
        engine_of(model).logprobs([[5, 6, 7], [5, 6, 261]], [2, 2])


def test_dense_layers_that_the_model_does_not_have_are_refused(model):
    message = r"dense_layers=\(0, 2, 999\) name 2, 999, but the model has 2 layers, 0 to 1"
    schedule = SparsitySchedule.fixed(4, dense_layers=(0, 2, 999))
    with pytest.raises(ValueError, match=message):
        engine_of(model, schedule)
    engine = engine_of(model)
    with pytest.raises(ValueError, match=message):
        engine.schedule = schedule
    assert engine.schedule is SPARSE
    engine.schedule = SparsitySchedule.dense(dense_layers=(999,))  # where all are dense, it means nothing
    engine_of(endless(num_hidden_layers=1), SparsitySchedule.fixed(4))  # the default is for every model


def test_stop_ids_are_a_union_in_order():
    assert stop_ids(None, 3, [5, 3, None], (), (7,)) == [3, 5, 7]
    assert stop_ids() == stop_ids(None) == []


def test_a_limit_for_each_prompt(model):
    prompts, limits = random_prompts(20, 7, 7, 33), [1, 17, 30, 5]
    engine = engine_of(model)
    output = engine.generate(prompts, sampling(30), max_new_tokens=limits)
    longest = engine.generate(prompts, sampling(30))
    assert output.completion_ids == [ids[:n] for ids, n in zip(longest.completion_ids, limits, strict=True)]
    with pytest.raises(ValueError, match="max_new_tokens has 2 entries for 4 prompts"):
        engine.generate(prompts, sampling(30), max_new_tokens=[3, 4])
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        engine.generate(prompts, sampling(30), max_new_tokens=[3, 4, 0, 1])


@pytest.mark.parametrize("new_tokens", [0, -1])
def test_bad_max_new_tokens(model, new_tokens):
    config = sampling(5)
    config.max_new_tokens = new_tokens
    with pytest.raises(ValueError, match=f"max_new_tokens={new_tokens}.*max_completion_length"):
        engine_of(model).generate([[7]], config)


def test_pool_is_sized_for_the_sequences_that_run_at_the_same_time(model):
    prompts, config = random_prompts(*[20] * 12), sampling(40)
    all_at_once = engine_of(model).generate(prompts, config).stats
    two_by_two = engine_of(model, max_num_seqs=2).generate(prompts, config).stats
    assert two_by_two.pages_total * 6 == all_at_once.pages_total
    assert two_by_two.preemptions == 0


def test_a_schedule_that_is_not_one_is_refused(model):
    with pytest.raises(TypeError, match="'fixed:2' is a str, not a SparsitySchedule"):
        engine_of(model, "fixed:2")
