"""DeepSeek-V3 and Kimi K2: latent attention, shared experts, biased routing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from forgeasync.config import LatentAttention, ModelFacts, YarnRope
from forgeasync.models.family import (
    ConfigReader,
    Family,
    Shape,
    biased_moe_shapes,
    biased_sizes,
    dense_shapes,
    norm_shapes,
    read_biased_facts,
    read_yarn,
    refuse_attention_variants,
    refuse_common_variants,
    sizes_of,
)

if TYPE_CHECKING:
    from torchtitan.models.common.decoder import TransformerBlock

    from forgeasync.models.titan_family import TitanFamily

_LATENT_NORM_EPS = 1e-6
"""Epsilon of the latents' norms in transformers, whatever rms_norm_eps is. vLLM uses rms_norm_eps."""


_LATENT_KEYS = {
    "kv_rank": "kv_lora_rank",
    "nope_head_dim": "qk_nope_head_dim",
    "rope_head_dim": "qk_rope_head_dim",
    "value_head_dim": "v_head_dim",
}


def _read(model_type: str, reader: ConfigReader) -> ModelFacts:
    _refuse_variants(reader)
    reader.require("q_lora_rank", "absent means 1536 to transformers, and null no latents of queries")
    num_heads = reader.integer("num_attention_heads")
    latent = LatentAttention(
        query_rank=reader.integer("q_lora_rank", default=0), **reader.integers(_LATENT_KEYS)
    )
    return read_biased_facts(
        reader,
        model_type,
        num_heads=num_heads,
        # Latents are expanded to keys and values of all heads.
        num_kv_heads=num_heads,
        head_dim=latent.nope_head_dim + latent.rope_head_dim,
        rope_scaling=_read_scaling(reader),
        latent=latent,
    )


def _refuse_variants(reader: ConfigReader) -> None:
    refuse_common_variants(reader)
    refuse_attention_variants(reader)
    reader.only("moe_layer_freq", 1)
    # transformers derives the first two from others. Latents are expanded to keys and values of all heads.
    reader.ignore("head_dim", "qk_head_dim", "num_key_value_heads")
    reader.only("rope_interleave", True)
    reader.only("scoring_func", "sigmoid", required="absent means softmax to vLLM")
    reader.only("topk_method", "noaux_tc", required="absent means a choice without bias to vLLM")
    reader.only("rms_norm_eps", _LATENT_NORM_EPS)


def _read_scaling(reader: ConfigReader) -> YarnRope | None:
    if reader.rope_type("default", "yarn") == "default":
        return None
    mscale, of_all = reader.rope_number("mscale"), reader.rope_number("mscale_all_dim")
    if mscale != of_all:
        # The ratio of the two would scale cosines and sines, which TorchTitan does not support.
        reader.add_problem(f"has mscale = {mscale} and mscale_all_dim = {of_all}; must be equal")
    return read_yarn(reader, mscale=mscale)


def _sizes(facts: ModelFacts) -> dict[str, object]:
    assert facts.latent is not None
    sizes = biased_sizes(facts) | sizes_of(facts.latent, _LATENT_KEYS)
    return sizes | {
        "q_lora_rank": facts.latent.query_rank or None,
        "qk_head_dim": facts.head_dim,
        # transformers uses head_dim as the number of rotated dimensions.
        "head_dim": facts.latent.rope_head_dim,
    }


def _layer_shapes(facts: ModelFacts, layer: int) -> dict[str, Shape]:
    shapes = norm_shapes(facts) | _attention_shapes(facts)
    if layer < facts.num_dense_layers:
        return shapes | dense_shapes(facts)
    return shapes | biased_moe_shapes(facts)


def _attention_shapes(facts: ModelFacts) -> dict[str, Shape]:
    assert facts.latent is not None
    hidden, latent = facts.hidden_size, facts.latent
    queries = facts.num_heads * facts.head_dim
    shapes: dict[str, Shape] = {
        "self_attn.kv_a_proj_with_mqa.weight": (latent.kv_rank + latent.rope_head_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (latent.kv_rank,),
        "self_attn.kv_b_proj.weight": (
            facts.num_heads * (latent.nope_head_dim + latent.value_head_dim),
            latent.kv_rank,
        ),
        "self_attn.o_proj.weight": (hidden, facts.num_heads * latent.value_head_dim),
    }
    if latent.query_rank == 0:
        return shapes | {"self_attn.q_proj.weight": (queries, hidden)}
    return shapes | {
        "self_attn.q_a_proj.weight": (latent.query_rank, hidden),
        "self_attn.q_a_layernorm.weight": (latent.query_rank,),
        "self_attn.q_b_proj.weight": (queries, latent.query_rank),
    }


def _titan_layers(facts: ModelFacts, attention_backend: str) -> list[TransformerBlock.Config]:
    from torchtitan.models.common import ComplexRoPE
    from torchtitan.models.deepseek_v3 import _build_dsv3_layers

    from forgeasync.models.titan_family import rope_config, set_norm_eps

    latent, routing = facts.latent, facts.routing
    assert latent is not None and routing is not None
    layers = _build_dsv3_layers(
        n_layers=facts.num_layers,
        n_dense_layers=facts.num_dense_layers,
        dim=facts.hidden_size,
        n_heads=facts.num_heads,
        q_lora_rank=latent.query_rank,
        kv_lora_rank=latent.kv_rank,
        qk_nope_head_dim=latent.nope_head_dim,
        qk_rope_head_dim=latent.rope_head_dim,
        v_head_dim=latent.value_head_dim,
        mscale=facts.rope_scaling.mscale if isinstance(facts.rope_scaling, YarnRope) else 1.0,
        dense_hidden_dim=facts.dense_hidden_size,
        moe_hidden_dim=facts.expert_hidden_size,
        num_experts=facts.num_experts,
        num_shared_experts=routing.num_shared_experts,
        router_top_k=facts.top_k,
        router_score_func="sigmoid",
        # With a single group, routing has no limit on groups.
        router_num_expert_groups=routing.num_groups if routing.num_groups > 1 else None,
        router_num_limited_groups=routing.num_limited_groups if routing.num_groups > 1 else None,
        router_route_scale=routing.scale,
        router_route_norm=routing.normalizes,
        attn_backend=attention_backend,
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        # Files and TorchTitan rotate adjacent dimensions.
        rope=rope_config(ComplexRoPE, facts),
    )
    for layer in layers:
        set_norm_eps(layer, facts)
        layer.attention.q_norm = replace(layer.attention.q_norm, eps=facts.rms_norm_eps)
        layer.attention.kv_norm = replace(layer.attention.kv_norm, eps=facts.rms_norm_eps)
    return layers


def _titan() -> TitanFamily:
    from torchtitan.models.deepseek_v3 import DeepSeekV3Model, parallelize_deepseekv3
    from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter

    from forgeasync.models.titan_family import TitanFamily

    return TitanFamily(
        model=DeepSeekV3Model,
        layers=_titan_layers,
        parallelize=parallelize_deepseekv3,
        adapter=DeepSeekV3StateDictAdapter,
    )


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    read=partial(_read, "deepseek_v3"),
    sizes=_sizes,
    layer_shapes=_layer_shapes,
    titan=_titan,
)

KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2", read=partial(_read, "kimi_k2"))
"""The same model by another ``model_type``, which transformers 5.19 does not have. vLLM 0.32 maps it too."""
