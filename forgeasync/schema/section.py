"""The base class of all sections of a run's config, and the ranges that many of their numbers share.

Every number has an upper bound too: a value that is far too large is refused here, before memory, an integer
type or a timer fails on it.
"""

import dataclasses
import functools
from collections.abc import Iterator
from enum import Enum
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    WrapSerializer,
)

from forgeasync.schema.problems import Problem

MAX_COUNT = 10**9
"""Counts are passed to libraries with 32-bit integers; this bound leaves room to add a little."""


Count = Annotated[int, Field(gt=0, le=MAX_COUNT)]

CountOrZero = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""A count that may be 0."""


Procs = Annotated[int, Field(gt=0, le=65536)]
"""Processes, GPUs or hosts."""


MAX_SECONDS = 366 * 86400.0


Seconds = Annotated[float, Field(ge=0.1, le=MAX_SECONDS)]
"""A deadline. Shorter ones pass before any call can answer; much longer ones overflow timers."""


Factor = Annotated[float, Field(ge=1e-30, le=1e30)]
"""A factor or threshold for float32 tensors: in float32 it is neither 0 nor infinite."""


Gibibytes = Annotated[float, Field(gt=0.0, le=65536.0)]


MAX_SEED = 2**32 - 1


Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
"""A random seed. vLLM passes its seed on to NumPy, which takes 32 bits."""


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent type conversion from strings."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    def find_problems(self) -> Iterator["Refusal"]:
        """Yield what is wrong between the keys of this section; keys are relative to the section.

        Pydantic checks the bounds of each key when it reads a section, but not when it copies one. These
        rules are checked with the rules across sections, so they hold for copies too.
        """
        yield from ()


Refusal = tuple[str, str] | tuple[str, str, object]
"""A dotted key, what would be right there, and a value if it is not what the section has at the key."""


def refuse(section: Section, key: str, remedy: str, *value: object) -> Problem:
    """Return the problem with a key of a section; without ``value``, with what the section has there."""
    return Problem(field=key, value=value[0] if value else _written(section, key), remedy=remedy)


def _written(section: Section, key: str) -> object:
    value = functools.reduce(_member, key.split("."), section)
    match value:
        case Enum():
            return value.value
        case Section(kind=kind):
            return kind
        case tuple():
            return list(value)
        case _:
            return value


def _member(node: Any, name: str) -> Any:
    if isinstance(node, dict):
        return node[name]
    return node[int(name)] if isinstance(node, tuple) else getattr(node, name)


def problems_within(value: object, at: str = "") -> Iterator[Problem]:
    """Yield what sections find wrong between their own keys: ``value`` and all sections within it."""
    prefix = f"{at}." if at else ""
    match value:
        case Section():
            for key, *rest in value.find_problems():
                yield dataclasses.replace(refuse(value, key, *rest), field=prefix + key)
            members: Any = value
        case dict():
            members = value.items()
        case tuple():
            members = enumerate(value)
        case _:
            return
    for name, member in members:
        yield from problems_within(member, f"{prefix}{name}")


def _read_kind(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


def _write_kind(value: Any, write: SerializerFunctionWrapHandler) -> Any:
    written = write(value)
    return written["kind"] if isinstance(written, dict) and written.keys() == {"kind"} else written


SHORT_FORM = (BeforeValidator(_read_kind), WrapSerializer(_write_kind))
"""Annotations of a union of sections that may be given by their ``kind`` alone, such as ``advantage: grpo``.
Sections without other keys are written in this short form too."""
