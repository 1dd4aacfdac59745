"""Which backend is chosen, and that the Triton kernels, in the interpreter, sample what PyTorch samples."""

from dataclasses import replace

import pytest
import torch

from rollouts import endless, engine_of, random_prompts, sampling
from sparrow_trl.rollout import backend
from sparrow_trl.rollout.backend import KVShape, choose_backend, make_ops, why_not_triton
from sparrow_trl.sparsity import SparsitySchedule
from tiny import tiny_model


CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = KVShape(4, frozenset({(2, 16, 16)}), page_size=16, max_pages=64, dtype=torch.float32)


@pytest.fixture(autouse=True)
def no_memory():
    why_not_triton.cache_clear()
    yield
    why_not_triton.cache_clear()


@pytest.fixture
def interpreted(monkeypatch):
    pytest.importorskip("triton")
    from triton.runtime.interpreter import InterpretedFunction

    from sparrow_kernels.store_kv import store_kv_kernel

    if not isinstance(store_kv_kernel, InterpretedFunction):
        pytest.skip("Triton was imported without TRITON_INTERPRET=1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def warnings(monkeypatch):
    given = []
    monkeypatch.setattr(backend.logger, "warning_once", given.append)
    return given


def test_choice_without_triton(monkeypatch, warnings):
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    assert choose_backend("auto", CPU, SHAPE) == "host" and warnings == []
    assert choose_backend("auto", CUDA, SHAPE) == "torch"
    assert len(warnings) == 1 and "Triton is not installed" in warnings[0]
    assert choose_backend("host", CUDA, SHAPE) == "host" and choose_backend("torch", CPU, SHAPE) == "torch"
    with pytest.raises(ValueError, match="decode_backend='triton' does not run here: Triton is not installed"):
        choose_backend("triton", CUDA, SHAPE)


def test_choice_with_triton(monkeypatch, warnings):
    pytest.importorskip("triton")
    monkeypatch.setattr(backend, "_try_kernels", lambda *args: None)
    monkeypatch.setattr(backend, "make_ops", lambda name: None)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert choose_backend("auto", CUDA, SHAPE) == "triton" and warnings == []
    assert choose_backend("auto", CPU, SHAPE) == "host"
    assert "no kernels for the device type 'cpu'" in why_not_triton(CPU, SHAPE)
    assert "do not know float64" in why_not_triton(CUDA, replace(SHAPE, dtype=torch.float64))


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"page_size": 8}, "page_size is 8"),
        ({"layers": frozenset({(2, 12, 12)})}, "multiple of 8 from 16 to 256"),
        ({"num_heads": 64}, "at most 16"),
        ({"max_pages": 8256}, "at most 8192"),
        ({}, None),
        ({"dtype": torch.float16}, None),
        ({"layers": frozenset({(2, 16, 16), (1, 64, 64)}), "page_size": 32}, None),
    ],
    ids=str,
)
def test_a_trial_says_which_shapes_the_kernels_do_not_know(changes, reason, interpreted):
    found = why_not_triton(CPU, replace(SHAPE, **changes))
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("op", ["store_kv", "select_pages", "paged_attention", "token_logprobs"])
def test_a_trial_notices_a_wrong_kernel(op, monkeypatch, interpreted):
    ops = make_ops("triton")
    kernel = getattr(ops, op)

    def wrong(*args, **kwargs):
        out = kernel(*args, **kwargs)
        if op == "store_kv":
            args[5].zero_()
            return None
        return (out[0] + 1, out[1]) if isinstance(out, tuple) else out + 0.1

    monkeypatch.setattr(
        backend, "make_ops", lambda name: replace(ops, **{op: wrong}) if name == "triton" else make_ops(name)
    )
    assert "differs from PyTorch's" in why_not_triton(CPU, SHAPE)


@pytest.mark.parametrize(
    "model_type, options", [("llama", {}), ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"]})]
)
def test_triton_samples_what_the_host_samples(model_type, options, interpreted):
    """Layers that choose pages, and dense or sliding ones."""
    model = tiny_model(model_type, num_hidden_layers=2, **options)
    schedule = SparsitySchedule((0, 1), bin_tokens=70, dense_layers=(0,))
    prompts, config = random_prompts(15, 60, 60), sampling(10)
    expected, found = (
        engine_of(model, schedule, decode_backend=name).generate(prompts, config, top_logprobs=2)
        for name in ("host", "triton")
    )
    assert found.completion_ids == expected.completion_ids and found.top_ids == expected.top_ids
    for a, b in zip(found.logprobs, expected.logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=1e-4, rtol=0)


def test_no_kernel_is_compiled_again_while_sequences_grow(interpreted, monkeypatch):
    """
    Triton compiles a kernel for its constants, for the dtypes of its arguments, and for integers that are 1 or divisible
    by 16. With the number of rows fixed, a rollout launches each kernel with few such signatures, and a longer one over
    the same width of page table adds none.
    """
    from triton.runtime.interpreter import InterpretedFunction

    seen = set()
    launch = InterpretedFunction.run

    def kind(value):
        if isinstance(value, torch.Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        if isinstance(value, int) and not isinstance(value, bool):
            return "int", value == 1, value % 16 == 0, value >= 2**31
        return type(value)

    def run(self, *args, grid, warmup, **kwargs):
        constants = tuple(sorted((key, value) for key, value in kwargs.items() if not isinstance(value, torch.Tensor)))
        seen.add((self.fn.__name__, tuple(map(kind, args)), constants))
        return launch(self, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    engine = engine_of(endless(num_hidden_layers=2), SparsitySchedule.fixed(1), decode_backend="triton")
    engine.generate(random_prompts(62, 40), sampling(4))
    warm = set(seen)
    assert warm
    engine.generate(random_prompts(75, 200), sampling(11))
    assert seen == warm
