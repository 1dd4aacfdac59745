"""The decode loop on a CUDA device: skipped where there is none."""

import pytest
import torch

from rollouts import engine_of, random_prompts, sampling
from sparrow_trl.rollout import device_loop
from sparrow_trl.rollout.graphs import GraphedStep
from sparrow_trl.sparsity import SparsitySchedule
from tiny import tiny_model


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SCHEDULE = SparsitySchedule((0, 1, 3, 2), bin_tokens=64)


@pytest.fixture
def graphs(monkeypatch):
    made = []

    class Spy(GraphedStep):
        def _record(self):
            made.append(super()._record())
            return made[-1]

        def __call__(self):
            if self.graph is None:
                return super().__call__()
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                super().__call__()
            finally:
                torch.cuda.set_sync_debug_mode(before)

    monkeypatch.setattr(device_loop, "GraphedStep", Spy)
    return made


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "gemma3_text"])
def test_graphs_sample_what_the_host_samples(model_type, backend, graphs):
    model = tiny_model(model_type).cuda()
    prompts = random_prompts(1, 15, 33, 33, 90, 200)
    options = {"stop_token_ids": range(5, 9), "max_num_seqs": 4}
    expected, found = (
        engine_of(model, SCHEDULE, decode_backend=name, **options).generate(prompts, sampling(60), top_logprobs=4)
        for name in ("host", backend)
    )
    assert graphs and None not in graphs
    assert found.completion_ids == expected.completion_ids and found.top_ids == expected.top_ids
    for a, b in zip(found.logprobs, expected.logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=1e-3, rtol=0)


def test_automatic_choice(graphs):
    engine_of(tiny_model().cuda(), SCHEDULE).generate(random_prompts(40, 9), sampling(30))
    assert graphs and None not in graphs


def test_autocast_over_float32_weights(graphs):
    model = tiny_model(num_hidden_layers=2).cuda()
    before = dict(model.named_parameters())
    with torch.autocast("cuda", torch.bfloat16):
        engine = engine_of(model, SparsitySchedule.dense())
        output = engine.generate(random_prompts(30, 8), sampling(20), top_logprobs=1)
    assert graphs and None not in graphs
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before)
    for prompt, completion, found in zip(random_prompts(30, 8), output.completion_ids, output.logprobs, strict=True):
        ids = torch.tensor([prompt + completion], device="cuda")
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        expected = logits.gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()
        assert (torch.tensor(found) - expected).abs().median() < 0.1
