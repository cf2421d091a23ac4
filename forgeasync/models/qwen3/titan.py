"""Qwen3, dense and MoE, as TorchTitan builds it."""

from dataclasses import replace

from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.qwen3 import (
    Qwen3Model,
    _build_qwen3_layers,
    _build_qwen3_moe_layers,
    parallelize_qwen3,
)
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

from forgeasync.config import ModelFacts
from forgeasync.models.titan_family import TitanFamily, set_norm_eps


def _layers(facts: ModelFacts, attention_backend: str) -> list[TransformerBlock.Config]:
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


QWEN3 = TitanFamily(
    model=Qwen3Model, layers=_layers, parallelize=parallelize_qwen3, adapter=Qwen3StateDictAdapter
)
