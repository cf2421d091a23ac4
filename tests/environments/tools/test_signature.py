"""Python functions as tools: what the model is told of them, and arguments that do not fit."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from typing_extensions import TypedDict

from forgeasync.environments import BadArguments, Signature, read_docstring


class Unit(StrEnum):
    METRE = "m"
    FOOT = "ft"


@dataclass
class Point:
    x: int
    y: float = 0.5


class Options(TypedDict):
    deep: bool


def measure(
    points: list[Point],
    unit: Unit,
    _mode: Literal["fast", 2],
    weights: dict[str, float],
    options: Options,
    schema: str | None = None,
    times: Annotated[int, Field(ge=1, le=3)] = 2,
) -> None:
    """Measure a path.

    Takes a while.

    Args:
        points: Where it leads,
            in order.
        unit (Unit): The unit of the result.
        times: How often.

    Returns:
        Nothing of interest to a model.
    """


def test_the_schema_says_all_that_the_annotations_say() -> None:
    spec = Signature(measure).spec
    assert spec.name == "measure"
    assert spec.description == "Measure a path.\n\nTakes a while."
    assert spec.parameters == {
        "type": "object",
        "additionalProperties": False,
        "required": ["points", "unit", "_mode", "weights", "options"],
        "properties": {
            "points": {
                "type": "array",
                "items": {"$ref": "#/$defs/Point"},
                "description": "Where it leads, in order.",
            },
            "unit": {"$ref": "#/$defs/Unit", "description": "The unit of the result."},
            "_mode": {"enum": ["fast", 2]},
            "weights": {"type": "object", "additionalProperties": {"type": "number"}},
            "options": {"$ref": "#/$defs/Options"},
            "schema": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            "times": {
                "type": "integer",
                "minimum": 1,
                "maximum": 3,
                "default": 2,
                "description": "How often.",
            },
        },
        "$defs": {
            "Point": {
                "type": "object",
                "title": "Point",
                "additionalProperties": False,
                "required": ["x"],
                "properties": {"x": {"type": "integer"}, "y": {"type": "number", "default": 0.5}},
            },
            "Unit": {"type": "string", "title": "Unit", "enum": ["m", "ft"]},
            "Options": {
                "type": "object",
                "title": "Options",
                "additionalProperties": False,
                "required": ["deep"],
                "properties": {"deep": {"type": "boolean"}},
            },
        },
    }


GOOD: dict[str, Any] = {
    "points": [{"x": 1}, {"x": 2, "y": 3}],
    "unit": "ft",
    "_mode": 2,
    "weights": {"a": 1},
    "options": {"deep": True},
}


def test_arguments_become_what_the_annotations_say() -> None:
    read = Signature(measure).read(GOOD | {"schema": None})
    assert read == {
        "points": [Point(1), Point(2, 3.0)],
        "unit": Unit.FOOT,
        "_mode": 2,
        "weights": {"a": 1.0},
        "options": {"deep": True},
        "schema": None,
    }


DEEP: Any = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"times": "2"}, "'times': Input should be a valid integer"),
        ({"times": 2.5}, "'times'"),
        ({"times": True}, "'times'"),
        ({"times": 4}, "'times': Input should be less than or equal to 3"),
        ({"times": None}, "'times'"),
        ({"unit": "yd"}, "'unit': Input should be 'm' or 'ft'"),
        ({"_mode": "slow"}, "'_mode': Input should be 'fast' or 2"),
        ({"points": [{"y": 1}]}, "'points.0.x' is missing"),
        ({"points": [{"x": 1, "z": 1}]}, "there is no argument 'points.0.z'"),
        ({"points": "x"}, "'points'"),
        ({"weights": {"a": math.nan}}, "'weights.a'"),
        ({"weights": {"a": math.inf}}, "'weights.a'"),
        ({"options": {"deep": 1}}, "'options.deep'"),
        ({"schema": "\ud800"}, "not a JSON object"),
        ({"schema": {"a": object()}}, "not a JSON object"),
        ({"weights": DEEP}, "not a JSON object"),
        ({"colour": "red"}, "there is no argument 'colour'"),
    ],
)
def test_wrong_arguments_are_told_by_their_names(change: dict[str, Any], told: str) -> None:
    with pytest.raises(BadArguments) as caught:
        Signature(measure).read(GOOD | change)
    assert told in str(caught.value)


def test_missing_and_many_wrong_arguments_are_told_shortly() -> None:
    with pytest.raises(BadArguments, match="'unit' is missing"):
        Signature(measure).read({key: GOOD[key] for key in GOOD if key != "unit"})
    with pytest.raises(BadArguments) as caught:
        Signature(measure).read({"x" * 5000 + str(number): 1 for number in range(100)})
    assert "and 100 more problems" in str(caught.value)
    assert len(str(caught.value)) < 1000


def takes_anything(*values: int) -> None:
    """Words."""


def takes_names(**values: int) -> None:
    """Words."""


def by_place(value: int, /) -> None:
    """Words."""


def untyped(value) -> None:  # type: ignore[no-untyped-def]
    """Words."""


def not_json(value: Callable[[], int]) -> None:
    """Words."""


def own_class(value: Signature) -> None:
    """Words."""


def odd_default(value: str | None = Signature) -> None:  # type: ignore[assignment]
    """Words."""


def undescribed(value: int) -> None:
    pass


def misdescribed(value: int) -> None:
    """Words.

    Args:
        valve: A number.
    """


def unresolved(value: "Nowhere") -> None:  # type: ignore[name-defined]  # noqa: F821
    """Words."""


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (takes_anything, r"takes_anything: its parameter 'values' is \*values"),
        (takes_names, r"takes_names: its parameter 'values' is \*\*values"),
        (by_place, "by_place: its parameter 'value' is"),
        (untyped, "untyped: its parameter 'value' has no type"),
        (not_json, "not_json: its parameter 'value' has type .*Callable.*, which JSON cannot carry"),
        (own_class, "own_class: its parameter 'value' has type .*Signature.*, which JSON cannot carry"),
        (odd_default, "odd_default: its parameter 'value' has a default that JSON cannot carry"),
        (undescribed, "undescribed: has no docstring"),
        (misdescribed, r"misdescribed: its docstring describes \['valve'\]"),
        (unresolved, "unresolved: its annotations cannot be read: .*Nowhere"),
        (lambda: None, "tool '<lambda>': a tool needs a name"),
        (Point, "is not a function"),
    ],
)
def test_what_cannot_be_described_is_named(function: Callable[..., object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Signature(function)


def test_a_method_of_an_object_and_a_function_without_parameters() -> None:
    class Counter:
        def next(self, by: int = 1) -> int:
            """Count on."""
            return by

    assert Signature(Counter().next).spec.parameters["properties"].keys() == {"by"}

    def now() -> str:
        """Tell the time."""
        return ""

    spec = Signature(now).spec
    assert (spec.parameters["properties"], spec.parameters["required"]) == ({}, [])


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            "Find a word.\n\n:param str word: One,\n    in lower case.\n:param limit: Two.\n:returns: x",
            {"word": "One, in lower case.", "limit": "Two."},
        ),
        ("Find a word.\n\nArgs:\n    word: A: b.\n\nRaises:\n    KeyError: none.", {"word": "A: b."}),
        ("Find a word.\n\nParameters\n----------\nword : str\n    Which.\n", {"word": "Which."}),
        ("Find a word.", {}),
    ],
)
def test_docstrings_in_every_style(text: str, lines: dict[str, str]) -> None:
    assert read_docstring(text) == ("Find a word.", lines)
