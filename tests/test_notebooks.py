"""The notebooks run from top to bottom, here with small settings, and what is stored of their outputs is fit to read."""

import base64
import re
import sys
from pathlib import Path

import pytest

from sparrow_trl import SparsitySchedule


nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "notebooks"
sys.path.insert(0, str(FOLDER))

from execute import clean, load, run, settings_of, with_settings  # noqa: E402


PICTURES = {"drop_in": 1, "calibrate_and_read_the_tail": 5, "distill_sparse": 2}
SMALL = {
    "drop_in": {
        "OUTPUT": "small",
        "STEPS": 1,
        "CHECK_STEPS": 1,
        "PROMPT_CHARACTERS": 400,
        "COMPLETION_TOKENS": 8,
    },
    "calibrate_and_read_the_tail": {
        "OUTPUT": "small",
        "TARGET": 0.5,
        "MAX_CONTEXT": 256,
        "BIN_TOKENS": 128,
        "PROMPT_LENGTH": 96,
        "TEXTS": 1,
        "PLACES": 32,
        "TOKENS": 8,
        "STEPS": 1,
        "COMPLETION_TOKENS": 8,
    },
    "distill_sparse": {
        "OUTPUT": "small",
        "BUDGET": 1,
        "STEPS": 1,
        "DISTILL_STEPS": 1,
        "BATCH": 4,
        "PROMPT_TOKENS": 96,
        "COMPLETION_TOKENS": 8,
        "MAX_CONTEXT": 192,
        "BIN_TOKENS": 96,
        "TEXTS": 1,
        "PLACES": 8,
        "TOKENS": 8,
    },
}
PRINTED = {
    "drop_in": [r"largest difference of a weight: 0\.0\n", r"\nas trained: True\n", r"(?m)^model\.safetensors$"],
    "calibrate_and_read_the_tail": [r"A sparse step is faster from \d+ tokens of context on"],
    "distill_sparse": [
        r"the policy as trained: True\n",
        r"by the LoRA: (?!0\.00)\d+\.\d\d when it is on, 0\.00 when it is off\n",
        r"MiB  sparrow/adapter/adapter_model\.safetensors\n",
    ],
}


def outputs_of(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def printed(notebook):
    return "".join(output.text for output in outputs_of(notebook) if output.get("name") == "stdout")


def pictures(notebook):
    found = [output.get("data", {}).get("image/png") for output in outputs_of(notebook)]
    return [base64.b64decode(picture) for picture in found if picture]


def test_every_notebook_is_tested():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SMALL))
def test_notebook_runs_from_top_to_bottom(name, tmp_path):
    done = run(with_settings(load(name), SMALL[name]), tmp_path, timeout=300)
    assert len(pictures(done)) == PICTURES[name]
    for pattern in PRINTED[name]:
        assert re.search(pattern, printed(done)), f"{pattern!r} is not in what {name} printed:\n{printed(done)}"
    assert (tmp_path / "small").is_dir()
    if name == "calibrate_and_read_the_tail":
        schedule = SparsitySchedule.from_pretrained(tmp_path / "small")
        assert (schedule.target, schedule.bin_tokens) == (0.5, 128)
        assert f"scored pages of each bin: {schedule.budgets}\n" in printed(done)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_stored_outputs_are_those_of_a_whole_run_and_of_no_machine(name):
    notebook = load(name)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert len(pictures(notebook)) == PICTURES[name]
    assert all(len(picture) < 100_000 for picture in pictures(notebook))
    for pattern in PRINTED[name]:
        assert re.search(pattern, printed(notebook))
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags"}
    for output in outputs_of(notebook):
        assert output.output_type != "error" and output.get("name") != "stderr"
        text = str({kind: value for kind, value in output.get("data", output).items() if kind != "image/png"})
        assert not re.search(r"/(home|root|tmp|usr|work|opt|Users)/|site-packages|object at 0x|<progress", text), text


@pytest.mark.parametrize("name", sorted(SMALL))
def test_links_of_notebooks_lead_somewhere(name):
    text = "".join(cell.source for cell in load(name).cells if cell.cell_type == "markdown")
    targets = re.findall(r"\]\((?!https?://)([^)#\s]+)", text)
    assert targets
    for target in targets:
        assert (FOLDER / target).exists(), f"{name} links to {target}"


@pytest.mark.parametrize("name", sorted(SMALL))
def test_first_cell_installs_and_settings_come_next(name):
    code = [cell for cell in load(name).cells if cell.cell_type == "code"]
    assert 'find_spec("sparrow_trl") is None' in code[0].source and "%pip install" in code[0].source
    assert code[1].metadata.tags == ["parameters"]


def test_settings_go_behind_those_of_the_notebook():
    notebook = load("drop_in")
    index, known = settings_of(notebook)
    changed = with_settings(notebook, {"STEPS": 1, "OUTPUT": "here"})
    assert known >= {"STEPS", "OUTPUT"}
    assert changed.cells[index + 1].source == "STEPS = 1\nOUTPUT = 'here'"
    assert changed.cells[: index + 1] == notebook.cells[: index + 1]
    assert changed.cells[index + 2 :] == notebook.cells[index + 1 :]
    with pytest.raises(ValueError, match=r"no setting STEP; it has .*STEPS"):
        with_settings(notebook, {"STEP": 1})


def test_what_differs_from_run_to_run_is_removed():
    new = nbformat.v4
    kept = [new.new_output("stream", name="stdout", text="1\n"), new.new_output("display_data", {"text/html": "<b>"})]
    noise = [
        new.new_output("stream", name="stderr", text="a warning\n"),
        new.new_output("display_data", {"text/html": "<progress value='1'></progress>"}),
    ]
    cell = new.new_code_cell("1", outputs=[*noise, *kept], metadata={"execution": {"iopub.status.idle": "now"}})
    notebook = new.new_notebook(cells=[cell], metadata={"language_info": {"name": "python", "version": "3.11.2"}})
    assert clean(notebook) == "a warning\n"
    assert notebook.cells[0].outputs == kept
    assert notebook.cells[0].metadata == {} and notebook.metadata.language_info == {"name": "python"}
