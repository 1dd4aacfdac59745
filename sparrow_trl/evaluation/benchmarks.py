"""The benchmarks as data: where their problems are, how they are asked, sampled and judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


MATHS_PROMPT = "{problem}\n\nReason step by step, and put your final answer within \\boxed{{}}."
PROGRAM_PROMPT = (
    "{problem}\n\nWrite a Python program that reads from standard input and prints to standard output. Put it in one "
    "block that starts with ```python."
)
FUNCTION_PROMPT = (
    "{problem}\n\nWrite it in Python, beginning like this:\n\n```python\n{starter}\n```\n\nPut the whole program in one "
    "block that starts with ```python."
)

PAPER = "Sparrow, arXiv 2606.08446"
MATHS_KNOWN = f"{PAPER}: Mean@16 on Qwen3 1.7B to 14B, at a limit of 32K tokens."
MATHS_UNKNOWN = "The paper's prompt, top-p and top-k, and the copy of the problems it took."
CODE_KNOWN = f"{PAPER}: accuracy of Qwen3 1.7B at a limit of 24K tokens."
CODE_UNKNOWN = "The paper's prompt, sampling, number of samples, and version of the benchmark."
OURS = "It is not among the results that we know of the paper; sampled as the others are."


@dataclass(frozen=True)
class Benchmark:
    """
    One benchmark.

    Args:
        name (`str`): as `sparrow eval --suite` takes it.
        title (`str`): as people write it.
        reader (`str`): how its rows become problems: see `sparrow_trl.evaluation.problems`.
        dataset_id (`str`): repository on the Hub, or `"bundled"`.
        split (`str`): its split.
        subset (`str`, *optional*): its configuration.
        data_files (`str`, *optional*): pattern of files of the repository, where it has no loadable configuration.
        columns (`dict[str, str]`): our name of a column -> the dataset's.
        prompt (`str`): with the placeholders `{problem}` and, for code, `{starter}`.
        num_samples (`int`): completions for each problem.
        pass_at (`tuple[int, ...]`): values of k for pass@k.
        temperature, top_p (`float`): sampling.
        max_new_tokens (`int`): limit of a completion.
        limits (`dict[str, int]`): of the sandbox, for code.
        packages (`bool`): whether the tests need the packages of this environment (numpy).
        known (`str`): what the paper says of it, and where.
        unknown (`str`): what had to be chosen.
    """

    name: str
    title: str
    reader: str
    dataset_id: str
    split: str
    subset: str | None = None
    data_files: str | None = None
    columns: Mapping[str, str] = field(default_factory=lambda: {"problem": "problem", "answer": "answer"})
    prompt: str = MATHS_PROMPT
    num_samples: int = 16
    pass_at: tuple[int, ...] = (1, 16)
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 32768
    limits: Mapping[str, float] = field(default_factory=dict)
    packages: bool = False
    known: str = MATHS_KNOWN
    unknown: str = MATHS_UNKNOWN

    @property
    def is_code(self) -> bool:
        """Whether answers are programs."""
        return self.reader in ("humaneval", "mbpp", "livecodebench", "bundled_code")


_CODE_LIMITS = {"cpu_seconds": 10, "wall_seconds": 20.0, "memory_bytes": 2**32}

BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("aime24", "AIME 2024", "maths", "HuggingFaceH4/aime_2024", "train"),
        Benchmark("aime25", "AIME 2025", "maths", "MathArena/aime_2025", "train"),
        Benchmark("aime26", "AIME 2026", "maths", "MathArena/aime_2026", "train"),
        Benchmark("amc", "AMC 2022 and 2023", "maths", "AI-MO/aimo-validation-amc", "train", known=OURS),
        Benchmark("math500", "MATH-500", "maths", "HuggingFaceH4/MATH-500", "test", known=OURS),
        Benchmark(
            "gsm8k",
            "GSM8K",
            "gsm8k",
            "openai/gsm8k",
            "test",
            subset="main",
            columns={"problem": "question", "answer": "answer"},
            max_new_tokens=8192,
            known=OURS,
        ),
        Benchmark(
            "humaneval_plus",
            "HumanEval+",
            "humaneval",
            "evalplus/humanevalplus",
            "test",
            columns={"problem": "prompt", "tests": "test", "entry_point": "entry_point"},
            prompt=FUNCTION_PROMPT,
            max_new_tokens=24576,
            limits=_CODE_LIMITS,
            packages=True,
            known=CODE_KNOWN,
            unknown=CODE_UNKNOWN,
        ),
        Benchmark(
            "mbpp_plus",
            "MBPP+",
            "mbpp",
            "evalplus/mbppplus",
            "test",
            columns={"problem": "prompt", "tests": "test", "examples": "test_list", "imports": "test_imports"},
            prompt="{problem}\n\nYour program should pass this test:\n\n```python\n{starter}\n```\n\nPut the whole "
            "program in one block that starts with ```python.",
            max_new_tokens=24576,
            limits=_CODE_LIMITS,
            packages=True,
            known=CODE_KNOWN,
            unknown=CODE_UNKNOWN,
        ),
        Benchmark(
            "livecodebench",
            "LiveCodeBench",
            "livecodebench",
            "livecodebench/code_generation_lite",
            "train",
            data_files="test*.jsonl",
            columns={
                "problem": "question_content",
                "starter": "starter_code",
                "public": "public_test_cases",
                "private": "private_test_cases",
                "metadata": "metadata",
            },
            prompt=PROGRAM_PROMPT,
            max_new_tokens=24576,
            limits=_CODE_LIMITS,
            known=CODE_KNOWN,
            unknown=CODE_UNKNOWN + " All releases are taken; the window of dates that the paper took is not known.",
        ),
        Benchmark(
            "offline",
            "Offline maths",
            "maths",
            "bundled",
            "test",
            num_samples=4,
            pass_at=(1, 4),
            max_new_tokens=256,
            known="Sixteen problems written for this package, for tests and first tries without a network.",
            unknown="",
        ),
        Benchmark(
            "offline_code",
            "Offline code",
            "bundled_code",
            "bundled",
            "test",
            columns={"problem": "problem", "tests": "tests", "starter": "starter"},
            prompt=PROGRAM_PROMPT,
            num_samples=4,
            pass_at=(1, 4),
            max_new_tokens=256,
            known="Four problems with tests written for this package.",
            unknown="",
        ),
    )
}
"""The suites of `sparrow eval`, by name."""


def find_benchmarks(names: str | list[str] | tuple[str, ...]) -> list[Benchmark]:
    """
    Benchmarks by name, from a list or a text with commas.

    Raises:
        ValueError: an unknown name, or one given twice.
    """
    wanted = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    wanted = [name for name in wanted if name]
    if not wanted:
        raise ValueError(f"No suite is named; there are {', '.join(BENCHMARKS)}.")
    for name in wanted:
        if name not in BENCHMARKS:
            raise ValueError(f"There is no suite {name!r}; there are {', '.join(BENCHMARKS)}.")
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"A suite is named twice: {', '.join(wanted)}.")
    return [BENCHMARKS[name] for name in wanted]
