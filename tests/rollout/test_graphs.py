"""
What a CUDA graph asks of a decode step, shown without a GPU: its operations, recorded once and replayed on the same
tensors, do what calling it does; and nothing in it looks at a value or mixes devices.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import AutoModelForCausalLM
from transformers.utils import import_utils

from rollouts import SPARSE, endless, engine_of, random_prompts, sampling
from sparrow_trl.rollout import device_loop, graphs
from sparrow_trl.rollout.backend import make_ops
from sparrow_trl.rollout.buffers import DecodeBuffers
from sparrow_trl.rollout.cache import PagedKVCache
from sparrow_trl.rollout.device_step import DecodeStep
from sparrow_trl.rollout.graphs import GraphedStep
from sparrow_trl.rollout.sampler import Sampler
from sparrow_trl.sparsity import SparsitySchedule
from tiny import tiny_config, tiny_model


LOOKS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2"}


class Recording(TorchDispatchMode):
    """Records the operations on tensors. They run meanwhile, which stands for the first replay."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.is_fresh = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # A look at a value or a copy from the host's memory (`torch.tensor`) ends a real recording. A single number that
        # is assigned to a slice comes as a tensor without dimensions; on a device that is a fill.
        name = func.name().split(".")[0]
        if name in LOOKS or (name == "aten::lift_fresh" and args[0].dim() > 0):
            raise RuntimeError(f"{func.name()} while recording")
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def replay(self):
        if self.is_fresh:
            self.is_fresh = False
            return
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_flatten(out)[0], tree_flatten(again)[0], strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture
def recorded(monkeypatch):
    """Steps are recorded and replayed, as on a CUDA device. Holds the recordings."""
    made = []
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)

    class Graph(GraphedStep):
        def __init__(self, step, device, memory_pool=None, records=True):
            super().__init__(step, device, memory_pool, records)
            self._records = True

        def _record(self):
            with Recording() as recording:
                self.step()
            made.append(recording)
            return recording

    monkeypatch.setattr(device_loop, "GraphedStep", Graph)
    return made


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "gemma3_text", "gpt2"])
def test_replayed_steps_sample_what_the_host_samples(model_type, recorded):
    """Lengths, budgets, page tables, random numbers and stops change from replay to replay; the operations do not."""
    model = tiny_model(model_type)
    schedule = SparsitySchedule((0, 1, 3, 2), bin_tokens=32, page_size=8)
    prompts, config = random_prompts(1, 15, 33, 33, 90), sampling(45, temperature=1.2, top_k=100, top_p=0.95)
    options = {"stop_token_ids": range(5, 9)}
    expected = engine_of(model, schedule, **options).generate(prompts, config, top_logprobs=4)
    found = engine_of(model, schedule, decode_backend="torch", **options).generate(prompts, config, top_logprobs=4)
    assert found.completion_ids == expected.completion_ids
    assert found.finish_reasons == expected.finish_reasons
    assert found.top_ids == expected.top_ids
    assert 0 < len(recorded) < 8 and sum(map(len, expected.completion_ids)) > 60


def test_one_recording_for_each_number_of_rows(recorded):
    """Three sequences, then the last one alone; a rollout records anew."""
    engine = engine_of(endless(num_hidden_layers=2), decode_backend="torch")
    for times in (1, 2):
        engine.generate(random_prompts(40, 40, 40), sampling(60), max_new_tokens=[20, 24, 60])
        assert len(recorded) == 2 * times


def meta_step(model_type="llama", config=None, dtype=torch.bfloat16, **options):
    """A decode step whose tensors have shapes and no values: a look at one raises, and so do two devices at once."""
    device = torch.device("meta")
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=dtype).to(device)
    model.config._attn_implementation = "sparrow"
    buffers = DecodeBuffers(4, 64, 8, 20, device)
    sampler = Sampler(config or sampling(5), [2, 3])
    cache = PagedKVCache(32, 4)
    return DecodeStep(
        model, cache, SPARSE, sampler, make_ops("torch"), buffers, prunes=True, top_logprobs=20, **options
    )


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt2"])
def test_a_step_looks_at_no_value(model_type, monkeypatch):
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
    config = sampling(
        5, top_k=5, top_p=0.5, min_p=0.1, typical_p=0.9, epsilon_cutoff=0.01, temperature=0.5, suppress_tokens=[3],
        remove_invalid_values=True,
    )  # fmt: skip
    with torch.no_grad():
        meta_step(model_type, config)()


def test_the_test_above_would_notice_a_look():
    step = meta_step()
    step.sampler.draw = lambda logits, *args, **kwargs: logits.argmax(-1).tolist()
    with torch.no_grad(), pytest.raises((RuntimeError, NotImplementedError)):
        step()


class FakeCuda:
    """Stands in for `torch.cuda.graph`: recording runs nothing here."""

    def __init__(self, monkeypatch, error=None):
        self.replayed, self.recording, self.error = 0, False, error
        monkeypatch.setattr(graphs.torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(graphs.torch.cuda, "graph", lambda graph, **options: self)
        monkeypatch.setattr(graphs.torch.cuda, "device", lambda device: self)
        # A recording that cannot be ended leaves its stream as the current one
        self.stream = "before"
        monkeypatch.setattr(graphs.torch.cuda, "current_stream", lambda device: self.stream)
        monkeypatch.setattr(graphs.torch.cuda, "set_stream", lambda stream: setattr(self, "stream", stream))

    def __enter__(self):
        self.recording = True

    def __exit__(self, *error):
        self.recording = False

    def replay(self):
        self.replayed += 1


def test_first_call_runs_second_is_recorded_all_later_ones_replay(monkeypatch):
    cuda, runs = FakeCuda(monkeypatch), []
    step = GraphedStep(lambda: runs.append(cuda.recording), torch.device("cuda"))
    for _ in range(5):
        step()
    assert runs == [False, True] and cuda.replayed == 4


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError])
def test_a_step_that_cannot_be_recorded_runs_as_it_is(monkeypatch, error):
    cuda, runs, warnings = FakeCuda(monkeypatch), [], []
    monkeypatch.setattr(graphs.logger, "warning_once", warnings.append)

    def step():
        if cuda.recording:
            cuda.stream = "of the recording"
            raise error("operation not permitted when stream is capturing\nmore")
        runs.append(1)

    graphed = GraphedStep(step, torch.device("cuda"))
    for _ in range(5):
        graphed()
    assert len(runs) == 5 and cuda.replayed == 0
    assert graphed.has_failed and cuda.stream == "before"
    (warning,) = warnings
    assert f"({error.__name__}: operation not permitted when stream is capturing)" in warning


def test_running_out_of_memory_while_recording_is_no_fallback(monkeypatch):
    cuda = FakeCuda(monkeypatch)

    def step():
        if cuda.recording:
            cuda.stream = "of the recording"
            raise torch.OutOfMemoryError

    graphed = GraphedStep(step, torch.device("cuda"))
    graphed()
    with pytest.raises(torch.OutOfMemoryError):
        graphed()
    assert cuda.stream == "before"


def test_on_a_cpu_every_call_runs():
    runs = []
    step = GraphedStep(lambda: runs.append(1), torch.device("cpu"))
    for _ in range(4):
        step()
    assert len(runs) == 4
