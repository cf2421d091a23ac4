"""Which changes of a model count for nothing: those that could decide how its solution is tested."""

import sys
from collections.abc import Sequence, Set
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

NAMES = (
    "test_*.py",
    "*_test.py",
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "pyproject.toml",
    "tox.ini",
    "setup.cfg",
    "sitecustomize.py",
    "usercustomize.py",
    "*.pth",
)
"""Names of files that are tests, or that pytest and Python read before them, in any folder."""

FOLDERS = ("tests", "*.egg-info", "*.dist-info")
"""Folders of tests and of entry points, which pytest loads plugins from, at any depth."""

FIRST_FOLDERS = ("test",)
"""Folders of tests directly in the repository; below, packages such as ``django.test`` are called so too."""

_RUNNERS = frozenset({"pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py"})


def is_protected(path: str, *, hidden: Set[str], patterns: Sequence[str]) -> bool:
    """Whether a change of this file is undone.

    ``hidden`` are the files of the test patch and those of listed tests; ``patterns`` are the record's
    own, in which ``*`` stands for any text, slashes included.
    """
    parts = PurePosixPath(path).parts
    return (
        path in hidden
        # A file or link where the tests' folder was.
        or any(one.startswith(f"{path}/") for one in hidden)
        or any(fnmatchcase(parts[-1], name) for name in NAMES)
        or any(fnmatchcase(part, name) for part in parts for name in FOLDERS)
        or parts[0] in FIRST_FOLDERS
        or any(fnmatchcase(path, pattern) or path.startswith(f"{pattern}/") for pattern in patterns)
    )


def hides_module(path: str, *, python_path: Sequence[str], checkout: Path) -> bool:
    """Whether a file would be imported in place of a module of Python or of the test runner, and the
    repository has no module of that name itself."""
    for root in python_path:
        if root != "." and not path.startswith(f"{root}/"):
            continue
        first = path.removeprefix("" if root == "." else f"{root}/").partition("/")[0]
        name = first.partition(".")[0]
        if name in sys.stdlib_module_names or name in _RUNNERS:
            own = checkout / root
            if not (own / name).exists() and not (own / f"{name}.py").exists():
                return True
    return False
