"""What a rehearsal changes of a config: each change with its reason, and what is not tried because of it."""

from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import BaseModel

from forgeasync.config import RunConfig

S = TypeVar("S", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One key of the config, or one size of the model, that a rehearsal has otherwise than the run."""

    field: str
    before: str
    after: str
    why: str
    untried: str | None = None
    """What the rehearsal cannot show because of this change; None if it shows the same at another size."""


@dataclass(slots=True)
class Draft:
    """A config that is being changed, and the changes so far."""

    config: RunConfig
    changes: list[Change] = field(default_factory=list)

    def set(self, key: str, value: object, why: str, untried: str | None = None) -> None:
        """Replace the value at a dotted key; nothing happens if it is the same already."""
        before = self.config
        for part in key.split("."):
            before = getattr(before, part)
        if before == value:
            return
        self.config = _replaced(self.config, key.split("."), value)
        self.note(key, before, value, why, untried)

    def note(self, name: str, before: object, after: object, why: str, untried: str | None = None) -> None:
        """Record a change that was made elsewhere; nothing happens if the values are equal."""
        if before != after:
            self.changes.append(
                Change(field=name, before=_shown(before), after=_shown(after), why=why, untried=untried)
            )


def _replaced(section: S, parts: list[str], value: object) -> S:
    first, *rest = parts
    new = _replaced(getattr(section, first), rest, value) if rest else value
    return section.model_copy(update={first: new})


def _shown(value: object) -> str:
    if isinstance(value, BaseModel):
        # The kind says which section it is; launchers and sources have one.
        return str(value.model_dump(mode="json").get("kind", type(value).__name__))
    if isinstance(value, tuple | list):
        return ", ".join(map(_shown, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else "none" if value is None else str(value)
