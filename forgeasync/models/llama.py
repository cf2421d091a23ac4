"""Llama-architecture models: Llama 2 and 3, SmolLM2 and others of the same model_type."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forgeasync.config import Llama3Rope, ModelFacts
from forgeasync.models.family import (
    ConfigReader,
    Family,
    Shape,
    attention_shapes,
    common_sizes,
    network_shapes,
    refuse_attention_variants,
    refuse_common_variants,
)

if TYPE_CHECKING:
    from torchtitan.models.common import CosSinRoPE, TransformerBlock

    from forgeasync.models.titan_family import TitanFamily


def _read(reader: ConfigReader) -> ModelFacts:
    refuse_common_variants(reader)
    refuse_attention_variants(reader)
    reader.only("mlp_bias", False)
    reader.only("rope_interleaved", False)
    num_layers, hidden_size = reader.integer("num_hidden_layers"), reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads")
    return ModelFacts(
        model_type="llama",
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=reader.integer("num_key_value_heads", default=num_heads),
        head_dim=reader.integer("head_dim", default=hidden_size // num_heads),
        num_experts=0,
        top_k=0,
        vocab_size=reader.integer("vocab_size"),
        expert_hidden_size=0,
        max_position_embeddings=reader.integer("max_position_embeddings"),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", default=False),
        rope_theta=reader.rope_theta(),
        rms_norm_eps=reader.number("rms_norm_eps"),
        num_dense_layers=num_layers,
        dense_hidden_size=reader.integer("intermediate_size"),
        rope_scaling=_read_scaling(reader),
    )


def _read_scaling(reader: ConfigReader) -> Llama3Rope | None:
    if reader.rope_type("default", "llama3") == "default":
        return None
    return Llama3Rope(
        factor=reader.rope_number("factor"),
        low_freq_factor=reader.rope_number("low_freq_factor"),
        high_freq_factor=reader.rope_number("high_freq_factor"),
        original_max_position_embeddings=int(reader.rope_number("original_max_position_embeddings")),
    )


def _sizes(facts: ModelFacts) -> dict[str, object]:
    return common_sizes(facts) | {"head_dim": facts.head_dim, "intermediate_size": facts.dense_hidden_size}


def _layer_shapes(facts: ModelFacts, layer: int) -> dict[str, Shape]:
    return attention_shapes(facts) | network_shapes(
        "mlp", hidden_size=facts.hidden_size, inner_size=facts.dense_hidden_size
    )


def _titan_rope(facts: ModelFacts) -> CosSinRoPE.Config:
    from torchtitan.models.common import CosSinRoPE

    from forgeasync.models.titan_family import Llama3CosSinRoPE

    scaling = facts.rope_scaling
    if scaling is None:
        return CosSinRoPE.Config(
            dim=facts.head_dim, max_seq_len=facts.max_position_embeddings, theta=facts.rope_theta
        )
    assert isinstance(scaling, Llama3Rope)
    return Llama3CosSinRoPE.Config(
        dim=facts.head_dim,
        max_seq_len=facts.max_position_embeddings,
        theta=facts.rope_theta,
        scaling="llama",
        scaling_factor=scaling.factor,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        original_max_position_embeddings=scaling.original_max_position_embeddings,
    )


def _titan_layers(facts: ModelFacts, attention_backend: str) -> list[TransformerBlock.Config]:
    """Return the configs of all layers, in the rotate-half layout of Hugging Face files."""
    from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3TransformerBlock

    from forgeasync.models.titan_family import LINEAR_INIT, norm_config

    # TorchTitan's own builder has no parameter head_dim, which some of these models set.
    return [
        Llama3TransformerBlock.Config(
            attention_norm=norm_config(facts.hidden_size, facts),
            ffn_norm=norm_config(facts.hidden_size, facts),
            attention=make_gqa_config(
                dim=facts.hidden_size,
                n_heads=facts.num_heads,
                n_kv_heads=facts.num_kv_heads,
                head_dim=facts.head_dim,
                wqkv_param_init=LINEAR_INIT,
                wo_param_init=LINEAR_INIT,
                inner_attention=get_attention_config(attention_backend),
                fuse_qkv=False,
                rope=_titan_rope(facts),
            ),
            feed_forward=make_ffn_config(
                dim=facts.hidden_size,
                hidden_dim=facts.dense_hidden_size,
                w1_param_init=LINEAR_INIT,
                w2w3_param_init=LINEAR_INIT,
            ),
        )
        for _ in range(facts.num_layers)
    ]


def _titan() -> TitanFamily:
    from torchtitan.models.llama3 import Llama3Model, parallelize_llama
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

    from forgeasync.models.titan_family import TitanFamily

    return TitanFamily(
        model=Llama3Model,
        layers=_titan_layers,
        parallelize=parallelize_llama,
        adapter=Llama3StateDictAdapter,
    )


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    read=_read,
    sizes=_sizes,
    layer_shapes=_layer_shapes,
    titan=_titan,
)
