"""Reading keys of a config.json: what is missing or wrong becomes a problem and a placeholder."""

from collections.abc import Mapping

from forgeasync.schema import Problem


class ConfigReader:
    """Reads one config.json; ``problems`` collects what is wrong with it."""

    def __init__(self, raw: Mapping[str, object], path: str) -> None:
        self._raw = raw
        self._path = path
        self.problems: list[Problem] = []

    def add_problem(self, remedy: str) -> None:
        """Something is wrong; ``remedy`` goes on after "its config.json"."""
        remedy = f"its config.json {remedy}"
        self.problems.append(Problem(field="model.path", value=self._path, remedy=remedy))

    def integer(self, *names: str, default: int | None = None) -> int:
        """A positive whole number under the first of ``names`` that is there."""
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
        """A whole number that may be 0."""
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
        """A positive number."""
        if name not in self._raw:
            self.add_problem(f"lacks {name}, a positive number")
            return 1.0
        return self._positive(name, self._raw[name])

    def rope_theta(self) -> float:
        """Read it from ``rope_parameters``, where transformers 5 writes it, or from the top level."""
        nested = self._mapping("rope_parameters")
        if "rope_theta" in nested:
            return self._positive("rope_parameters.rope_theta", nested["rope_theta"])
        if "rope_theta" not in self._raw:
            self.add_problem("lacks rope_theta (or rope_parameters.rope_theta), a positive number")
            return 1.0
        return self._positive("rope_theta", self._raw["rope_theta"])

    def rope_type(self, *supported: str) -> str:
        """Which rotary frequencies the model has: one of ``supported``; the first is a placeholder."""
        source, scaling = self._rope_scaling()
        # rope_scaling of older files says type.
        name = next((name for name in ("rope_type", "type") if name in scaling), None)
        kind = "default" if name is None else scaling[name]
        if kind not in supported:
            expected = " or ".join(map(repr, supported))
            self.add_problem(f"has {source}.{name} = {kind!r}; only {expected} is supported")
            return supported[0]
        return str(kind)

    def rope_number(self, name: str, default: float | None = None) -> float:
        """A positive number of the rotary scaling."""
        source, scaling = self._rope_scaling()
        if name not in scaling and default is not None:
            return default
        if name not in scaling:
            self.add_problem(f"lacks {source}.{name}, a positive number")
            return 1.0
        return self._positive(f"{source}.{name}", scaling[name])

    def only(self, name: str, *accepted: object, required: str = "") -> None:
        """Refuse other values than ``accepted``, and with ``required`` (what absence means) absence too."""
        if name in self._raw and self._raw[name] not in accepted:
            self.add_problem(f"has {name} = {self._raw[name]!r}; only {accepted[0]!r} is supported")
        if name not in self._raw and required:
            self.add_problem(f"lacks {name}, which must be {_as_json(accepted[0])} ({required})")

    def all_full_attention(self) -> None:
        """Refuse layers that see a window of the sequence only."""
        layer_types = self._raw.get("layer_types")
        if isinstance(layer_types, list):
            others = sorted({str(kind) for kind in layer_types} - {"full_attention"})
            if others:
                self.add_problem(f"has layer_types with {others[0]!r}; only 'full_attention' is supported")

    def full_rotation(self) -> None:
        """Refuse a rotation of only a part of each head."""
        for source, prefix in ((self._raw, ""), (self._mapping("rope_parameters"), "rope_parameters.")):
            value = source.get("partial_rotary_factor", 1.0)
            if value not in (None, 1.0):
                self.add_problem(f"has {prefix}partial_rotary_factor = {value!r}; only 1.0 is supported")

    def _rope_scaling(self) -> tuple[str, Mapping[str, object]]:
        """Return the key of the rotary scaling, and its value."""
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
