"""Definition of a model family: how to read its config.json, and the tensors of its layers.

Needs no weights and no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forgeasync.config import ModelFacts
from forgeasync.schema import Problem

if TYPE_CHECKING:
    from forgeasync.models.titan_family import TitanFamily
Shape = tuple[int, ...]


class ConfigReader:
    """Reads the values of one config.json.

    A missing or wrong value adds an entry to ``problems`` and is read as a placeholder, so that all problems
    are found at once.
    """

    def __init__(self, raw: Mapping[str, object], path: str) -> None:
        self._raw = raw
        self._path = path
        self.problems: list[Problem] = []

    def add_problem(self, remedy: str) -> None:
        """Add a problem. ``remedy`` continues the sentence "its config.json ..."."""
        remedy = f"its config.json {remedy}"
        self.problems.append(Problem(field="model.path", value=self._path, remedy=remedy))

    def integer(self, *names: str, default: int | None = None) -> int:
        """Read a positive integer under the first of ``names`` that exists."""
        for name in names:
            if name in self._raw:
                value = self._raw[name]
                if value is None and default is not None:
                    return default
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
                self.add_problem(f"has {name} = {value!r}; expected a positive whole number")
                return 1
        if default is not None:
            return default
        self.add_problem(f"lacks {' or '.join(names)}, a positive whole number")
        return 1

    def count(self, name: str) -> int:
        """Read an integer that may be 0."""
        if name in self._raw and self._raw[name] == 0 and not isinstance(self._raw[name], bool):
            return 0
        return self.integer(name)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        if name in self._raw and isinstance(self._raw[name], bool):
            return self._raw[name] is True
        if name not in self._raw and default is not None:
            return default
        found = f"has {name} = {self._raw[name]!r}" if name in self._raw else f"lacks {name}"
        self.add_problem(f"{found}; expected true or false")
        return False

    def number(self, name: str) -> float:
        """Read a positive number."""
        if name not in self._raw:
            self.add_problem(f"lacks {name}, a positive number")
            return 1.0
        return self._positive(name, self._raw[name])

    def rope_theta(self) -> float:
        """Read ``rope_theta`` from ``rope_parameters``, where transformers 5 writes it, or the top level."""
        nested = self._mapping("rope_parameters")
        if "rope_theta" in nested:
            return self._positive("rope_parameters.rope_theta", nested["rope_theta"])
        if "rope_theta" not in self._raw:
            self.add_problem("lacks rope_theta (or rope_parameters.rope_theta), a positive number")
            return 1.0
        return self._positive("rope_theta", self._raw["rope_theta"])

    def rope_type(self, *supported: str) -> str:
        """Read the type of rotary frequencies, one of ``supported``. The first one is the placeholder."""
        source, scaling = self._rope_scaling()
        # Older files have the key rope_scaling.type.
        name = next((name for name in ("rope_type", "type") if name in scaling), None)
        kind = "default" if name is None else scaling[name]
        if kind not in supported:
            expected = " or ".join(map(repr, supported))
            self.add_problem(f"has {source}.{name} = {kind!r}; only {expected} is supported")
            return supported[0]
        return str(kind)

    def rope_number(self, name: str, default: float | None = None) -> float:
        """Read a positive number from the settings of rotary scaling."""
        source, scaling = self._rope_scaling()
        if name not in scaling and default is not None:
            return default
        if name not in scaling:
            self.add_problem(f"lacks {source}.{name}, a positive number")
            return 1.0
        return self._positive(f"{source}.{name}", scaling[name])

    def only(self, name: str, *accepted: object, required: str = "") -> None:
        """Refuse values other than ``accepted``.

        With ``required``, which explains what absence means, a missing key is refused too.
        """
        if name in self._raw and self._raw[name] not in accepted:
            self.add_problem(f"has {name} = {self._raw[name]!r}; only {accepted[0]!r} is supported")
        if name not in self._raw and required:
            self.add_problem(f"lacks {name}, which must be {_as_json(accepted[0])} ({required})")

    def all_full_attention(self) -> None:
        """Refuse layers with sliding-window attention."""
        layer_types = self._raw.get("layer_types")
        if isinstance(layer_types, list):
            others = sorted({str(kind) for kind in layer_types} - {"full_attention"})
            if others:
                self.add_problem(f"has layer_types with {others[0]!r}; only 'full_attention' is supported")

    def full_rotation(self) -> None:
        """Refuse rotary embeddings that cover only a part of each head."""
        for source, prefix in ((self._raw, ""), (self._mapping("rope_parameters"), "rope_parameters.")):
            value = source.get("partial_rotary_factor", 1.0)
            if value not in (None, 1.0):
                self.add_problem(f"has {prefix}partial_rotary_factor = {value!r}; only 1.0 is supported")

    def _rope_scaling(self) -> tuple[str, Mapping[str, object]]:
        """Return the key of the settings of rotary scaling, and their values."""
        for name in ("rope_parameters", "rope_scaling"):
            if values := self._mapping(name):
                return name, values
        return "rope_parameters", {}

    def _mapping(self, name: str) -> Mapping[str, object]:
        value = self._raw.get(name)
        return value if isinstance(value, dict) else {}

    def _positive(self, name: str, value: object) -> float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            return float(value)
        self.add_problem(f"has {name} = {value!r}; expected a positive number")
        return 1.0


def _as_json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Definition of the models of one ``model_type``."""

    model_type: str
    architecture: str
    """Class name in transformers, as in config.json."""
    read: Callable[[ConfigReader], ModelFacts]
    """Function that reads the facts of a config.json.

    It adds a problem for each option that TorchTitan's model does not support.
    """
    sizes: Callable[[ModelFacts], Mapping[str, object]]
    """Function that returns the sizes of a model as items of config.json; the inverse of ``read``."""
    layer_shapes: Callable[[ModelFacts, int], Mapping[str, Shape]]
    """Function that returns the names (within the layer) and shapes of the tensors of layer i."""
    titan: Callable[[], TitanFamily]
    """Function that imports and returns TorchTitan's part of the family."""


def refuse_common_variants(reader: ConfigReader) -> None:
    """Refuse options that transformers has for all families and TorchTitan supports for none."""
    reader.only("hidden_act", "silu")
    reader.only("attention_bias", False)
    reader.only("attention_dropout", 0.0, None)
    reader.only("quantization_config", None)
    reader.full_rotation()
    reader.all_full_attention()


def attention_shapes(facts: ModelFacts) -> dict[str, Shape]:
    """Return the shapes of grouped-query attention without biases, and of the layer's two norms."""
    hidden = facts.hidden_size
    queries, keys = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    return {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
    } | norm_shapes(facts)


def common_sizes(facts: ModelFacts) -> dict[str, object]:
    """Return the sizes in config.json that every family has."""
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
    """Return the shapes of a gated feed-forward network."""
    return {
        f"{prefix}.gate_proj.weight": (inner_size, hidden_size),
        f"{prefix}.up_proj.weight": (inner_size, hidden_size),
        f"{prefix}.down_proj.weight": (hidden_size, inner_size),
    }


def expert_shapes(facts: ModelFacts) -> dict[str, Shape]:
    """Return the shapes of the gate and all routed experts of a layer."""
    shapes: dict[str, Shape] = {"mlp.gate.weight": (facts.num_experts, facts.hidden_size)}
    for expert in range(facts.num_experts):
        shapes |= network_shapes(
            f"mlp.experts.{expert}", hidden_size=facts.hidden_size, inner_size=facts.expert_hidden_size
        )
    return shapes
