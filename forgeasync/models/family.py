"""Definition of a model family: how to read its config.json, and the tensors of its layers.

Needs no weights and no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forgeasync.config import BiasedRouting, ModelFacts, YarnRope
from forgeasync.schema import Problem

if TYPE_CHECKING:
    from forgeasync.models.titan_family import TitanFamily
Shape = tuple[int, ...]
"""Sizes of a tensor's dimensions."""


HARMLESS = frozenset(
    """architectures model_type _name_or_path auto_map tokenizer_class transformers_version
    transformers.js_config unsloth_fixed unsloth_version is_llama_config torch_dtype dtype
    bos_token_id eos_token_id pad_token_id max_length use_cache return_dict output_attentions
    output_hidden_states output_router_logits _attn_implementation_autoset chunk_size_feed_forward
    id2label label2id problem_type is_encoder_decoder
    initializer_range router_aux_loss_coef aux_loss_alpha seq_aux ep_size""".split()
)
"""Keys of config.json that do not change what a model computes: names, files, tokens, outputs, training."""


class _Keys(Mapping[str, object]):
    """A mapping that knows which keys were looked up."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self.values_by_key, self.seen = values, set[str]()

    def __getitem__(self, key: str) -> object:
        self.seen.add(key)
        return self.values_by_key[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_key)

    def __len__(self) -> int:
        return len(self.values_by_key)


class ConfigReader:
    """Reads the values of one config.json.

    A missing or wrong value adds an entry to ``problems`` and is read as a placeholder, so that all problems
    are found at once.
    """

    def __init__(self, raw: Mapping[str, object], path: str) -> None:
        self._raw = _Keys(raw)
        self._rope = {name: _Keys(_as_mapping(raw.get(name))) for name in ("rope_parameters", "rope_scaling")}
        self._path, self._place = path, "its config.json"
        self._nested: dict[str, ConfigReader] = {}
        self.problems: list[Problem] = []

    def ignore(self, *names: str) -> None:
        """Let keys have any value, because the model does not depend on them."""
        for keys in (self._raw, *self._rope.values()):
            keys.seen.update(names)

    def refuse_unread(self) -> None:
        """Refuse keys that were not read, unless they are null or harmless."""
        sources = {"": self._raw} | {f"{name}.": keys for name, keys in self._rope.items()}
        for prefix, keys in sources.items():
            for name in sorted(set(keys) - keys.seen - HARMLESS):
                if (value := keys[name]) is not None:
                    self.add_problem(f"has {prefix}{name} = {value!r}; this key is not supported")
        for reader in self._nested.values():
            reader.refuse_unread()

    def nested(self, name: str) -> ConfigReader:
        """Return a reader of the object under ``name``, which adds to the same problems."""
        reader = ConfigReader(_as_mapping(self._raw.get(name)), self._path)
        reader.problems, reader._place = self.problems, f"{name} of its config.json"
        self._nested[name] = reader
        return reader

    def add_problem(self, remedy: str) -> None:
        """Add a problem. ``remedy`` continues the sentence "its config.json ..."."""
        self.problems.append(Problem(field="model.path", value=self._path, remedy=f"{self._place} {remedy}"))

    def integer(self, *names: str, default: int | None = None) -> int:
        """Read a positive integer under the first of ``names`` that exists."""
        self.ignore(*names)
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

    def require(self, name: str, reason: str) -> None:
        """Refuse a missing key, with the reason; null is a value."""
        if name not in self._raw:
            self.add_problem(f"lacks {name} ({reason})")

    def integers(self, keys: Mapping[str, str]) -> dict[str, Any]:
        """Read positive integers under ``keys``, which gives each name's key."""
        return {name: self.integer(key) for name, key in keys.items()}

    def num_mtp_layers(self) -> int:
        """Read the number of layers of multi-token prediction; a missing key means 0."""
        # transformers 5 also writes num_mtp_layers.
        names = ("num_nextn_predict_layers", "num_mtp_layers")
        self.ignore(*names)
        return next((self.count(name) for name in names if self._raw.get(name) is not None), 0)

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

    def rope_theta(self, default: float | None = None) -> float:
        """Read ``rope_theta`` from the settings of rotary embeddings, or else from the top level."""
        self.ignore("rope_theta")
        source, scaling = self._rope_scaling()
        if "rope_theta" in scaling:
            return self._positive(f"{source}.rope_theta", scaling["rope_theta"])
        if "rope_theta" not in self._raw and default is not None:
            return default
        if "rope_theta" not in self._raw:
            self.add_problem("lacks rope_theta (or rope_parameters.rope_theta), a positive number")
            return 1.0
        return self._positive("rope_theta", self._raw["rope_theta"])

    def rope_type(self, *supported: str) -> str:
        """Read the type of rotary frequencies, one of ``supported``. The first one is the placeholder."""
        source, scaling = self._rope_scaling()
        # Older files have the key rope_scaling.type.
        scaling.seen.add("type")
        name = next((name for name in ("rope_type", "type") if name in scaling), "rope_type")
        kind = scaling.get(name, "default")
        if kind not in supported:
            expected = " or ".join(map(repr, supported))
            self.add_problem(f"has {source}.{name} = {kind!r}; only {expected} is supported")
            scaling.seen.update(scaling)
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

    def rope_flag(self, name: str, default: bool) -> bool:
        """Read whether the settings of rotary scaling have an option."""
        source, scaling = self._rope_scaling()
        value = scaling.get(name, default)
        if not isinstance(value, bool):
            self.add_problem(f"has {source}.{name} = {value!r}; expected true or false")
        return value is True

    def only(self, name: str, *accepted: object, required: str = "") -> None:
        """Refuse values other than ``accepted``.

        With ``required``, which explains what absence means, a missing key is refused too.
        """
        if name in self._raw and self._raw[name] not in accepted:
            self.add_problem(f"has {name} = {self._raw[name]!r}; only {accepted[0]!r} is supported")
        if name not in self._raw and required:
            self.add_problem(f"lacks {name}, which must be {_as_json(accepted[0])} ({required})")

    def full_attention_layers(self, num_layers: int) -> tuple[int, ...]:
        """Read which layers have full attention; all others have linear attention."""
        kinds = self._raw.get("layer_types")
        if kinds is None:
            interval = self.integer("full_attention_interval", default=4)
            kinds = ["linear_attention"] * num_layers
            kinds[interval - 1 :: interval] = ["full_attention"] * (num_layers // interval)
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            self.add_problem(f"has layer_types = {kinds!r}; expected a list of {num_layers}")
        elif others := sorted({str(kind) for kind in kinds} - {"full_attention", "linear_attention"}):
            expected = "'full_attention' and 'linear_attention'"
            self.add_problem(f"has layer_types with {others[0]!r}; only {expected} are supported")
        elif len(set(kinds)) == 1:
            self.add_problem(f"has layers with {kinds[0]} only; must have layers of both kinds")
        else:
            return tuple(index for index, kind in enumerate(kinds) if kind == "full_attention")
        return ()

    def all_full_attention(self) -> None:
        """Refuse layers with sliding-window attention."""
        layer_types = self._raw.get("layer_types")
        if isinstance(layer_types, list):
            others = sorted({str(kind) for kind in layer_types} - {"full_attention"})
            if others:
                self.add_problem(f"has layer_types with {others[0]!r}; only 'full_attention' is supported")

    def partial_rotary_factor(self, default: float) -> float:
        """Read which part of each head is rotated."""
        self.ignore("partial_rotary_factor")
        source, scaling = self._rope_scaling()
        for keys, prefix in ((scaling, f"{source}."), (self._raw, "")):
            if (value := keys.get("partial_rotary_factor")) is not None:
                return self._positive(f"{prefix}partial_rotary_factor", value)
        return default

    def full_rotation(self) -> None:
        """Refuse rotary embeddings that cover only a part of each head."""
        if (factor := self.partial_rotary_factor(default=1.0)) != 1.0:
            self.add_problem(f"has partial_rotary_factor = {factor!r}; only 1.0 is supported")

    def _rope_scaling(self) -> tuple[str, _Keys]:
        """Return the key of the settings of rotary scaling, and their values."""
        name = next((name for name, keys in self._rope.items() if keys), "rope_parameters")
        self.ignore(name)
        return name, self._rope[name]

    def _positive(self, name: str, value: object) -> float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            return float(value)
        self.add_problem(f"has {name} = {value!r}; expected a positive number")
        return 1.0


def _as_mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


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
    unused: tuple[str, ...] = ()
    """Patterns (fnmatch) of names of tensors that are not part of the policy, and are exported unchanged."""


def refuse_basic_variants(reader: ConfigReader, *, is_quantized: bool = False) -> None:
    """Refuse options that transformers has for all families and TorchTitan supports for none.

    With ``is_quantized`` the family reads the settings of quantization itself.
    """
    reader.only("hidden_act", "silu")
    reader.only("attention_dropout", 0.0, None)
    if not is_quantized:
        reader.only("quantization_config", None)
    reader.only("pretraining_tp", 1, None)


def refuse_common_variants(reader: ConfigReader) -> None:
    """Refuse these, and attention that is not full."""
    refuse_basic_variants(reader)
    reader.all_full_attention()


def refuse_attention_variants(reader: ConfigReader) -> None:
    """Refuse biases of attention and partial rotation."""
    reader.only("attention_bias", False)
    reader.full_rotation()


def read_yarn(reader: ConfigReader, *, mscale: float, truncates: bool = True) -> YarnRope:
    factor = reader.rope_number("factor")
    if factor < 1.0:
        # TorchTitan would not scale.
        reader.add_problem(f"has a factor = {factor} of rotary scaling; must be at least 1")
    return YarnRope(
        factor=factor,
        beta_fast=reader.rope_number("beta_fast", default=32.0),
        beta_slow=reader.rope_number("beta_slow", default=1.0),
        mscale=mscale,
        original_max_position_embeddings=int(reader.rope_number("original_max_position_embeddings")),
        truncates=truncates,
    )


_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}
DENSE_KEYS = _KEYS | {"dense_hidden_size": "intermediate_size"}
"""Key in config.json of each size of a model without experts, by its name in ``ModelFacts``."""

MOE_KEYS = _KEYS | {
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_hidden_size": "moe_intermediate_size",
}
"""Those of a model with experts in all layers."""

BIASED_MOE_KEYS = MOE_KEYS | {
    "num_experts": "n_routed_experts",
    "num_dense_layers": "first_k_dense_replace",
    "dense_hidden_size": "intermediate_size",
    "num_mtp_layers": "num_nextn_predict_layers",
}
"""Those of a model with biased routing, next to ``_ROUTING_KEYS``."""

_ROUTING_KEYS = {
    "num_groups": "n_group",
    "num_limited_groups": "topk_group",
    "num_shared_experts": "n_shared_experts",
}


def read_facts(reader: ConfigReader, model_type: str, keys: Mapping[str, str], **own: Any) -> ModelFacts:
    """Read the facts that all families have, and the sizes under ``keys``, except those given as ``own``."""
    sizes = reader.integers({name: key for name, key in keys.items() if name not in own})
    if "num_experts" not in keys:
        sizes["num_dense_layers"] = sizes["num_layers"]
    if "tie_word_embeddings" not in own:
        own["tie_word_embeddings"] = reader.boolean("tie_word_embeddings", default=False)
    if "rope_theta" not in own:
        own["rope_theta"] = reader.rope_theta()
    return ModelFacts(model_type=model_type, rms_norm_eps=reader.number("rms_norm_eps"), **sizes, **own)


def sizes_of(shape: object, keys: Mapping[str, str]) -> dict[str, object]:
    """Return sizes as items of config.json; the inverse of ``ConfigReader.integers``."""
    return {key: getattr(shape, name) for name, key in keys.items()}


def read_biased_facts(reader: ConfigReader, model_type: str, **own: Any) -> ModelFacts:
    """Read the facts of a model with DeepSeek-V3's routing."""
    routing = BiasedRouting(
        normalizes=reader.boolean("norm_topk_prob"),
        scale=reader.number("routed_scaling_factor"),
        **reader.integers(_ROUTING_KEYS),
    )
    num_dense_layers, num_layers = reader.count("first_k_dense_replace"), reader.integer("num_hidden_layers")
    if num_dense_layers >= num_layers:
        found = f"has first_k_dense_replace = {num_dense_layers}"
        reader.add_problem(f"{found}; must be less than num_hidden_layers = {num_layers}")
    return read_facts(
        reader,
        model_type,
        BIASED_MOE_KEYS,
        num_layers=num_layers,
        num_dense_layers=num_dense_layers,
        num_mtp_layers=reader.num_mtp_layers(),
        routing=routing,
        **own,
    )


def biased_sizes(facts: ModelFacts) -> dict[str, object]:
    """Return the sizes in config.json of a model with biased routing."""
    return sizes_of(facts, BIASED_MOE_KEYS) | sizes_of(facts.routing, _ROUTING_KEYS)


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


def dense_shapes(facts: ModelFacts) -> dict[str, Shape]:
    """Return the shapes of a dense layer's feed-forward network."""
    return network_shapes("mlp", hidden_size=facts.hidden_size, inner_size=facts.dense_hidden_size)


def biased_moe_shapes(facts: ModelFacts) -> dict[str, Shape]:
    """Return the shapes of a layer with biased routing: experts, the routers' biases and shared experts."""
    shared = network_shapes(
        "mlp.shared_experts", hidden_size=facts.hidden_size, inner_size=facts.shared_hidden_size
    )
    return expert_shapes(facts) | {"mlp.gate.e_score_correction_bias": (facts.num_experts,)} | shared


def expert_shapes(facts: ModelFacts) -> dict[str, Shape]:
    """Return the shapes of the gate and all routed experts of a layer."""
    shapes: dict[str, Shape] = {"mlp.gate.weight": (facts.num_experts, facts.hidden_size)}
    for expert in range(facts.num_experts):
        shapes |= network_shapes(
            f"mlp.experts.{expert}", hidden_size=facts.hidden_size, inner_size=facts.expert_hidden_size
        )
    return shapes
