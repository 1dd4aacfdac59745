"""What sparse rollouts do not support is refused by name, before a token is sampled; what is accepted runs rightly."""

import logging

import pytest
import torch
from peft import PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, Gemma3Config, LlamaConfig

from rollouts import SPARSE, endless, engine_of, logprobs, random_prompts, sampling
from sparrow_trl.rollout import RolloutEngine, UnsupportedModelError, check_model_config, support
from sparrow_trl.sparsity import SparsitySchedule
from tiny import tiny_config, tiny_model


SMALL = {"vocab_size": 261, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def refusal(model):
    with pytest.raises(UnsupportedModelError) as error:
        RolloutEngine(model, SPARSE)
    message = str(error.value)
    assert isinstance(error.value, ValueError)
    assert f"'{model.config.model_type}'" in message
    assert message.endswith("Set `sparse_schedule=None` to train without sparse rollouts, as TRL does.")
    return message


# Model type -> what the refusal has to say. These are known from the config.
BY_CONFIG = {
    "deepseek_v3": "multi-head latent attention (kv_lora_rank=32)",
    "qwen3_next": "its layers include linear_attention",
    "falcon_h1": "its layers include hybrid",
    "mamba": "its layers include linear_attention",
    "recurrent_gemma": "its layers include linear_attention",
    "llama4_text": "its layers include chunked_attention",
}


@pytest.mark.parametrize("model_type", BY_CONFIG)
def test_refused_by_the_config_alone(model_type):
    config = tiny_config(model_type)
    with pytest.raises(UnsupportedModelError) as error:
        check_model_config(config)
    assert f"'{model_type}'" in str(error.value) and BY_CONFIG[model_type] in str(error.value)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_next", "falcon_h1", "mamba", "llama4_text"])
def test_refused_by_the_config_when_an_engine_is_built(model_type, monkeypatch):
    monkeypatch.setattr(support, "ModelRunner", None)  # nothing is run
    assert BY_CONFIG[model_type] in refusal(tiny_model(model_type))


def short_convolutions():
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model("lfm2", **SMALL, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=2, layer_types=["conv", "full_attention"])
    )  # fmt: skip


def encoder_decoder(model_type, **sizes):
    config = AutoConfig.for_model(model_type, **SMALL, decoder_start_token_id=0, **sizes)
    return AutoModelForSeq2SeqLM.from_config(config)


ENCODER_DECODERS = {
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    "bart": {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 128,
    },
}  # fmt: skip


def test_short_convolutions_are_refused():
    assert "its layers include conv" in refusal(short_convolutions())


@pytest.mark.parametrize("model_type", ENCODER_DECODERS)
def test_encoder_decoders_are_refused(model_type):
    assert "encoder-decoder" in refusal(encoder_decoder(model_type, **ENCODER_DECODERS[model_type]))


def test_models_that_take_images_are_refused():
    config = Gemma3Config(text_config=tiny_config("gemma3_text"))
    with pytest.raises(UnsupportedModelError, match="'gemma3' models: it takes images or audio; load its text model"):
        check_model_config(config)
    check_model_config(config.text_config)


# Model type -> what the refusal has to say. These take a trial to find out.
BY_TRIAL = {
    "gpt_oss": ["attention sinks (`s_aux`)"],
    "stablelm": ["a trial decode failed", "did not receive the keyword argument `sparrow`"],
    "nemotron": ["a trial decode failed", "did not receive the keyword argument `sparrow`"],
}


@pytest.mark.parametrize("model_type", BY_TRIAL)
def test_refused_by_trial(model_type):
    message = refusal(tiny_model(model_type))
    assert all(part in message for part in BY_TRIAL[model_type])


def causal_lm(model_type, **sizes):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SMALL, **sizes))


@pytest.mark.parametrize(
    "model_type, sizes",
    [
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
        ("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}),
        ("falcon", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}),
    ],
)  # fmt: skip
def test_models_that_do_not_reach_the_attention_interface_are_refused(model_type, sizes):
    refusal(causal_lm(model_type, **sizes))


@pytest.mark.parametrize("config_class", [PromptTuningConfig, PrefixTuningConfig, PromptEncoderConfig])
def test_learnt_prompts_are_refused(config_class):
    model = get_peft_model(
        tiny_model(num_hidden_layers=2), config_class(task_type="CAUSAL_LM", num_virtual_tokens=3), adapter_name="hint"
    )
    with pytest.raises(
        UnsupportedModelError, match=r"adapter 'hint' \(peft_type=.*\) puts virtual tokens before the prompt. Use LoRA"
    ):
        RolloutEngine(model, SPARSE)


def test_a_difference_is_refused_with_its_size_and_the_kinds_of_layers():
    """A model whose layers look at how many tokens there are, which a paged decode does not tell them."""
    model = tiny_model("gemma3_text")
    model.model.layers[2].register_forward_hook(lambda module, args, output: output * (1 + 0.1 * output.shape[1]))
    message = refusal(model)
    assert "(full_attention, sliding_attention)" in message
    assert "logits of a trial decode differ from the model's own forward by" in message
    assert "limit 0.001" in message


def test_check_support_false_skips_the_comparison_only():
    model = tiny_model(num_hidden_layers=2)
    model.model.layers[1].register_forward_hook(lambda module, args, output: output * (1 + 0.1 * output.shape[1]))
    RolloutEngine(model, SPARSE, check_support=False)
    for model_type in ("deepseek_v3", "gpt_oss", "nemotron"):
        with pytest.raises(UnsupportedModelError):
            RolloutEngine(tiny_model(model_type), SPARSE, check_support=False)


def test_sliding_windows_of_a_probed_length_are_crossed(monkeypatch):
    """The trial is longer than the window: a model whose mask slides although its layers do not say so is refused."""
    config = LlamaConfig(**tiny_config("llama").to_dict())
    config.sliding_window = 30
    model = AutoModelForCausalLM.from_config(config)
    lengths = []

    class Runner(support.ModelRunner):
        def run(self, pieces, *args, **kwargs):
            lengths.append(pieces[0].stop)
            return super().run(pieces, *args, **kwargs)

    monkeypatch.setattr(support, "ModelRunner", Runner)
    RolloutEngine(model, SPARSE)
    assert max(lengths) > 60


@pytest.fixture
def warnings_of_the_library():
    """Texts of the warnings that are logged meanwhile."""
    texts = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logger = support.logger
    type(logger).warning_once.cache_clear()
    logger.addHandler(handler)
    yield texts
    logger.removeHandler(handler)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_mixtures_of_experts_run_with_one_warning(model_type, warnings_of_the_library):
    model = endless(model_type, num_local_experts=4, num_experts_per_tok=2)
    prompts = random_prompts(3, 30)
    for schedule in (SparsitySchedule.dense(), SPARSE):
        engine = RolloutEngine(model, schedule, progress_bar=False)
        output = engine.generate(prompts, sampling(12))
        for prompt, completion, found in zip(prompts, output.completion_ids, output.logprobs, strict=True):
            if schedule.is_dense:
                expected = logprobs(model, prompt, completion)
            else:
                expected = engine.logprobs([prompt + completion], [len(prompt)])[0].double()
            torch.testing.assert_close(torch.tensor(found).double(), expected, atol=1e-4, rtol=0)
    assert len(warnings_of_the_library) == 1
    assert f"'{model_type}' is a mixture of experts" in warnings_of_the_library[0]


def test_dense_models_run_without_a_warning(warnings_of_the_library):
    for model_type in ("llama", "gemma3_text", "gpt2"):
        RolloutEngine(tiny_model(model_type), SPARSE)
    assert warnings_of_the_library == []


# Layers that slide, with windows too long for the trial to cross.
LONG_WINDOW = 600
LONG_WINDOWS = {
    "mistral": {},
    "starcoder2": {},
    "phi3": {},
    "ministral": {},
    "gemma2": {},
    "gemma3_text": {},
    "cohere2": {},
    "exaone4": {},
    "olmo3": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "phimoe": {},
    "doge": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"use_sliding_window": True, "num_experts": 4, "shared_expert_intermediate_size": 32},
}


@pytest.mark.parametrize("model_type", LONG_WINDOWS)
def test_long_sliding_windows_are_exact_or_refused(model_type):
    sizes = {"num_hidden_layers": 2, "sliding_window": LONG_WINDOW, **LONG_WINDOWS[model_type]}
    if model_type not in ("mistral", "starcoder2", "phi3", "qwen2", "phimoe", "doge", "olmoe", "qwen2_moe"):
        sizes["layer_types"] = ["sliding_attention", "full_attention"]
    model = endless(model_type, **sizes)
    try:
        engine = engine_of(model, SparsitySchedule.dense(), check_support=True)
    except UnsupportedModelError:
        return
    (prompt,) = random_prompts(LONG_WINDOW + 50)
    output = engine.generate([prompt], sampling(4))
    expected = logprobs(model, prompt, output.completion_ids[0])
    torch.testing.assert_close(torch.tensor(output.logprobs[0]).double(), expected, atol=1e-4, rtol=0)


def test_a_window_that_only_the_attention_function_is_told_of_is_refused():
    """OLMoE passes `config.sliding_window` on, but its mask shows the whole past."""
    model = endless("olmoe", num_experts=4, num_experts_per_tok=2, sliding_window=LONG_WINDOW)
    with pytest.raises(
        UnsupportedModelError, match="'olmoe' models with sliding_window=600: .* masks .* do not slide"
    ):
        engine_of(model, SparsitySchedule.dense(), check_support=True)


SHORT = {"original_max_position_embeddings": 64, "rope_theta": 1e4, "factor": 4.0}
ROPES = {
    "longrope": ("phi3", {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, **SHORT}),
    "dynamic": ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    "yarn": ("llama", {"rope_type": "yarn", **SHORT}),
    "llama3": ("llama", {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SHORT}),
}


@pytest.mark.parametrize("rope", ROPES)
def test_ropes_that_look_at_the_length_are_exact_or_refused(rope):
    """A long sequence in the batch, or a sequence that grows, must not change the rotations of others or of the past."""
    model_type, parameters = ROPES[rope]
    lengths = {"max_position_embeddings": 256, "original_max_position_embeddings": 64}
    model = endless(model_type, rope_parameters=parameters, **lengths)
    prompts = random_prompts(20, 100, 60)
    try:
        engine = engine_of(model, SparsitySchedule.dense(), check_support=True)
        output = engine.generate(prompts, sampling(10))
    except ValueError:
        return
    for prompt, completion, found in zip(prompts, output.completion_ids, output.logprobs, strict=True):
        expected = logprobs(model, prompt, completion)
        torch.testing.assert_close(torch.tensor(found).double(), expected, atol=1e-4, rtol=0)
