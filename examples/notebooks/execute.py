"""
Run the notebooks from top to bottom, and keep what they put out.

    python examples/notebooks/execute.py [NAME ...]

Each runs in a temporary folder, with the settings that it has. Its outputs are stored in it, without what differs from
run to run or from machine to machine. Warnings and the like go to the terminal.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode


FOLDER = Path(__file__).parent
SETTINGS_TAG = "parameters"  # papermill's
INJECTED_TAG = "injected-parameters"


def load(name: str) -> NotebookNode:
    """The notebook `NAME.ipynb` of this folder."""
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def settings_of(notebook: NotebookNode) -> tuple[int, set[str]]:
    """
    Where the settings are: the index of the cell with the tag `parameters`, and the names that it assigns.

    Raises:
        ValueError: there is not exactly one such cell.
    """
    tagged = [index for index, cell in enumerate(notebook.cells) if SETTINGS_TAG in cell.metadata.get("tags", ())]
    if len(tagged) != 1:
        raise ValueError(f"The notebook has {len(tagged)} cells with the tag {SETTINGS_TAG!r}, and one is wanted.")
    return tagged[0], set(re.findall(r"^(\w+) =", notebook.cells[tagged[0]].source, re.MULTILINE))


def with_settings(notebook: NotebookNode, settings: Mapping[str, Any]) -> NotebookNode:
    """
    A copy with other settings, in a cell behind that of the settings, as papermill does it.

    Raises:
        ValueError: the notebook has no such setting.
    """
    index, known = settings_of(notebook)
    if unknown := settings.keys() - known:
        raise ValueError(
            f"The notebook has no setting {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}."
        )
    changed = deepcopy(notebook)
    source = "\n".join(f"{name} = {value!r}" for name, value in settings.items())
    cell = nbformat.v4.new_code_cell(source, metadata={"tags": [INJECTED_TAG]})
    changed.cells.insert(index + 1, cell)
    return changed


def run(notebook: NotebookNode, folder: str | Path, timeout: int = 3600) -> NotebookNode:
    """
    Run all cells in a kernel of their own, which works in `folder`; outputs are put into the notebook.

    Args:
        timeout (`int`, *optional*, defaults to `3600`): seconds for one cell.

    Raises:
        CellExecutionError: a cell failed.
    """
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    return client.execute()


def clean(notebook: NotebookNode) -> str:
    """
    Remove from the outputs what is not to be stored: what went to stderr, and progress bars.

    Returns:
        `str`: what went to stderr.
    """
    errors = []
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        kept = []
        for output in cell.outputs:
            if output.get("name") == "stderr":
                errors.append(output.text)
            elif not _is_progress(output):
                kept.append(output)
        cell.outputs = kept
    return "".join(errors)


def _is_progress(output: NotebookNode) -> bool:
    return "<progress" in output.get("data", {}).get("text/html", "")


def main(names: list[str]) -> None:
    for name in names or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        notebook = load(name)
        with tempfile.TemporaryDirectory() as folder:
            run(notebook, folder)
        print(clean(notebook), file=sys.stderr)
        nbformat.write(notebook, FOLDER / f"{name}.ipynb")


if __name__ == "__main__":
    main(sys.argv[1:])
