"""The engine on the device that is there: a GPU in `make gpu-check`, else the CPU. Sizes are tiny, and one test is all of it."""

import inspect

import pytest
import torch

from rollouts import random_prompts, sampling
from sparrow_trl.rollout import RolloutEngine
from sparrow_trl.sparsity import SparsitySchedule
from tiny import tiny_model


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPARSE = SparsitySchedule.fixed(1, page_size=16, dense_layers=(0,))
BACKENDS = ["auto", "torch", "host"] if "decode_backend" in inspect.signature(RolloutEngine).parameters else [None]


@pytest.fixture(autouse=True)
def _full_precision():
    torch.backends.cuda.matmul.allow_tf32 = False


def make_engine(model, schedule, backend, **options):
    if backend is not None:
        options["decode_backend"] = backend
    return RolloutEngine(model, schedule, progress_bar=False, **options)


@torch.no_grad()
def plain_logprobs(model, prompt, completion):
    ids = torch.tensor([[*prompt, *completion]], device=DEVICE)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "qwen2"])
def test_decoding_equals_one_forward(model_type, backend):
    """Dense: the model's own forward. Sparse: a teacher-forced one. Ragged prompts, page boundaries, preemption."""
    model = tiny_model(model_type, eos_token_id=None).to(DEVICE)
    prompts = random_prompts(1, 15, 16, 17, 70, 90)
    for schedule in (SparsitySchedule.dense(), SPARSE):
        engine = make_engine(model, schedule, backend, max_pages=20)
        output = engine.generate(prompts, sampling(24), seed=3)
        for prompt, completion, found in zip(prompts, output.completion_ids, output.logprobs, strict=True):
            assert len(completion) == 24
            if schedule.is_dense:
                expected = plain_logprobs(model, prompt, completion)
            else:
                expected = engine.logprobs([prompt + completion], [len(prompt)])[0].double().cpu()
            torch.testing.assert_close(torch.tensor(found).double(), expected, atol=1e-4, rtol=0)
    assert output.stats.kv_share < 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_completions_do_not_depend_on_the_batch(backend):
    model = tiny_model("llama", eos_token_id=None).to(DEVICE)
    prompts = random_prompts(20, 40, 60) * 2
    together = make_engine(model, SPARSE, backend).generate(prompts, sampling(20), seed=1)
    two = make_engine(model, SPARSE, backend, max_num_seqs=2).generate(prompts, sampling(20), seed=1)
    assert together.completion_ids == two.completion_ids


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_float32(dtype):
    """Log-probabilities of the same tokens; both are rounded at every layer."""
    model = tiny_model("llama", eos_token_id=None).to(DEVICE)
    half = tiny_model("llama", eos_token_id=None).to(DEVICE, dtype)
    [prompt] = random_prompts(50)
    output = make_engine(half, SparsitySchedule.dense(), None).generate([prompt], sampling(20))
    expected = plain_logprobs(model, prompt, output.completion_ids[0])
    found = torch.tensor(output.logprobs[0]).double()
    assert (found - expected).norm() / expected.norm() < 0.1


def test_nothing_of_a_rollout_stays_on_the_device():
    if DEVICE.type != "cuda":
        pytest.skip("memory is counted on a GPU alone")
    model = tiny_model("llama", eos_token_id=None).to(DEVICE)
    engine = make_engine(model, SPARSE, None)
    prompts = random_prompts(*[64] * 8)
    engine.generate(prompts, sampling(8))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        engine.generate(prompts, sampling(8))
    assert torch.cuda.memory_allocated() <= before
