"""The metrics of the rollouts, against values worked out by hand."""

import math

import pytest
import torch

from sparrow_trl import SparsitySchedule
from sparrow_trl.rollout import RolloutStats
from sparrow_trl.rollout_metrics import RolloutMetrics
from sparrow_trl.trl_seams import ScoredRollout


DENSE = SparsitySchedule.dense()


def scored(ratios, mask=None, prompt_length=3) -> ScoredRollout:
    """A batch with these importance ratios; the log-probabilities of the actor are -1, -2, ..."""
    ratios = torch.tensor(ratios)
    mask = torch.ones_like(ratios) if mask is None else torch.tensor(mask)
    actor = -torch.arange(1.0, ratios.size(1) + 1).expand_as(ratios)
    return ScoredRollout(
        prompt_ids=torch.ones(len(ratios), prompt_length, dtype=torch.long),
        prompt_mask=torch.ones(len(ratios), prompt_length, dtype=torch.long),
        completion_ids=torch.ones_like(ratios, dtype=torch.long),
        completion_mask=torch.ones_like(mask),
        mask=mask.bool(),
        advantages=torch.zeros(len(ratios)),
        actor_logprobs=actor,
        policy_logprobs=actor + ratios.log(),
    )


def alone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def make(clip_min=None, clip_max=2.0, by_sequence=False) -> RolloutMetrics:
    return RolloutMetrics(clip_min=clip_min, clip_max=clip_max, by_sequence=by_sequence)


def test_ratios_of_one_batch():
    metrics = make()
    clipped = metrics.update([], scored([[0.5, 1.0, 4.0], [1.5, 3.0, 2.0]]), DENSE, alone)
    assert clipped == pytest.approx(2 / 6)  # 4 and 3; the bound itself is within
    found = metrics.pop()
    assert found["importance_ratio/mean"] == pytest.approx(12.0 / 6)
    assert found["importance_ratio/min"] == pytest.approx(0.5)
    assert found["importance_ratio/max"] == pytest.approx(4.0)
    assert found["clipped_fraction"] == pytest.approx(2 / 6)


def test_masking_tokens_is_deleting_them():
    masked, deleted = make(), make()
    masked.update([], scored([[0.5, 9.0, 1.5], [3.0, 1.0, 0.01]], [[1, 0, 1], [1, 1, 0]]), DENSE, alone)
    deleted.update([], scored([[0.5, 1.5, 3.0, 1.0]]), DENSE, alone)
    assert masked.pop() == pytest.approx(deleted.pop())


def test_lower_bound_counts_too():
    metrics = make(clip_min=0.6, clip_max=None)
    assert metrics.update([], scored([[0.5, 1.0, 4.0, 0.7]]), DENSE, alone) == pytest.approx(1 / 4)


def test_bounds_of_a_whole_sequence():
    # 1.5 * 1.5 is above 2: no token is out of bounds, its sequence is
    batch = scored([[1.5, 1.5, 1.0], [1.0, 1.2, 1.0]], [[1, 1, 0], [1, 1, 1]])
    assert make().update([], batch, DENSE, alone) == 0.0
    by_sequence = make(by_sequence=True)
    assert by_sequence.update([], batch, DENSE, alone) == pytest.approx(2 / 5)
    assert by_sequence.pop()["importance_ratio/max"] == pytest.approx(1.5)


def test_all_masked_batch_has_no_ratios():
    metrics = make()
    assert metrics.update([], scored([[5.0, 5.0]], [[0, 0]]), DENSE, alone) is None
    assert not [name for name in metrics.pop() if "ratio" in name or "clipped" in name]


def test_without_policy_logprobs_there_are_no_ratios():
    batch = scored([[5.0, 5.0]])
    batch.policy_logprobs = None
    metrics = make()
    assert metrics.update([], batch, DENSE, alone) is None
    assert "importance_ratio/mean" not in metrics.pop()


def test_batches_until_a_log_are_weighted_by_tokens():
    metrics = make()
    metrics.update([], scored([[1.0, 1.0, 1.0]]), DENSE, alone)
    metrics.update([], scored([[0.2]]), DENSE, alone)
    metrics.update([], scored([[4.0, 1.0]]), DENSE, alone)
    found = metrics.pop()
    assert found["importance_ratio/mean"] == pytest.approx(8.2 / 6)  # not the mean of the three batches' means
    assert found["importance_ratio/min"] == pytest.approx(0.2)
    assert found["importance_ratio/max"] == pytest.approx(4.0)
    assert found["clipped_fraction"] == pytest.approx(1 / 6)
    assert metrics.pop() == {}


def test_two_processes():
    """The same as one process with the tokens of both, except for times: a step waits for its slowest process."""
    batches = [scored([[0.5, 1.0, 4.0]]), scored([[1.5, 3.0, 2.0], [0.1, 1.0, 1.0]], [[1, 1, 1], [1, 0, 0]])]
    stats = [
        [
            RolloutStats(completion_tokens=30, seconds=2.0, kv_bytes_read=10, kv_bytes_dense=40, pages_peak=9),
            RolloutStats(completion_tokens=6, seconds=1.0, kv_bytes_read=10, kv_bytes_dense=10, pages_peak=4),
        ],
        [
            RolloutStats(
                completion_tokens=64, seconds=4.0, kv_bytes_read=30, kv_bytes_dense=50, pages_peak=5, preemptions=3
            )
        ],
    ]
    vectors = []
    for batch, of_process in zip(batches, stats, strict=True):
        make().update(of_process, batch, DENSE, lambda vector: vectors.append(vector) or vector)

    metrics = make()
    metrics.update(stats[0], batches[0], DENSE, lambda vector: torch.cat(vectors))
    found = metrics.pop()
    assert found["importance_ratio/mean"] == pytest.approx((5.5 + 6.5 + 0.1) / 7)
    assert found["importance_ratio/min"] == pytest.approx(0.1)
    assert found["importance_ratio/max"] == pytest.approx(4.0)
    assert found["clipped_fraction"] == pytest.approx(2 / 7)
    assert found["kv_share"] == pytest.approx(50 / 100)
    assert found["rollout_seconds"] == pytest.approx(4.0)
    assert found["rollout_tokens_per_second"] == pytest.approx(100 / 4.0)
    assert found["preemptions"] == 3
    assert found["pages_peak"] == 9


def test_bytes_are_summed_exactly():
    """A float32 would round the sums of one batch to a multiple of 16 MiB."""
    metrics = make()
    read, dense = 2**47 + 1, 2**47 + 2
    metrics.update([RolloutStats(kv_bytes_read=read, kv_bytes_dense=dense)], scored([[1.0]]), DENSE, alone)
    assert metrics.pop()["kv_share"] == read / dense < 1


def test_rates_over_several_batches():
    metrics = make()
    for seconds, tokens in ((1.0, 10), (3.0, 10)):
        metrics.update([RolloutStats(completion_tokens=tokens, seconds=seconds)], scored([[1.0]]), DENSE, alone)
    found = metrics.pop()
    assert found["rollout_seconds"] == pytest.approx(2.0)  # of a batch
    assert found["rollout_tokens_per_second"] == pytest.approx(20 / 4.0)
    assert found["kv_share"] == 1.0  # nothing was decoded


def test_budget_is_that_of_the_querying_positions():
    schedule = SparsitySchedule(budgets=(2, 8, 32), bin_tokens=4)
    metrics = make()
    # Prompt of 3 tokens: the queries are at 2, 3 | 4, 5; the last token is masked
    metrics.update([], scored([[1.0, 1.0, 1.0, 1.0]], [[1, 1, 1, 0]]), schedule, alone)
    assert metrics.pop()["budget"] == pytest.approx((2 + 2 + 8) / 3)
    metrics.update([], scored([[1.0]]), DENSE, alone)
    assert "budget" not in metrics.pop()


def test_token_without_a_logprob_counts_as_unchanged():
    batch = scored([[4.0, 1.0]])
    batch.actor_logprobs = batch.actor_logprobs.clone()
    batch.actor_logprobs[0, 0] = math.nan
    metrics = make()
    metrics.update([], batch, DENSE, alone)
    assert metrics.pop()["importance_ratio/max"] == pytest.approx(1.0)
