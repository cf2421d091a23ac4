"""Sections of ``kind: python``: the user's own code, imported by its dotted name or sent along pickled.

The same three forms work wherever a section takes ``kind: python`` (objectives, corrections, advantages,
filters, rewards, environments):

    a class                   ``Banded(low=0.5)``: called with the options as keywords; its instance is used
    a function that returns   ``banded(low=0.5)``: called with the options as keywords; its result is used
    the function itself       ``reward(task, response)``: used as it is; options become further keywords
"""

import base64
import functools
import importlib
import inspect
import pickle
from collections.abc import Callable, Mapping
from typing import Literal

import cloudpickle
from pydantic import BeforeValidator, Field

from forgeasync.schema.section import Section


class PythonCode(Section):
    """Code of your own."""

    kind: Literal["python"] = "python"
    factory: str
    """Dotted name of a class or function, ``package.module.name``; the processes of the run import it too."""
    options: dict[str, int | float | bool | str] = Field(default_factory=dict)
    """Keyword arguments that ``factory`` is called with."""
    pickled: str | None = None
    """The class or function itself (cloudpickle, base64) if it was defined in a notebook or in the running
    script, where other processes cannot import it. ``code_of`` writes it."""


def code_of(thing: Callable[..., object]) -> tuple[str, str | None]:
    """Return ``factory`` and ``pickled`` for a class or function that was handed over in Python.

    Raises:
        ValueError: it cannot be called, or cannot be sent to another process; says why.
    """
    if not callable(thing):
        raise ValueError(f"must be a class or a function, not a {type(thing).__name__}")
    name = f"{thing.__module__}.{thing.__qualname__}" if hasattr(thing, "__qualname__") else repr(type(thing))
    if _is_importable(thing):
        return name, None
    try:
        return name, base64.b64encode(cloudpickle.dumps(thing)).decode("ascii")
    except Exception as error:
        # Whatever the pickling of a user's own objects raises is for the user to see.
        raise ValueError(
            f"{name} cannot be sent to other processes ({type(error).__name__}: {error}); define it in a "
            "module, or remove from it what cannot be pickled"
        ) from error


def section_of(thing: object) -> dict[str, object] | None:
    """Return the ``kind: python`` section for an instance of a user's own class, such as ``MyLoss(width=2)``.

    None for everything else, built-in sections among them.

    Raises:
        ValueError: the class cannot be sent to another process.
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
"""Annotation of a union of sections that instances of a user's own classes may be given for, too."""


def _is_importable(thing: Callable[..., object]) -> bool:
    """Whether other processes can import this very object by its module and name."""
    module, name = getattr(thing, "__module__", "__main__"), getattr(thing, "__qualname__", "")
    if module == "__main__" or not name.isidentifier():
        return False
    try:
        return vars(importlib.import_module(module)).get(name) is thing
    except ImportError:
        return False


def build_code(section: PythonCode, parameters: tuple[str, ...]) -> Callable[..., object]:
    """Build what the section describes, ready to be called with positional ``parameters``.

    Imports and runs the user's code. Within a process the same section gives the same object.

    Raises:
        ValueError: it does not exist, or cannot be called with these parameters; says which part is wrong.
    """
    # Other fields of a derived section do not change what is built.
    return _build(section.model_dump_json(include=set(PythonCode.model_fields)), parameters)


def load_code(section: PythonCode) -> Callable[..., object]:
    """Load the class or function itself, for callers that pass the options on their own.

    Imports and runs the user's code.

    Raises:
        ValueError: it does not exist, or cannot be called; says which part is wrong.
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
    """Say which option is missing or unknown, if that is all that is wrong."""
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
        # Unpickling imports what the user's code imports: anything can be missing.
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
        # Whatever the user's module raises while it is imported is for the user to see.
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
