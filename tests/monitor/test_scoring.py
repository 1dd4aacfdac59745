"""A model in two parts is the model, and what a batch's forward computes is kept for the right tokens."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from sparrow_trl.monitor import Scorer
from sparrow_trl.sparsity import SparsitySchedule
from tiny import VOCAB_SIZE, tiny_model


TYPES = ["llama", "qwen3", "gemma2", "granite", "cohere2", "qwen3_moe", "gpt2", "opt", "phi3"]


def tokens(*shape):
    return torch.randint(5, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("model_type", TYPES)
@torch.no_grad()
def test_parts_are_the_model(model_type):
    """With its logit scaling and soft-capping; and the model is then as it was."""
    model, ids = tiny_model(model_type), tokens(1, 30)
    expected = model(input_ids=ids).logits[0]
    scorer = Scorer(model)
    hidden = scorer.hidden_states(SparsitySchedule.dense(page_size=4), ids[0].tolist(), 12)
    assert hidden.shape == (18, 64)
    torch.testing.assert_close(scorer.logits(hidden), expected[11:-1], rtol=1e-4, atol=1e-4)
    assert torch.equal(model(input_ids=ids).logits[0], expected)


@torch.no_grad()
def test_adapters_count():
    plain = tiny_model()
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    ids, scorer = tokens(1, 20), Scorer(model)
    logits = scorer.logits(scorer.hidden_states(SparsitySchedule.dense(page_size=4), ids[0].tolist(), 5))
    torch.testing.assert_close(logits, model(input_ids=ids).logits[0, 4:-1], rtol=1e-4, atol=1e-4)
    assert (logits - plain(input_ids=ids).logits[0, 4:-1]).abs().max() > 0.1


@torch.no_grad()
def test_capture_keeps_the_rows_of_a_batch_in_chunks():
    model, ids = tiny_model(), tokens(5, 24)
    scorer = Scorer(model)
    with scorer.capture([1, 4], num_tokens=10) as captured:
        for chunk in ids.split(2):
            model(input_ids=chunk)
    assert sorted(captured) == [1, 4]
    for row, hidden in captured.items():
        logits = model(input_ids=ids[row : row + 1]).logits[0, -11:-1]
        torch.testing.assert_close(scorer.logits(hidden), logits, rtol=1e-4, atol=1e-4)
    model(input_ids=ids)
    assert sorted(captured) == [1, 4]  # the hook is gone


def test_capture_ends_with_an_exception():
    scorer = Scorer(tiny_model())
    with pytest.raises(RuntimeError, match="in between"), scorer.capture([0], 2):
        raise RuntimeError("in between")
    assert not scorer.body._forward_hooks


def test_model_without_a_backbone_is_refused():
    model = tiny_model()
    forward, backbone = model.forward, model.model.forward
    # A head that goes around the backbone it names
    model.forward = lambda **kwargs: (setattr(model.model, "forward", backbone), forward(**kwargs))[1]
    with pytest.raises(ValueError, match="LlamaForCausalLM.*tail_monitor=False"):
        Scorer(model)
