"""AMC 2022 and 2023, for `evaluate.EvaluationSuite.load`."""

from sparrow_trl.evaluation.suite import SparrowSuite


class Suite(SparrowSuite):
    benchmarks = ("amc",)
