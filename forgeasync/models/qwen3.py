"""Qwen3 and Qwen3.5 models, dense and MoE. TorchTitan's part of Qwen3.5 is in ``qwen3_5``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from forgeasync.config import LinearAttention, ModelFacts
from forgeasync.models.family import (
    DENSE_KEYS,
    MOE_KEYS,
    ConfigReader,
    Family,
    Shape,
    attention_shapes,
    dense_shapes,
    expert_shapes,
    network_shapes,
    norm_shapes,
    read_facts,
    refuse_attention_variants,
    refuse_basic_variants,
    refuse_common_variants,
    sizes_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchtitan.models.common.decoder import TransformerBlock

    from forgeasync.models.titan_family import TitanFamily


def _read_dense(reader: ConfigReader) -> ModelFacts:
    _refuse_variants(reader)
    is_tied = reader.boolean("tie_word_embeddings")
    return read_facts(reader, "qwen3", DENSE_KEYS, tie_word_embeddings=is_tied)


def _read_moe(reader: ConfigReader) -> ModelFacts:
    _refuse_variants(reader)
    reader.only("norm_topk_prob", True, required="absent means false")
    reader.only("decoder_sparse_step", 1)
    reader.only("mlp_only_layers", [], None)
    # Layers without experts would have this size.
    reader.ignore("intermediate_size")
    return read_facts(
        reader,
        "qwen3_moe",
        MOE_KEYS,
        # transformers 5 writes num_local_experts, earlier versions num_experts.
        num_experts=reader.integer("num_experts", "num_local_experts"),
        tie_word_embeddings=reader.boolean("tie_word_embeddings"),
    )


def _refuse_variants(reader: ConfigReader) -> None:
    refuse_common_variants(reader)
    refuse_attention_variants(reader)
    reader.only("use_sliding_window", False)
    reader.ignore("sliding_window", "max_window_layers")
    reader.rope_type("default")


def _moe_sizes(facts: ModelFacts) -> dict[str, object]:
    return sizes_of(facts, MOE_KEYS) | {
        "num_local_experts": facts.num_experts,
        # No layer has this size, but transformers and vLLM need the key.
        "intermediate_size": facts.expert_hidden_size,
    }


def _layer_shapes(facts: ModelFacts, layer: int) -> dict[str, Shape]:
    shapes = attention_shapes(facts)
    shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (facts.head_dim,)
    if facts.num_experts:
        return shapes | expert_shapes(facts)
    return shapes | dense_shapes(facts)


_LINEAR_KEYS = {
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_head_dim": "linear_key_head_dim",
    "value_head_dim": "linear_value_head_dim",
    "width": "linear_conv_kernel_dim",
}
_GATED_KEYS = MOE_KEYS | {"gated_hidden_size": "shared_expert_intermediate_size"}


def _read_text(reader: ConfigReader, model_type: str, is_tied: bool, prefix: str) -> ModelFacts:
    """Read the decoder of a Qwen3.5."""
    refuse_basic_variants(reader)
    reader.only("attention_bias", False)
    reader.rope_type("default")
    # Positions of images, and layers of multi-token prediction.
    reader.ignore("mrope_section", "mrope_interleaved", "mtp_num_hidden_layers")
    reader.ignore("mtp_use_dedicated_embeddings", "full_attention_interval")
    reader.only("attn_output_gate", True)
    reader.only("output_gate_type", "silu", "swish")
    reader.only("mlp_only_layers", [], None)
    reader.only("mamba_ssm_dtype", "float32")
    keys = _GATED_KEYS if "moe" in model_type else DENSE_KEYS
    facts = read_facts(reader, model_type, keys, tie_word_embeddings=is_tied, checkpoint_prefix=prefix)
    linear = LinearAttention(
        **reader.integers(_LINEAR_KEYS),
        full_layers=reader.full_attention_layers(facts.num_layers),
        rotary_dim=int(facts.head_dim * reader.partial_rotary_factor(default=0.25)),
    )
    if linear.num_value_heads % linear.num_key_heads:
        reader.add_problem(
            f"has linear_num_key_heads = {linear.num_key_heads}; must divide linear_num_value_heads = "
            f"{linear.num_value_heads}"
        )
    return replace(facts, linear=linear)


def _read_text_only(model_type: str, reader: ConfigReader) -> ModelFacts:
    return _read_text(reader, model_type, reader.boolean("tie_word_embeddings", default=False), "model.")


def _read_multimodal(model_type: str, reader: ConfigReader) -> ModelFacts:
    """Read the decoder of a checkpoint that also has a vision tower."""
    text = reader.nested("text_config")
    reader.ignore("vision_config", "image_token_id", "video_token_id")
    reader.ignore("vision_start_token_id", "vision_end_token_id", "vocab_size")
    text.only("model_type", f"{model_type}_text", required="the decoder's")
    is_tied = reader.boolean("tie_word_embeddings", default=False)
    # transformers uses the outer one, and vLLM the decoder's.
    text.only("tie_word_embeddings", is_tied, required="as outside of text_config" if is_tied else "")
    return _read_text(text, model_type, is_tied, "model.language_model.")


def _text_sizes(facts: ModelFacts) -> dict[str, object]:
    assert facts.linear is not None
    kinds = ["linear_attention"] * facts.num_layers
    for index in facts.linear.full_layers:
        kinds[index] = "full_attention"
    sizes = sizes_of(facts, _GATED_KEYS if facts.num_experts else DENSE_KEYS)
    return sizes | sizes_of(facts.linear, _LINEAR_KEYS) | {"layer_types": kinds}


def _text_layer_shapes(facts: ModelFacts, layer: int) -> dict[str, Shape]:
    assert facts.linear is not None
    linear, hidden = facts.linear, facts.hidden_size
    if layer in linear.full_layers:
        shapes = attention_shapes(facts)
        # Each head's query is followed by the gate of its output.
        shapes["self_attn.q_proj.weight"] = (2 * facts.num_heads * facts.head_dim, hidden)
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (facts.head_dim,)
    else:
        heads, values = linear.num_value_heads, linear.num_value_heads * linear.value_head_dim
        shapes = norm_shapes(facts) | {
            "linear_attn.in_proj_qkv.weight": (linear.num_channels, hidden),
            "linear_attn.in_proj_z.weight": (values, hidden),
            "linear_attn.in_proj_b.weight": (heads, hidden),
            "linear_attn.in_proj_a.weight": (heads, hidden),
            "linear_attn.conv1d.weight": (linear.num_channels, 1, linear.width),
            "linear_attn.A_log": (heads,),
            "linear_attn.dt_bias": (heads,),
            "linear_attn.norm.weight": (linear.value_head_dim,),
            "linear_attn.out_proj.weight": (hidden, values),
        }
    if not facts.num_experts:
        return shapes | dense_shapes(facts)
    shared = network_shapes("mlp.shared_expert", hidden_size=hidden, inner_size=facts.gated_hidden_size)
    return shapes | expert_shapes(facts) | shared | {"mlp.shared_expert_gate.weight": (1, hidden)}


def _titan_layers(facts: ModelFacts, attention_backend: str) -> list[TransformerBlock.Config]:
    from torchtitan.models.common import CosSinRoPE
    from torchtitan.models.qwen3 import _build_qwen3_layers, _build_qwen3_moe_layers

    from forgeasync.models.titan_family import rope_config, set_norm_eps

    build: Callable[..., list[TransformerBlock.Config]] = _build_qwen3_layers
    own: dict[str, object] = {"hidden_dim": facts.dense_hidden_size}
    if facts.num_experts:
        build = _build_qwen3_moe_layers
        own = {
            "moe_hidden_dim": facts.expert_hidden_size,
            "num_experts": facts.num_experts,
            "top_k": facts.top_k,
            "moe_comm_backend": "standard",
        }
    layers = build(
        n_layers=facts.num_layers,
        dim=facts.hidden_size,
        n_heads=facts.num_heads,
        n_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        # Separate q, k and v give parameters the names and shapes of the Hugging Face files.
        fuse_qkv=False,
        attn_backend=attention_backend,
        rope=rope_config(CosSinRoPE, facts),
        **own,
    )
    for layer in layers:
        set_norm_eps(layer, facts)
        layer.attention.qk_norm = replace(layer.attention.qk_norm, eps=facts.rms_norm_eps)
        if layer.moe is not None:
            # Qwen3 has no load-balancing bias, so the generator could not use a trained one.
            layer.moe.load_balance_coeff = None
    return layers


def _titan() -> TitanFamily:
    from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    from forgeasync.models.titan_family import TitanFamily

    return TitanFamily(
        model=Qwen3Model,
        layers=_titan_layers,
        parallelize=parallelize_qwen3,
        adapter=Qwen3StateDictAdapter,
    )


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    read=_read_dense,
    sizes=partial(sizes_of, keys=DENSE_KEYS),
    layer_shapes=_layer_shapes,
    titan=_titan,
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read=_read_moe,
    sizes=_moe_sizes,
    layer_shapes=_layer_shapes,
    titan=_titan,
)


def _text_titan() -> TitanFamily:
    from forgeasync.models.qwen3_5 import titan_family

    return titan_family()


def _qwen3_5(model_type: str, architecture: str) -> Family:
    is_text = model_type.endswith("_text")
    return Family(
        model_type=model_type,
        architecture=architecture,
        read=partial(_read_text_only if is_text else _read_multimodal, model_type),
        sizes=_text_sizes,
        layer_shapes=_text_layer_shapes,
        titan=_text_titan,
        # The vision tower, and layers for multi-token prediction.
        unused=("model.visual.*", "mtp.*"),
    )


QWEN3_5 = (
    _qwen3_5("qwen3_5_text", "Qwen3_5ForCausalLM"),
    _qwen3_5("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    _qwen3_5("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    _qwen3_5("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
)
"""The decoder alone, and checkpoints with a vision tower, which is not used."""
