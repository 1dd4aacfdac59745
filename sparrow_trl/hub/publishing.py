"""The part of the trainer that publishes: record, model card, upload."""

from __future__ import annotations

import warnings
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from accelerate.utils import is_peft_model
from huggingface_hub import CommitInfo, HfApi, ModelCard

from ..environment import hardware, versions
from ..sparsity import SparsitySchedule
from ..trl_seams import SeamedGRPOTrainer
from .card import make_card
from .push import is_network_failure, push_command, push_folder
from .record import RECORD_FOLDER, RunRecord, average_metrics, public_config, reproduce_command


class PublishingTrainer(SeamedGRPOTrainer):
    """
    [`~trl.GRPOTrainer`] that publishes its dense policy with the evidence beside it, in the folder `sparrow/`. A failed
    upload is a warning: the model is on disk, the upload is tried again, and `sparrow push` finishes it later.

    With sparsity off every method does what TRL's does.
    """

    _has_failed_push = False

    @property
    def rollout_schedule(self) -> SparsitySchedule:
        """The schedule of the next rollout."""
        raise NotImplementedError

    @rollout_schedule.setter
    def rollout_schedule(self, schedule: SparsitySchedule) -> None:
        raise NotImplementedError

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if self.samples_rollouts and self.is_world_process_zero():
            self.save_record(output_dir or self.args.output_dir)

    def save_record(self, folder: str, dataset: str | None = None) -> None:
        """Write how the model was trained, and its schedule, into `folder/sparrow/`."""
        record = RunRecord(
            base_model=self.model.config.name_or_path or None,
            dataset=dataset,
            command=reproduce_command(num_processes=self.accelerator.num_processes),
            config=public_config(self.args.to_dict()),
            environment=versions(),
            hardware=hardware(),
            num_processes=self.accelerator.num_processes,
            global_step=self.state.global_step,
            metrics=average_metrics(self.state.log_history),
        )
        record.save(folder)
        self.rollout_schedule.save_pretrained(Path(folder) / RECORD_FOLDER)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        super().create_model_card(model_name=model_name, dataset_name=dataset_name, tags=tags)
        if not self.samples_rollouts or not self.is_world_process_zero():
            return
        folder = Path(self.args.output_dir)
        try:
            self.save_record(self.args.output_dir, dataset_name)
            card = make_card(
                folder,
                repo_id=self.hub_model_id or self.args.hub_model_id,
                tags=ModelCard.load(folder / "README.md").data.tags or (),
                is_adapter=is_peft_model(self.accelerator.unwrap_model(self.model)),
            )
            card.save(folder / "README.md")
        except Exception as error:
            warnings.warn(
                f"The model card could not be written ({type(error).__name__}: {error}), so TRL's stays in "
                f"{str(folder / 'README.md')!r}. `{push_command(folder, self.args.hub_model_id)}` writes it anew.",
                UserWarning,
                stacklevel=2,
            )

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        try:
            super().init_hf_repo(token=token, private=private)
        except Exception as error:
            # A network that is down is no reason not to train; a refused token is, while nothing is lost yet
            if self.args.sparse_schedule is None or not is_network_failure(error):
                raise
            self.push_in_progress = None
            self.push_failed(error)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs,
    ) -> CommitInfo | Future[CommitInfo] | None:
        """
        Upload the dense policy, and the folder `sparrow/` beside it, to `args.hub_model_id`. Arguments are those of
        [`~transformers.Trainer.push_to_hub`]. The model is saved and its card written first.

        Returns:
            [`~huggingface_hub.CommitInfo`], or a `Future` of it with `blocking=False`. `None` where the upload failed
            for good, which is a warning, and on all processes but the first.
        """
        if not self.samples_rollouts:
            return super().push_to_hub(commit_message, blocking, token, revision, private, **kwargs)
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)  # on every process: sharded parameters are gathered
        if not self.is_world_process_zero():
            return None
        kwargs.setdefault("model_name", self._repository().split("/")[-1])
        self.create_model_card(**kwargs)
        self.finish_push()
        push = partial(
            push_folder,
            self.args.output_dir,
            self._repository(),
            token=token if token is not None else self.args.hub_token,
            private=private if private is not None else self.args.hub_private_repo,
            revision=revision if revision is not None else self.args.hub_revision,
            commit_message=commit_message or "End of training",
        )
        if not blocking:
            return HfApi().run_as_future(self._push, push)  # type: ignore[arg-type]
        return self._push(push)

    def _push(self, push: partial[CommitInfo]) -> CommitInfo | None:
        try:
            return push()
        except Exception as error:
            self.push_failed(error)
            return None

    def _repository(self) -> str:
        return self.hub_model_id or self.args.hub_model_id or Path(self.args.output_dir).absolute().name

    def after_pushes(self) -> None:
        """Make up for an upload that failed, be it that a file changed meanwhile: the next one would include it."""
        if not self._has_failed_push or not self.is_world_process_zero():
            return
        self._has_failed_push = False
        push = partial(
            push_folder,
            self.args.output_dir,
            self._repository(),
            token=self.args.hub_token,
            private=self.args.hub_private_repo,
            revision=self.args.hub_revision,
            commit_message=f"Training in progress, step {self.state.global_step}",
        )
        self._push(push)

    def push_failed(self, error: BaseException) -> None:
        self._has_failed_push = True
        command = push_command(self.args.output_dir, self._repository())
        warnings.warn(
            f"An upload to the Hub failed, and nothing is lost by it: what was to be uploaded is in "
            f"{self.args.output_dir!r}. The next upload includes it; to finish it by hand: {command}\n"
            f"{type(error).__name__}: {error}",
            UserWarning,
            stacklevel=2,
        )
