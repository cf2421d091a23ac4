"""Qwen3 models, dense and MoE."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from forgeasync.config import ModelFacts
from forgeasync.models.family import (
    ConfigReader,
    Family,
    Shape,
    attention_shapes,
    common_sizes,
    expert_shapes,
    network_shapes,
    refuse_attention_variants,
    refuse_common_variants,
)

if TYPE_CHECKING:
    from torchtitan.models.common.decoder import TransformerBlock

    from forgeasync.models.titan_family import TitanFamily


def _read_dense(reader: ConfigReader) -> ModelFacts:
    _refuse_variants(reader)
    num_layers = reader.integer("num_hidden_layers")
    return ModelFacts(
        model_type="qwen3",
        num_layers=num_layers,
        hidden_size=reader.integer("hidden_size"),
        num_heads=reader.integer("num_attention_heads"),
        num_kv_heads=reader.integer("num_key_value_heads"),
        head_dim=reader.integer("head_dim"),
        num_experts=0,
        top_k=0,
        vocab_size=reader.integer("vocab_size"),
        expert_hidden_size=0,
        max_position_embeddings=reader.integer("max_position_embeddings"),
        tie_word_embeddings=reader.boolean("tie_word_embeddings"),
        rope_theta=reader.rope_theta(),
        rms_norm_eps=reader.number("rms_norm_eps"),
        num_dense_layers=num_layers,
        dense_hidden_size=reader.integer("intermediate_size"),
    )


def _read_moe(reader: ConfigReader) -> ModelFacts:
    _refuse_variants(reader)
    reader.only("norm_topk_prob", True, required="absent means false")
    reader.only("decoder_sparse_step", 1)
    reader.only("mlp_only_layers", [], None)
    # Layers without experts would have this size.
    reader.ignore("intermediate_size")
    return ModelFacts(
        model_type="qwen3_moe",
        num_layers=reader.integer("num_hidden_layers"),
        hidden_size=reader.integer("hidden_size"),
        num_heads=reader.integer("num_attention_heads"),
        num_kv_heads=reader.integer("num_key_value_heads"),
        head_dim=reader.integer("head_dim"),
        # transformers 5 writes num_local_experts, earlier versions num_experts.
        num_experts=reader.integer("num_experts", "num_local_experts"),
        top_k=reader.integer("num_experts_per_tok"),
        vocab_size=reader.integer("vocab_size"),
        expert_hidden_size=reader.integer("moe_intermediate_size"),
        max_position_embeddings=reader.integer("max_position_embeddings"),
        tie_word_embeddings=reader.boolean("tie_word_embeddings"),
        rope_theta=reader.rope_theta(),
        rms_norm_eps=reader.number("rms_norm_eps"),
    )


def _refuse_variants(reader: ConfigReader) -> None:
    refuse_common_variants(reader)
    refuse_attention_variants(reader)
    reader.only("use_sliding_window", False)
    reader.ignore("sliding_window", "max_window_layers")
    reader.rope_type("default")


def _dense_sizes(facts: ModelFacts) -> dict[str, object]:
    return common_sizes(facts) | {"head_dim": facts.head_dim, "intermediate_size": facts.dense_hidden_size}


def _moe_sizes(facts: ModelFacts) -> dict[str, object]:
    return common_sizes(facts) | {
        "head_dim": facts.head_dim,
        "num_experts": facts.num_experts,
        "num_local_experts": facts.num_experts,
        "num_experts_per_tok": facts.top_k,
        "moe_intermediate_size": facts.expert_hidden_size,
        # No layer has this size, but transformers and vLLM need the key.
        "intermediate_size": facts.expert_hidden_size,
    }


def _layer_shapes(facts: ModelFacts, layer: int) -> dict[str, Shape]:
    shapes = attention_shapes(facts)
    shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (facts.head_dim,)
    if facts.num_experts:
        return shapes | expert_shapes(facts)
    return shapes | network_shapes("mlp", hidden_size=facts.hidden_size, inner_size=facts.dense_hidden_size)


def _titan_layers(facts: ModelFacts, attention_backend: str) -> list[TransformerBlock.Config]:
    from torchtitan.models.common import CosSinRoPE
    from torchtitan.models.qwen3 import _build_qwen3_layers, _build_qwen3_moe_layers

    from forgeasync.models.titan_family import set_norm_eps

    rope = CosSinRoPE.Config(
        dim=facts.head_dim, max_seq_len=facts.max_position_embeddings, theta=facts.rope_theta
    )
    if facts.num_experts:
        layers = _build_qwen3_moe_layers(
            n_layers=facts.num_layers,
            dim=facts.hidden_size,
            n_heads=facts.num_heads,
            n_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            moe_hidden_dim=facts.expert_hidden_size,
            num_experts=facts.num_experts,
            top_k=facts.top_k,
            # Separate q, k and v give parameters the names and shapes of the Hugging Face files.
            fuse_qkv=False,
            attn_backend=attention_backend,
            moe_comm_backend="standard",
            rope=rope,
        )
    else:
        layers = _build_qwen3_layers(
            n_layers=facts.num_layers,
            dim=facts.hidden_size,
            n_heads=facts.num_heads,
            n_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            hidden_dim=facts.dense_hidden_size,
            fuse_qkv=False,
            attn_backend=attention_backend,
            rope=rope,
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
    sizes=_dense_sizes,
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
