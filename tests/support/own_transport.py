"""The transport that the docstring of ``Transport`` shows, as a module of a user's own."""

import inspect
import textwrap
from pathlib import Path

from forgeasync.schema import PythonCode
from forgeasync.weights import Transport


def write_own_transport(folder: Path, module: str) -> PythonCode:
    """Write the example into ``folder`` as a module; returns the section that asks for it.

    Its files go into ``folder`` too.
    """
    assert Transport.__doc__ is not None
    _, code = inspect.getdoc(Transport).split(".. code-block:: python\n")
    code, _ = code.split("\nRules for a transport:")
    (folder / f"{module}.py").write_text(textwrap.dedent(code))
    return PythonCode(factory=f"{module}.FolderTransport", options={"folder": str(folder)})
