"""Tells the user, and the trackers, what a tail monitor found."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

from transformers import TrainerCallback

from ..sparsity.schedule import RECORD_FOLDER
from .plots import write_plots
from .tail_monitor import BatchReport, TailMonitor


class TailCallback(TrainerCallback):
    """
    Writes `tail.json` and the pictures whenever a checkpoint is saved and at the end, and passes messages on. Only the
    main process writes and tells.

    Args:
        monitor ([`TailMonitor`]): what to draw.
        is_main_process (`bool`): whether this process is the one that tells.
        trackers (`list[str]`): those of `report_to`; breaches are also alerts on Trackio.
    """

    def __init__(self, monitor: TailMonitor, is_main_process: bool, trackers: Collection[str]):
        self.monitor, self.is_main_process, self.trackers = monitor, is_main_process, trackers

    def tell(self, report: BatchReport) -> None:
        """Warn of what a batch led to."""
        if not self.is_main_process:
            return
        for message in report.messages:
            warnings.warn(message, UserWarning, stacklevel=2)
        breaches = [verdict for verdict in report.verdicts if verdict.is_breach]
        if breaches and "trackio" in self.trackers and find_spec("trackio") is not None:
            self._alert("; ".join(f"bin {verdict.index}: {verdict.tail:.3f}" for verdict in breaches))

    def _alert(self, text: str) -> None:
        import trackio

        if trackio.context_vars.current_run.get() is not None:
            trackio.alert(f"The tail is below {self.monitor.threshold}", text, level=trackio.AlertLevel.WARN)

    def write(self, output_dir: str | None) -> None:
        """Write the report and the pictures into `output_dir/sparrow/`, where there is something to tell."""
        if self.is_main_process and output_dir is not None and self.monitor.judged.tokens():
            folder = Path(output_dir) / RECORD_FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "tail.json").write_text(json.dumps(self.monitor.report(), indent=1), encoding="utf-8")
            write_plots(self.monitor, folder)

    def on_save(self, args, state, control, **kwargs):
        self.write(args.output_dir)

    def on_train_end(self, args, state, control, **kwargs):
        self.write(args.output_dir)
