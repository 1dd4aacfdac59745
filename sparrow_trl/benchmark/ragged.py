"""
Whole rollouts side by side: completions of very unequal length, the same lengths for all contenders.

`generate` runs the batch until its longest completion ends and feeds padding to those that ended before; only tokens
that belong to completions count. The lengths are forced, since contenders draw different tokens: none has stop tokens,
and each ends a completion by its own means.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from ..rollout import RolloutEngine, RolloutOutput
from ..sparsity import SparsitySchedule
from .checks import Gate, teacher_forced, token_logprobs
from .measure import spread, timed


NO_STOP_TOKEN = -1  # `None` would be filled from the model's generation config
PAD_TOKEN = 0
WARMUP_TOKENS = 4
REPORT_EVERY = 100  # steps of `generate`
CPU_BATCH_TOKENS = 512  # of continuous batching, where it does not look at the GPU's memory


def draw_lengths(count: int, median_length: int, longest: int, seed: int) -> list[int]:
    """
    `count` lengths from a log-normal distribution: its quantiles in the middle of `count` equal shares, with the spread
    that makes the last one `longest`, in random order. So the median and the tail do not depend on luck.
    """
    normal = NormalDist()
    quantiles = [normal.inv_cdf((index + 0.5) / count) for index in range(count)]
    sigma = math.log(longest / median_length) / quantiles[-1] if count > 1 else 0.0
    lengths = [max(1, round(median_length * math.exp(sigma * quantile))) for quantile in quantiles]
    random.Random(seed).shuffle(lengths)
    return lengths


class RowLimits(StoppingCriteria):
    """Ends each row of a batch after its own number of new tokens, and says now and then how far the batch is."""

    def __init__(
        self, prompt_length: int, lengths: list[int], device: torch.device, report: Callable[[str], None] | None
    ):
        self.prompt_length, self.longest, self.report = prompt_length, max(lengths), report
        self.stop = torch.tensor(lengths, device=device) + prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        new = input_ids.shape[1] - self.prompt_length
        if self.report is not None and new % REPORT_EVERY == 0:
            self.report(f"generate, {new} of {self.longest} steps")
        return self.stop <= input_ids.shape[1]


def sampling_config(max_new_tokens: int, eos_token_id: int | None = None) -> GenerationConfig:
    """Plain sampling, as GRPO wants it."""
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=eos_token_id,
        pad_token_id=PAD_TOKEN,
    )


def generate(
    model: PreTrainedModel,
    prompts: list[list[int]],
    lengths: list[int],
    report: Callable[[str], None] | None = None,
) -> list[int]:
    """
    transformers' `generate` on the whole batch.

    Args:
        prompts (`list[list[int]]`): of equal length.
        lengths (`list[int]`): when each row ends.
        report (`Callable[[str], None]`, *optional*): told how far it is.

    Returns:
        `list[int]`: the tokens of each row. A row that did not turn into padding when it should have counts as long as
        the batch.
    """
    ids = torch.tensor(prompts, device=model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=sampling_config(max(lengths), NO_STOP_TOKEN),
        stopping_criteria=StoppingCriteriaList([RowLimits(ids.shape[1], lengths, model.device, report)]),
    )
    new = output[:, ids.shape[1] :].tolist()
    return [length if set(row[length:]) <= {PAD_TOKEN} else len(row) for row, length in zip(new, lengths, strict=True)]


class OutOfTimeError(Exception):
    """A contender was stopped after `seconds`. `tokens` are those of the completions it had finished."""

    def __init__(self, message: str, seconds: float, tokens: int):
        super().__init__(message)
        self.seconds, self.tokens = seconds, tokens


def continuous_batching(
    model: PreTrainedModel, prompts: list[list[int]], lengths: list[int], limit: float
) -> list[int]:
    """
    transformers' continuous batching, as TRL runs it with `use_transformers_continuous_batching=True`.

    Returns:
        `list[int]`: the tokens of each completion.

    Raises:
        OutOfTimeError: after `limit` seconds.
        RuntimeError: where it gives up.
    """
    from transformers import ContinuousBatchingConfig

    options: dict[str, Any] = {}
    if model.device.type == "cpu":
        # By default it would fill most of the machine's memory with zeros.
        default = ContinuousBatchingConfig()
        block = default.page_size if hasattr(default, "page_size") else default.block_size  # before transformers 5.18
        blocks = [-(-(len(prompt) + new) // block) + 1 for prompt, new in zip(prompts, lengths, strict=True)]
        options = {"num_blocks": sum(blocks), "max_batch_tokens": CPU_BATCH_TOKENS}
    finished: dict[str, int] = {}
    deadline = time.perf_counter() + limit
    with model.continuous_batching_context_manager(
        generation_config=sampling_config(max(lengths), NO_STOP_TOKEN),
        continuous_batching_config=ContinuousBatchingConfig(**options),
        timeout=60,
    ) as manager:
        names = [
            manager.add_request(prompt, max_new_tokens=length, eos_token_id=NO_STOP_TOKEN)
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        while len(finished) < len(names):
            result = manager.get_result(timeout=0.5)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                finished[result.request_id] = len(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError("its thread ended early")
            if time.perf_counter() > deadline and len(finished) < len(names):
                raise OutOfTimeError(
                    f"stopped after {limit:.0f} s, with {len(finished)} of {len(names)} completions finished",
                    limit,
                    sum(finished.values()),
                )
    return [finished[name] for name in names]


def rollout(engine: RolloutEngine, prompts: list[list[int]], lengths: list[int], seed: int) -> RolloutOutput:
    """Our engine."""
    return engine.generate(prompts, sampling_config(max(lengths)), seed=seed, max_new_tokens=lengths)


def measure_rollouts(
    model: PreTrainedModel,
    exact_model: PreTrainedModel | None,
    prompts: list[list[int]],
    lengths: list[int],
    schedules: dict[str, SparsitySchedule],
    repeats: int,
    with_continuous_batching: bool,
    time_limit: float | None,
    seed: int,
    gate: Gate,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    """
    Time whole rollouts of all contenders, one after the other in every repetition.

    Args:
        prompts (`list[list[int]]`): one a completion, of equal length.
        lengths (`list[int]`): new tokens of each completion.
        time_limit (`float`, *optional*): seconds after which continuous batching is stopped; by default the time of
            `generate`.
        report (`Callable[[str], None]`): told what is going on, and every result once its checks have passed.

    Returns:
        One entry a contender.

    Raises:
        CheckFailedError: where completions have wrong lengths or log-probabilities.
    """
    device = model.device
    engines = {}
    for name, schedule in schedules.items():
        engines[name] = RolloutEngine(model, schedule, check_support=False, progress_bar=False)
        engines[name].stop_token_ids = []
    short = [WARMUP_TOKENS] * len(lengths)
    report("rollouts: warm-up")
    generate(model, prompts, short)
    for engine in engines.values():
        rollout(engine, prompts, short, seed)

    other = _ContinuousBatching(model, prompts, lengths, gate) if with_continuous_batching else None
    base: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    outputs: dict[str, RolloutOutput] = {}
    for repetition in range(repeats):
        label = f"rollouts, {repetition + 1} of {repeats}:"
        if repetition == 0:  # once: it takes longer than all others together
            report(f"{label} generate")
            elapsed, found = timed(device, generate, model, prompts, lengths, report)
            gate.equal("lengths of generate", found, lengths)
            base = _row("generate", [elapsed], sum(lengths))
            report(f"{label} generate: {base['median']:.1f} s for {base['tokens']:,} tokens")
        if other is not None:
            report(f"{label} continuous batching")
            other.measure(base["median"] if time_limit is None else time_limit)
            report(f"{label} continuous batching: {other.outcome()}")
        for name, engine in engines.items():
            report(f"{label} {name}")
            elapsed, outputs[name] = timed(device, rollout, engine, prompts, lengths, seed)
            gate.equal(f"lengths of {name}", [len(ids) for ids in outputs[name].completion_ids], lengths)
            _check_logprobs(model, exact_model, name, schedules[name], prompts, outputs[name], gate)
            seconds[name].append(elapsed)
            row = _row(name, seconds[name], sum(lengths), base["tokens_per_second"])
            report(f"{label} {name}: {elapsed:.1f} s for {row['tokens']:,} tokens, {row['speedup']:.2f}x generate")

    rows = [base] if other is None else [base, other.row(base["tokens_per_second"])]
    for name, output in outputs.items():
        row = _row(name, seconds[name], sum(lengths), base["tokens_per_second"])
        rows.append({**row, "stats": output.stats.to_dict()})
    return rows


def _row(name: str, seconds: list[float], tokens: int, base_speed: float | None = None) -> dict[str, Any]:
    times = spread(seconds)
    speed = tokens / times["median"]
    return {
        "contender": name,
        **times,
        "tokens": tokens,
        "tokens_per_second": speed,
        "speedup": 1.0 if base_speed is None else speed / base_speed,
    }


class _ContinuousBatching:
    """Measures it until it fails or runs out of time, which then is its result."""

    def __init__(self, model: PreTrainedModel, prompts: list[list[int]], lengths: list[int], gate: Gate):
        self.model, self.prompts, self.lengths, self.gate = model, prompts, lengths, gate
        self.seconds: list[float] = []
        self.failure: Exception | None = None

    def measure(self, limit: float) -> None:
        """One rollout, cut off after `limit` seconds."""
        if self.failure is not None:
            return
        try:
            if not self.seconds:
                continuous_batching(self.model, self.prompts[:2], [WARMUP_TOKENS] * 2, limit)
            elapsed, found = timed(
                self.model.device, continuous_batching, self.model, self.prompts, self.lengths, limit
            )
            self.gate.equal("lengths of continuous batching", found, self.lengths)
            self.seconds.append(elapsed)
        except Exception as error:  # it is not ours: whatever it raises is why it is not available here
            self.failure = error

    def outcome(self) -> str:
        """The last measurement in words."""
        if self.failure is None:
            return f"{self.seconds[-1]:.1f} s for {sum(self.lengths):,} tokens"
        if isinstance(self.failure, OutOfTimeError):
            return str(self.failure)
        return f"not available here: {type(self.failure).__name__}: {self.failure}"

    def row(self, base_speed: float) -> dict[str, Any]:
        """What is known about it, against a contender of `base_speed` tokens per second."""
        name = "continuous batching"
        if self.failure is None:
            return _row(name, self.seconds, sum(self.lengths), base_speed)
        if isinstance(self.failure, OutOfTimeError):
            speed = self.failure.tokens / self.failure.seconds
            return {
                "contender": name,
                "tokens": self.failure.tokens,
                "tokens_per_second": speed,
                "speedup": speed / base_speed,
                "note": self.outcome(),
            }
        return {"contender": name, "note": self.outcome()}


def _check_logprobs(
    model: PreTrainedModel,
    exact_model: PreTrainedModel | None,
    name: str,
    schedule: SparsitySchedule,
    prompts: list[list[int]],
    output: RolloutOutput,
    gate: Gate,
) -> None:
    """Compare the reported log-probabilities of the longest and the shortest completion with a forward over them."""
    by_length = sorted(range(len(prompts)), key=lambda index: len(output.completion_ids[index]))
    chosen = {by_length[0], by_length[-1]}

    def expected(reference: PreTrainedModel) -> torch.Tensor:
        rows = []
        for index in chosen:
            completion = output.completion_ids[index]
            logits = teacher_forced(reference, schedule, prompts[index] + completion, len(prompts[index]))
            rows.append(token_logprobs(logits, completion).cpu())
        return torch.cat(rows)

    sampled = torch.cat([torch.tensor(output.logprobs[index]) for index in chosen])
    label = f"log-probabilities of the rollout with {name}, against one forward"
    gate.compare(label, sampled, expected(model), None if exact_model is None else expected(exact_model))
