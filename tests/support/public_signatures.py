"""What users write to call public names: parameters and whether they have defaults, as a stub of Python.

    python -m tests.support.public_signatures

writes it to ``tests/recorded/public_signatures.pyi``, which ``tests/test_api.py`` compares.
"""

import ast
import enum
import inspect
import textwrap
from collections.abc import Iterator
from inspect import Parameter, Signature
from pathlib import Path

import forgeasync as fa

RECORD = Path(__file__).resolve().parents[1] / "recorded" / "public_signatures.pyi"

HOW_TO_RECORD = "record it: python -m tests.support.public_signatures"

LINE = 100

_HEAD = """\
# Parameters of every public class and function, `...` for a default. What goes from here breaks the code of
# users: tests/test_api.py. Written by python -m tests.support.public_signatures.
"""


def public_signatures() -> dict[str, Signature]:
    """What users call, by its public name: no enums, no protocols and no exceptions without parameters."""
    found: dict[str, Signature] = {}
    for name in sorted(fa.__all__):
        value = getattr(fa, name)
        if not callable(value) or isinstance(value, enum.EnumMeta) or getattr(value, "_is_protocol", False):
            continue
        if isinstance(value, type) and issubclass(value, Exception) and "__init__" not in vars(value):
            continue
        found[name] = inspect.signature(value)
    return found


def shown(signatures: dict[str, Signature]) -> str:
    """The record: a function of the same parameters for each name, one parameter a line where many."""
    text = _HEAD
    for name, signature in signatures.items():
        parameters = []
        for one in signature.parameters.values():
            default = ... if one.default is not Parameter.empty else Parameter.empty
            parameters.append(one.replace(annotation=Parameter.empty, default=default))
        bare = Signature(parameters)
        words = str(bare).replace("Ellipsis", "...").removeprefix("(").removesuffix(")")
        line = f"def {name}({words}): ...\n"
        if len(line) > LINE:
            lines = textwrap.indent(words.replace(", ", ",\n"), "    ")
            line = f"def {name}(\n{lines},\n): ...\n"
        text += line
    return text


def read(text: str) -> dict[str, Signature]:
    """The signatures of a record."""
    found: dict[str, Signature] = {}
    for node in ast.parse(text).body:
        assert isinstance(node, ast.FunctionDef)
        space: dict[str, object] = {}
        exec(ast.unparse(node), space)
        function = space[node.name]
        assert callable(function)
        found[node.name] = inspect.signature(function)
    return found


def broken(before: dict[str, Signature], after: dict[str, Signature]) -> Iterator[str]:
    """What stops working of calls that worked with the recorded signatures."""
    for name, old in before.items():
        if name not in after:
            yield f"fa.{name}: is gone; users import it"
            continue
        new = after[name].parameters
        for parameter in old.parameters.values():
            now = new.get(parameter.name)
            if now is None:
                yield f"fa.{name}: parameter {parameter.name} is gone or has another name; users pass it"
            elif now.default is Parameter.empty and parameter.default is not Parameter.empty:
                yield f"fa.{name}: parameter {parameter.name} has lost its default; users leave it out"
            elif parameter.kind is not Parameter.KEYWORD_ONLY and (
                now.kind is not parameter.kind
                or list(new).index(now.name) != list(old.parameters).index(now.name)
            ):
                yield f"fa.{name}: parameter {parameter.name} is at another position; users pass it by that"
            elif now.kind is Parameter.POSITIONAL_ONLY and parameter.kind is not now.kind:
                yield f"fa.{name}: parameter {parameter.name} cannot be named; users pass it by its name"
        for now in new.values():
            is_variable = now.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
            if now.name not in old.parameters and now.default is Parameter.empty and not is_variable:
                yield f"fa.{name}: parameter {now.name} is new and required; new fields need defaults"


if __name__ == "__main__":
    RECORD.write_text(shown(public_signatures()), encoding="utf-8")
