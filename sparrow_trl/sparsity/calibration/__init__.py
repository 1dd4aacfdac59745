"""Calibration: the cheapest schedule of a model that keeps the tail, measured."""

from importlib import import_module
from typing import TYPE_CHECKING, Any


# Imported on first use, so that `sparrow --help` costs no PyTorch.
_EXPORTS = {
    "Calibration": "results",
    "CalibrationOptions": "options",
    "MeasureOptions": "options",
    "Source": "texts",
    "Tail": "curves",
    "TailReport": "results",
    "calibrate_schedule": "run",
    "load_source": "texts",
    "measure_tail": "run",
}

__all__ = [
    "Calibration",
    "CalibrationOptions",
    "MeasureOptions",
    "Source",
    "Tail",
    "TailReport",
    "calibrate_schedule",
    "load_source",
    "measure_tail",
]

if TYPE_CHECKING:
    from .curves import Tail
    from .options import CalibrationOptions, MeasureOptions
    from .results import Calibration, TailReport
    from .run import calibrate_schedule, measure_tail
    from .texts import Source, load_source


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value
    return value
