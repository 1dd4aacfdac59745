"""AIME 2026, for `evaluate.EvaluationSuite.load`."""

from sparrow_trl.evaluation.suite import SparrowSuite


class Suite(SparrowSuite):
    benchmarks = ("aime26",)
