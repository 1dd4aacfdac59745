"""Unbiased pass@k, as a metric of `evaluate`."""

import datasets
import evaluate

from sparrow_trl.evaluation.statistics import mean_pass_at_k


_DESCRIPTION = """
Chance that at least one of k samples is right, estimated without bias from n samples of each problem, and averaged over
problems.
"""

_KWARGS = """
Args:
    predictions (list of list of float): for each problem, 1 for each sample that is right and 0 for each that is not.
    k (list of int): values of k, none above the number of samples. Defaults to [1].
Returns:
    dict: "pass@k" for each k.
Examples:
    >>> metric.compute(predictions=[[1, 0, 0, 0], [0, 0, 0, 0]], k=[1, 2])
    {'pass@1': 0.125, 'pass@2': 0.25}
"""

_CITATION = """
@article{chen2021evaluating,
  title={Evaluating Large Language Models Trained on Code},
  author={Chen, Mark and others},
  journal={arXiv:2107.03374},
  year={2021}
}
"""


class PassAtK(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS,
            features=datasets.Features({"predictions": datasets.Sequence(datasets.Value("float32"))}),
        )

    def _compute(self, predictions, k=(1,)):
        return {f"pass@{value}": mean_pass_at_k(predictions, value) for value in k}
