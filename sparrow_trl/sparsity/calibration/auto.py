"""`sparse_schedule="auto"`: calibrate once, on the first training prompts, and remember the result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ...processes import warn
from ..schedule import SCHEDULE_FILE, SparsitySchedule
from .measure import Store
from .options import CalibrationOptions
from .run import calibrate_schedule, key_of
from .texts import load_source


logger = logging.get_logger(__name__)

FOLDER = "sparrow_calibration"
SHORTEST = 1024  # positions below which sparse attention has little to leave out


def calibrate_for_training(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Iterable[Any] | None,
    output_dir: str,
    *,
    name: str,
    max_completion_length: int,
    options: CalibrationOptions,
    progress_bar: bool = True,
) -> SparsitySchedule:
    """
    The schedule of a model without a published one: that which an earlier run with the same model, prompts and settings
    has left in `output_dir/sparrow_calibration`, or a new one. Dense, with a warning, where there is nothing to gain.

    Args:
        dataset: rows with a `prompt`; the first ones are used.
        name (`str`): of the model.
        max_completion_length (`int`): of the run; with the longest of the prompts it bounds the context.
        options ([`CalibrationOptions`]): settings; `max_context` is set here.

    Raises:
        ValueError: the schedule cannot be found, see [`calibrate_schedule`].
    """
    rows = list(islice(dataset, options.texts)) if dataset is not None else []
    source = load_source(rows, tokenizer) if rows and "prompt" in rows[0] else None
    longest = max_completion_length + max((len(prompt) for prompt in source.rows), default=0) if source else 0
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or longest
    longest = min(longest, limit)
    if source is None or longest < SHORTEST:
        why = (
            "there are no training prompts to calibrate on"
            if source is None
            else f"its sequences of at most {longest:,} tokens are too short for sparse attention to gain anything"
        )
        warn(
            f"sparse_schedule='auto': there is no published schedule for the model {name!r}, and {why}, so the rollout "
            "is dense. sparse_schedule='dense' keeps it dense without this warning.",
            stacklevel=4,
        )
        return SparsitySchedule.dense()
    source = replace(source, name="the first training prompts")
    options = replace(options, max_context=longest)
    folder = Path(output_dir) / FOLDER
    key, settings = key_of(model, source, options, name)
    cached = folder / key / SCHEDULE_FILE
    if cached.is_file():
        logger.warning(f"sparse_schedule='auto': the schedule calibrated before, {cached}, is used.")
        return SparsitySchedule.from_pretrained(cached)
    logger.warning(
        f"sparse_schedule='auto': there is no published schedule for the model {name!r}, so one is calibrated on "
        f"{len(source.rows)} training prompts for sequences of up to {longest:,} tokens. That happens once: it is kept in "
        f"{cached.parent}. `sparrow calibrate` does it beforehand, 'fixed:64' or 'dense' goes without."
    )
    found = calibrate_schedule(
        model, tokenizer, source, out=folder, name=name, progress_bar=progress_bar, options=options
    )
    found.schedule.save_pretrained(cached.parent)
    Store(folder, settings).clear()
    return found.schedule
