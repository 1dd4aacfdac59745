"""Uploading a trained folder, so that a fault of the network costs a warning and not a checkpoint."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CommitInfo, HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..sparsity.schedule import RECORD_FOLDER


RETRIES = 3
FIRST_WAIT = 2.0  # seconds before the first retry; each further one waits twice as long

# Checkpoints of the trainer go to the Hub by `hub_strategy` alone, as in transformers.
IGNORED = ("_*", f"{PREFIX_CHECKPOINT_DIR}-*")
# What a checkpoint holds to be resumed, and nobody else needs.
TRAINER_STATE = (
    "optimizer.*",
    "scheduler.*",
    "scaler.*",
    "rng_state*",
    "trainer_state.json",
    "global_step*",
    "latest",
    f"{RECORD_FOLDER}/monitor.json",
    f"{RECORD_FOLDER}/distill.pt",
)

_RETRIED_STATUS = (408, 409, 425, 429)


class PushError(RuntimeError):
    """An upload failed; the message says why and how to finish it."""


def push_command(folder: str | os.PathLike[str], repo_id: str | None) -> str:
    """The command that finishes an upload later."""
    return shlex.join(["sparrow", "push", os.fspath(folder), repo_id or "USER/NAME"])


def is_network_failure(error: BaseException) -> bool:
    """Whether the network or the server failed (or is switched off), and not the request."""
    for cause in _causes(error):
        if isinstance(cause, HfHubHTTPError) and cause.response is not None:
            status = cause.response.status_code
            return status >= 500 or status in _RETRIED_STATUS
    # A dropped or refused connection, a timeout: the client raises them as errors of its HTTP library
    return any(
        isinstance(cause, (ConnectionError, TimeoutError)) or type(cause).__module__.startswith("httpx")
        for cause in _causes(error)
    )


def _is_offline(error: BaseException) -> bool:
    return any(isinstance(cause, OfflineModeIsEnabled) for cause in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and what it was raised from: the client wraps the faults of its upload threads."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    token: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload model trained with sparse rollouts",
    retries: int = RETRIES,
    sleep: Callable[[float], Any] = time.sleep,
) -> CommitInfo:
    """
    Upload a folder to the Hub model repository `repo_id`, made if missing. Checkpoints (`checkpoint-*`) are left out.
    A fault of the network or of the server is retried; what has arrived is not sent again.

    Args:
        folder (`str` or `os.PathLike`): what the trainer saved.
        token (`str`, *optional*): with write permission; by default the one you are logged in with.
        private (`bool`, *optional*): visibility of a repository that is made now.
        retries (`int`, *optional*, defaults to `3`): attempts after the first.
        sleep (`Callable`): waits for the given number of seconds.

    Returns:
        [`~huggingface_hub.CommitInfo`]

    Raises:
        `FileNotFoundError`: there is no such folder, or nothing in it that could be published.
        `ValueError`: `repo_id` is not the name of a repository.
        [`PushError`]: it failed, after all retries.
    """
    path = _model_folder(folder)
    api = HfApi(token=token)
    for attempt in range(retries + 1):
        try:
            full_name = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            return api.upload_folder(
                repo_id=full_name,
                folder_path=path,
                commit_message=commit_message,
                revision=revision,
                ignore_patterns=[*IGNORED, *TRAINER_STATE],
            )
        except HFValidationError as error:
            raise ValueError(f"repo_id={repo_id!r} is not the name of a repository: {error}") from error
        except Exception as error:
            if attempt == retries or not is_network_failure(error) or _is_offline(error):
                raise PushError(
                    f"{os.fspath(folder)!r} could not be uploaded to {repo_id!r} ({type(error).__name__}: {error}). To try "
                    f"again: {push_command(folder, repo_id)}"
                ) from error
            sleep(FIRST_WAIT * 2**attempt)
    raise AssertionError("unreachable")


def _model_folder(folder: str | os.PathLike[str]) -> Path:
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"There is no folder {os.fspath(folder)!r} to push.")
    if not (path / "config.json").is_file() and not (path / "adapter_config.json").is_file():
        raise FileNotFoundError(
            f"The folder {os.fspath(folder)!r} has neither config.json nor adapter_config.json, so it holds no model. Give "
            "the output_dir of a training, or one of its checkpoints."
        )
    return path


def main(
    folder: str,
    repo_id: str,
    *,
    token: str | None,
    private: bool | None,
    revision: str | None,
    message: str,
    keep_card: bool,
) -> int:
    """
    `sparrow push`.

    Returns:
        `int`: 0; 1 where the upload failed, 2 where there is nothing to upload.
    """
    from .card import make_card

    try:
        path = _model_folder(folder)  # before a README.md that is none of ours is overwritten
        if not keep_card:
            card = path / "README.md"
            tags = ModelCard.load(card).data.tags if card.is_file() else None
            make_card(folder, repo_id=repo_id, tags=tags or ()).save(card)
        commit = push_folder(folder, repo_id, token=token, private=private, revision=revision, commit_message=message)
    except PushError as error:
        print(error, file=sys.stderr)
        return 1
    except (OSError, ValueError, yaml.YAMLError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(commit.commit_url)
    return 0
