"""JSON schema of a Python function's arguments, and validation of the model's arguments.

Types come from the function's annotations and descriptions from its docstring. All types that pydantic can
read from JSON are supported: str, int, float, bool, Literal, enums, lists, dicts, Optional, dataclasses,
TypedDict (of ``typing_extensions`` before Python 3.12) and pydantic's models.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NoReturn, NotRequired, get_type_hints

import docstring_parser
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind
from pydantic_core import ErrorDetails, PydanticSerializationError, to_jsonable_python
from typing_extensions import TypedDict

from forgeasync.environments.messages import ToolSpec, show

TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_\-.]{0,63}", re.ASCII)
"""Tool names that chat endpoints and templates accept."""

MAX_NAMED_PROBLEMS = 5
"""Maximum number of wrong arguments in one error message to the model."""


class BadArguments(ValueError):
    """The arguments of a call do not fit the tool. The text is for the model."""


class Signature:
    """Schema and validation of one function's arguments."""

    def __init__(self, function: Callable[..., object]) -> None:
        """Read annotations and docstring.

        Raises:
            ValueError: A schema cannot describe the function. The error names the function and the parameter.
        """
        name, signature = _name_and_signature(function)
        description, lines = read_docstring(inspect.getdoc(function) or "")
        if not description:
            raise ValueError(
                f"tool {name}: has no docstring; its first lines must tell the model what it is for"
            )
        if unknown := lines.keys() - signature.parameters.keys():
            raise ValueError(
                f"tool {name}: its docstring describes {sorted(unknown)}, which are none of its parameters"
            )
        fields: dict[str, Any] = {}
        for parameter, hint in _hints(function, name, signature).items():
            fields[parameter] = _field(name, signature.parameters[parameter], hint, lines.get(parameter))
        self._arguments = _adapter(name, fields)
        schema = self._arguments.json_schema(schema_generator=_Schema)
        schema.pop("title", None)
        self.spec = ToolSpec(
            name=name, description=description, parameters={"properties": {}, "required": []} | schema
        )

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the validated arguments as Python values, without those that are left to their defaults.

        Types that JSON distinguishes are not converted: the text "1" is not a number.

        Raises:
            BadArguments: An argument is missing, unknown, of another type or out of bounds.
        """
        try:
            text = json.dumps(arguments)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadArguments(f"the arguments are no JSON object ({type(error).__name__})") from error
        try:
            return self._arguments.validate_json(text, strict=True)
        except ValidationError as error:
            # The input can be long, and the model knows it.
            problems = error.errors(include_url=False, include_input=False)
        told = "; ".join(map(_told, problems[:MAX_NAMED_PROBLEMS]))
        more = len(problems) - MAX_NAMED_PROBLEMS
        raise BadArguments(told + (f"; and {more} more problems" if more > 0 else ""))


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into its description and the lines on parameters.

    Parameters are in a section ``Args:`` (``name: text``), in a section in NumPy's style, or in fields
    ``:param name: text``. Other sections, and text after the parameters, are left out.
    """
    parsed = docstring_parser.parse(text)
    lines = {one.arg_name: " ".join((one.description or "").split()) for one in parsed.params}
    return (parsed.description or "").strip(), lines


class _Schema(GenerateJsonSchema):
    """JSON schema without titles, which repeat the names of parameters."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def emit_warning(self, kind: JsonSchemaWarningKind, detail: str) -> None:
        raise ValueError(f"{kind}: {detail}")


def _name_and_signature(function: Callable[..., object]) -> tuple[str, inspect.Signature]:
    if not inspect.isroutine(function):
        raise ValueError(f"{show(function)} is no function; a tool is made of a function or a method")
    name = function.__name__
    if TOOL_NAME.fullmatch(name) is None:
        raise ValueError(f"tool {name!r}: a tool needs a name that the model can write: letters, digits, '_'")
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            _refuse(
                name, parameter.name, f"is {parameter}; must be an argument that can be given by its name"
            )
    return name, signature


def _hints(function: Callable[..., object], name: str, signature: inspect.Signature) -> dict[str, Any]:
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:
        # Annotations can be any expression.
        raise ValueError(f"tool {name}: its annotations cannot be read: {error}") from error
    for parameter in signature.parameters:
        if parameter not in hints:
            _refuse(name, parameter, "has no type; annotate it, for instance as str")
    return {parameter: hints[parameter] for parameter in signature.parameters}


def _field(name: str, parameter: inspect.Parameter, hint: Any, description: str | None) -> Any:
    try:
        TypeAdapter(hint).json_schema(schema_generator=_Schema)
    except (PydanticUserError, ValueError) as error:
        reason = str(error).split("\n")[0]
        _refuse(name, parameter.name, f"has type {show(hint)}, which JSON cannot carry: {reason}")
    extra: dict[str, Any] = {}
    if parameter.default is not parameter.empty:
        try:
            extra["default"] = to_jsonable_python(parameter.default)
        except PydanticSerializationError as error:
            _refuse(name, parameter.name, f"has a default that JSON cannot carry: {error}")
    described = Field(description=description or None, json_schema_extra=extra or None)
    field = Annotated[hint, described]
    return NotRequired[field] if extra else field


def _adapter(name: str, fields: dict[str, Any]) -> TypeAdapter[dict[str, Any]]:
    make: Any = TypedDict
    arguments = make(name, fields)
    arguments.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)
    return TypeAdapter(arguments)


def _refuse(name: str, parameter: str, remedy: str) -> NoReturn:
    raise ValueError(f"tool {name}: its parameter {parameter!r} {remedy}")


def _told(problem: ErrorDetails) -> str:
    place = ".".join(map(str, problem["loc"]))
    match problem["type"]:
        case "missing":
            return f"{place!r} is missing"
        case "extra_forbidden" | "unexpected_keyword_argument":
            return f"there is no argument {show(place)}"
        case "json_invalid":
            return "the arguments are no JSON object"
    return f"{place!r}: {problem['msg']}"
