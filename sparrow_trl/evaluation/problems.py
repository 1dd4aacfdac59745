"""Problems of the benchmarks: from a dataset's rows to a prompt and what judges the answer."""

from __future__ import annotations

import base64
import io
import json
import pickle
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..rewards.code_tests import AssertTests, Tests, parse_tests
from .benchmarks import FUNCTION_PROMPT, Benchmark


@dataclass(frozen=True)
class Problem:
    """
    One problem.

    Args:
        name (`str`): what it is called within its benchmark.
        prompt (`str`): the user's message.
        answer (`str`, *optional*): reference answer, for maths.
        tests (`Tests`, *optional*): tests, for code.
        preamble (`str`, *optional*): code that comes before the program, such as imports the problem gives.
    """

    name: str
    prompt: str
    answer: str | None = None
    tests: Tests | None = None
    preamble: str = ""


_NAMES = ("id", "task_id", "question_id", "unique_id")


def load_problems(benchmark: Benchmark, limit: int | None = None, data: str | Path | None = None) -> list[Problem]:
    """
    Problems of a benchmark.

    Args:
        benchmark (`Benchmark`): which.
        limit (`int`, *optional*): take the first so many.
        data (`str` or `Path`, *optional*): a JSON-lines or Parquet file, or a folder that `datasets` can load, with the
            columns of the benchmark's dataset, to be read in its place.

    Raises:
        ValueError: `limit` is below 1, there are no problems, or a column is missing.
        ConnectionError: the dataset is neither cached nor can it be had.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} must be at least 1.")
    rows = _rows(benchmark, data)
    if limit is not None:
        rows = rows[:limit]
    if not rows:
        raise ValueError(f"The suite {benchmark.name!r} has no problems in {data or benchmark.dataset_id}.")
    optional = {"starter", "imports"}
    for ours, theirs in benchmark.columns.items():
        if ours not in optional and theirs not in rows[0]:
            raise ValueError(
                f"The suite {benchmark.name!r} needs the column {theirs!r}; {data or benchmark.dataset_id} has "
                f"{sorted(rows[0])}."
            )
    read = _READERS[benchmark.reader]
    names = [next((str(row[key]) for key in _NAMES if row.get(key) is not None), str(n)) for n, row in enumerate(rows)]
    if len(set(names)) < len(names):  # samples are pooled by name
        names = [str(number) for number in range(len(rows))]
    return [
        read(benchmark, name, {ours: row.get(theirs) for ours, theirs in benchmark.columns.items()})
        for name, row in zip(names, rows, strict=True)
    ]


def _rows(benchmark: Benchmark, data: str | Path | None) -> list[dict[str, Any]]:
    if data is None and benchmark.dataset_id == "bundled":
        text = files(__package__).joinpath("data").joinpath(f"{benchmark.name}.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]
    from datasets import load_dataset

    if data is not None:
        path = Path(data)
        if not path.exists():
            raise ValueError(f"data={str(data)!r} for the suite {benchmark.name!r} does not exist.")
        if path.suffix in (".jsonl", ".json"):
            return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if path.suffix == ".parquet":
            return list(load_dataset("parquet", data_files=str(path), split="train"))
        return list(load_dataset(str(path), split=benchmark.split))
    if benchmark.data_files is not None:
        pattern = f"hf://datasets/{benchmark.dataset_id}/{benchmark.data_files}"
        return list(load_dataset("json", data_files=pattern, split=benchmark.split))
    return list(load_dataset(benchmark.dataset_id, benchmark.subset, split=benchmark.split))


def _maths(benchmark: Benchmark, name: str, row: Mapping[str, Any]) -> Problem:
    answer = row["answer"]
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)  # AMC's answers are stored as 142.0
    answer = "" if answer is None else str(answer).strip()
    return Problem(name, benchmark.prompt.format(problem=str(row["problem"]).strip()), answer=answer)


def _gsm8k(benchmark: Benchmark, name: str, row: Mapping[str, Any]) -> Problem:
    answer = str(row["answer"]).rpartition("####")[2].replace(",", "").strip()
    return Problem(name, benchmark.prompt.format(problem=str(row["problem"]).strip()), answer=answer)


def _humaneval(benchmark: Benchmark, name: str, row: Mapping[str, Any]) -> Problem:
    """The problem is the beginning of a program, which the answer repeats; what stands above the function may lack."""
    starter, entry_point = str(row["problem"]), str(row["entry_point"])
    preamble = re.split(rf"^def {re.escape(entry_point)}\b", starter, maxsplit=1, flags=re.MULTILINE)[0]
    prompt = benchmark.prompt.format(problem="Complete this program.", starter=starter.rstrip())
    return Problem(name, prompt, tests=AssertTests(str(row["tests"]), entry_point), preamble=preamble)


def _mbpp(benchmark: Benchmark, name: str, row: Mapping[str, Any]) -> Problem:
    example = row["examples"][0] if row["examples"] else ""
    prompt = benchmark.prompt.format(problem=str(row["problem"]).strip(), starter=example)
    setup = "\n".join(row.get("imports") or ())
    return Problem(name, prompt, tests=AssertTests(str(row["tests"]), setup=setup))


class _StringsOnly(pickle.Unpickler):
    """LiveCodeBench's hidden tests are a pickled text; nothing else is let in."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"LiveCodeBench's tests hold {module}.{name}, where only a text is expected.")


def _livecodebench(benchmark: Benchmark, name: str, row: Mapping[str, Any]) -> Problem:
    cases = _json(row["public"])
    private = row["private"]
    if isinstance(private, str) and private.strip() and not private.lstrip().startswith("["):
        private = _StringsOnly(io.BytesIO(zlib.decompress(base64.b64decode(private)))).load()
    cases = cases + _json(private)
    function = (_json(row["metadata"]) or {}).get("func_name")
    tests: dict[str, Any] = {
        "inputs": [case["input"] for case in cases],
        "outputs": [case["output"] for case in cases],
    }
    if function:
        tests = {
            "fn_name": function,
            "inputs": [[json.loads(line) for line in text.splitlines()] for text in tests["inputs"]],
            "outputs": [json.loads(text) for text in tests["outputs"]],
        }
    return _code(benchmark, name, {"problem": row["problem"], "starter": row.get("starter"), "tests": tests})


def _code(benchmark: Benchmark, name: str, row: Mapping[str, Any]) -> Problem:
    tests = parse_tests(row["tests"])
    if tests is None:
        raise ValueError(f"The problem {name!r} of the suite {benchmark.name!r} has no tests.")
    starter = str(row.get("starter") or "").rstrip()
    template = FUNCTION_PROMPT if starter else benchmark.prompt
    prompt = template.format(problem=str(row["problem"]).strip(), starter=starter)
    return Problem(name, prompt, tests=tests)


def _json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and value.strip() else value or []


_READERS: dict[str, Callable[[Benchmark, str, Mapping[str, Any]], Problem]] = {
    "maths": _maths,
    "gsm8k": _gsm8k,
    "humaneval": _humaneval,
    "mbpp": _mbpp,
    "livecodebench": _livecodebench,
    "bundled_code": _code,
}
