"""What users write to call public names: parameters and whether they have defaults, as a stub of Python.

    python -m tests.support.public_signatures

writes it to ``tests/recorded/public_signatures.pyi``, which ``tests/test_api.py`` compares.
"""

import enum
import inspect
import textwrap
from inspect import Parameter, Signature
from pathlib import Path

import forgeasync as fa

RECORD = Path(__file__).resolve().parents[1] / "recorded" / "public_signatures.pyi"

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


if __name__ == "__main__":
    RECORD.write_text(shown(public_signatures()), encoding="utf-8")
