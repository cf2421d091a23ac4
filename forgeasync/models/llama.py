"""Llama-architecture models: Llama 2 and 3, SmolLM2 and others of the same model_type."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from forgeasync.config import Llama3Rope, ModelFacts
from forgeasync.models.family import (
    DENSE_KEYS,
    ConfigReader,
    Family,
    Shape,
    attention_shapes,
    dense_shapes,
    read_facts,
    refuse_attention_variants,
    refuse_common_variants,
    sizes_of,
)

if TYPE_CHECKING:
    from torchtitan.models.common import TransformerBlock

    from forgeasync.models.titan_family import TitanFamily


def _read(reader: ConfigReader) -> ModelFacts:
    refuse_common_variants(reader)
    refuse_attention_variants(reader)
    reader.only("mlp_bias", False)
    reader.only("rope_interleaved", False)
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    return read_facts(
        reader,
        "llama",
        DENSE_KEYS,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=reader.integer("num_key_value_heads", default=num_heads),
        head_dim=reader.integer("head_dim", default=hidden_size // num_heads),
        # Llama 2's files do not have the key.
        rope_theta=reader.rope_theta(default=10000.0),
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


def _layer_shapes(facts: ModelFacts, layer: int) -> dict[str, Shape]:
    return attention_shapes(facts) | dense_shapes(facts)


def _titan_layers(facts: ModelFacts, attention_backend: str) -> list[TransformerBlock.Config]:
    """Return the configs of all layers, in the rotate-half layout of Hugging Face files."""
    from torchtitan.models.common import CosSinRoPE
    from torchtitan.models.common.config_utils import get_attention_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3TransformerBlock

    from forgeasync.models.titan_family import (
        LINEAR_INIT,
        Llama3CosSinRoPE,
        network_config,
        norm_config,
        rope_config,
    )

    rope = rope_config(CosSinRoPE if facts.rope_scaling is None else Llama3CosSinRoPE, facts)
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
                rope=replace(rope),
            ),
            feed_forward=network_config(facts, facts.dense_hidden_size),
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
    sizes=partial(sizes_of, keys=DENSE_KEYS),
    layer_shapes=_layer_shapes,
    titan=_titan,
    # Rotary frequencies, which files of Llama 2 have.
    unused=("*.rotary_emb.inv_freq",),
)
