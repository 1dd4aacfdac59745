"""The two terms of the loss of DistillSparse, token by token (Algorithm 1 of arXiv 2606.08446)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


KL_ESTIMATORS = ("full", "top_k", "k1", "k2", "k3")
KL_DIRECTIONS = ("forward", "reverse")
SAMPLED_ESTIMATORS = ("k1", "k2", "k3")

MOST_WEIGHT = 2.0  # of a token's importance weight p/q in the sampled forward estimators, as in the policy's loss


@dataclass(frozen=True)
class DistillLoss:
    """
    `ppo_coef * L_ppo + kl_coef * L_KL` of single tokens. The student q is the sparse actor with its LoRA, the teacher p the dense
    policy; p gets no gradient.

    Args:
        kl (`str`):
            - `"full"`: over the whole vocabulary.
            - `"top_k"`: over the teacher's `top_k` most likely tokens, all others counting as one.
            - `"k1"`, `"k2"`, `"k3"`: from the sampled token alone.
        direction (`str`): `"forward"` is KL(p || q), `"reverse"` is KL(q || p).
        kl_coef, ppo_coef (`float`): weights of the two terms.
        top_k (`int`): see `kl`.
        epsilon_low, epsilon_high (`float`): clip range of the PPO term.
    """

    kl: str = "full"
    direction: str = "forward"
    kl_coef: float = 1.0
    ppo_coef: float = 1.0
    top_k: int = 64
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2

    @property
    def needs_distributions(self) -> bool:
        """Whether the teacher's log-probabilities of all tokens are needed, not only of the sampled ones."""
        return self.kl not in SAMPLED_ESTIMATORS

    def ppo(self, logprobs: torch.Tensor, actor_logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """
        The clipped policy-gradient term. All of shape `(num_tokens,)`.

        Args:
            logprobs (`torch.Tensor`): of the sampled tokens under the student.
            actor_logprobs (`torch.Tensor`): the same, when they were sampled.
            advantages (`torch.Tensor`): of the tokens' completions.
        """
        ratio = (logprobs - actor_logprobs).exp()
        clipped = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
        return -torch.minimum(ratio * advantages, clipped * advantages)

    def total(self, ppo: Any, kl: Any) -> Any:
        """The weighted sum of the two terms."""
        return self.ppo_coef * ppo + self.kl_coef * kl

    def divergence(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """KL of distributions, `(num_tokens,)`, from log-probabilities `(num_tokens, vocab_size)`."""
        if self.kl == "top_k":
            student, teacher = _top_k(student, teacher, min(self.top_k, student.shape[-1] - 1))
        if self.direction == "forward":
            return (teacher.exp() * (teacher - student)).sum(-1)
        return (student.exp() * (student - teacher)).sum(-1)

    def sampled_divergence(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """
        KL estimated from tokens that the student sampled, `(num_tokens,)`, from their log-probabilities.

        With u = log q - log p: k1 is u, k2 is u^2 / 2, k3 is exp(-u) - 1 + u (Schulman, "Approximating KL
        divergence", 2020). The gradient of k1's mean over samples is not the mean of its gradients, which is zero, so
        k1 is differentiated as a score function, u grad log q. For the forward direction p and q change places and
        each token is weighted by p / q, at most `MOST_WEIGHT`.
        """
        log_ratio = student - teacher
        if self.direction == "reverse":
            if self.kl == "k1":
                score = log_ratio.detach() * student
                return log_ratio.detach() + score - score.detach()
            return log_ratio.square() / 2 if self.kl == "k2" else (-log_ratio).exp() - 1 + log_ratio
        weight = (-log_ratio).detach().exp().clamp(max=MOST_WEIGHT)
        if self.kl == "k1":
            return -weight * log_ratio
        return weight * (log_ratio.square() / 2 if self.kl == "k2" else log_ratio.exp() - 1 - log_ratio)


def _top_k(student: torch.Tensor, teacher: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both restricted to the teacher's k best tokens, `(num_tokens, k + 1)`; the last entry is all other tokens."""
    best = teacher.topk(k, dim=-1).indices
    rest = torch.ones_like(teacher, dtype=torch.bool).scatter_(-1, best, False)
    parts = []
    for logprobs in (student, teacher):
        others = logprobs.masked_fill(~rest, float("-inf")).logsumexp(-1, keepdim=True)
        parts.append(torch.cat([logprobs.gather(-1, best), others], dim=-1))
    return parts[0], parts[1]
