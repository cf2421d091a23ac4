"""gpt-oss: attention sinks, windows in every second layer, biases everywhere, clamped experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forgeasync.config import ModelFacts
from forgeasync.models.family import (
    MOE_KEYS,
    ConfigReader,
    Family,
    Shape,
    attention_shapes,
    read_facts,
    read_yarn,
    refuse_basic_variants,
    sizes_of,
)

if TYPE_CHECKING:
    from torchtitan.models.common.attention import BaseAttention
    from torchtitan.models.common.decoder import TransformerBlock
    from torchtitan.models.common.moe import MoE
    from torchtitan.protocols.state_dict_adapter import StateDictAdapter

    from forgeasync.models.titan_family import TitanFamily


_KEYS = MOE_KEYS | {
    "num_experts": "num_local_experts",
    "expert_hidden_size": "intermediate_size",
    "window": "sliding_window",
}


def _read(reader: ConfigReader) -> ModelFacts:
    refuse_basic_variants(reader, is_quantized=True)
    quantization = reader.nested("quantization_config")
    quantization.only("quant_method", "mxfp4")
    quantization.ignore("modules_to_not_convert")
    reader.full_rotation()
    reader.only("attention_bias", True)
    reader.only("tie_word_embeddings", False)
    # vLLM 0.32 has these built in.
    reader.only("swiglu_alpha", 1.702)
    reader.only("swiglu_limit", 7.0)
    reader.only("rms_norm_eps", 1e-5)
    reader.rope_type("yarn")
    facts = read_facts(
        reader,
        "gpt_oss",
        _KEYS,
        num_experts=reader.integer("num_local_experts", "num_experts"),
        tie_word_embeddings=False,
        # TorchTitan's attention has the scale of gpt-oss.
        rope_scaling=read_yarn(reader, mscale=1.0, truncates=reader.rope_flag("truncate", default=True)),
        has_attention_biases=True,
    )
    reader.only("layer_types", _layer_types(facts.num_layers), None)
    # The released files have copies of two keys.
    reader.only("experts_per_token", facts.top_k)
    reader.ignore("initial_context_length")
    return facts


def _layer_types(num_layers: int) -> list[str]:
    return [("sliding_attention", "full_attention")[index % 2] for index in range(num_layers)]


def _sizes(facts: ModelFacts) -> dict[str, object]:
    return sizes_of(facts, _KEYS) | {"experts_per_token": facts.top_k}


def _layer_shapes(facts: ModelFacts, layer: int) -> dict[str, Shape]:
    experts, hidden, inner = facts.num_experts, facts.hidden_size, facts.expert_hidden_size
    shapes = attention_shapes(facts)
    shapes |= {
        name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items() if "_proj." in name
    }
    return shapes | {
        "self_attn.sinks": (facts.num_heads,),
        "mlp.router.weight": (experts, hidden),
        "mlp.router.bias": (experts,),
        # Rows of gate and up take turns.
        "mlp.experts.gate_up_proj": (experts, hidden, 2 * inner),
        "mlp.experts.gate_up_proj_bias": (experts, 2 * inner),
        "mlp.experts.down_proj": (experts, inner, hidden),
        "mlp.experts.down_proj_bias": (experts, hidden),
    }


_EXPERTS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


def _titan_layers(facts: ModelFacts, attention_backend: str) -> list[TransformerBlock.Config]:
    """Return layers made of TorchTitan's parts, because its builder has fixed sizes."""
    from torchtitan.models.gpt_oss.model import GptOssTransformerBlock

    from forgeasync.models.titan_family import norm_config

    return [
        GptOssTransformerBlock.Config(
            attention=_titan_attention(facts, layer, attention_backend),
            attention_norm=norm_config(facts.hidden_size, facts),
            ffn_norm=norm_config(facts.hidden_size, facts),
            moe=_titan_moe(facts),
        )
        for layer in range(facts.num_layers)
    ]


def _titan_attention(facts: ModelFacts, layer: int, attention_backend: str) -> BaseAttention.Config:
    from torchtitan.models.common import CosSinRoPE
    from torchtitan.models.gpt_oss import _make_gptoss_attn_config

    from forgeasync.models.titan_family import rope_config

    return _make_gptoss_attn_config(
        dim=facts.hidden_size,
        layer_id=layer,
        attn_backend=attention_backend,
        n_heads=facts.num_heads,
        n_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        sliding_window_size=None if layer % 2 else facts.window,
        fuse_qkv=False,
        rope=rope_config(CosSinRoPE, facts),
    )


def _titan_moe(facts: ModelFacts) -> MoE.Config:
    from torch.nn.init import zeros_
    from torchtitan.models.common.config_utils import make_moe_config, make_router_config
    from torchtitan.models.gpt_oss import _make_gptoss_experts_config

    from forgeasync.models.titan_family import LINEAR_INIT

    experts = _make_gptoss_experts_config(
        dim=facts.hidden_size,
        hidden_dim=facts.expert_hidden_size,
        num_experts=facts.num_experts,
        layer_id=0,
        top_k=facts.top_k,
        moe_comm_backend="standard",
    )
    experts.inner_experts.param_init = dict.fromkeys(_EXPERTS, LINEAR_INIT["weight"])
    router = make_router_config(
        dim=facts.hidden_size,
        num_experts=facts.num_experts,
        gate_param_init=LINEAR_INIT | {"bias": zeros_},
        top_k=facts.top_k,
        score_func="softmax",
        # A softmax over the chosen ones alone.
        route_norm=True,
        bias=True,
    )
    # As for Qwen3: the generator could not use a trained bias for load balancing.
    return make_moe_config(
        num_experts=facts.num_experts, router=router, routed_experts=experts, load_balance_coeff=None
    )


def _titan_adapter(*arguments: object) -> StateDictAdapter:
    """Return TorchTitan's names, with the experts of files in bfloat16."""
    from torchtitan.models.gpt_oss.state_dict_adapter import GptOssStateDictAdapter

    adapter = GptOssStateDictAdapter(*arguments)
    adapter.from_hf_map = {hf: own for hf, own in adapter.from_hf_map.items() if ".experts." not in hf} | {
        f"model.layers.{{}}.mlp.experts.{name}": f"layers.{{}}.moe.routed_experts.inner_experts.{name}"
        for name in _EXPERTS
    }
    return adapter


def _titan() -> TitanFamily:
    from torchtitan.models.gpt_oss import GptOssModel, parallelize_gptoss

    from forgeasync.models.titan_family import TitanFamily

    return TitanFamily(
        model=GptOssModel, layers=_titan_layers, parallelize=parallelize_gptoss, adapter=_titan_adapter
    )


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    read=_read,
    sizes=_sizes,
    layer_shapes=_layer_shapes,
    titan=_titan,
)
