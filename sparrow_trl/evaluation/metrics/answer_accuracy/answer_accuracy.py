"""Accuracy of mathematical answers, as a metric of `evaluate`."""

import datasets
import evaluate

from sparrow_trl.evaluation.benchmarks import BENCHMARKS
from sparrow_trl.evaluation.judge import judge
from sparrow_trl.evaluation.problems import Problem


_DESCRIPTION = """
Share of completions whose final answer equals the reference, compared by math-verify in a process that is ended at its
limit of time, and beside it the share whose answer is the reference as a text.
"""

_KWARGS = """
Args:
    predictions (list of str): completions; the last box after the reasoning counts.
    references (list of str): reference answers.
Returns:
    dict: "accuracy", "exact_match", "timeouts" and "unreadable" (references that could not be read, left out).
Examples:
    >>> metric.compute(predictions=["It is \\\\boxed{0.5}."], references=["\\\\frac{1}{2}"])
    {'accuracy': 1.0, 'exact_match': 0.0, 'timeouts': 0, 'unreadable': 0}
"""


class AnswerAccuracy(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_KWARGS,
            features=datasets.Features({name: datasets.Value("string") for name in ("predictions", "references")}),
        )

    def _compute(self, predictions, references):
        problems = [Problem(str(index), "", answer) for index, answer in enumerate(references)]
        judged = judge(BENCHMARKS["offline"], problems, predictions)
        counted = [judgement for judgement in judged if judgement.right is not None]
        share = 1 / len(counted) if counted else float("nan")
        return {
            "accuracy": sum(bool(judgement.right) for judgement in counted) * share,
            "exact_match": sum(bool(judgement.exact) for judgement in counted) * share,
            "timeouts": sum(judgement.timed_out for judgement in judged),
            "unreadable": len(judged) - len(counted),
        }
