"""Share of programs that pass their tests, as a metric of `evaluate`."""

import datasets
import evaluate

from sparrow_trl.rewards import parse_tests, run_programs
from sparrow_trl.rewards.code import shared_sandbox


_DESCRIPTION = """
Share of programs that pass all their tests, run in sandboxed child processes.
"""

_KWARGS = """
Args:
    predictions (list of str): Python programs.
    references (list of str): tests of each, as JSON: inputs and outputs, calls of a function, or assertions.
    workers (int, optional): programs at a time.
Returns:
    dict: "accuracy", "timeouts" (tests that ended at the limit of time), "isolation" (what isolates the programs here).
Examples:
    >>> metric.compute(predictions=["print(int(input()) * 2)"], references=['{"inputs": ["4"], "outputs": ["8"]}'])
    {'accuracy': 1.0, 'timeouts': 0, 'isolation': 'namespaces'}
"""


class CodeExecution(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_KWARGS,
            features=datasets.Features({name: datasets.Value("string") for name in ("predictions", "references")}),
        )

    def _compute(self, predictions, references, workers=None):
        tests = [parse_tests(reference) for reference in references]
        if None in tests:
            raise ValueError(f"The reference at index {tests.index(None)} holds no tests.")
        verdicts = run_programs(predictions, tests, workers=workers)
        return {
            "accuracy": sum(verdict.ok for verdict in verdicts) / len(verdicts),
            "timeouts": sum(verdict.timeouts for verdict in verdicts),
            "isolation": shared_sandbox().isolation,
        }
