from .adapter import ADAPTER_FOLDER, ADAPTER_NAME, SparrowAdapter
from .loss import DistillLoss
from .samples import Sample, samples_of
from .session import DistillSession
from .update import DistillStats, DistillUpdate


__all__ = [
    "ADAPTER_FOLDER",
    "ADAPTER_NAME",
    "DistillLoss",
    "DistillSession",
    "DistillStats",
    "DistillUpdate",
    "Sample",
    "SparrowAdapter",
    "samples_of",
]
