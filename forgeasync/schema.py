"""Sections of configs, problems with them, user code in them, and kinds that installed packages add.

Every number has an upper bound, so that a value that is far too large is refused here, before memory, an
integer type or a timer fails.

A package declares a kind in its pyproject.toml, in one of two forms (docs/plugins.md). The first form names
code:

    [project.entry-points."forgeasync.environments"]
    alfworld = "my_package.alfworld:AlfWorld"

If the package is installed, a config can contain ``environment: {kind: alfworld, max_turns: 30}``. This means
``{kind: python, factory: my_package.alfworld.AlfWorld, options: {max_turns: 30}}``, which is also the form in
the resolved config of a run.

The second form names a class of sections, whose fields are the keys of the section:

    [project.entry-points."forgeasync.environment_sections"]
    coding = "forgeasync.plugins.coding.section:CodingAgent"
"""

import base64
import dataclasses
import functools
import importlib
import inspect
import json
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, Literal, get_args

import cloudpickle
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    SerializerFunctionWrapHandler,
    WrapSerializer,
)
from pydantic_core import CoreSchema, core_schema

EXIT_FAILED = 1

EXIT_REFUSED = 2
"""Exit code of a program that refused its input before it started anything."""

EXIT_SIGNAL = 128
"""Added to a signal's number to get the exit code of a program stopped by that signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One mistake in the input of a run, which the user has to fix."""

    field: str
    """Dotted name of the field."""
    value: object = None
    """Value of the field; None if it has none."""
    remedy: str
    """Description of what would be right."""

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.field}: {self.remedy}"
        shown = repr(self.value)
        if len(shown) > MAX_SHOWN_CHARACTERS:
            shown = shown[:MAX_SHOWN_CHARACTERS] + "..."
        return f"{self.field} = {shown}: {self.remedy}"


MAX_SHOWN_CHARACTERS = 160
"""Maximum length of a value in messages, so that a misplaced section does not fill the screen."""


class ConfigError(ValueError):
    """The input of a run is wrong. The text of the error has one line per problem."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def raise_if_any(problems: Iterable[Problem]) -> None:
    """Raise ``ConfigError`` with all of ``problems``, if there are any."""
    found = tuple(problems)
    if found:
        raise ConfigError(found)


MAX_COUNT = 10**9
"""Upper bound of counts. Libraries store them as 32-bit integers; the bound leaves room for additions."""


Count = Annotated[int, Field(gt=0, le=MAX_COUNT)]

CountOrZero = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""A count that may be 0."""


Procs = Annotated[int, Field(gt=0, le=65536)]
"""Number of processes, GPUs or hosts."""


MAX_SECONDS = 366 * 86400.0


Seconds = Annotated[float, Field(ge=0.1, le=MAX_SECONDS)]
"""Time limit in seconds. Shorter limits expire before a call can return; much longer ones overflow timers."""


Factor = Annotated[float, Field(ge=1e-30, le=1e30)]
"""Factor or threshold for float32 tensors. In float32, it is neither 0 nor infinite."""


Gibibytes = Annotated[float, Field(gt=0.0, le=65536.0)]


MAX_SEED = 2**32 - 1


Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
"""Random seed. vLLM passes its seed to NumPy, which accepts 32 bits."""


class Section(BaseModel):
    """Base class of config sections. They are immutable and refuse unknown keys, nan and infinity."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    def find_problems(self) -> Iterator["Refusal"]:
        """Yield violations of the rules between the keys of this section. Keys are relative to the section.

        Pydantic checks the bounds of each key when it creates a section, but not when it copies one. These
        rules are checked together with the rules across sections, so they hold for copies too.
        """
        yield from ()


Refusal = tuple[str, str] | tuple[str, str, object]
"""A dotted key, the remedy, and the value to show if it is not the section's value at the key."""


def refuse(section: Section, key: str, remedy: str, *value: object) -> Problem:
    """Return a problem with a key of a section. Without ``value``, it has the section's value at the key."""
    return Problem(field=key, value=value[0] if value else _written(section, key), remedy=remedy)


def _written(section: Section, key: str) -> object:
    value = functools.reduce(_member, key.split("."), section)
    match value:
        case Enum():
            return value.value
        case Section():
            return getattr(value, "kind", value)
        case tuple():
            return list(value)
        case _:
            return value


def _member(node: Any, name: str) -> Any:
    if isinstance(node, dict):
        return node[name]
    return node[int(name)] if isinstance(node, tuple) else getattr(node, name)


def problems_within(value: object, at: str = "") -> Iterator[Problem]:
    """Yield the problems that ``value`` and all sections within it find between their own keys.

    ``at`` is the dotted name of ``value``.
    """
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
"""Annotations of a union of sections that can be given by their ``kind`` alone, such as ``advantage: grpo``.

Sections without other keys are also written in this short form.
"""


class PythonCode(Section):
    """Your own code, imported by its dotted name or sent to other processes as a pickle.

    The same three forms work for all sections with ``kind: python`` (objectives, corrections, advantages,
    filters, rewards, environments):

        a class                 ``Banded(low=0.5)``: called with the options as keywords; its instance is used
        a function that returns ``banded(low=0.5)``: called with the options as keywords; its result is used
        the function itself     ``reward(task, response)``: used as it is; options become further keywords
    """

    kind: Literal["python"] = "python"
    factory: str
    """Dotted name of a class or function, ``package.module.name``, which all processes can import."""
    options: dict[str, int | float | bool | str] = Field(default_factory=dict)
    """Keyword arguments for ``factory``."""
    pickled: str | None = None
    """The class or function itself (cloudpickle, base64), if it was defined in a notebook or in the running
    script, where other processes cannot import it. ``code_of`` creates it."""


def code_of(thing: Callable[..., object]) -> tuple[str, str | None]:
    """Return the values of ``factory`` and ``pickled`` for a Python class or function.

    Raises:
        ValueError: ``thing`` is not callable, or cannot be sent to another process. The message says why.
    """
    if not callable(thing):
        raise ValueError(f"must be a class or a function, not a {type(thing).__name__}")
    name = f"{thing.__module__}.{thing.__qualname__}" if hasattr(thing, "__qualname__") else repr(type(thing))
    if _is_importable(thing):
        return name, None
    try:
        return name, base64.b64encode(cloudpickle.dumps(thing)).decode("ascii")
    except Exception as error:
        # Pickling user objects can raise any exception.
        raise ValueError(
            f"{name} cannot be sent to other processes ({type(error).__name__}: {error}); define it in a "
            "module, or remove from it what cannot be pickled"
        ) from error


def section_of(thing: object) -> dict[str, object] | None:
    """Return the ``kind: python`` section for an instance of a user-defined section, such as ``MyLoss(w=2)``.

    Returns None for everything else, including built-in sections.

    Raises:
        ValueError: The class cannot be sent to another process.
    """
    if not isinstance(thing, Section) or type(thing).__module__.startswith("forgeasync."):
        return None
    factory, pickled = code_of(type(thing))
    section: dict[str, object] = {"kind": "python", "factory": factory}
    section["options"] = thing.model_dump(mode="json", exclude={"kind"}, exclude_defaults=True)
    return section if pickled is None else section | {"pickled": pickled}


def _read_own(value: object) -> object:
    own = section_of(value)
    return value if own is None else own


OWN_INSTANCE = BeforeValidator(_read_own)
"""Annotation of a union of sections that also accepts instances of user-defined classes."""


def _is_importable(thing: Callable[..., object]) -> bool:
    """Whether other processes can import exactly this object by its module and name."""
    module, name = getattr(thing, "__module__", "__main__"), getattr(thing, "__qualname__", "")
    if module == "__main__" or not name.isidentifier():
        return False
    try:
        return vars(importlib.import_module(module)).get(name) is thing
    except ImportError:
        return False


def build_code(section: PythonCode, parameters: tuple[str, ...]) -> Callable[..., object]:
    """Return the callable that a section describes, to be called with the positional ``parameters``.

    This imports and runs user code. Within a process, equal sections give the same object.

    Raises:
        ValueError: The code does not exist, or cannot be called with these parameters. The message says which
            part is wrong.
    """
    # Other fields of a derived section do not change what is built.
    return _build(section.model_dump_json(include=set(PythonCode.model_fields)), parameters)


def load_code(section: PythonCode) -> Callable[..., object]:
    """Return the class or function itself, for callers that pass the options themselves.

    This imports and runs user code.

    Raises:
        ValueError: The code does not exist, or is not callable. The message says which part is wrong.
    """
    return _unpickle(section) if section.pickled is not None else _import(section.factory)


@functools.lru_cache(maxsize=256)
def _build(section_json: str, parameters: tuple[str, ...]) -> Callable[..., object]:
    section = PythonCode.model_validate_json(section_json)
    found = load_code(section)
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{section.factory} has no signature to check: {error}") from error
    if _fits(signature, (), section.options):
        built = found(**section.options)
        if not callable(built):
            raise ValueError(
                f"{section.factory} returned a {type(built).__name__}; must return a function of "
                f"({', '.join(parameters)})"
            )
        return built
    if not inspect.isclass(found) and _fits(signature, parameters, section.options):
        return functools.partial(found, **section.options) if section.options else found
    if (problem := _option_problem(signature, parameters, section.options)) is not None:
        raise ValueError(f"{section.factory} takes {signature}; {problem}")
    options = [f"{name}=..." for name in section.options]
    raise ValueError(
        f"{section.factory} takes {signature}; must take ({', '.join(options)}), its options, and return a "
        f"function of ({', '.join(parameters)}), or take ({', '.join([*parameters, *options])}) itself"
    )


def _option_problem(
    signature: inspect.Signature, parameters: tuple[str, ...], options: Mapping[str, object]
) -> str | None:
    """Return a description of missing and unknown options; None if these are not the only problem."""
    named = [
        one
        for one in signature.parameters.values()
        if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    others = [one for one in named if one.name not in parameters]
    missing = [one.name for one in others if one.default is one.empty and one.name not in options]
    unknown = [name for name in options if name not in {one.name for one in others}]
    if len(others) == len(signature.parameters) and (missing or unknown):
        words = [f"options lacks {name!r}" for name in missing]
        words += [f"options.{name} is none of its arguments" for name in unknown]
        return ", ".join(words)
    return None


def _fits(signature: inspect.Signature, parameters: tuple[str, ...], options: Mapping[str, object]) -> bool:
    try:
        signature.bind(*parameters, **options)
    except TypeError:
        return False
    return True


def _unpickle(section: PythonCode) -> Callable[..., object]:
    assert section.pickled is not None
    try:
        found = pickle.loads(base64.b64decode(section.pickled, validate=True))
    except Exception as error:
        # Unpickling runs the imports of user code, which can raise any exception.
        raise ValueError(
            f"{section.factory} cannot be loaded from its pickled form ({type(error).__name__}: {error})"
        ) from error
    if not callable(found):
        raise ValueError(f"{section.factory} is a {type(found).__name__}; must be a class or a function")
    return found


def _import(path: str) -> Callable[..., object]:
    module_name, dot, name = path.rpartition(".")
    if not dot or not all(part.isidentifier() for part in path.split(".")):
        raise ValueError("must read package.module.name")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        # Importing a user's module can raise any exception.
        raise ValueError(
            f"module {module_name!r} cannot be imported ({type(error).__name__}: {error}); it must be "
            "installed or in a folder of PYTHONPATH"
        ) from error
    if name not in vars(module):
        raise ValueError(f"module {module_name!r} has no {name!r}")
    found = vars(module)[name]
    if not callable(found):
        raise ValueError(f"is a {type(found).__name__}; must be a class or a function")
    return found


class PluginGroup(StrEnum):
    """Groups of entry points, one for each type of section to which packages can add kinds."""

    ENVIRONMENTS = "forgeasync.environments"
    REWARDS = "forgeasync.rewards"
    SOURCES = "forgeasync.sources"
    TRANSPORTS = "forgeasync.transports"


_SECTIONS = {
    PluginGroup.ENVIRONMENTS: "forgeasync.environment_sections",
    PluginGroup.SOURCES: "forgeasync.source_sections",
}
"""Groups of entry points that name classes of sections, by the group that names code."""


class PluginSection(Section):
    """Base class of the sections that installed packages add as classes."""

    kind: str


def python_form(
    group: PluginGroup, field: str, section: Mapping[str, Any], *, own_keys: Collection[str]
) -> Mapping[str, Any]:
    """Convert a section whose kind names a package's code to the form of ``kind: python``.

    Other sections are returned unchanged.

    Args:
        group: Group of entry points to search for the kind.
        field: Dotted name of the section, for error messages.
        section: Keys and values of the section.
        own_keys: Keys of the section for user code, which keep their meaning. All others become options.

    Raises:
        ConfigError: The section has keys of ``kind: python`` itself, or the class of its kind cannot be
            loaded.
    """
    kind = section.get("kind")
    point = installed_kinds(group).get(kind) if isinstance(kind, str) else None
    if point is None or point.group != group:
        # Refuses a kind whose class cannot be loaded here, before pydantic reads the config.
        section_class(group, kind)
        return section
    factory = point.value.replace(":", ".")
    for key in ("factory", "pickled", "options"):
        if key in section:
            remedy = f"must be left out: kind {kind!r} is {factory}, and its options stand beside kind"
            raise ConfigError([Problem(field=f"{field}.{key}", value=section[key], remedy=remedy)])
    own = {key: value for key, value in section.items() if key in own_keys and key != "kind"}
    options = {key: value for key, value in section.items() if key not in own_keys}
    return {"kind": "python", "factory": factory, "options": options, **own}


def section_class(group: PluginGroup, kind: object) -> type[PluginSection] | None:
    """Return the section class of a kind that a package adds as a class; None for all other kinds.

    This imports the package.

    Raises:
        ConfigError: The package cannot be imported, or the entry point does not name a section class.
    """
    point = installed_kinds(group).get(kind) if isinstance(kind, str) else None
    if point is None or point.group == group:
        return None
    try:
        found = point.load()
        problem = "is not a class derived from a section of forgeasync that packages may add"
    except Exception as error:
        # Importing a package can raise any exception.
        found, problem = None, f"cannot be imported ({type(error).__name__}: {error})"
    if not isinstance(found, type) or not issubclass(found, PluginSection):
        raise ConfigError([Problem(field=point.group, value=kind, remedy=f"{point.value} {problem}")])
    return found


@functools.cache
def installed_kinds(group: PluginGroup) -> Mapping[str, EntryPoint]:
    """Return the entry points, by kind, that installed packages add to a group in either form.

    Raises:
        ConfigError: Two packages add the same kind.
    """
    found: dict[str, EntryPoint] = {}
    for name in (group.value, _SECTIONS.get(group, "")):
        for point in entry_points(group=name):
            if (first := found.setdefault(point.name, point)).value != point.value:
                values = " and ".join(one.value.replace(":", ".") for one in (first, point))
                remedy = f"two installed packages add this kind: {values}; uninstall one of them"
                raise ConfigError([Problem(field=group.value, value=point.name, remedy=remedy)])
    return found


_INSTALLED = "(installed)"
"""Tag of the union for all sections that packages add. It appears in the locations of pydantic's errors."""


@dataclass(frozen=True, slots=True)
class WithPlugins:
    """Annotation of a union of sections to which packages can add.

    The union consists of the built-in sections, distinguished by ``kind``, and ``PluginSection``, the base
    class of those that packages add.
    """

    group: PluginGroup

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema with which pydantic reads and writes such a section."""
        built_in = [one for one in get_args(source) if not issubclass(one, PluginSection)]
        choices = {
            kind: handler.generate_schema(one)
            for one in built_in
            for kind in get_args(one.model_fields["kind"].annotation)
        }
        first = next(iter(choices))

        def tag(value: Any) -> str | None:
            if not isinstance(value, Mapping | Section):
                # The error of that schema says what is expected.
                return first
            kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
            if kind is None or str(kind) in choices or section_class(self.group, kind) is None:
                return None if kind is None else str(kind)
            return _INSTALLED

        return core_schema.tagged_union_schema(
            {**choices, _INSTALLED: core_schema.no_info_plain_validator_function(self._read)},
            tag,
            # Serializes by the class of the actual section.
            serialization=core_schema.simple_ser_schema("any"),
        )

    def _read(self, value: Any) -> PluginSection:
        if isinstance(value, PluginSection):
            return value
        found = section_class(self.group, value["kind"])
        assert found is not None, "what tag has found"
        # Read from JSON like all sections; see load_config.
        return found.model_validate_json(json.dumps(value), strict=True)
