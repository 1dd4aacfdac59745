"""Datasets for maths and code RL: where they are, which columns they have, and how a prompt is made of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from .code_tests import parse_tests


if TYPE_CHECKING:
    from datasets import Dataset


MATHS_INSTRUCTION = "{problem}\n\nReason step by step, and put your final answer within \\boxed{{}}."
STDIO_INSTRUCTION = (
    "{problem}\n\nWrite a Python program that reads from standard input and prints to standard output. Put it in one "
    "block that starts with ```python."
)
FUNCTION_INSTRUCTION = (
    "{problem}\n\nWrite it in Python, beginning like this:\n\n```python\n{starter}\n```\n\nPut the whole program in one "
    "block that starts with ```python."
)


@dataclass(frozen=True)
class Recipe:
    """
    How a dataset becomes prompts with what a reward function needs.

    Args:
        name (`str`): short name.
        kind (`str`): `"maths"` or `"code"`.
        dataset_id (`str`): repository on the Hub, or `"bundled"`.
        split (`str`): its split.
        columns (`dict[str, str]`): our name -> the dataset's: `problem` and `answer` for maths; `problem`, `tests` and,
            if there is one, `starter` (the beginning of the program) for code.
        source (`str`): where this is known from.
        keep (`tuple[str]`, *optional*): other columns of the dataset that stay, for a filter or a reward function.
        data_files (`str`, *optional*): the Parquet files of a split in the repository, with `{split}` in their names, where
            `datasets` cannot load the repository itself.
    """

    name: str
    kind: str
    dataset_id: str
    split: str
    columns: Mapping[str, str]
    source: str
    keep: tuple[str, ...] = field(default=())
    data_files: str | None = None

    def with_columns(self, **columns: str) -> Recipe:
        """The recipe for a dataset with other names of columns."""
        known = ("problem", "answer") if self.kind == "maths" else ("problem", "tests", "starter")
        unknown = sorted(set(columns) - set(known))
        if unknown:
            raise ValueError(
                f"Unknown column {', '.join(unknown)} for {self.kind}; the columns are {', '.join(known)}."
            )
        return replace(self, columns={**self.columns, **columns})

    def load(self, **options: Any) -> Dataset:
        """
        Load the dataset and prepare it. `options` go to `datasets.load_dataset`, such as `split="train[:1000]"` or
        `streaming=True`. A bundled one needs no network.
        """
        if self.dataset_id == "bundled":
            return self.prepare(load_bundled(self.kind, prepare=False))
        from datasets import load_dataset

        options = {"split": self.split, **options}
        if self.data_files is None:
            return self.prepare(load_dataset(self.dataset_id, **options))
        split = str(options["split"]).partition("[")[0]
        files = f"hf://datasets/{self.dataset_id}/{self.data_files.format(split=split)}"
        return self.prepare(load_dataset("parquet", **{"data_files": {split: files}, **options}))

    def prepare(self, dataset: Dataset) -> Dataset:
        """
        Make the columns that training needs: `prompt` (messages), and `solution` for maths or `tests` (JSON) for code.
        Other columns are dropped, and so are problems without an answer or without tests.

        Args:
            dataset (`Dataset` or `IterableDataset`): with the columns of the recipe.

        Raises:
            ValueError: a column is missing.
        """
        names = dataset.column_names or list(next(iter(dataset)))
        for ours, theirs in self.columns.items():
            if theirs not in names and ours != "starter":
                raise ValueError(
                    f"The recipe {self.name!r} needs the column {theirs!r} ({ours}), and the dataset has {names}. Name "
                    f"the right one with `get_recipe({self.name!r}).with_columns({ours}=...)`."
                )
        convert: Callable[[Mapping[str, Any]], dict[str, Any]] = self._maths if self.kind == "maths" else self._code
        kept = "solution" if self.kind == "maths" else "tests"
        made = {"prompt", kept, *self.keep}
        prepared = dataset.map(convert, remove_columns=[name for name in names if name not in made])
        return prepared.filter(lambda row: bool(row[kept]))

    def _maths(self, row: Mapping[str, Any]) -> dict[str, Any]:
        answer = row[self.columns["answer"]]
        problem = MATHS_INSTRUCTION.format(problem=str(row[self.columns["problem"]]).strip())
        return {"prompt": _message(problem), "solution": "" if answer is None else str(answer).strip()}

    def _code(self, row: Mapping[str, Any]) -> dict[str, Any]:
        value = row[self.columns["tests"]]
        try:
            tests = parse_tests(value) if value else None
        except ValueError as error:
            warnings.warn(f"A problem of {self.dataset_id} is left out: {error}", UserWarning)
            tests = None
        starter = str(row.get(self.columns.get("starter", ""), "") or "").rstrip()
        instruction = FUNCTION_INSTRUCTION if starter else STDIO_INSTRUCTION
        prompt = instruction.format(problem=str(row[self.columns["problem"]]).strip(), starter=starter)
        text = "" if tests is None else value if isinstance(value, str) else json.dumps(value)
        return {"prompt": _message(prompt), "tests": text}

    def reward_funcs(self) -> list[Callable[..., list[float | None]]]:
        """The reward functions for this data, with their defaults."""
        from .code import CodeReward
        from .maths import MathsReward

        return [MathsReward() if self.kind == "maths" else CodeReward()]


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "polaris",
            "maths",
            "POLARIS-Project/Polaris-Dataset-53K",
            "train",
            {"problem": "problem", "answer": "answer"},
            "The Sparrow paper trains on Polaris (arXiv 2606.08446); repository and columns by the dataset's card. The "
            "paper's prompt is not known here: the instruction is our own.",
        ),
        Recipe(
            "taco",
            "code",
            "BAAI/TACO",
            "train",
            {"problem": "question", "tests": "input_output", "starter": "starter_code"},
            "The Sparrow paper trains on TACO (arXiv 2606.08446); repository and columns by TACO's README (arXiv "
            "2312.14852). Which subset and prompt the paper took is not known here: the instruction is our own.",
            data_files="ALL/{split}-*.parquet",  # the repository has a loading script, which `datasets` no longer runs
        ),
        Recipe(
            "tiny-maths",
            "maths",
            "bundled",
            "train",
            {"problem": "problem", "answer": "answer"},
            "Thirty problems written for this package.",
        ),
        Recipe(
            "tiny-code",
            "code",
            "bundled",
            "train",
            {"problem": "problem", "tests": "tests", "starter": "starter"},
            "Twenty problems with tests written for this package.",
        ),
    )
}


def get_recipe(name: str) -> Recipe:
    """
    A recipe by name: `"polaris"`, `"taco"`, `"tiny-maths"`, `"tiny-code"`.

    Example:

    ```python
    >>> recipe = get_recipe("tiny-maths")
    >>> dataset = recipe.load()
    >>> trainer = GRPOTrainer(model=..., reward_funcs=recipe.reward_funcs(), train_dataset=dataset)
    ```
    """
    if name not in RECIPES:
        raise ValueError(f"There is no recipe {name!r}; there are {', '.join(RECIPES)}.")
    return RECIPES[name]


def load_bundled(kind: str, prepare: bool = True) -> Dataset:
    """
    The tiny dataset that ships with the package.

    Args:
        kind (`str`): `"maths"` or `"code"`.
        prepare (`bool`, *optional*, defaults to `True`): whether to make prompts of it; otherwise as it is written.

    Returns:
        `Dataset`.
    """
    if kind not in ("maths", "code"):
        raise ValueError(f"kind={kind!r} is unknown; use 'maths' or 'code'.")
    from datasets import Dataset

    text = files(__package__).joinpath("data").joinpath(f"{kind}.jsonl").read_text(encoding="utf-8")
    dataset = Dataset.from_list([json.loads(line) for line in text.splitlines()])
    return RECIPES[f"tiny-{kind}"].prepare(dataset) if prepare else dataset


def _message(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]
