"""The seams between this package and TRL, with the trainer of transformers beneath it.

TRL has no public way to bring another generation engine into [`~trl.GRPOTrainer`]. Every private name of TRL that the
package relies on is in this file, and `tests/test_trl_seams.py` checks each of them against the installed version. The
rest of the package sees the public members of [`SeamedGRPOTrainer`] alone.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.extras.profiling import profiling_context


@dataclass
class ScoredRollout:
    """One process's share of a generation batch after TRL has scored it: B sequences, their prompts padded on the left
    to P tokens, their completions padded on the right to T tokens."""

    prompt_ids: torch.Tensor
    """(B, P), int64."""
    prompt_mask: torch.Tensor
    """(B, P), 1 on tokens."""
    completion_ids: torch.Tensor
    """(B, T), int64."""
    completion_mask: torch.Tensor
    """(B, T), 1 on the tokens of the completions, tool results included. 0 throughout on masked completions."""
    mask: torch.Tensor
    """(B, T), bool: the tokens that count in the loss. Padding, tool results and masked completions do not."""
    advantages: torch.Tensor
    """(B,), float32."""
    actor_logprobs: torch.Tensor | None
    """(B, T), float32: of the sampled tokens, under the actor that sampled them."""
    policy_logprobs: torch.Tensor | None
    """(B, T), float32: of the same tokens, under the policy before its update. None where TRL does not need them."""


class _AfterStep(TrainerCallback):
    def __init__(self, trainer: "SeamedGRPOTrainer"):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.after_step()


class SeamedGRPOTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] with public hooks, so that a subclass can bring its own generation engine.

    A subclass calls [`take_over_generation`] at the end of its `__init__` and implements [`rollout`]. TRL's handling of
    vLLM then does the rest: the completions come with the log-probabilities of their tokens under the actor, so TRL
    computes those under the policy, the importance-sampling ratios between the two and their metrics, and weights the
    loss with them. Without that call every method here does what TRL's does.
    """

    samples_rollouts: bool = False
    """Whether [`rollout`] generates the completions instead of TRL."""

    _awaits_policy_pass: bool = False

    def rollout(
        self, prompt_ids: list[list[int]], num_generations: int = 1
    ) -> tuple[list[list[int]], list[list[float]]]:
        """
        Sample one completion for each entry of `prompt_ids`.

        Args:
            prompt_ids (`list[list[int]]`):
                Token ids. A prompt comes as often as completions of it are wanted.
            num_generations (`int`, *optional*, defaults to `1`):
                How often each distinct prompt comes over all processes, as TRL tells it.

        Returns:
            `tuple[list[list[int]], list[list[float]]]`: the token ids of each completion, and the log-probability of
            each of these tokens under the actor.
        """
        raise NotImplementedError

    def sampled_since_last_batch(self) -> bool:
        """Whether [`rollout`] ran on this process since the last call of [`after_rollout_scored`]."""
        raise NotImplementedError

    def before_batch(self) -> None:
        """Called on every process before a generation batch is sampled."""

    def around_policy_pass(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, num_tokens: int
    ) -> AbstractContextManager:
        """
        A context in which TRL computes the log-probabilities of a generation batch under the policy, without gradients.
        It is not entered where TRL does not need them.

        Args:
            input_ids, attention_mask (`torch.Tensor`):
                (B, P + T), prompts padded on the left and completions on the right. They go through the model in chunks
                of rows.
            num_tokens (`int`):
                T.
        """
        return nullcontext()

    def after_rollout_scored(self, scored: ScoredRollout) -> None:
        """Called on every process when a generation batch of [`rollout`] is scored, in training and in evaluation."""

    def after_step(self) -> None:
        """Called on every process after each optimizer step of the policy, before a checkpoint is saved."""

    def save_beside_model(self, folder: str) -> None:
        """Called on the main process, with the folder of a checkpoint or of the output, when the model is saved."""

    def save_state(self, folder: str) -> None:
        """Called on the main process, with a checkpoint's folder, when the optimizer is saved."""

    def load_state(self, folder: str) -> None:
        """Called on every process, with a checkpoint's folder, when training is resumed from it."""

    @property
    def has_finished_batch(self) -> bool:
        """Whether all updates of the last generation batch of [`rollout`] are done, as seen between two steps."""
        return self._step % (self.args.steps_per_generation * self.num_iterations) == 0

    def take_over_generation(self, stop_token_ids: list[int]) -> None:
        """
        Generate with [`rollout`] from now on.

        Args:
            stop_token_ids (`list[int]`):
                The tokens that end a completion, so that TRL's masks and metrics of truncated completions agree.
        """
        self.samples_rollouts = True
        self.eos_token_ids = stop_token_ids
        self.generation_config.eos_token_id = stop_token_ids
        # Whether a rollout function samples with `rollout` is known only after it has run, see `_generate`
        self.use_vllm = self.rollout_func is None
        # In "colocate" mode the tool loop asks an engine of vLLM for the context length
        self.vllm_mode = "server"
        self.add_callback(_AfterStep(self))

    @property
    def metrics_mode(self) -> str:
        """`"train"` or `"eval"`: whose metrics are collected now."""
        return "train" if self.model.training else "eval"

    def log_sparrow_metric(self, name: str, value: float) -> None:
        """Add `sparrow/{name}` to the next log. Several values until then are averaged."""
        self._metrics[self.metrics_mode][f"sparrow/{name}"].append(value)

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        if not self.samples_rollouts:
            return super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, num_generations, has_tool_images=has_tool_images
            )
        if images is not None or has_tool_images:
            raise ValueError("A prompt has images, which sparse rollouts do not support. Set sparse_schedule=None.")
        with profiling_context(self, "sparrow.rollout"):
            return self.rollout(prompt_ids, num_generations)

    def _generate(self, prompts: list):
        if not self.samples_rollouts:
            return super()._generate(prompts)
        self.before_batch()
        if self.rollout_func is None:
            return super()._generate(prompts)
        self.use_vllm = False  # or TRL would update the weights of a vLLM server that does not exist
        generated = super()._generate(prompts)
        # What the rollout function sampled with `rollout` needs the correction. The processes have to agree, because
        # TRL gathers metrics along with it.
        sampled = torch.tensor([self.sampled_since_last_batch()], device=self.accelerator.device)
        self.use_vllm = bool(self.accelerator.gather(sampled).any())
        return generated

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._awaits_policy_pass = self.samples_rollouts
        try:
            batch = super()._generate_and_score_completions(inputs)
        finally:
            self._awaits_policy_pass = False
        if self.samples_rollouts and self.use_vllm:
            mask = batch["completion_mask"]
            if "tool_mask" in batch:
                mask = mask * batch["tool_mask"]
            self.after_rollout_scored(
                ScoredRollout(
                    prompt_ids=batch["prompt_ids"],
                    prompt_mask=batch["prompt_mask"],
                    completion_ids=batch["completion_ids"],
                    completion_mask=batch["completion_mask"],
                    mask=mask.bool(),
                    advantages=batch["advantages"],
                    actor_logprobs=batch.get("sampling_per_token_logps"),
                    policy_logprobs=batch.get("old_per_token_logps"),
                )
            )
        return batch

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        # With the correction, the first pass over a new batch is the policy's; the reference model's may follow
        corrects = self.use_vllm and self.vllm_importance_sampling_correction
        around: AbstractContextManager = nullcontext()
        if self._awaits_policy_pass and corrects:
            self._awaits_policy_pass = False
            around = self.around_policy_pass(input_ids, attention_mask, logits_to_keep)
        with around:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )

    def push_failed(self, error: BaseException) -> None:
        """Called on the main process when an upload during training failed. What was uploaded is on disk."""
        raise error

    def report_failed_pushes(self) -> None:
        """Call [`push_failed`] for uploads that failed in the background: transformers does not look at how they end."""
        push = getattr(self, "push_in_progress", None)
        if push is None:
            return
        for job in [job for job in push.jobs if job.done()]:
            push.jobs.remove(job)
            if not job.cancelled() and job.exception() is not None:
                self.push_failed(job.exception())

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self.samples_rollouts:
            return super()._push_from_checkpoint(checkpoint_folder)
        self.report_failed_pushes()
        try:
            if self.hub_model_id is None and self.is_world_process_zero():
                self.init_hf_repo()  # there was no network when the training started
            if self.hub_model_id is not None or not self.is_world_process_zero():
                super()._push_from_checkpoint(checkpoint_folder)
        except Exception as error:
            self.push_failed(error)

    def finish_push(self) -> None:
        """Wait for the uploads that run in the background, and report those that failed."""
        super()._finish_current_push()
        self.report_failed_pushes()

    def after_pushes(self) -> None:
        """Called when the uploads of a training are over, and those that failed are reported."""

    def _finish_current_push(self) -> None:
        if not self.samples_rollouts:
            return super()._finish_current_push()
        self.finish_push()
        self.after_pushes()

    def _compute_loss(self, model, inputs):
        if self.samples_rollouts and self.rollout_func is not None:
            # A batch generated since, for example for an evaluation, may have decided otherwise than this one
            self.use_vllm = "importance_sampling_ratio" in inputs
        return super()._compute_loss(model, inputs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.samples_rollouts and self.args.should_save:
            # First, because the files are pushed to the Hub along with the model
            self.save_beside_model(output_dir or self.args.output_dir)
        super().save_model(output_dir, _internal_call=_internal_call)

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        if self.samples_rollouts and self.args.should_save:
            self.save_state(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.samples_rollouts and checkpoint is not None:
            self.load_state(checkpoint)
