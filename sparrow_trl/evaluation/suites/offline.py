"""Problems of our own, for `evaluate.EvaluationSuite.load`."""

from sparrow_trl.evaluation.suite import SparrowSuite


class Suite(SparrowSuite):
    benchmarks = ("offline", "offline_code")
