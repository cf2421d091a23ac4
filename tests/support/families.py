"""Tiny random models of every family, as Hugging Face folders written by transformers itself."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2Model,
    Qwen3Config,
    Qwen3MoeConfig,
)

from forgeasync.models import build_tokenizer, character_tokenizer, save_tokenizer

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 40,
}
YARN_SCALING = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.8,
    "mscale_all_dim": 0.8,
    "original_max_position_embeddings": 40,
}

TEXTS = (
    "State the final answer to the following arithmetic problem: 0123456789 + 4 - 5 =",
    "0123456789+1=2;3-4=5#6",
)
"""Their characters are the tokens."""

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    # Another one than any of TorchTitan's own.
    "rms_norm_eps": 3e-5,
}


# The heads of Llamas have another size than hidden_size / num_attention_heads.
_DENSE = _COMMON | {"num_hidden_layers": 2, "head_dim": 32}
_MOE = _DENSE | {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_DEEPSEEK = _COMMON | {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 48,
    "num_nextn_predict_layers": 0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}

VARIANTS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3": partial(Qwen3Config, **_DENSE, tie_word_embeddings=False),
    "qwen3_tied": partial(Qwen3Config, **_DENSE, tie_word_embeddings=True),
    "qwen3_moe": partial(Qwen3MoeConfig, **_MOE, tie_word_embeddings=False),
    "llama": partial(LlamaConfig, **_DENSE, tie_word_embeddings=True),
    "llama3_rope": partial(LlamaConfig, **_DENSE, rope_parameters=LLAMA3_SCALING),
    "deepseek_v3": partial(DeepseekV3Config, **_DEEPSEEK),
    "deepseek_v3_yarn": partial(DeepseekV3Config, **_DEEPSEEK, rope_parameters=YARN_SCALING),
    # As Moonlight has it: no query latents, one group.
    "deepseek_v3_one_group": partial(
        DeepseekV3Config, **_DEEPSEEK | {"q_lora_rank": None, "n_group": 1, "topk_group": 1}
    ),
}
"""transformers' config of every kind of model that is supported."""


def write_family(folder: Path, variant: str, *, seed: int = 0) -> Path:
    """A model of ``VARIANTS`` with random weights (biases of routers too) and the tests' tokenizer."""
    tokenizer = build_tokenizer(TEXTS)
    config = VARIANTS[variant]()
    config.vocab_size = len(tokenizer)
    config.bos_token_id, config.eos_token_id = None, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    config.dtype = torch.float32
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.06)
            else:
                parameter.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                # Wide enough to change many choices.
                buffer.normal_(std=0.1)
    model.save_pretrained(folder)
    generation = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    save_tokenizer(tokenizer, folder)
    return folder


STEP_TAG = "<extra_0>"
"""What ends a step for ``write_process_reward_model``."""


def write_process_reward_model(
    folder: Path, *, architecture: str = "Qwen2ForProcessRewardModel", nan_at: str | None = None
) -> Path:
    """Two layers of a random Qwen2 with a head that scores steps, one token per character.

    A text with the character ``nan_at`` makes its scores NaN.
    """
    tokenizer = character_tokenizer(chat_template=True)
    tokenizer.add_special_tokens({"additional_special_tokens": [STEP_TAG]})
    config = Qwen2Config(
        architectures=[architecture],
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    torch.manual_seed(0)
    num_classes = 2 if architecture == "Qwen2ForProcessRewardModel" else 1
    model = Qwen2Model(config).float()
    head = process_reward_head(num_classes)
    with torch.no_grad():
        for parameter in (*model.parameters(), *head.parameters()):
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
        if nan_at is not None:
            model.embed_tokens.weight[tokenizer.convert_tokens_to_ids(nan_at)] = float("nan")
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"score.{name}": tensor for name, tensor in head.state_dict().items()}
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(tokenizer, folder)
    return folder


def process_reward_head(num_classes: int) -> torch.nn.Sequential:
    """The head of ``Qwen2ForProcessRewardModel``, as Qwen's own modeling_qwen2_rm.py has it."""
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, num_classes))
