"""Tiny random models of every family, as Hugging Face folders written by transformers itself."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2Model,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

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
GPT_OSS_SCALING = {key: value for key, value in YARN_SCALING.items() if "mscale" not in key} | {
    "truncate": False
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

_GLM = _COMMON | {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 6,
    "head_dim": 32,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "attention_bias": True,
    "use_qk_norm": True,
    "num_nextn_predict_layers": 1,
}

_HYBRID = _COMMON | {
    "num_hidden_layers": 5,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 3],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 40,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
_HYBRID_MOE = {key: value for key, value in _HYBRID.items() if key != "intermediate_size"} | {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}

_GPT_OSS = _COMMON | {
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "head_dim": 32,
    "num_local_experts": 10,
    "num_experts_per_tok": 3,
    "sliding_window": 17,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_parameters": GPT_OSS_SCALING,
}

VARIANTS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3": partial(Qwen3Config, **_DENSE, tie_word_embeddings=False),
    "qwen3_tied": partial(Qwen3Config, **_DENSE, tie_word_embeddings=True),
    "qwen3_moe": partial(Qwen3MoeConfig, **_MOE, tie_word_embeddings=False),
    "llama": partial(LlamaConfig, **_DENSE, tie_word_embeddings=True),
    "llama3_rope": partial(LlamaConfig, **_DENSE, rope_parameters=LLAMA3_SCALING),
    "deepseek_v3": partial(DeepseekV3Config, **_DEEPSEEK),
    "deepseek_v3_yarn": partial(
        DeepseekV3Config, **_DEEPSEEK | {"num_nextn_predict_layers": 1}, rope_parameters=YARN_SCALING
    ),
    # As Moonlight has it: no query latents, one group.
    "deepseek_v3_one_group": partial(
        DeepseekV3Config, **_DEEPSEEK | {"q_lora_rank": None, "n_group": 1, "topk_group": 1}
    ),
    "glm4_moe": partial(Glm4MoeConfig, **_GLM),
    # As GLM-4.5-Air has it: no norms of heads, one group.
    "glm4_moe_air": partial(
        Glm4MoeConfig, **_GLM | {"use_qk_norm": False, "n_group": 1, "topk_group": 1, "n_routed_experts": 9}
    ),
    "gpt_oss": partial(GptOssConfig, **_GPT_OSS),
    # Windows of a token, and windows longer than any sequence, and rounded bounds of scaled dimensions.
    "gpt_oss_window_1": partial(GptOssConfig, **_GPT_OSS | {"sliding_window": 1}),
    "gpt_oss_window_200": partial(
        GptOssConfig,
        **_GPT_OSS | {"sliding_window": 200, "rope_parameters": GPT_OSS_SCALING | {"truncate": True}},
    ),
    # Its scaling of rotary frequencies, which changes at one wavelength, and its routing.
    "kimi_k2": partial(
        DeepseekV3Config,
        **_DEEPSEEK | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 2.827},
        rope_parameters=YARN_SCALING
        | {"rope_theta": 500.0, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "qwen3_5": partial(Qwen3_5TextConfig, **_HYBRID, tie_word_embeddings=True),
    "qwen3_5_moe": partial(Qwen3_5MoeTextConfig, **_HYBRID_MOE),
    "qwen3_5_vision": lambda: Qwen3_5Config(text_config=_HYBRID, vision_config=_VISION),
    "qwen3_5_moe_vision": lambda: Qwen3_5MoeConfig(text_config=_HYBRID_MOE, vision_config=_VISION),
}
"""transformers' config of every kind of model that is supported."""

_MODEL_TYPES = {"kimi_k2": "deepseek_v3"}
"""transformers' ``model_type`` of those that it does not have."""


_WITH_VISION: dict[type[PretrainedConfig], Any] = {
    Qwen3_5Config: Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig: Qwen3_5MoeForConditionalGeneration,
}


def config_json(variant: str) -> dict[str, Any]:
    """The config.json of a variant, of which transformers writes no ``architectures`` without a model."""
    config = VARIANTS[variant]()
    raw: dict[str, Any] = json.loads(config.to_json_string())
    if variant in _MODEL_TYPES:
        raw["model_type"] = variant
    if type(config) in _WITH_VISION:
        return raw | {"architectures": [_WITH_VISION[type(config)].__name__]}
    return raw | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]}


def transformers_config(raw: dict[str, Any]) -> PretrainedConfig:
    """A config.json as transformers reads it."""
    model_type = raw["model_type"]
    config: PretrainedConfig = AutoConfig.for_model(
        **raw | {"model_type": _MODEL_TYPES.get(model_type, model_type)}
    )
    return config


def load_family(folder: Path, **options: Any) -> Any:
    """transformers' model of a folder."""
    config = transformers_config(json.loads((folder / "config.json").read_text()))
    return AutoModelForCausalLM.from_pretrained(folder, config=config, **options)


def write_family(folder: Path, variant: str, *, seed: int = 0) -> Path:
    """A model of ``VARIANTS`` with random weights (biases of routers too) and the tests' tokenizer.

    With ``num_nextn_predict_layers`` the folder has some tensors of such a layer, in bfloat16.
    """
    tokenizer = build_tokenizer(TEXTS)
    config = VARIANTS[variant]()
    for one in (config, config.get_text_config()):
        one.vocab_size = len(tokenizer)
        one.bos_token_id, one.eos_token_id = None, tokenizer.eos_token_id
        one.pad_token_id = tokenizer.pad_token_id
        one.dtype = torch.float32
    torch.manual_seed(seed)
    model = _WITH_VISION.get(type(config), AutoModelForCausalLM.from_config)(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate_up_proj_bias"):
                # Wide enough that gpt-oss clamps many products.
                parameter.normal_(std=3.0)
            elif parameter.dim() > 1:
                parameter.normal_(std=0.06)
            elif name.endswith(".bias"):
                parameter.normal_(std=0.3)
            else:
                parameter.uniform_(0.5, 1.5)
        for name, parameter in model.named_parameters():
            if "linear_attn.conv1d" in name or "linear_attn.in_proj" in name:
                # Decays, betas and states would hardly depend on the token.
                parameter.mul_(5.0)
            elif "visual" not in name and name.endswith("norm.weight") and "qwen3_5" in config.model_type:
                # All but the one after linear attention are offsets from 1.
                parameter.sub_(0.0 if "linear_attn" in name else 1.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                # Wide enough to change many choices.
                buffer.normal_(std=0.1)
    model.save_pretrained(folder)
    if getattr(config, "num_nextn_predict_layers", 0):
        prefix = f"model.layers.{config.num_hidden_layers}"
        shapes = {
            "enorm": (64,),
            "eh_proj": (64, 128),
            "mlp.experts.0.up_proj": (32, 64),
            "shared_head.head": (9, 64),
        }
        tensors = {f"{prefix}.{name}.weight": torch.randn(shape).bfloat16() for name, shape in shapes.items()}
        file = folder / "model.safetensors"
        save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    if variant in _MODEL_TYPES:
        raw = json.loads((folder / "config.json").read_text()) | {"model_type": variant}
        (folder / "config.json").write_text(json.dumps(raw, indent=2))
    generation = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    save_tokenizer(tokenizer, folder)
    return folder


def write_mxfp4(folder: Path, variant: str) -> Path:
    """A gpt-oss whose experts are random in MXFP4, as the published ones are."""
    write_family(folder, variant)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 122, shape, generator=generator, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(raw))
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
