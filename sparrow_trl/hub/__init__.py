"""Publishing: the record of a run beside its model, the model card, and the upload."""

from .card import make_card
from .push import PushError, push_folder
from .record import RECORD_FOLDER, RunRecord, reproduce_command


__all__ = ["RECORD_FOLDER", "PushError", "RunRecord", "make_card", "push_folder", "reproduce_command"]
