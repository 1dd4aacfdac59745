"""What the files in `suites/` share: benchmarks as an `evaluate.EvaluationSuite`, run through the rollout engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evaluate import EvaluationSuite
from evaluate.evaluation_suite import SubTask

from .benchmarks import find_benchmarks


class SparrowSuite(EvaluationSuite):
    """
    Benchmarks that `evaluate.EvaluationSuite.load(suite_path(name))` gives. `run` samples through `RolloutEngine` and
    returns a result for each benchmark.
    """

    benchmarks: tuple[str, ...] = ()

    def __init__(self, name: str):
        super().__init__(name)
        self.suite = [
            SubTask("text-generation", data=benchmark.dataset_id, subset=benchmark.subset, split=benchmark.split)
            for benchmark in find_benchmarks(self.benchmarks)
        ]

    def run(self, model_or_pipeline: Any, tokenizer: Any = None, **options: Any) -> list[dict[str, Any]]:  # type: ignore[override]
        """
        Evaluate a model.

        Args:
            model_or_pipeline (`str`, `PreTrainedModel` or `TextGenerationPipeline`): a name or path, a model (with
                `tokenizer`), or a pipeline.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): the model's.
            options: those of `evaluate_model`.

        Returns:
            `list[dict]`: for each benchmark `task_name`, `accuracy` (of the dense decode) and all its numbers.
        """
        from .models import load_model
        from .run import evaluate_model

        self.assert_suite_nonempty()
        model = model_or_pipeline
        if isinstance(model, str):
            model, tokenizer = load_model(model)
        elif tokenizer is None and hasattr(model, "tokenizer") and hasattr(model, "model"):
            model, tokenizer = model.model, model.tokenizer
        if tokenizer is None:
            raise TypeError(
                f"{type(model_or_pipeline).__name__} comes without a tokenizer: give a name, a text-generation pipeline, "
                "or a model with `tokenizer=`."
            )
        evaluation = evaluate_model(model, tokenizer, list(self.benchmarks), **options)
        return [
            {"task_name": name, "accuracy": by_decode["dense"]["mean"], **by_decode}
            for name, by_decode in evaluation.results.items()
        ]


def suite_path(name: str) -> str:
    """Path of a suite's file, for `evaluate.EvaluationSuite.load`."""
    folder = Path(__file__).with_name("suites")
    path = folder / f"{name}.py"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.py")))
        raise ValueError(f"There is no suite {name!r}; there are {known}.")
    return str(path)
