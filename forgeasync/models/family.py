"""The facts about a model family that are needed before any weight is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forgeasync.config import ModelFacts
from forgeasync.models.config_json import ConfigReader

if TYPE_CHECKING:
    from forgeasync.models.titan_family import TitanFamily

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models of one ``model_type``."""

    model_type: str
    architecture: str
    """transformers' class, as config.json names it."""
    read: Callable[[ConfigReader], ModelFacts]
    """Facts of a config.json; adds problems for all that TorchTitan's model would compute differently."""
    sizes: Callable[[ModelFacts], Mapping[str, object]]
    """The keys of config.json that hold sizes, with those of a model: what ``read`` reads, the other way."""
    layer_shapes: Callable[[ModelFacts, int], Mapping[str, Shape]]
    """Names (within the layer) and shapes of all tensors of the layer of this index."""
    titan: Callable[[], TitanFamily]
    """TorchTitan's side of the family. Imports it when called: reading a config.json needs no torch."""


def refuse_common_variants(reader: ConfigReader) -> None:
    """Options that transformers has for every family and TorchTitan for none."""
    reader.only("hidden_act", "silu")
    reader.only("attention_bias", False)
    reader.only("attention_dropout", 0.0, None)
    reader.only("quantization_config", None)
    reader.full_rotation()
    reader.all_full_attention()


def attention_shapes(facts: ModelFacts) -> dict[str, Shape]:
    """Grouped-query attention without biases, and the layer's two norms."""
    hidden = facts.hidden_size
    queries, keys = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    return {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
    } | norm_shapes(facts)


def common_sizes(facts: ModelFacts) -> dict[str, object]:
    """Keys of config.json that every family has."""
    return {
        "num_hidden_layers": facts.num_layers,
        "hidden_size": facts.hidden_size,
        "num_attention_heads": facts.num_heads,
        "num_key_value_heads": facts.num_kv_heads,
        "vocab_size": facts.vocab_size,
        "max_position_embeddings": facts.max_position_embeddings,
    }


def norm_shapes(facts: ModelFacts) -> dict[str, Shape]:
    return {
        "input_layernorm.weight": (facts.hidden_size,),
        "post_attention_layernorm.weight": (facts.hidden_size,),
    }


def network_shapes(prefix: str, *, hidden_size: int, inner_size: int) -> dict[str, Shape]:
    """A gated feed-forward network."""
    return {
        f"{prefix}.gate_proj.weight": (inner_size, hidden_size),
        f"{prefix}.up_proj.weight": (inner_size, hidden_size),
        f"{prefix}.down_proj.weight": (hidden_size, inner_size),
    }


def expert_shapes(facts: ModelFacts) -> dict[str, Shape]:
    """The gate and all routed experts of a layer."""
    shapes: dict[str, Shape] = {"mlp.gate.weight": (facts.num_experts, facts.hidden_size)}
    for expert in range(facts.num_experts):
        shapes |= network_shapes(
            f"mlp.experts.{expert}", hidden_size=facts.hidden_size, inner_size=facts.expert_hidden_size
        )
    return shapes
