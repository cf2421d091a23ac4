"""Qwen3 models, dense and MoE."""

from __future__ import annotations

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
    refuse_common_variants,
)

if TYPE_CHECKING:
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
    reader.only("use_sliding_window", False)
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


def _titan() -> TitanFamily:
    from forgeasync.models.qwen3.titan import QWEN3

    return QWEN3


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
