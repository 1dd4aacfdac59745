"""The loss of DistillSparse against sums over the whole vocabulary."""

import math

import pytest
import torch

from sparrow_trl.distill.loss import MOST_WEIGHT, DistillLoss


def pair(seed=0, spread=1.0, tokens=4, vocab=11):
    """Log-probabilities of a student and a teacher in float64; the student requires gradients."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, vocab, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = logits.detach() + spread * torch.randn(tokens, vocab, generator=generator, dtype=torch.float64)
    return logits, teacher.log_softmax(-1)


def kl(p, q):
    return sum(float(a) * math.log(float(a) / float(b)) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_full_divergence(direction):
    logits, teacher = pair()
    student = logits.log_softmax(-1)
    found = DistillLoss(direction=direction).divergence(student, teacher)
    for row, value in enumerate(found):
        p, q = teacher[row].exp(), student[row].detach().exp()
        assert value.item() == pytest.approx(kl(p, q) if direction == "forward" else kl(q, p))


def test_gradient_of_the_full_forward_divergence():
    logits, teacher = pair()
    DistillLoss().divergence(logits.log_softmax(-1), teacher).sum().backward()
    torch.testing.assert_close(logits.grad, logits.detach().softmax(-1) - teacher.exp())


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_top_k_counts_all_other_tokens_as_one(direction):
    logits, teacher = pair()
    student = logits.log_softmax(-1).detach()
    found = DistillLoss(kl="top_k", top_k=3, direction=direction).divergence(student, teacher)
    for row, value in enumerate(found):
        best = sorted(range(11), key=lambda v, row=row: -teacher[row, v])[:3]
        p = [teacher[row, v].exp() for v in best]
        q = [student[row, v].exp() for v in best]
        p, q = [*p, 1 - sum(p)], [*q, 1 - sum(q)]
        assert value.item() == pytest.approx(kl(p, q) if direction == "forward" else kl(q, p))
    full = DistillLoss(direction=direction).divergence(student, teacher)
    assert (found <= full + 1e-12).all()
    everything = DistillLoss(kl="top_k", top_k=100, direction=direction).divergence(student, teacher)
    torch.testing.assert_close(everything, full)


def expectation(estimator, direction, logits, teacher):
    """Mean of an estimator over the student's own samples, and of its gradient, exactly."""
    loss = DistillLoss(kl=estimator, direction=direction)
    student = logits.log_softmax(-1)
    value, gradient = torch.zeros(len(logits), dtype=torch.float64), torch.zeros_like(logits)
    for token in range(logits.shape[1]):
        terms = loss.sampled_divergence(student[:, token], teacher[:, token])
        weight = student[:, token].detach().exp()
        value += weight * terms.detach()
        gradient += torch.autograd.grad((weight * terms).sum(), logits, retain_graph=True)[0]
    return value, gradient


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_sampled_estimators_have_the_right_mean_and_gradient(estimator, direction):
    logits, teacher = pair(spread=0.05)  # importance weights below their limit
    student = logits.log_softmax(-1)
    assert (teacher - student).exp().max() < MOST_WEIGHT
    exact = DistillLoss(direction=direction).divergence(student, teacher)
    value, gradient = expectation(estimator, direction, logits, teacher)
    # k2 is biased, in the third order of the difference
    torch.testing.assert_close(value, exact.detach(), rtol=0.1 if estimator == "k2" else 1e-9, atol=1e-9)
    (expected,) = torch.autograd.grad(exact.sum(), logits)
    # k3 of the reverse direction has the gradient of the forward one, and k2 of the forward one is off likewise: they
    # agree where the distributions are close
    close = (estimator, direction) in (("k3", "reverse"), ("k2", "forward"))
    assert (gradient - expected).norm() <= (0.2 if close else 1e-9) * expected.norm()


def test_importance_weight_of_the_forward_estimators_is_bounded():
    student, teacher = torch.tensor([-9.0]), torch.tensor([-1.0])
    found = DistillLoss(kl="k1", direction="forward").sampled_divergence(student, teacher)
    assert found.item() == pytest.approx(MOST_WEIGHT * 8)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.2, 2.0, -2.4, -2.4),
        (1.5, 2.0, -2.56, 0.0),  # clipped at 1.28
        (0.5, 2.0, -1.0, -1.0),
        (0.5, -2.0, 1.6, 0.0),  # clipped at 0.8
        (1.5, -2.0, 3.0, 3.0),
    ],
)
def test_clipped_policy_gradient(ratio, advantage, value, slope):
    logprobs = torch.tensor([-1.0], dtype=torch.float64).requires_grad_()
    actor = logprobs.detach() - torch.tensor(ratio, dtype=torch.float64).log()
    found = DistillLoss(epsilon_low=0.2, epsilon_high=0.28).ppo(logprobs, actor, torch.tensor([advantage]))
    assert found.item() == pytest.approx(value)
    assert torch.autograd.grad(found.sum(), logprobs)[0].item() == pytest.approx(slope)
