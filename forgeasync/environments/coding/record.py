"""The record of one coding task: a repository as it was, tests that a solution must pass, and its issue."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any

MAX_TESTS = 10_000
PACKAGES = "packages"
CHECKOUT = "checkout"


class TestRunner(StrEnum):
    """What runs the tests of a record, and how it names them."""

    __test__ = False  # pytest takes every class whose name begins with Test for tests.

    PYTEST = "pytest"
    """Tests are called ``tests/test_sum.py::TestSum::test_two[1-2]``."""
    UNITTEST = "unittest"
    """Tests are called ``tests.test_sum.TestSum.test_two``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingRecord:
    """What the environment needs of a record."""

    instance_id: str
    problem_statement: str
    test_patch: str
    """Unified diff that brings the hidden tests."""
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    checkout: Path
    """Folder with the repository as the model gets it."""
    packages: Path | None
    """Folder with Python packages that the tests need, which boxes see read-only."""
    image: str | None
    """Image of the boxes, with ``sandbox.kind`` docker or podman; None: the one of the section."""
    runner: TestRunner
    python_path: tuple[str, ...]
    """Folders of the repository that tests import from."""
    protected: tuple[str, ...]
    """Patterns of further paths whose changes are undone."""

    @property
    def tests(self) -> tuple[str, ...]:
        """All tests that must pass."""
        return (*self.fail_to_pass, *self.pass_to_pass)

    def target(self, test: str) -> str:
        """Return the file, or for unittest the module, that a test is in."""
        if self.runner is TestRunner.PYTEST:
            return test.partition("::")[0]
        return test.rsplit(".", 2)[0]


def is_plain_path(path: str) -> bool:
    """Whether a path stays below the folder that it is relative to, and is written in its only form."""
    if not path or "\0" in path or path.startswith("/") or not path.isprintable():
        return False
    parts = path.split("/")
    return not {"", ".", "..", ".git"} & set(parts) and len(path.encode()) <= 1024


def read_record(record: Mapping[str, Any], folder: Path) -> CodingRecord:
    """Read a record; relative paths in it begin at ``folder``.

    Raises:
        ValueError: a field is missing or wrong; names it, its value and what would be right.
    """
    runner = _runner(record)
    found = CodingRecord(
        instance_id=_text(record, "instance_id"),
        problem_statement=_text(record, "problem_statement"),
        test_patch=_text(record, "test_patch"),
        fail_to_pass=_tests(record, "FAIL_TO_PASS", runner),
        pass_to_pass=_tests(record, "PASS_TO_PASS", runner),
        checkout=folder / _text(record, CHECKOUT),
        packages=None if record.get(PACKAGES) is None else folder / _text(record, PACKAGES),
        image=None if record.get("image") is None else _text(record, "image"),
        runner=runner,
        python_path=_paths(record, "python_path", default=(".",)),
        protected=_paths(record, "protected", default=()),
    )
    if not found.fail_to_pass:
        raise ValueError("FAIL_TO_PASS is empty; must have at least one test that a solution makes pass")
    if both := set(found.fail_to_pass) & set(found.pass_to_pass):
        raise ValueError(f"{min(both)!r} is in FAIL_TO_PASS and in PASS_TO_PASS; must be in one of them")
    for field, path in ((CHECKOUT, found.checkout), (PACKAGES, found.packages)):
        if path is not None and not path.is_dir():
            raise ValueError(f"{field} = {str(path)!r}: there is no such folder")
    if (found.checkout / ".git").exists():
        raise ValueError(
            f"checkout = {str(found.checkout)!r}: has .git, whose history can hold the solution; remove it"
        )
    return found


def _text(record: Mapping[str, Any], field: str) -> str:
    value = record.get(field)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{field} is {value!r:.80}; must be a text that is not empty")
    if not value.isascii() and any("\ud800" <= one <= "\udfff" for one in value):
        # JSON can hold what no tokenizer and no file can.
        raise ValueError(f"{field} is {value!r:.80}; has half a character, must be valid Unicode")
    return value


def _runner(record: Mapping[str, Any]) -> TestRunner:
    value = record.get("runner", TestRunner.PYTEST)
    if value not in list(TestRunner):
        raise ValueError(f"runner is {value!r:.80}; must be one of {', '.join(TestRunner)}")
    return TestRunner(value)


def _texts(record: Mapping[str, Any], field: str) -> tuple[str, ...]:
    value = record.get(field)
    if isinstance(value, str):
        # The hub's tables hold these lists as JSON in a text.
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError(f"{field} is {value!r:.80}; must be a list of texts, or one as JSON") from None
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{field} is {value!r:.80}; must be a list of texts, or one as JSON")
    return tuple(dict.fromkeys(value))


def _tests(record: Mapping[str, Any], field: str, runner: TestRunner) -> tuple[str, ...]:
    tests = _texts(record, field)
    if len(tests) > MAX_TESTS:
        raise ValueError(f"{field} has {len(tests)} tests; must have at most {MAX_TESTS}")
    for test in tests:
        path, mark, _ = test.partition("::")
        if runner is TestRunner.PYTEST and not (mark and is_plain_path(path)):
            raise ValueError(f"{field} has {test!r:.120}; must read like 'tests/test_sum.py::test_two'")
        if runner is TestRunner.UNITTEST and not (
            test.count(".") >= 2 and all(part.isidentifier() for part in test.split("."))
        ):
            raise ValueError(f"{field} has {test!r:.120}; must read like 'tests.test_sum.TestSum.test_two'")
    return tests


def _paths(record: Mapping[str, Any], field: str, *, default: tuple[str, ...]) -> tuple[str, ...]:
    if record.get(field) is None:
        return default
    paths = tuple(str(PurePosixPath(path)) for path in _texts(record, field))
    for path in paths:
        if path != "." and not is_plain_path(path):
            raise ValueError(f"{field} has {path!r:.80}; must be a path relative to the repository")
    return paths
