"""HumanEval+, for `evaluate.EvaluationSuite.load`."""

from sparrow_trl.evaluation.suite import SparrowSuite


class Suite(SparrowSuite):
    benchmarks = ("humaneval_plus",)
