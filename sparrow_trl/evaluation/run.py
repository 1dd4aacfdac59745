"""Evaluating a model on benchmarks through the rollout engine, in batches that are kept on disk."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..rewards.text import opens_thinking
from ..sparsity import SparsitySchedule
from .benchmarks import Benchmark, find_benchmarks
from .judge import judge
from .problems import Problem, load_problems
from .results import Evaluation, add_difference, summary, write_file


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..rollout import RolloutEngine, RolloutOutput


DECODES = ("dense", "sparse")
RESULTS_FILE = "results.json"


@dataclass(frozen=True)
class Sampling:
    """
    What replaces the sampling of the benchmarks; `None` leaves theirs.

    Args:
        num_samples (`int`, *optional*): completions for each problem.
        max_new_tokens (`int`, *optional*): limit of a completion.
        temperature (`float`, *optional*): 0 decodes greedily.
        top_p (`float`, *optional*): nucleus.
        top_k (`int`, *optional*, defaults to `0`): most likely tokens to draw from; 0: all.
        seed (`int`, *optional*, defaults to `0`): seed of the samples.
    """

    num_samples: int | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_samples", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        for name in ("top_k", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative.")
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be finite and not negative; 0 decodes greedily.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is not in (0, 1]; 1.0 turns it off.")
        if self.temperature == 0 and self.num_samples not in (None, 1):
            raise ValueError(f"num_samples={self.num_samples} at temperature 0 would all be the same; use 1.")

    def for_benchmark(self, benchmark: Benchmark) -> dict[str, Any]:
        """The sampling of one benchmark, complete."""
        temperature = benchmark.temperature if self.temperature is None else self.temperature
        return {
            "num_samples": 1 if temperature == 0 else self.num_samples or benchmark.num_samples,
            "max_new_tokens": self.max_new_tokens or benchmark.max_new_tokens,
            "temperature": temperature,
            "top_p": benchmark.top_p if self.top_p is None else self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
        }


def evaluate_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    suites: str | Sequence[str],
    *,
    decode: Sequence[str] = ("dense",),
    schedule: SparsitySchedule | str | None = None,
    out: str | os.PathLike[str] | None = None,
    sampling: Sampling | None = None,
    limit: int | None = None,
    batch_size: int = 64,
    data: Mapping[str, str] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    model_name: str | None = None,
    engine_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[str, str, int, int], None] | None = None,
) -> Evaluation:
    """
    Evaluate a model on benchmarks, by dense decode and, where asked for, by sparse decode beside it.

    With `out`, each batch is written as it is done; a run that was interrupted continues after the last one when it is
    started again with the same settings, and ends with the same completions.

    Args:
        model (`PreTrainedModel`): causal language model.
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer; its chat template makes the prompts, if it has one.
        suites (`str` or `list[str]`): names of benchmarks.
        decode (`list[str]`, *optional*, defaults to `("dense",)`): `"dense"`, which is always there, and `"sparse"`.
        schedule (`SparsitySchedule` or `str`, *optional*): for the sparse decode.
        out (`str` or `os.PathLike`, *optional*): folder for completions and `results.json`.
        sampling (`Sampling`, *optional*): what replaces the sampling of the benchmarks.
        limit (`int`, *optional*): problems of each benchmark, the first so many.
        batch_size (`int`, *optional*, defaults to `64`): completions in a batch; those of one problem stay together.
        data (`dict[str, str]`, *optional*): suite -> file or folder to read its problems from.
        chat_template_kwargs (`dict`, *optional*): options of the chat template, such as `enable_thinking`.
        model_name (`str`, *optional*): by default the one in the model's config.
        engine_options (`dict`, *optional*): options of `RolloutEngine`.
        on_progress (`Callable`, *optional*): called with suite, decode, problems done and problems there are.

    Raises:
        ValueError: unknown suites, options out of range, a sparse decode without a sparse schedule, or a folder that
            holds completions made with other settings.
    """
    from ..rollout import RolloutEngine
    from ..sparsity.calibration.provenance import weights_fingerprint

    benchmarks = find_benchmarks(suites if isinstance(suites, str) else list(suites))
    name = str(model_name or getattr(model.config, "name_or_path", "") or type(model).__name__)
    schedules = resolve_schedules(decode, schedule, name)
    sampling = sampling or Sampling()
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1.")
    unused = sorted(set(data or ()) - {benchmark.name for benchmark in benchmarks})
    if unused:
        raise ValueError(f"data names {', '.join(unused)}, which {'is' if len(unused) == 1 else 'are'} not evaluated.")
    problems = {b.name: load_problems(b, limit, (data or {}).get(b.name)) for b in benchmarks}

    folder = None if out is None else Path(out)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    evaluation = Evaluation(
        name,
        settings={
            "dtype": str(model.dtype).removeprefix("torch."),
            "batch_size": batch_size,
            "weights": weights_fingerprint(model),  # a folder that was trained on keeps its name
        },
    )
    stops = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    engine = RolloutEngine(model, SparsitySchedule.dense(), stop_token_ids=stops, **dict(engine_options or {}))
    for benchmark in benchmarks:
        evaluation.results[benchmark.name] = {}
        for kind, one in schedules.items():
            engine.schedule = one
            run = _Run(engine, tokenizer, benchmark, problems[benchmark.name], sampling, batch_size)
            settings = {**evaluation.settings, **run.settings(name, one, limit, chat_template_kwargs)}
            path = None if folder is None else folder / f"{benchmark.name}.{kind}.jsonl"
            report = (
                (lambda done, total, b=benchmark.name, k=kind: on_progress(b, k, done, total)) if on_progress else None
            )
            batches = run.batches(path, settings, dict(chat_template_kwargs or {}), report)
            evaluation.results[benchmark.name][kind] = {
                **summary(batches, benchmark, sampling.seed),
                "settings": settings,
            }
        add_difference(evaluation.results[benchmark.name])
        if folder is not None:
            write_file(folder / RESULTS_FILE, json.dumps(evaluation.to_dict(), indent=2) + "\n")
    return evaluation


def resolve_schedules(
    decode: Sequence[str], schedule: SparsitySchedule | str | None, model_name: str
) -> dict[str, SparsitySchedule]:
    """The schedule of each decode, dense first; with clear errors."""
    for kind in decode:
        if kind not in DECODES:
            raise ValueError(f"decode={kind!r} is unknown; use {' and '.join(DECODES)}.")
    if "dense" not in decode:
        raise ValueError(f"decode={','.join(decode)!r} lacks 'dense': it is what judges the policy.")
    schedules = {"dense": SparsitySchedule.dense()}
    if "sparse" not in decode:
        if schedule is not None:
            raise ValueError("A schedule is given, and decode lacks 'sparse', which would use it.")
        return schedules
    if schedule is None:
        raise ValueError(
            "The sparse decode needs a schedule: a preset such as 'qwen3-1.7b@0.86', 'fixed:64', or a path."
        )
    sparse = SparsitySchedule.resolve(schedule, model_name)
    if sparse.is_dense:
        raise ValueError(f"schedule={schedule!r} is dense for {model_name!r}; the sparse decode needs a sparse one.")
    return {**schedules, "sparse": sparse}


@dataclass
class _Run:
    """One benchmark with one schedule."""

    engine: RolloutEngine
    tokenizer: PreTrainedTokenizerBase
    benchmark: Benchmark
    problems: list[Problem]
    sampling: Sampling
    batch_size: int

    def settings(
        self, model: str, schedule: SparsitySchedule, limit: int | None, template: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """All that the completions depend on."""
        return {
            "model": model,
            "suite": self.benchmark.name,
            "problems": len(self.problems),
            "problems_fingerprint": hashlib.sha256(repr(self.problems).encode()).hexdigest()[:16],
            "limit": limit,
            "schedule": None if schedule.is_dense else schedule.to_dict(),
            "chat_template_kwargs": dict(template or {}),
            **self.sampling.for_benchmark(self.benchmark),
        }

    def batches(
        self,
        path: Path | None,
        settings: Mapping[str, Any],
        template: Mapping[str, Any],
        report: Callable[[int, int], None] | None,
    ) -> list[dict[str, Any]]:
        """The batches: those on disk, and the others as they are made."""
        done = [] if path is None else _read_batches(path, settings)
        per_batch = max(1, self.batch_size // settings["num_samples"])
        for start in range(0, len(self.problems), per_batch):
            if report is not None:
                report(start, len(self.problems))
            number = start // per_batch
            if number < len(done):
                continue
            batch = self._batch(self.problems[start : start + per_batch], number, settings, template)
            done.append(batch)
            if path is not None:
                with open(path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(batch) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
        if report is not None:
            report(len(self.problems), len(self.problems))
        return done

    def _batch(
        self, problems: list[Problem], number: int, settings: Mapping[str, Any], template: Mapping[str, Any]
    ) -> dict[str, Any]:
        from transformers import GenerationConfig

        texts = [self._render(problem, template) for problem in problems]
        special = self.tokenizer.chat_template is None  # a template writes its own special tokens
        prompts = [self.tokenizer(text, add_special_tokens=special)["input_ids"] for text in texts]
        count = settings["num_samples"]
        greedy = settings["temperature"] == 0
        config = GenerationConfig(
            max_new_tokens=settings["max_new_tokens"],
            do_sample=not greedy,
            temperature=None if greedy else settings["temperature"],
            top_p=None if greedy else settings["top_p"],
            top_k=None if greedy else settings["top_k"],
        )
        output: RolloutOutput = self.engine.generate(
            [prompt for prompt in prompts for _ in range(count)], config, seed=settings["seed"] * 1_000_003 + number
        )
        completions = self.tokenizer.batch_decode(output.completion_ids, skip_special_tokens=True)
        clock = time.perf_counter()
        judged = judge(
            self.benchmark,
            [problem for problem in problems for _ in range(count)],
            completions,
            [opens_thinking(text) for text in texts for _ in range(count)],
        )
        stats = output.stats
        return {
            "batch": number,
            "seconds_rollout": stats.seconds,
            "seconds_judging": time.perf_counter() - clock,
            "kv_bytes_read": stats.kv_bytes_read,
            "kv_bytes_dense": stats.kv_bytes_dense,
            "records": [
                {
                    "problem": problems[index // count].name,
                    "sample": index % count,
                    "right": judgement.right,
                    "exact": judgement.exact,
                    "detail": judgement.detail,
                    "timed_out": judgement.timed_out,
                    "tokens": len(output.completion_ids[index]),
                    "finish_reason": output.finish_reasons[index],
                    "text": completions[index],
                }
                for index, judgement in enumerate(judged)
            ],
        }

    def _render(self, problem: Problem, template: Mapping[str, Any]) -> str:
        if self.tokenizer.chat_template is None:
            return problem.prompt
        messages = [{"role": "user", "content": problem.prompt}]
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template)


def _read_batches(path: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """
    Batches of an earlier run with the same settings. A file that is new, or cut within its last line, is put right.

    Raises:
        ValueError: the settings differ.
    """
    expected = json.loads(json.dumps({"settings": settings}))
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    complete = lines[:-1]  # what follows the last line end was cut, or is empty
    parsed = [json.loads(line) for line in complete]
    if not parsed:
        write_file(path, json.dumps(expected) + "\n")
        return []
    found = parsed[0].get("settings", {})
    if parsed[0] != expected:
        names = {*found, *expected["settings"]}
        name = next((n for n in sorted(names) if found.get(n) != expected["settings"].get(n)), "settings")
        raise ValueError(
            f"{path} holds completions made with {name}={found.get(name)!r}, and now it is "
            f"{expected['settings'].get(name)!r}. Use the same settings to continue, another --out, or remove the file."
        )
    if lines[-1]:
        write_file(path, "".join(line + "\n" for line in complete))
    return parsed[1:]
