"""The update of the co-resident LoRA: teacher-forced sparse forward, loss, and its own optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from ..attention import TeacherForced
from ..monitor import acceptance_rate
from ..rollout.isolation import teacher_forced_mode
from ..sparsity import SparsitySchedule
from ..split_forward import SplitForward
from .adapter import SparrowAdapter
from .loss import DistillLoss
from .samples import Sample, micro_batches, within_tokens


LOGIT_BYTES = 256 << 20
"""Memory that the logits of one chunk of tokens may take: student's, teacher's, and what the loss makes of them."""

_COPIES = 6  # tensors of the logits' size that a chunk holds at the same time, about


@dataclass
class DistillStats:
    """
    What an update did. Sums are over the tokens of all processes.

    Attributes:
        tokens (`float`): sampled tokens in the loss.
        loss, ppo, kl (`float`): means over these tokens.
        acceptance (`float`, *optional*): mean acceptance rate of the LoRA's sparse forward, where both full
            distributions were at hand.
        grad_norm (`float`): before clipping, mean over the optimizer steps that were made.
        steps, skipped (`int`): optimizer steps that were made, and that were left out for a non-finite gradient.
        learning_rate (`float`): of the next step.
        seconds (`float`): that the update took on this process.
    """

    tokens: float = 0.0
    loss: float = 0.0
    ppo: float = 0.0
    kl: float = 0.0
    acceptance: float | None = None
    grad_norm: float = 0.0
    steps: int = 0
    skipped: int = 0
    learning_rate: float = 0.0
    seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """What a trainer logs, by name."""
        metrics: dict[str, float] = {}
        metrics["distill/skipped_steps"] = self.skipped
        metrics["distill/seconds"] = self.seconds
        if self.tokens:
            metrics["distill/tokens"] = self.tokens
            metrics["distill/loss"] = self.loss
            metrics["distill/ppo"] = self.ppo
            metrics["distill/kl"] = self.kl
            metrics["distill/learning_rate"] = self.learning_rate
        if self.steps:
            metrics["distill/grad_norm"] = self.grad_norm
        if self.acceptance is not None:
            metrics["distill/acceptance"] = self.acceptance
        return metrics


@dataclass
class _Sums:
    """Sums over tokens, on the device until the update ends."""

    tokens: float = 0.0
    ppo: torch.Tensor | float = 0.0
    kl: torch.Tensor | float = 0.0
    acceptance: torch.Tensor | float = 0.0
    grad_norms: list[float] = field(default_factory=list)
    skipped: int = 0


class DistillUpdate:
    """
    Trains the LoRA of a [`SparrowAdapter`] on what the sparse actor sampled. The policy is the frozen teacher.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The policy, not wrapped for distributed training.
        adapter ([`SparrowAdapter`]):
            Its LoRA.
        loss ([`DistillLoss`], *optional*):
            The loss of a token.
        learning_rate (`float`, *optional*, defaults to `5e-4`):
            Of AdamW, constant after the warmup.
        warmup_steps (`int`, *optional*, defaults to `5`):
            Optimizer steps over which the learning rate rises from 0.
        max_grad_norm (`float`, *optional*, defaults to `1.0`):
            Norm to which the LoRA's gradient is clipped; 0 turns clipping off.
        num_steps (`int`, *optional*, defaults to `1`):
            Optimizer steps of one update, each on its part of the samples.
        max_tokens (`int`, *optional*):
            Tokens (context and sampled) of one update, at most, on each process. By default all.
        micro_tokens (`int`, *optional*, defaults to `4096`):
            Tokens of one forward, at most; gradients are accumulated over forwards.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature.
        fp16 (`bool`, *optional*, defaults to `False`):
            Whether autocast computes in float16, so that the loss has to be scaled.
        autocast (`Callable`, *optional*):
            Makes the context in which forwards run.
        reduce_sum (`Callable`, *optional*):
            Sums a tensor over all processes; by default there is one.
        seed (`int`, *optional*, defaults to `0`):
            Of the order of the samples.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: SparrowAdapter,
        loss: DistillLoss | None = None,
        *,
        learning_rate: float = 5e-4,
        warmup_steps: int = 5,
        max_grad_norm: float = 1.0,
        num_steps: int = 1,
        max_tokens: int | None = None,
        micro_tokens: int = 4096,
        temperature: float = 1.0,
        fp16: bool = False,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
        reduce_sum: Callable[[torch.Tensor], torch.Tensor] | None = None,
        seed: int = 0,
    ):
        self.model, self.adapter, self.loss = model, adapter, loss or DistillLoss()
        self.max_grad_norm, self.num_steps = max_grad_norm, num_steps
        self.max_tokens, self.micro_tokens, self.temperature = max_tokens, micro_tokens, temperature
        self.autocast, self.reduce_sum = autocast, reduce_sum or (lambda tensor: tensor)
        self.split = SplitForward(model)
        self.parameters = list(adapter.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / max(1, warmup_steps))
        )
        self.device = self.parameters[0].device
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=fp16)
        self.generator = torch.Generator().manual_seed(seed)
        self.skipped_steps = 0

    def update(self, samples: Sequence[Sample], schedule: SparsitySchedule) -> DistillStats:
        """
        One update on the samples of a generation batch. Every process calls this with its share.

        Args:
            samples (`list[Sample]`): what the actor sampled; may be empty where other processes have some.
            schedule (`SparsitySchedule`): the schedule under which it did.

        Returns:
            `DistillStats`.
        """
        started = time.perf_counter()
        chosen = within_tokens(samples, self.max_tokens, self.generator) if samples else []
        sums = _Sums()
        for step in range(self.num_steps):
            self._step(chosen[step :: self.num_steps], schedule, sums)
        self.skipped_steps += sums.skipped
        stats = self._stats(sums)
        stats.seconds = time.perf_counter() - started
        return stats

    def _step(self, samples: Sequence[Sample], schedule: SparsitySchedule, sums: _Sums) -> None:
        tokens = torch.tensor(float(sum(len(sample.sampled_ids) for sample in samples)), device=self.device)
        total = self.reduce_sum(tokens).item()
        if total == 0:
            return
        self.optimizer.zero_grad()
        for batch in micro_batches(samples, self.micro_tokens):
            self._accumulate(batch, schedule, total, sums)
        sums.tokens += total
        self._reduce_gradients()
        self.scaler.unscale_(self.optimizer)
        limit = self.max_grad_norm if self.max_grad_norm > 0 else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, limit).item()
        if torch.tensor(norm).isfinite():
            self.scaler.step(self.optimizer)
            self.scheduler.step()
            sums.grad_norms.append(norm)
        else:
            sums.skipped += 1
        self.scaler.update()
        self.optimizer.zero_grad()

    def _reduce_gradients(self) -> None:
        """Sum the gradients over all processes, of which some may have had no samples."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        flat = self.reduce_sum(torch.cat([gradient.flatten() for gradient in gradients]))
        parts = flat.split([gradient.numel() for gradient in gradients])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def _accumulate(self, batch: Sequence[Sample], schedule: SparsitySchedule, total: float, sums: _Sums) -> None:
        """Add the gradient of one micro-batch, of the loss summed over its tokens and divided by `total`."""
        lengths = [len(sample) for sample in batch]
        contexts = [len(sample.context_ids) for sample in batch]
        ids = [token for sample in batch for token in sample.context_ids + sample.sampled_ids]
        rows, start = [], 0
        for length, context in zip(lengths, contexts, strict=True):
            # The query of a token is the token before it
            rows.append(torch.arange(start + context - 1, start + length - 1))
            start += length
        picked = torch.cat(rows).to(self.device)
        tokens = torch.tensor(ids, device=self.device)
        inputs = {
            "input_ids": tokens[None],
            "position_ids": torch.cat([torch.arange(length) for length in lengths]).to(self.device)[None],
        }
        sampled = tokens[picked + 1]
        actor = torch.cat([sample.actor_logprobs for sample in batch]).to(self.device)
        advantages = torch.cat([torch.full((len(sample.sampled_ids),), sample.advantage) for sample in batch]).to(
            self.device
        )
        known = None
        if not self.loss.needs_distributions and all(sample.teacher_logprobs is not None for sample in batch):
            known = torch.cat([sample.teacher_logprobs for sample in batch if sample.teacher_logprobs is not None])
            known = known.to(self.device)

        with self.autocast():
            teacher_hidden = None
            if known is None:
                with teacher_forced_mode(self.model, gradients=False):
                    dense = TeacherForced(SparsitySchedule.dense(), lengths, contexts)
                    teacher_hidden = self.split.hidden(**inputs, sparrow=dense)[0, picked]
            # Until the end of the backward pass: gradient checkpointing runs the forward again
            with self.adapter.active(), teacher_forced_mode(self.model, gradients=True):
                sparse = TeacherForced(schedule, lengths, contexts)
                hidden = self.split.hidden(**inputs, sparrow=sparse)[0, picked]
                # The head is differentiated chunk by chunk, up to its inputs, and the body once, from there
                leaf = hidden.detach().requires_grad_()
                chunk = self._chunk_size()
                for first in range(0, len(picked), chunk):
                    part = slice(first, first + chunk)
                    ppo, kl, acceptance = self._terms(
                        leaf[part],
                        None if teacher_hidden is None else teacher_hidden[part],
                        None if known is None else known[part],
                        sampled[part],
                        actor[part],
                        advantages[part],
                    )
                    self.scaler.scale(self.loss.total(ppo, kl).sum() / total).backward()
                    sums.ppo = sums.ppo + ppo.detach().sum()
                    sums.kl = sums.kl + kl.detach().sum()
                    sums.acceptance = sums.acceptance + acceptance
                hidden.backward(leaf.grad)

    def _terms(self, hidden, teacher_hidden, known, sampled, actor, advantages):
        """PPO and KL terms of each token, and the sum of the acceptance rates (0 without distributions)."""
        student = (self.split.logits(hidden) / self.temperature).log_softmax(-1)
        logprobs = student.gather(-1, sampled[:, None])[:, 0]
        ppo = self.loss.ppo(logprobs, actor, advantages)
        if known is not None:
            return ppo, self.loss.sampled_divergence(logprobs, known), 0.0
        with torch.no_grad(), self.adapter.suspended():
            teacher = (self.split.logits(teacher_hidden) / self.temperature).log_softmax(-1)
        if self.loss.needs_distributions:
            kl = self.loss.divergence(student, teacher)
        else:
            kl = self.loss.sampled_divergence(logprobs, teacher.gather(-1, sampled[:, None])[:, 0])
        # Log-probabilities are logits too
        return ppo, kl, acceptance_rate(teacher, student.detach()).sum()

    def _chunk_size(self) -> int:
        vocab_size = self.split.causal_lm.get_output_embeddings().weight.shape[0]
        return max(1, LOGIT_BYTES // (_COPIES * 4 * vocab_size))

    def _stats(self, sums: _Sums) -> DistillStats:
        if not sums.tokens:
            return DistillStats(learning_rate=float(self.scheduler.get_last_lr()[0]))
        local = [
            torch.as_tensor(value, device=self.device, dtype=torch.float32)
            for value in (sums.ppo, sums.kl, sums.acceptance)
        ]
        ppo, kl, acceptance = (self.reduce_sum(torch.stack(local)) / sums.tokens).tolist()
        return DistillStats(
            tokens=sums.tokens,
            loss=self.loss.total(ppo, kl),
            ppo=ppo,
            kl=kl,
            acceptance=acceptance if acceptance > 0 else None,
            grad_norm=sum(sums.grad_norms) / len(sums.grad_norms) if sums.grad_norms else 0.0,
            steps=len(sums.grad_norms),
            skipped=sums.skipped,
            learning_rate=float(self.scheduler.get_last_lr()[0]),
        )

    def state_dict(self) -> dict:
        """Of the optimizer, the scheduler, the scaler and the random stream; the weights are the adapter's."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "generator": self.generator.get_state(),
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on from what [`state_dict`] returned."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        self.generator.set_state(state["generator"].cpu())
        self.skipped_steps = state["skipped_steps"]
