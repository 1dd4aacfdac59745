"""The model card: what was trained and how, with the evidence that lies beside the model."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..sparsity import SparsitySchedule
from .citations import CITATIONS
from .evidence import EvalRow, TailRow, read_bench, read_eval, read_tail
from .record import RECORD_FOLDER, RunRecord


TEMPLATE = Path(__file__).with_name("model_card.md")
TAGS = ("generated_from_trainer", "trl", "grpo", "sparrow", "sparse-rollout")

_DESCRIPTIONS = {
    "sparrow_schedule.json": "the sparsity schedule; `SparsitySchedule.from_pretrained` reads it",
    "run.json": "configuration, versions and hardware of the run",
    "tail.json": "the acceptance rate of the sparse actor, by length bin",
    "eval.json": "the evaluation",
    "bench.json": "the speed measurement",
    "adapter": "the LoRA of DistillSparse, which only sparse rollouts use; the policy above does not need it",
}


def make_card(
    folder: str | os.PathLike[str],
    *,
    repo_id: str | None = None,
    tags: Collection[str] = (),
    dataset: str | None = None,
    is_adapter: bool | None = None,
) -> ModelCard:
    """
    Write the card of a trained model from what lies in its folder.

    Args:
        folder (`str` or `os.PathLike`): the model, with the folder `sparrow/` (see [`~sparrow_trl.hub.record`]). What is
            missing there is left out of the card, and so is what is damaged, with a warning.
        repo_id (`str`, *optional*): the repository it is for; by default the folder's name.
        tags (`Collection[str]`, *optional*): further tags.
        dataset (`str`, *optional*): name of the training data; by default that of the record.
        is_adapter (`bool`, *optional*): whether the model is a PEFT adapter; by default the folder tells.

    Returns:
        [`~huggingface_hub.ModelCard`]
    """
    path = Path(folder)
    record = RunRecord.load(path)
    base_model = record.base_model if record else None
    dataset = dataset or (record.dataset if record else None)
    repo_id = repo_id or path.resolve().name
    model_name = repo_id.split("/")[-1]
    if is_adapter is None:
        is_adapter = (path / "adapter_config.json").is_file()
    evaluation = read_eval(path)
    tail, threshold, floor = read_tail(path)
    data = ModelCardData(
        base_model=base_model if _is_repository(base_model) else None,
        datasets=[dataset] if dataset and _is_repository(dataset) else None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        model_name=model_name,
        tags=sorted({*TAGS, *tags}),
        eval_results=_eval_results(evaluation) or None,
    )
    schedule = _schedule(path)
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        model_name=model_name,
        repo_id=repo_id,
        is_adapter=is_adapter,
        trained=_trained(base_model, dataset),
        training=_training(record, schedule),
        tail=_tail(path, tail, threshold, floor),
        speed=_speed(path, record),
        evaluation=_evaluation(evaluation),
        files=_files(path),
        limits=_limits(tail, bool(evaluation)),
        reproduce=_reproduce(record),
        citations=CITATIONS,
    )


def _is_repository(name: str | None) -> bool:
    """Whether a model or dataset is named as the Hub names them, and not by a local path."""
    if not name or os.path.exists(name):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _schedule(path: Path) -> SparsitySchedule | None:
    try:
        return SparsitySchedule.from_pretrained(path / RECORD_FOLDER)
    except (OSError, ValueError):
        return None


def _link(name: str, kind: str = "") -> str:
    return f"[{name}](https://huggingface.co/{kind}{name})" if _is_repository(name) else f"`{name}`"


def _trained(base_model: str | None, dataset: str | None) -> str:
    text = f"Fine-tuned from {_link(base_model)}" if base_model else "Trained"
    if dataset:
        text += f" on {_link(dataset, 'datasets/')}"
    return (
        f"{text} with GRPO in [TRL](https://github.com/huggingface/trl). Its rollouts were sampled with sparse attention "
        "([Sparrow](https://huggingface.co/papers/2606.08446)): the actor that sampled read a part of the KV cache, and "
        "truncated importance sampling corrected for the difference to the dense policy that was trained."
    )


def _training(record: RunRecord | None, schedule: SparsitySchedule | None) -> str:
    rows = []
    if record:
        config = record.config
        names = (
            "learning_rate",
            "num_generations",
            "max_completion_length",
            "temperature",
            "beta",
            "epsilon",
            "epsilon_high",
            "vllm_importance_sampling_mode",
            "vllm_importance_sampling_clip_max",
            "seed",
        )
        rows.append(("optimizer steps", f"{record.global_step:,}"))
        rows.append(("processes", str(record.num_processes)))
        rows += [(f"`{name}`", str(config[name])) for name in names if config.get(name) is not None]
    if schedule is not None:
        rows.append(("schedule", _describe(schedule)))
    if not rows:
        return "No record of the run lies beside the model."
    return table(("", ""), rows)


def _describe(schedule: SparsitySchedule) -> str:
    if schedule.is_dense:
        return "dense"
    budgets = ", ".join(map(str, schedule.budgets))
    return (
        f"{budgets} scored pages of {schedule.page_size} tokens by bin of {schedule.bin_tokens:,} positions, beside "
        f"{schedule.sink_pages} sink and {schedule.recent_pages} recent; layers {list(schedule.dense_layers)} dense"
    )


def _tail(path: Path, rows: list[TailRow], threshold: float | None, floor: float | None) -> str:
    if not rows:
        return ""
    text = (
        "The acceptance rate of a token is the overlap of the dense and the sparse distribution, "
        "`sum of min(p_dense, p_sparse)`; the tail is its 5th percentile in a bin of positions. Training was found stable "
        "with a tail of 0.86 and above (arXiv 2606.08446)."
    )
    if threshold is not None:
        text += f" Threshold of this run: {threshold:g}."
    if floor is not None:
        text += f" Noise floor, dense against dense: {floor:.3f}."
    header = ("positions", "tokens", "tail", "confidence interval", "mean")
    lines = [
        (
            f"{row.first:,} to {row.last:,}",
            f"{row.tokens:,}",
            f"{row.tail:.3f}",
            f"{row.low:.3f} to {row.high:.3f}",
            f"{row.mean:.3f}",
        )
        for row in rows
    ]
    images = [f"![{name}]({RECORD_FOLDER}/{name})" for name in _plots(path)]
    return "\n\n".join([text, table(header, lines), *images])


def _plots(path: Path) -> list[str]:
    return sorted(file.name for file in (path / RECORD_FOLDER).glob("*.png"))


def _speed(path: Path, record: RunRecord | None) -> str:
    parts = []
    if record and record.metrics.get("rollout_tokens_per_second"):
        metrics = record.metrics
        text = f"Rollouts during training: {metrics['rollout_tokens_per_second']:,.0f} tokens/s on average"
        if "kv_share" in metrics:
            text += f", reading {metrics['kv_share']:.0%} of the bytes of the KV cache that dense rollouts read"
        parts.append(f"{text} ({describe_hardware(record.hardware, record.num_processes)}).")
    for title, rows in read_bench(path):
        parts.append(f"{title}:")
        parts.append(table(("", "time", "against `generate`"), rows))
    return "\n\n".join(parts)


def describe_hardware(hardware: dict[str, Any], num_processes: int) -> str:
    """One line: GPUs where there are some, else processor and cores."""
    gpus = [gpu.get("name", "GPU") for gpu in hardware.get("gpus") or ()]
    machine = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    if not machine:
        machine = f"{hardware.get('cpu', 'CPU')}, {hardware.get('cores', '?')} cores"
    return machine if num_processes == 1 else f"{machine}; {num_processes} processes"


def _evaluation(rows: list[EvalRow]) -> str:
    if not rows:
        return ""
    lines = [
        (row.suite, row.metric, row.decode, f"{row.value:.3f}", f"{row.low:.3f} to {row.high:.3f}", str(row.problems))
        for row in rows
    ]
    return "The policy is judged by dense decoding; sparse decoding is shown beside it.\n\n" + table(
        ("suite", "metric", "decoding", "value", "confidence interval", "problems"), lines
    )


def _eval_results(rows: list[EvalRow]) -> list[EvalResult]:
    """What the Hub shows as results of the model: those of the dense policy. Sparse ones are marked as such."""
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=row.dataset or row.suite,
            dataset_name=row.suite,
            metric_type=row.metric,
            metric_name=row.metric if row.decode == "dense" else f"{row.metric}, sparse decoding",
            metric_value=round(row.value, 4),
            dataset_args={"decode": row.decode},
        )
        for row in rows
    ]


def _files(path: Path) -> str:
    found = [(name, text) for name, text in _DESCRIPTIONS.items() if (path / RECORD_FOLDER / name).exists()]
    return "\n".join(f"- `{RECORD_FOLDER}/{name}`: {text}." for name, text in found)


def _limits(tail: list[TailRow], evaluated: bool) -> str:
    limits = []
    if tail:
        limits.append(f"The acceptance rate was measured up to position {tail[-1].last:,}; behind that it is unknown.")
    else:
        limits.append("The acceptance rate of the sparse actor was not recorded.")
    if not evaluated:
        limits.append("No evaluation lies beside the model: rewards during training say little about other tasks.")
    limits.append("The schedule belongs to this model; for another one it has to be calibrated anew.")
    return "\n".join(f"- {limit}" for limit in limits)


def _reproduce(record: RunRecord | None) -> str:
    if record is None:
        return "The command was not recorded."
    versions = ", ".join(f"{name} {version}" for name, version in record.environment.items())
    hardware = describe_hardware(record.hardware, record.num_processes)
    return f"```bash\n{record.command}\n```\n\n{versions}; {hardware}. All arguments: `{RECORD_FOLDER}/run.json`."


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
