"""DeepSeek-V3 as TorchTitan builds it."""

from dataclasses import replace

from torchtitan.models.common import ComplexRoPE
from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.deepseek_v3 import DeepSeekV3Model, _build_dsv3_layers, parallelize_deepseekv3
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter

from forgeasync.config import ModelFacts, YarnRope
from forgeasync.models.titan_family import TitanFamily, set_norm_eps


def _rope(facts: ModelFacts) -> ComplexRoPE.Config:
    """Return the config of rotary embeddings, which rotate adjacent dimensions in files and TorchTitan."""
    assert facts.latent is not None
    rope = ComplexRoPE.Config(
        dim=facts.latent.rope_head_dim, max_seq_len=facts.max_position_embeddings, theta=facts.rope_theta
    )
    scaling = facts.rope_scaling
    if scaling is None:
        return rope
    assert isinstance(scaling, YarnRope)
    return replace(
        rope,
        scaling="yarn",
        rope_factor=scaling.factor,
        beta_fast=scaling.beta_fast,
        beta_slow=scaling.beta_slow,
        original_seq_len=scaling.original_max_position_embeddings,
    )


def _layers(facts: ModelFacts, attention_backend: str) -> list[TransformerBlock.Config]:
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
        rope=_rope(facts),
    )
    for layer in layers:
        set_norm_eps(layer, facts)
        layer.attention.q_norm = replace(layer.attention.q_norm, eps=facts.rms_norm_eps)
        layer.attention.kv_norm = replace(layer.attention.kv_norm, eps=facts.rms_norm_eps)
    return layers


DEEPSEEK_V3 = TitanFamily(
    model=DeepSeekV3Model,
    layers=_layers,
    parallelize=parallelize_deepseekv3,
    adapter=DeepSeekV3StateDictAdapter,
)
