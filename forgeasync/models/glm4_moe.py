"""GLM-4.5 and later models of its model_type: partly rotated heads, biases, DeepSeek-V3's routing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forgeasync.config import ModelFacts
from forgeasync.models.family import (
    ConfigReader,
    Family,
    Shape,
    attention_shapes,
    biased_moe_shapes,
    biased_sizes,
    dense_shapes,
    read_biased_facts,
    refuse_common_variants,
)

if TYPE_CHECKING:
    from torchtitan.models.common.attention import GQAttention
    from torchtitan.models.common.decoder import TransformerBlock
    from torchtitan.models.common.moe import MoE
    from torchtitan.protocols.state_dict_adapter import StateDictAdapter

    from forgeasync.models.titan_family import TitanFamily


def _read(reader: ConfigReader) -> ModelFacts:
    refuse_common_variants(reader)
    reader.rope_type("default")
    return read_biased_facts(
        reader,
        "glm4_moe",
        partial_rotary_factor=reader.partial_rotary_factor(default=0.5),
        has_attention_biases=reader.boolean("attention_bias", default=False),
        has_head_norms=reader.boolean("use_qk_norm", default=False),
    )


def _layer_shapes(facts: ModelFacts, layer: int) -> dict[str, Shape]:
    shapes = attention_shapes(facts)
    if facts.has_attention_biases:
        shapes |= {f"self_attn.{name}.bias": shapes[f"self_attn.{name}.weight"][:1] for name in _WITH_BIAS}
    if facts.has_head_norms:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (facts.head_dim,)
    if layer >= facts.num_dense_layers:
        return shapes | biased_moe_shapes(facts)
    return shapes | dense_shapes(facts)


_WITH_BIAS = {"q_proj": "wq", "k_proj": "wk", "v_proj": "wv"}
"""TorchTitan's name of each projection that can have a bias."""


def _titan_layers(facts: ModelFacts, attention_backend: str) -> list[TransformerBlock.Config]:
    """Return layers of TorchTitan's parts; it has no GLM."""
    from torchtitan.models.qwen3.model import Qwen3TransformerBlock

    from forgeasync.models.titan_family import network_config, norm_config

    return [
        Qwen3TransformerBlock.Config(
            attention_norm=norm_config(facts.hidden_size, facts),
            ffn_norm=norm_config(facts.hidden_size, facts),
            attention=_titan_attention(facts, attention_backend),
            feed_forward=network_config(facts, facts.dense_hidden_size)
            if layer < facts.num_dense_layers
            else None,
            moe=_titan_moe(facts) if layer >= facts.num_dense_layers else None,
        )
        for layer in range(facts.num_layers)
    ]


def _titan_attention(facts: ModelFacts, attention_backend: str) -> GQAttention.Config:
    from torch.nn.init import zeros_
    from torchtitan.models.common.config_utils import get_attention_config, make_gqa_config

    from forgeasync.models.titan_family import LINEAR_INIT, PartialCosSinRoPE, norm_config, rope_config

    attention = make_gqa_config(
        dim=facts.hidden_size,
        n_heads=facts.num_heads,
        n_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        wqkv_param_init=LINEAR_INIT | {"bias": zeros_},
        wo_param_init=LINEAR_INIT,
        inner_attention=get_attention_config(attention_backend),
        fuse_qkv=False,
        qk_norm=norm_config(facts.head_dim, facts) if facts.has_head_norms else None,
        rope=rope_config(PartialCosSinRoPE, facts),
    )
    for projections in (attention.qkv_linear.wq, attention.qkv_linear.wkv):
        projections.bias = facts.has_attention_biases
    return attention


def _titan_moe(facts: ModelFacts) -> MoE.Config:
    from torchtitan.models.common.config_utils import (
        make_moe_config,
        make_routed_experts_config,
        make_router_config,
    )

    from forgeasync.models.titan_family import LINEAR_INIT, network_config

    assert facts.routing is not None
    routing = facts.routing
    return make_moe_config(
        num_experts=facts.num_experts,
        router=make_router_config(
            dim=facts.hidden_size,
            num_experts=facts.num_experts,
            gate_param_init=LINEAR_INIT,
            top_k=facts.top_k,
            score_func="sigmoid",
            route_norm=routing.normalizes,
            route_scale=routing.scale,
            # With a single group, routing has no limit on groups.
            num_expert_groups=routing.num_groups if routing.num_groups > 1 else None,
            num_limited_groups=routing.num_limited_groups if routing.num_groups > 1 else None,
        ),
        routed_experts=make_routed_experts_config(
            dim=facts.hidden_size,
            hidden_dim=facts.expert_hidden_size,
            num_experts=facts.num_experts,
            top_k=facts.top_k,
            param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), LINEAR_INIT["weight"]),
            comm_backend="standard",
        ),
        shared_experts=network_config(facts, facts.shared_hidden_size),
    )


def _titan_adapter(*arguments: object) -> StateDictAdapter:
    """Return Qwen3's names, with biases and what Qwen3's experts lack."""
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    adapter = Qwen3StateDictAdapter(*arguments)
    layer, titan = "model.layers.{}", "layers.{}"
    adapter.from_hf_map |= {
        f"{layer}.self_attn.{name}.bias": f"{titan}.attention.qkv_linear.{own}.bias"
        for name, own in _WITH_BIAS.items()
    }
    adapter.from_hf_map |= {
        f"{layer}.mlp.shared_experts.{name}.weight": f"{titan}.moe.shared_experts.{own}.weight"
        for name, own in {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}.items()
    }
    adapter.from_hf_map[f"{layer}.mlp.gate.e_score_correction_bias"] = f"{titan}.moe.expert_bias_E"
    return adapter


def _titan() -> TitanFamily:
    from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3

    from forgeasync.models.titan_family import TitanFamily

    return TitanFamily(
        model=Qwen3Model, layers=_titan_layers, parallelize=parallelize_qwen3, adapter=_titan_adapter
    )


GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    read=_read,
    sizes=biased_sizes,
    layer_shapes=_layer_shapes,
    titan=_titan,
)
