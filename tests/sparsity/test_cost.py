"""The cost model: units by hand, bytes against what the engine counts, and the order the paper found."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from sparrow_trl import RolloutEngine, SparsitySchedule
from sparrow_trl.benchmark.measure import weight_bytes
from sparrow_trl.cli import main
from sparrow_trl.rollout import UnsupportedModelError
from sparrow_trl.sparsity.cost import (
    CHIPS,
    Chip,
    Cost,
    ModelShape,
    TailCurve,
    cheapest_schedule,
    crossover,
    measure_chip,
    rollout_cost,
    speedup,
    step_cost,
)
from sparrow_trl.sparsity.cost.compare import compare_with_bench
from sparrow_trl.sparsity.cost.options import CHIP_NAMES, CostOptions
from sparrow_trl.sparsity.cost.report import keeping_tokens
from tiny import tiny_config, tiny_model


CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "configs"
NAMES = ("1.7b", "4b", "8b", "14b")
DENSE = SparsitySchedule.dense()
SMALL = ModelShape("small", windows=(None, None, None, 64), heads=6, kv_heads=2, head_dim=8, weights=1000)
SLOW = Chip("slow", flops=1e9, bandwidth=1e8, memory=1e9)


def test_a_dense_step_by_hand():
    cost = step_cost(SMALL, DENSE, context=100, batch=3, bytes_per_value=2)
    tokens = 100 + 100 + 100 + 64  # three full layers, and a window
    assert cost.weight_bytes == 2 * 1000  # once for the batch
    assert cost.kv_bytes == 3 * tokens * 2 * (2 * 8) * 2  # sequences, keys and values of 2 heads of 8, 2 bytes
    assert cost.flops == 3 * (2 * 1000 + 4 * tokens * 6 * 8)  # q.k and p.v of 6 heads of 8


def test_a_sparse_step_by_hand():
    schedule = SparsitySchedule.fixed(1, page_size=16, dense_layers=(0,))
    cost = step_cost(SMALL, schedule, context=100, batch=1, bytes_per_value=4)
    # Position 99 lies in page 6: pages 0, 5 and 6 are kept, of 1 to 4 one is: 3 pages of 16 tokens are left out.
    kept, scored = 100 - 3 * 16, 4
    tokens = 100 + kept + kept + 64
    assert cost.kv_bytes == 4 * 2 * 8 * (2 * tokens + 2 * scored)
    assert cost.flops == 2 * 1000 + 4 * tokens * 6 * 8 + 2 * (2 * scored) * 2 * 8


def test_equivalent_flops_and_time():
    cost = Cost(weight_bytes=300, kv_bytes=700, flops=5000)
    assert SLOW.intensity == 10
    assert cost.equivalent_flops(SLOW) == 5000 + 10 * 1000
    assert cost.seconds(SLOW) == pytest.approx(5000 / 1e9 + 1000 / 1e8)
    assert cost.floor_seconds(SLOW) == pytest.approx(1e-5)
    assert speedup(Cost(kv_bytes=2000), Cost(kv_bytes=500), SLOW) == pytest.approx(4)


def test_a_rollout_is_the_sum_of_its_steps():
    schedule = SparsitySchedule((1, 3), bin_tokens=128)
    steps = Cost()
    for context in range(41, 301):
        steps += step_cost(SMALL, schedule, context, 2)
    whole = rollout_cost(SMALL, schedule, 40, 300, 2)
    assert (whole.weight_bytes, whole.kv_bytes, whole.flops) == pytest.approx(
        (steps.weight_bytes, steps.kv_bytes, steps.flops)
    )


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
@pytest.mark.parametrize(
    "schedule", [DENSE, SparsitySchedule.fixed(2, dense_layers=(1,)), SparsitySchedule((0, 3), bin_tokens=64)]
)
def test_bytes_are_those_that_the_engine_counts(model_type, schedule):
    model = tiny_model(model_type)
    shape = ModelShape.from_config(model.config)
    engine = RolloutEngine(model, schedule)
    config = GenerationConfig(do_sample=True, max_new_tokens=60, min_new_tokens=60, eos_token_id=None)
    stats = engine.generate([[5] * 50], config).stats
    assert stats.completion_tokens == 60
    # The first token comes from the prefill; the last one is never fed.
    assert stats.kv_bytes_read == rollout_cost(shape, schedule, 50, 109, 1, 4).kv_bytes
    assert stats.kv_bytes_dense == rollout_cost(shape, DENSE, 50, 109, 1, 4).kv_bytes


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen2", "gpt2"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_those_of_the_model(model_type, tied):
    model = tiny_model(model_type, tie_word_embeddings=tied)
    shape = ModelShape.from_config(model.config)
    assert 4 * shape.read_parameters(batch=3) == weight_bytes(model, 3)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_experts_are_read_as_far_as_they_are_used():
    shape = ModelShape.from_config(tiny_config("qwen3_moe"))
    dense = ModelShape.from_config(tiny_config("qwen3"))
    model = tiny_model("qwen3_moe")
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert (shape.experts, shape.active_experts, shape.expert_weights) == (4, 2, experts)
    assert shape.read_parameters(1) == shape.weights + shape.embedding_row + experts / 2
    assert shape.read_parameters(1000) == pytest.approx(shape.weights + 1000 * shape.embedding_row + experts)
    assert shape.active_parameters == shape.weights + experts / 2
    assert dense.experts == 1 and dense.expert_weights == 0


def test_known_sizes_of_the_published_models():
    for name, billions, tied in zip(NAMES, (1.72, 4.02, 7.57, 13.99), (True, True, False, False), strict=True):
        shape = ModelShape.from_pretrained(CONFIGS / f"qwen3-{name}")
        assert shape.weights / 1e9 == pytest.approx(billions, abs=0.01)
        assert (shape.embedding_row == 0) == tied


@pytest.mark.parametrize("batch", [8, 16, 32, 64])
def test_the_order_of_the_paper(batch):
    """At its schedules for 0.86, rollouts of 32K tokens gain less from 1.7B to 14B, and more the longer they are."""
    chip, gains = CHIPS["h200"], []
    for name in NAMES:
        shape = ModelShape.from_pretrained(CONFIGS / f"qwen3-{name}.json")
        schedule = SparsitySchedule.from_preset(f"qwen3-{name}", 0.86)
        by_length = [
            speedup(rollout_cost(shape, DENSE, 512, n, batch), rollout_cost(shape, schedule, 512, n, batch), chip)
            for n in (4096, 8192, 32768)
        ]
        assert by_length == sorted(by_length)
        gains.append(by_length[-1])
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] > 1.2


def test_the_published_speedups_are_within_a_third():
    """At batch 16 on one H200 the model comes near to what the paper measured with its own engine."""
    for name, published in zip(NAMES, (2.21, 2.41, 2.06, 1.49), strict=True):
        shape = ModelShape.from_pretrained(CONFIGS / f"qwen3-{name}")
        costs = [
            rollout_cost(shape, schedule, 512, 32768, 16)
            for schedule in (DENSE, SparsitySchedule.from_preset(f"qwen3-{name}"))
        ]
        assert speedup(costs[0], costs[1], CHIPS["h200"]) == pytest.approx(published, rel=1 / 3)


def test_crossover_is_where_steps_begin_to_be_faster():
    schedule = SparsitySchedule.fixed(20)
    found = crossover(SMALL, schedule, SLOW, 4, longest=4096)
    faster = [
        context
        for context in range(16, 4097, 16)
        if step_cost(SMALL, schedule, context, 4).seconds(SLOW) < step_cost(SMALL, DENSE, context, 4).seconds(SLOW)
    ]
    assert found == faster[0]
    assert faster == list(range(found, 4097, 16))
    assert crossover(SMALL, DENSE, SLOW, 4) is None


def test_cheapest_budget_and_page_size():
    layout = SparsitySchedule.fixed(0)
    curves = {
        16: [TailCurve((8, 16, 32), (0.8, 0.87, 0.95)), TailCurve((8, 16, 32), (0.7, 0.8, 0.9))],
        64: [TailCurve((4, 8), (0.8, 0.95)), TailCurve((8, 16), (0.8, 0.9))],
    }
    found = cheapest_schedule(curves, 0.86, SMALL, layout, SLOW, 8)
    assert [(c.schedule.page_size, c.schedule.budgets) for c in found] == [(16, (16, 32)), (64, (8, 16))]
    assert found[0].cost.seconds(SLOW) < found[1].cost.seconds(SLOW)
    assert found[0].cost.kv_bytes == sum(
        step_cost(SMALL, found[0].schedule, context, 8).kv_bytes for context in (1000, 3000)
    )
    with pytest.raises(ValueError, match=r"target=0.99 .* 0.900 \(page size 16\), 0.900 \(page size 64\)"):
        cheapest_schedule(curves, 0.99, SMALL, layout, SLOW, 8)


def test_a_page_size_that_misses_the_target_is_left_out():
    curves = {16: [TailCurve((8,), (0.9,))], 32: [TailCurve((8,), (0.5,))]}
    [found] = cheapest_schedule(curves, 0.86, SMALL, SparsitySchedule.fixed(0), SLOW, 1)
    assert found.schedule.page_size == 16 and found.schedule.target == 0.86


@pytest.mark.parametrize(
    ("budgets", "tails"), [((1, 2), (0.5,)), ((), ()), ((2, 1), (0.5, 0.6)), ((1, 1), (0.5, 0.6))]
)
def test_curves_are_checked(budgets, tails):
    with pytest.raises(ValueError):
        TailCurve(budgets, tails)


def test_larger_pages_keep_as_many_tokens():
    schedule = SparsitySchedule((29, 61))
    wide = keeping_tokens(schedule, 64)
    assert (wide.page_size, wide.budgets, wide.sink_pages, wide.recent_pages) == (64, (8, 16), 1, 1)
    assert keeping_tokens(wide, 16).budgets == (32, 64)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: step_cost(SMALL, DENSE, 0, 1), "context=0"),
        (lambda: step_cost(SMALL, DENSE, 1, 0), "batch=0"),
        (lambda: rollout_cost(SMALL, DENSE, 5, 5, 1), "prompt_length=5"),
        (lambda: rollout_cost(SMALL, DENSE, 5, 6, 0), "batch=0"),
    ],
)
def test_sizes_are_checked(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_unsupported_models_are_refused():
    with pytest.raises(UnsupportedModelError, match="latent"):
        ModelShape.from_config(tiny_config("deepseek_v3"))


def test_chips_of_the_command_line():
    assert set(CHIP_NAMES) == set(CHIPS)
    measured = measure_chip(torch.float32, torch.device("cpu"), repeats=1)
    assert measured.flops > 1e8 and measured.bandwidth > 1e8 and measured.memory > 1e8


def run(capsys, *argv):
    try:
        status = main(["cost", *argv])
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_command_prints_writes_and_draws(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    plot, path = tmp_path / "speed.png", tmp_path / "cost.json"
    status, out, _ = run(
        capsys, "--model", str(CONFIGS / "qwen3-1.7b"), "--plot", str(plot), "--json", str(path), "--batch", "16"
    )
    assert status == 0
    assert plot.stat().st_size > 1000
    results = json.loads(path.read_text())
    shape = ModelShape.from_pretrained(CONFIGS / "qwen3-1.7b.json")
    schedule = SparsitySchedule.from_preset("qwen3-1.7b")
    last = results["contexts"][-1]
    assert last["context"] == 32768 and last["budget"] == 253
    costs = [step_cost(shape, chosen, 32768, 16) for chosen in (DENSE, schedule)]
    assert last["speedup"] == pytest.approx(speedup(costs[0], costs[1], CHIPS["h200"]))
    assert f"{last['speedup']:.2f}x" in out and f"{results['crossover']:,} tokens" in out
    assert last["fits"] and [row["page_size"] for row in results["page_sizes"]] == [16, 32, 64, 128]


def test_page_sizes_are_compared_at_equal_cost(capsys):
    """What a larger page saves in landmarks pays for half as many tokens, for a token is a key and a value."""
    status, out, _ = run(capsys, "--model", str(CONFIGS / "qwen3-1.7b"), "--json", "-", "--chip", "h100")
    rows = {row["page_size"]: row for row in json.loads(out)["page_sizes"]}
    assert status == 0 and rows[16]["as_cheap_budget"] == rows[16]["budget"] == 253
    for page_size in (32, 64, 128):
        saved = 32768 / 16 - 32768 / page_size
        kept = 256 * 16 + saved / 2  # sink and recent pages among them
        always = (-(-16 // page_size) + -(-32 // page_size)) * page_size
        assert rows[page_size]["as_cheap_budget"] * page_size + always == pytest.approx(kept, abs=1.5 * page_size)


def test_command_says_what_does_not_fit(capsys):
    status, out, _ = run(
        capsys, "--model", str(CONFIGS / "qwen3-14b"), "--chip", "l4", "--batch", "1", "--context", "1024"
    )
    assert status == 0 and "does not fit" in out


def test_contexts_end_by_default_with_the_model(capsys):
    status, out, _ = run(capsys, "--model", str(CONFIGS / "smollm2-135m"), "--json", "-")
    assert status == 0
    assert [row["context"] for row in json.loads(out)["contexts"]] == [2048, 4096, 8192]


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        (["--batch", "0"], 2, "--batch 0"),
        (["--context", "100"], 2, "--context 100 must be above --prompt-length 512"),
        (["--page-size", "24"], 2, "--page-size 24 is not a power of two"),
        (["--target", "1"], 2, "--target 1.0"),
        (["--chip", "abacus"], 2, "invalid choice"),
        (["--model", "/no/such/model"], 2, "OSError"),
        (["--model", str(CONFIGS / "qwen3-1.7b"), "--context", "50000"], 2, "beyond the 40,960 positions"),
        (["--model", str(CONFIGS / "qwen3-1.7b"), "--bench", "/no/such/file"], 2, "FileNotFoundError"),
    ],
)
def test_mistakes(capsys, argv, status, said):
    found, out, err = run(capsys, *argv)
    assert found == status and said in err.replace("\n", " ") and not out


@pytest.mark.parametrize("text", ["[]", "{}", "not JSON", '{"runs": 1}'])
def test_a_file_that_the_benchmark_did_not_write(capsys, tmp_path, text):
    (tmp_path / "bench.json").write_text(text)
    status, out, err = run(capsys, "--model", str(CONFIGS / "smollm2-135m"), "--bench", str(tmp_path / "bench.json"))
    assert status == 2 and not out and "is not what `sparrow bench rollout --json` writes" in " ".join(err.split())


def test_the_cheapest_of_calibrated_schedules(capsys, tmp_path):
    files = []
    for page_size, budgets, low in ((16, (8, 16, 32), (0.8, 0.87, 0.95)), (64, (4, 16), (0.8, 0.95))):
        bins = [{"index": 0, "budgets": budgets, "low": low}, {"index": 1, "status": "extrapolated"}]
        schedule = SparsitySchedule((16, 16), page_size=page_size, provenance={"bins": bins})
        files.append(str(schedule.save_pretrained(tmp_path / str(page_size))))
    argv = ["--model", str(CONFIGS / "smollm2-135m"), "--context", "2048", "--curves", *files, "--json", "-"]
    status, out, _ = run(capsys, *argv)
    assert status == 0
    found = json.loads(out)["cheapest"]
    assert [(row["page_size"], row["budgets"], row["kept_tokens"]) for row in found] == [
        (16, [16], [256]),
        (64, [16], [1024]),
    ]
    short = SparsitySchedule((16,), page_size=32, bin_tokens=500, provenance={"bins": bins[:1]}).save_pretrained(
        tmp_path / "s"
    )
    status, _, err = run(capsys, *argv[:4], "--curves", files[0], str(short))
    assert status == 2 and "bins of 500 tokens" in " ".join(err.split())
    made_for = {"architecture": {"layers": 28, "heads": 9}}
    other = SparsitySchedule((16,), provenance={"bins": bins[:1], "model": made_for}).save_pretrained(tmp_path / "o")
    status, _, err = run(capsys, *argv[:4], "--curves", str(other))
    assert status == 2 and "another model than smollm2-135m: layers 28 against 30." in " ".join(err.split())
    later = [{"index": 0, "status": "extrapolated"}, {"index": 1, "budgets": (8, 16), "low": (0.8, 0.9)}]
    gap = SparsitySchedule((16, 16), provenance={"bins": later}).save_pretrained(tmp_path / "gap")
    status, _, err = run(capsys, *argv[:4], "--curves", str(gap))
    assert status == 2 and "no measured tails in bin 0" in " ".join(err.split())
    bare = SparsitySchedule((16,)).save_pretrained(tmp_path / "bare")
    assert run(capsys, *argv[:4], "--curves", str(bare))[0] == 2


def bench_results(shape, schedule, contexts, batch, chip):
    """What `sparrow bench rollout` would write on a machine that takes exactly as long as the model predicts."""
    steps = []
    for context in contexts:
        for name, chosen in (("dense", DENSE), ("fixed:4", schedule)):
            cost = step_cost(shape, chosen, context + 1, batch, 4)
            steps.append(
                {
                    "contender": name,
                    "context": context,
                    "batch": batch,
                    "median": cost.seconds(chip),
                    "kv_bytes": cost.kv_bytes,
                }
            )
    decode = {"steps": steps, "bandwidth": {"copy": chip.bandwidth}}
    return {
        "model": {"name": "small", "layers": 4, "heads": 6, "kv_heads": 2},
        "schedules": {"dense": DENSE.to_dict(), "fixed:4": schedule.to_dict()},
        "runs": [{"dtype": "float32", "decode": decode}],
    }


def test_comparison_with_the_benchmark():
    schedule = SparsitySchedule.fixed(4)
    results = bench_results(SMALL, schedule, [500, 200], 8, SLOW)
    rows = compare_with_bench(results, SMALL, {"float32": replace(SLOW, bandwidth=1.0)})
    assert [row["context"] for row in rows] == [500, 200]
    for row in rows:
        assert row["kv_bytes_measured"] == row["kv_bytes_predicted"]
        assert row["error"] == pytest.approx(1) and row["speedup_measured"] > 1
        assert row["seconds_measured"] == pytest.approx(row["seconds_predicted"])
    with pytest.raises(ValueError, match="4 layers, 6 heads and 2 KV heads; other has 4, 6 and 6"):
        compare_with_bench(results, replace(SMALL, name="other", kv_heads=6), {"float32": SLOW})
    with pytest.raises(ValueError, match="no sparse decode steps"):
        compare_with_bench({**results, "runs": [{"dtype": "float32"}]}, SMALL, {})


def test_measured_steps_have_the_predicted_bytes():
    """Against the real benchmark: the keys and values that its steps read, counted by the engine."""
    from sparrow_trl.benchmark.options import RolloutOptions
    from sparrow_trl.benchmark.rollout import _run_dtype

    model = tiny_model("llama", max_position_embeddings=1024)
    options = RolloutOptions(dtypes=["float32"], contexts=[600], batch=2, steps=1, warmup=1, ragged=False)
    schedule = SparsitySchedule.fixed(4)
    stream = np.random.default_rng(0).integers(5, 200, 700).tolist()
    run_ = _run_dtype(model, stream, {"dense": DENSE, "fixed:4": schedule}, options, lambda text: None)
    shape = ModelShape.from_config(model.config)
    results = {
        "model": {"name": "tiny", "layers": 4, "heads": 4, "kv_heads": 2},
        "schedules": {"dense": DENSE.to_dict(), "fixed:4": schedule.to_dict()},
        "runs": [{"dtype": "float32", **run_}],
    }
    [row] = compare_with_bench(results, shape, {"float32": SLOW})
    assert row["kv_bytes_measured"] == row["kv_bytes_predicted"]


def test_options_have_the_chip_of_the_paper():
    assert CostOptions().chip == "h200"
