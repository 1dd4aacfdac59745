"""The part of the trainer that trains the LoRA of DistillSparse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from .distill import DistillLoss, DistillSession, DistillUpdate, SparrowAdapter, samples_of
from .monitored_trainer import MonitoredTrainer
from .processes import warn
from .sparsity import SparsitySchedule
from .trl_seams import ScoredRollout


class DistillingTrainer(MonitoredTrainer):
    """
    Keeps a LoRA beside the policy that is on in rollouts alone, and updates it after each update of the policy (Algorithm
    1 of arXiv 2606.08446). What it trains with is a [`DistillSession`]; here it is told of the batches.

    A subclass calls [`start_distill`] at the end of its `__init__`, and samples in [`sampling_mode`].
    """

    _distill: DistillSession | None = None

    @property
    def distill(self) -> DistillSession | None:
        """The LoRA of `distill_sparse` and its update; `None` where it is off."""
        return self._distill

    def start_distill(self, schedule: SparsitySchedule) -> None:
        """Add the LoRA, if the configuration says so and the schedule is sparse."""
        args = self.args
        if not args.distill_sparse:
            return
        if schedule.is_dense:
            warn(
                "distill_sparse=True has no effect: the schedule is dense, so the actor is the policy and there is "
                "nothing to learn. Set a sparse_schedule that prunes.",
                stacklevel=3,
            )
            return
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        adapter = SparrowAdapter(
            model,
            rank=args.distill_rank,
            alpha=args.distill_alpha,
            target_modules=args.distill_target_modules or "attention",
            seed=args.seed,
        ).to(self.accelerator.device)
        loss = DistillLoss(
            kl=args.distill_kl,
            direction=args.distill_kl_direction,
            kl_coef=args.distill_kl_coef,
            ppo_coef=args.distill_ppo_coef,
            top_k=args.distill_top_k,
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
        )
        update = DistillUpdate(
            model,
            adapter,
            loss,
            learning_rate=args.distill_learning_rate,
            warmup_steps=args.distill_warmup_steps,
            max_grad_norm=args.distill_max_grad_norm,
            num_steps=args.distill_steps,
            max_tokens=args.distill_tokens,
            micro_tokens=args.distill_micro_tokens,
            temperature=args.temperature,
            fp16=args.fp16,
            autocast=self.accelerator.autocast,
            reduce_sum=lambda tensor: self.accelerator.reduce(tensor, reduction="sum"),
            seed=args.seed,
        )
        self._distill = DistillSession(
            adapter, update, every=args.distill_every, reuse_teacher=args.distill_reuse_teacher
        )

    def actor_mode(self, schedule: SparsitySchedule) -> AbstractContextManager:
        return nullcontext() if self._distill is None else self._distill.sampling(schedule)

    @contextmanager
    def sampling_mode(self) -> Iterator[None]:
        """
        The context of a rollout. With a LoRA, evaluations sample from the policy as it is published: without it, and
        densely, for the budgets may be those that the LoRA affords.
        """
        schedule = self.rollout_schedule
        if self.metrics_mode == "train":
            with self.actor_mode(schedule):
                yield
        elif self._distill is None:
            yield
        else:
            self.rollout_schedule = replace(schedule, budgets=())
            try:
                yield
            finally:
                self.rollout_schedule = schedule

    def after_rollout_scored(self, scored: ScoredRollout) -> None:
        if self._distill is not None and self.metrics_mode == "train" and scored.actor_logprobs is not None:
            samples = samples_of(
                scored.prompt_ids,
                scored.prompt_mask,
                scored.completion_ids,
                scored.mask,
                scored.advantages,
                scored.actor_logprobs,
                scored.policy_logprobs if self._distill.reuse_teacher else None,
            )
            self._distill.add(samples, self.rollout_schedule)
        super().after_rollout_scored(scored)  # may change the schedule

    def after_step(self) -> None:
        super().after_step()
        if self._distill is None:
            return
        stats = self._distill.update(all_batches=self.has_finished_batch)
        if stats is not None:
            for name, value in stats.metrics().items():
                self.log_sparrow_metric(name, value)

    def save_beside_model(self, folder: str) -> None:
        super().save_beside_model(folder)
        if self._distill is not None:
            self._distill.save_adapter(folder)

    def save_state(self, folder: str) -> None:
        super().save_state(folder)
        if self._distill is not None:
            self._distill.save_state(folder)

    def load_state(self, folder: str) -> None:
        if self._distill is not None:
            self._distill.load(folder)
        super().load_state(folder)
