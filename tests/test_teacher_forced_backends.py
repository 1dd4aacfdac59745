"""The attention state of whole sequences gives the same on Triton kernels as on PyTorch operations, and as decoding."""

import pytest
import torch

from rollouts import endless, engine_of, random_prompts, sampling
from sparrow_trl.attention import TeacherForced
from sparrow_trl.rollout.isolation import rollout_mode
from sparrow_trl.sparsity import SparsitySchedule


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCHEDULE = SparsitySchedule(budgets=(0, 1, 3), bin_tokens=16, page_size=4, dense_layers=(0,))
LENGTHS, PROMPTS = [41, 7, 30], [20, 2, 29]

pytest.importorskip("triton")


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("sliding_window", [None, 9])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_triton_equals_torch(layer, sliding_window, softcap):
    generator = torch.Generator().manual_seed(0)
    tensors = tuple(
        torch.randn(sum(LENGTHS), heads, 16, generator=generator).to(DEVICE).requires_grad_() for heads in (4, 2, 2)
    )
    direction = torch.randn(sum(LENGTHS), 4, 16, generator=generator).to(DEVICE)
    results = []
    for backend in ("triton", "torch"):
        state = TeacherForced(SCHEDULE, LENGTHS, PROMPTS, backend)
        out = state.attend(layer, *tensors, scaling=0.3, sliding_window=sliding_window, softcap=softcap)
        results.append((out, *torch.autograd.grad(out, tensors, direction)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_decode_equals_teacher_forced_on_triton():
    model = endless(num_hidden_layers=2).to(DEVICE)
    prompts = random_prompts(18, 31)
    output = engine_of(model, SCHEDULE).generate(prompts, sampling(25), seed=3)
    assert output.stats.kv_share < 1
    sequences = [prompt + completion for prompt, completion in zip(prompts, output.completion_ids, strict=True)]
    state = TeacherForced(SCHEDULE, [len(ids) for ids in sequences], [len(prompt) for prompt in prompts], "triton")
    with torch.no_grad(), rollout_mode(model):
        logits = (
            model(
                input_ids=torch.tensor([sum(sequences, [])], device=DEVICE),
                position_ids=torch.cat([torch.arange(len(ids)) for ids in sequences])[None].to(DEVICE),
                use_cache=False,
                sparrow=state,
            )
            .logits[0]
            .cpu()
        )
    start = 0
    for prompt, completion, found in zip(prompts, output.completion_ids, output.logprobs, strict=True):
        rows = logits[start + len(prompt) - 1 : start + len(prompt) + len(completion) - 1].log_softmax(-1)
        forced = rows.gather(-1, torch.tensor(completion)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found), forced, atol=1e-4, rtol=0)
        start += len(prompt) + len(completion)


def test_under_autocast_it_computes_in_the_autocast_dtype():
    tensors = tuple(torch.randn(12, 2, 16, device=DEVICE) for _ in range(3))
    state = TeacherForced(SCHEDULE, [12], [12], "triton")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = state.attend(1, *tensors, scaling=0.3, sliding_window=None, softcap=None)
    assert out.dtype == torch.bfloat16


def test_unknown_backends_are_refused():
    with pytest.raises(ValueError, match="backend='cuda' is not one of auto, torch, triton"):
        TeacherForced(SCHEDULE, [3], [1], "cuda")
