"""Tiny random models of many architectures and a tiny tokenizer: everything a test needs, offline and in milliseconds.

The weights are deterministic, and larger than transformers' default initialisation: with the default, attention scores
are so small that every attention pattern is flat, and a test of page selection would test nothing.
"""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast


SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for tool_call in message.tool_calls or [] %}
        {{- '<tool_call>{"name": "' + tool_call.function.name + '", "arguments": ' }}
        {{- tool_call.function.arguments | tojson }}
        {{- '}</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": ["<|im_end|>", "<|endoftext|>"], "content": "text"},
    },
}


def tiny_tokenizer(tools: bool = False) -> PreTrainedTokenizerFast:
    """One token a byte, five special tokens, a ChatML template that renders tool calls.

    With `tools=True` the tokenizer can also parse the tool calls of a completion, as TRL's tool loop wants.
    """
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS[:3])
    tokenizer.add_tokens(SPECIAL_TOKENS[3:])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        model_max_length=4096,
    )
    fast.chat_template = CHAT_TEMPLATE
    if tools:
        fast.response_template = RESPONSE_TEMPLATE
    return fast


# What an architecture needs on top of the shared sizes. Names are transformers' `model_type`.
_SPECIFIC = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": None},
    "ministral": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "gemma2": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 16,
    },
    "phi3": {"pad_token_id": 0},
    "olmo2": {},
    "olmo3": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.5},
    "cohere2": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2, "logit_scale": 0.5},
    "glm4": {"pad_token_id": 0},
    "starcoder2": {"sliding_window": None},
    "exaone4": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "hunyuan_v1_dense": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 4096},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0},
    # Refused: what each of them is for is in `docs/supported-models.md`.
    "gpt_oss": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "nemotron": {},
    "stablelm": {},
    "mamba": {"state_size": 8},
}

MODEL_TYPES = tuple(_SPECIFIC)

_QUERY_KEY_NORMS = ("q_norm.weight", "k_norm.weight", "query_layernorm.weight", "key_layernorm.weight")


def tiny_config(model_type: str, **overrides):
    """A configuration with 4 layers, 4 query heads, 2 KV heads and head dimension 16, unless `overrides` say otherwise."""
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
        "pad_token_id": SPECIAL_TOKENS.index("<|endoftext|>"),
    }
    return AutoConfig.for_model(model_type, **{**settings, **_SPECIFIC.get(model_type, {}), **overrides})


def tiny_model(model_type: str = "llama", seed: int = 0, **overrides) -> PreTrainedModel:
    """A random fp32 causal language model in eval mode: the same weights for the same arguments.

    Args:
        model_type (`str`): one of `MODEL_TYPES`, or any other model type of transformers that takes the usual sizes.
        seed (`int`): seed of the weights. The caller's random state is left alone.
        overrides: configuration values, for example `num_key_value_heads=4`.
    """
    config = tiny_config(model_type, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # Architectures initialise differently (some scale with depth, some ignore `initializer_range`), so draw every
        # matrix here. Norms, biases and single-dimension parameters keep the architecture's own initialisation.
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() >= 2 and "norm" not in name and "conv" not in name:
                torch.nn.init.normal_(parameter, std=config.initializer_range)
            elif name.endswith(_QUERY_KEY_NORMS):
                parameter.data.add_(0.7)  # normalised queries and keys: only this weight can sharpen the attention
    model.tie_weights()
    return model.eval()
