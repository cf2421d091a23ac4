"""Coding tasks from a file of records, each with a repository, an issue and the tests of a solution."""

import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath
from random import Random
from typing import Any

from forgeasync.environments import HELD_OUT_SEED, DrawnProblems, json_like, read_json_records
from forgeasync.plugins.coding.section import CodingSource
from forgeasync.rollouts import Task
from forgeasync.schema import ConfigError, Problem

MAX_TESTS = 10_000
PACKAGES = "packages"
CHECKOUT = "checkout"


class TestRunner(StrEnum):
    """The test runner of a record, which decides how its tests are named."""

    __test__ = False  # pytest collects every class whose name begins with Test.

    PYTEST = "pytest"
    """Tests are named like ``tests/test_sum.py::TestSum::test_two[1-2]``."""
    UNITTEST = "unittest"
    """Tests are named like ``tests.test_sum.TestSum.test_two``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingRecord:
    """The fields of a record that the environment uses."""

    instance_id: str
    problem_statement: str
    test_patch: str
    """Unified diff that adds the hidden tests."""
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    checkout: Path
    """Folder with the repository in the state in which the model gets it."""
    packages: Path | None
    """Folder with Python packages that the tests need, mounted read-only in sandboxes."""
    image: str | None
    """Sandbox image, for ``sandbox.kind`` docker or podman; None selects the image of the section."""
    runner: TestRunner
    python_path: tuple[str, ...]
    """Folders of the repository that tests import from."""
    protected: tuple[str, ...]
    """Patterns of further paths whose changes do not count."""

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
    """Return whether a relative path is normalized, printable, and stays below its folder."""
    if not path or "\0" in path or path.startswith("/") or not path.isprintable():
        return False
    parts = path.split("/")
    return not {"", ".", "..", ".git"} & set(parts) and len(path.encode()) <= 1024


def read_record(record: Mapping[str, Any], folder: Path) -> CodingRecord:
    """Read and check a record; its relative paths are relative to ``folder``.

    Raises:
        ValueError: a field is missing or wrong; the text names it, its value and what would be right.
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
        # JSON can hold lone surrogates, which no tokenizer and no file can.
        raise ValueError(f"{field} is {value!r:.80}; has a lone surrogate; must be valid Unicode")
    return value


def _runner(record: Mapping[str, Any]) -> TestRunner:
    value = record.get("runner", TestRunner.PYTEST)
    if value not in list(TestRunner):
        raise ValueError(f"runner is {value!r:.80}; must be one of {', '.join(TestRunner)}")
    return TestRunner(value)


def _texts(record: Mapping[str, Any], field: str) -> tuple[str, ...]:
    value = record.get(field)
    if isinstance(value, str):
        # Data sets of the Hugging Face hub store these lists as JSON text.
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


GIT_LIMIT_S = 60.0
_RENAMED = re.compile(r"^(?:rename|copy) from (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenTests:
    """Files that are put into a grading sandbox after the model's changes."""

    files: Mapping[str, bytes]
    deleted: tuple[str, ...]
    listed: frozenset[str]
    """Files that may contain the record's tests, whether or not the patch changes them."""

    @property
    def paths(self) -> frozenset[str]:
        """Files that only the record determines; a model's changes of them do not count."""
        return self.listed.union(self.files, self.deleted)


def hidden_tests(record: CodingRecord) -> HiddenTests:
    """Apply a record's test patch to copies of the files that it names, and return the result.

    ``git apply`` runs outside of any repository. The patch comes from the data set, never from a model.

    Raises:
        ValueError: git is missing, the patch does not apply, or a listed test is in no file.
    """
    with tempfile.TemporaryDirectory(prefix="test-patch-") as folder:
        patch = Path(folder, "patch")
        patch.write_bytes(record.test_patch.encode())
        tree = Path(folder, "tree")
        tree.mkdir()
        rows = _git(["--numstat", "-z", str(patch)], tree).split("\0")
        names = {one.split("\t", 2)[2] for one in rows if one.count("\t") >= 2}
        names |= set(_RENAMED.findall(record.test_patch))
        if not names:
            raise ValueError("test_patch changes no file; must be a unified diff with the hidden tests")
        for name in names:
            if not is_plain_path(name):
                raise ValueError(f"test_patch changes {name!r:.120}; must change files of the repository")
            _copy(record.checkout, tree, name)
        _git([str(patch)], tree)
        found = {name: tree / name for name in sorted(names)}
        for name, path in found.items():
            if path.is_symlink():
                # Reading the link would read its target on the host.
                raise ValueError(f"test_patch makes a symbolic link of {name!r:.120}; must make files only")
        files = {name: path.read_bytes() for name, path in found.items() if path.is_file()}
        deleted = tuple(name for name, path in found.items() if not path.exists())
    listed: set[str] = set()
    for test in record.tests:
        possible = _possible_files(record, test)
        there = [
            path
            for path in possible
            if path in files or (path not in deleted and (record.checkout / path).is_file())
        ]
        if not there:
            raise ValueError(f"test {test!r:.120} is in no file of the checkout or of test_patch")
        # All possible files: a package would be imported in place of a module of the same name.
        listed.update(possible)
    return HiddenTests(files=files, deleted=deleted, listed=frozenset(listed))


def _copy(checkout: Path, tree: Path, name: str) -> None:
    source, target = checkout / name, tree / name
    if any(path.is_symlink() for path in (source, *source.parents[: name.count("/")])):
        raise ValueError(f"test_patch changes {name!r:.120}, which is or lies behind a symbolic link")
    if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def _git(arguments: list[str], folder: Path) -> str:
    # Neither the user's git settings nor a surrounding repository may affect how the patch applies.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CEILING_DIRECTORIES": str(folder.parent),
        "LC_ALL": "C",
    }
    try:
        done = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            timeout=GIT_LIMIT_S,
        )
    except FileNotFoundError:
        raise ValueError("test_patch cannot be applied: the program git is not installed") from None
    except subprocess.TimeoutExpired:
        raise ValueError(f"test_patch cannot be applied within {GIT_LIMIT_S:g} s") from None
    if done.returncode:
        reason = " ".join(done.stderr.decode(errors="replace").split())[:300]
        raise ValueError(f"test_patch does not apply to the checkout: {reason}")
    return done.stdout.decode(errors="surrogateescape")


def _possible_files(record: CodingRecord, test: str) -> list[str]:
    target = record.target(test)
    if record.runner is TestRunner.PYTEST:
        return [target]
    module = target.replace(".", "/")
    roots = ["" if root == "." else f"{root}/" for root in record.python_path]
    return [f"{root}{module}{end}" for root in roots for end in (".py", "/__init__.py")]


class CodingProblems(DrawnProblems):
    """The tasks of a file. Records may have the same issue; those with equal text are held out together."""

    def __init__(self, source: CodingSource, *, num_train: int, num_held_out: int, seed: int) -> None:
        """Read all records, and check that their checkouts exist and that the test patches apply to them.

        Raises:
            ConfigError: a record is wrong; the text names its line.
        """
        super().__init__(source.path, num_train=num_train, num_held_out=num_held_out, seed=seed)
        self._tasks = _read(source)

    def candidates(self, *, held_out: bool) -> Iterator[Task]:
        """See ``DrawnProblems``."""
        tasks = sorted(self._tasks, key=lambda task: task.prompt) if held_out else list(self._tasks)
        Random(HELD_OUT_SEED if held_out else self._seed).shuffle(tasks)
        yield from tasks


def _read(source: CodingSource) -> list[Task]:
    path = Path(source.path)
    if not path.is_file():
        raise _refusal(source, "there is no such file")
    folder = (path.parent if source.checkouts is None else Path(source.checkouts)).absolute()
    tasks: list[Task] = []
    places: dict[str, str] = {}
    try:
        for where, raw in read_json_records(path):
            try:
                record = read_record(raw, folder)
                _check_checkout(record.checkout, path)
                hidden_tests(record)
            except ValueError as error:
                raise _refusal(source, f"{where}: {error}") from None
            if (earlier := places.setdefault(record.instance_id, where)) != where:
                raise _refusal(source, f"{where}: {earlier} has instance_id {record.instance_id!r} too")
            plain = json_like(raw) | {CHECKOUT: str(record.checkout)}
            if record.packages is not None:
                plain[PACKAGES] = str(record.packages)
            tasks.append(
                Task(
                    task_id=record.instance_id,
                    prompt=record.problem_statement,
                    answer="",
                    source_index=len(tasks),
                    source=source.path,
                    record=plain,
                )
            )
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise _refusal(source, f"cannot be read: {error}") from None
    return tasks


def _check_checkout(checkout: Path, records: Path) -> None:
    """Raise ValueError if the folder cannot be copied into a sandbox, or contains the hidden tests."""
    if records.resolve().is_relative_to(checkout.resolve()):
        raise ValueError(
            f"checkout = {str(checkout)!r}: has the file of records in it, with the hidden tests; must be "
            "the repository's own folder"
        )
    for parent, _, files in os.walk(checkout):
        for name in files:
            kind = os.lstat(where := os.path.join(parent, name)).st_mode
            if not (stat.S_ISREG(kind) or stat.S_ISLNK(kind)):
                raise ValueError(
                    f"checkout = {str(checkout)!r}: {os.path.relpath(where, checkout)!r} is a pipe, a socket "
                    "or a device; must have files, folders and links only"
                )


def _refusal(source: CodingSource, remedy: str) -> ConfigError:
    return ConfigError([Problem(field="data.source.path", value=source.path, remedy=remedy)])
