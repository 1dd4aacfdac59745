"""`sparrow tail --adapter`: the tail of a schedule with and without a LoRA."""

import json
import random

import pytest

from adapters import randomise
from sparrow_trl.cli import main
from sparrow_trl.distill import SparrowAdapter
from tiny import tiny_model, tiny_tokenizer


FLAGS = "--max-context 256 --texts 2 --check-places 12 --check-tokens 16 --prompt-length 16 --min-tokens 40".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    (path / "text.txt").write_text("".join(random.Random(0).choices("abcdefgh \n", k=2000)))
    return path


def run(folder, out, *options):
    schedule = folder / "schedule.json"
    schedule.write_text(json.dumps({"budgets": [2], "bin_tokens": 128, "dense_layers": [0]}))
    data = str(folder / "text.txt")
    argv = ["tail", str(folder), "--schedule", str(schedule), "--dataset", data, "--out", str(out), *FLAGS, *options]
    assert main(argv) == 0
    return json.loads((out / "sparrow_tail.json").read_text())["reports"]


def test_tail_with_and_without_a_lora(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    adapter = SparrowAdapter(tiny_model())
    adapter.save_pretrained(tmp_path / "zero")
    randomise(adapter, std=0.2).save_pretrained(tmp_path / "adapter")
    [plain] = run(folder, tmp_path / "plain").values()
    reports = run(folder, tmp_path / "out", "--adapter", str(tmp_path / "adapter"))
    assert list(reports) == ["schedule.json, without the LoRA", "schedule.json, with the LoRA"]
    without, with_it = reports.values()
    printed = capsys.readouterr().out
    assert "without the LoRA" in printed and f"{with_it['bins'][0]['value']:.3f}" in printed
    assert without["bins"] == plain["bins"]
    # The LoRA is in the sparse actor alone, so one that is far from the policy lowers the tail
    for one, other in zip(without["bins"], with_it["bins"], strict=True):
        assert other["value"] < one["value"] - 0.05
    assert (tmp_path / "out" / "sparrow_tail.png").stat().st_size > 1000
    # In the same folder of partial results another LoRA is another actor; one without an effect changes nothing
    zero = run(folder, tmp_path / "out", "--adapter", str(tmp_path / "zero"))
    for one, other in zip(without["bins"], zero["schedule.json, with the LoRA"]["bins"], strict=True):
        assert other == pytest.approx(one, abs=1e-5)


def test_partial_results_of_another_dtype_are_not_taken(folder, tmp_path):
    tiny_model().bfloat16().save_pretrained(tmp_path / "model")  # weights that are the same numbers in both
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "text.txt").write_text((folder / "text.txt").read_text())
    for dtype in ("float32", "bfloat16"):
        run(tmp_path / "model", tmp_path / "out", "--dtype", dtype)
    assert len(list((tmp_path / "out" / "partial").iterdir())) == 2


@pytest.mark.parametrize(
    ("targets", "said"),
    [("all-linear", "adapts other layers than this one"), ("attention", "does not fit the model")],
)
def test_adapter_that_does_not_fit(folder, tmp_path, capsys, targets, said):
    SparrowAdapter(tiny_model("gpt2"), target_modules=targets).save_pretrained(tmp_path / "adapter")
    argv = ["tail", str(folder), "--schedule", "fixed:2", "--adapter", str(tmp_path / "adapter"), *FLAGS]
    assert main(argv) == 2
    assert said in " ".join(capsys.readouterr().err.split())
