"""Reads a model's changes from its sandbox, and judges them by the repository's hidden tests.

A program in the sandbox compares the files there with digests of the checkout, which the host computes. It
relies on nothing that the model could have made, such as a git repository. A model that tampers with the
program can only misreport its own changes. The changes are judged in fresh sandboxes, in which no model ran.
"""

import base64
import functools
import hashlib
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any

from forgeasync.config import SandboxLimits, SandboxSection
from forgeasync.isolation import ExecResult, FileTooLarge, Sandbox, SandboxError
from forgeasync.plugins.coding.section import CodingAgent
from forgeasync.plugins.coding.tasks import CodingRecord, HiddenTests, TestRunner, is_plain_path

TAKE_LIMIT_S = 60.0
MAX_PATH_BYTES = 4096
_SKIPPED_FOLDERS = frozenset({".git", "__pycache__", ".pytest_cache"})
_SKIPPED_ENDS = (".pyc", ".pyo")


class Refusal(StrEnum):
    """Why a change does not count."""

    PROTECTED = "protected"
    """The change could decide how the solution is tested."""
    HIDES_MODULE = "hides_module"
    """The file would be imported in place of a standard library module or a module of the test runner."""
    LINK = "link"
    """The file is a symbolic link, a pipe, a socket or a device."""
    BINARY = "binary"
    """The content is not UTF-8 text."""
    NAME = "name"
    """The path has characters that cannot be printed, or parts such as ``.git``."""
    NO_PLACE = "no_place"
    """A folder, file or link at the path or at a parent of it blocks the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedFile:
    """A file that the model changed or added, in its final state."""

    content: bytes
    is_executable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The changes of a model to its repository."""

    files: Mapping[str, ChangedFile]
    deleted: tuple[str, ...]
    refused: Mapping[str, Refusal]
    """Changes that do not count: path to reason."""
    problem: str | None = None
    """Why there are no changes to judge, although the model has made some; None if nothing is wrong."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to judge."""
        return not self.files and not self.deleted

    @property
    def num_tampered(self) -> int:
        """Number of refused changes that could have decided how the solution is tested."""
        tampering = (Refusal.PROTECTED, Refusal.HIDES_MODULE)
        return sum(one in tampering for one in self.refused.values())


def program(name: str) -> str:
    """Return the source of a program that runs in a sandbox."""
    return resources.files("forgeasync.plugins.coding.inside").joinpath(f"{name}.py").read_text()


def run_command(name: str, *arguments: str | int) -> list[str]:
    """Return the command that runs such a program; ``-I`` hides the repository's modules from it."""
    return ["python3", "-I", "-c", program(name), *map(str, arguments)]


@functools.lru_cache(maxsize=64)
def manifest_of(checkout: Path) -> bytes:
    """Return kind, digest and mode of every file of a checkout, as JSON for the program ``changes``."""
    found: dict[str, list[Any]] = {}
    for parent, folders, files in os.walk(checkout):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS and name not in links]
        for name in (*files, *links):
            path = Path(parent, name)
            if name in _SKIPPED_FOLDERS or name.endswith(_SKIPPED_ENDS):
                continue
            where = os.path.relpath(path, checkout)
            if path.is_symlink():
                found[where] = ["link", hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest(), False]
            else:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                found[where] = ["file", digest, bool(path.stat().st_mode & 0o100)]
    return json.dumps(found).encode()


async def take_changes(
    sandbox: Sandbox, record: CodingRecord, hidden: HiddenTests, section: CodingAgent
) -> Changes:
    """Return the differences between a sandbox and the checkout.

    No process of the model may still run in the sandbox. A damaged sandbox raises no error: ``problem`` of
    the result then says what cannot be judged.
    """
    folder = f".coding-{secrets.token_hex(8)}"
    listed, result = f"{folder}/list", f"{folder}/result"
    max_bytes, max_files = section.max_patch_kib * 2**10, section.max_changed_files
    try:
        await sandbox.write(listed, manifest_of(record.checkout))
        done = await sandbox.exec(
            run_command("changes", "take", listed, result, max_bytes, max_files), timeout_s=TAKE_LIMIT_S
        )
        if done.timed_out or done.exit_code:
            return _nothing(f"the workspace cannot be read: {done.stderr.strip()[-300:]}")
        read = await sandbox.read(result, max_bytes=2 * max_bytes + max_files * MAX_PATH_BYTES + 2**16)
    except (FileNotFoundError, FileTooLarge, SandboxError) as error:
        return _nothing(f"the workspace cannot be read: {error}")
    try:
        return _sort(json.loads(read), record, hidden, section)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return _nothing(f"the list of changes cannot be read: {type(error).__name__}")


def _nothing(problem: str) -> Changes:
    return Changes(files={}, deleted=(), refused={}, problem=problem)


def _sort(answer: dict[str, Any], record: CodingRecord, hidden: HiddenTests, section: CodingAgent) -> Changes:
    limits = f"max_patch_kib = {section.max_patch_kib} or max_changed_files = {section.max_changed_files}"
    if answer["is_too_large"]:
        return _nothing(f"the changes exceed {limits}")
    files: dict[str, ChangedFile] = {}
    deleted: list[str] = []
    refused: dict[str, Refusal] = {}
    for path, (kind, encoded, is_executable) in answer["changed"].items():
        content = base64.b64decode(encoded, validate=True)
        if (refusal := _refusal(path, kind, content, record, hidden)) is None:
            files[path] = ChangedFile(content=content, is_executable=bool(is_executable))
        else:
            refused[path] = refusal
    for path in answer["deleted"]:
        if (refusal := _refusal(path, "file", b"", record, hidden)) in (None, Refusal.HIDES_MODULE):
            deleted.append(path)
        else:
            refused[path] = refusal
    size = sum(len(one.content) for one in files.values())
    if size > section.max_patch_kib * 2**10 or len(files) + len(deleted) > section.max_changed_files:
        return _nothing(f"the changes exceed {limits}")
    return Changes(files=files, deleted=tuple(deleted), refused=refused)


def _refusal(
    path: str, kind: str, content: bytes, record: CodingRecord, hidden: HiddenTests
) -> Refusal | None:
    try:
        if not is_plain_path(path):
            return Refusal.NAME
    except UnicodeEncodeError:
        return Refusal.NAME
    if is_protected(path, hidden=hidden.paths, patterns=record.protected):
        return Refusal.PROTECTED
    if kind != "file":
        return Refusal.LINK
    if hides_module(path, python_path=record.python_path, checkout=record.checkout):
        return Refusal.HIDES_MODULE
    try:
        is_text = "\0" not in content.decode()
    except UnicodeDecodeError:
        is_text = False
    return None if is_text else Refusal.BINARY


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
"""Name patterns of test files and of files that pytest or Python reads before tests, in any folder."""

FOLDERS = ("tests", "*.egg-info", "*.dist-info")
"""Name patterns of folders, at any depth, with tests or with entry points (plug-ins of pytest)."""

FIRST_FOLDERS = ("test",)
"""Test folders in the root of the repository only; deeper, packages such as ``django.test`` have the name."""

_RUNNERS = frozenset({"pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py"})


def is_protected(path: str, *, hidden: Set[str], patterns: Sequence[str]) -> bool:
    """Return whether changes of a file do not count, because it could decide how the solution is tested.

    ``hidden`` has the files of the test patch and of listed tests. ``patterns`` are the record's own; in
    them ``*`` matches any text, including slashes.
    """
    parts = PurePosixPath(path).parts
    return (
        path in hidden
        # A file or link in place of a folder of tests.
        or any(one.startswith(f"{path}/") for one in hidden)
        or any(fnmatchcase(parts[-1], name) for name in NAMES)
        or any(fnmatchcase(part, name) for part in parts for name in FOLDERS)
        or parts[0] in FIRST_FOLDERS
        or any(fnmatchcase(path, pattern) or path.startswith(f"{pattern}/") for pattern in patterns)
    )


def hides_module(path: str, *, python_path: Sequence[str], checkout: Path) -> bool:
    """Return whether a file would be imported in place of a module of Python or of the test runner.

    False if the checkout itself has a module of that name.
    """
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


PLACE_LIMIT_S = 60.0
DIFFERENCE_LIMIT_S = 10.0
"""Time limit of the diff, in seconds; some texts take very long to compare."""
MAX_DIFFERENCE_BYTES = 4 * 2**20
REPORT_KIB = 4096
MAX_LOG_CHARACTERS = 2**20
"""Maximum length of the kept test output; the artifacts of an episode are bounded too."""
_PYTEST_HAS_RUN = (0, 1)
"""Values of ``pytest.ExitCode`` of complete runs: all tests passed, or some failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The results of the tests."""

    passed: frozenset[str]
    """Listed tests that passed."""
    log: str
    """Output of the tests, and how their processes ended."""
    patch: str
    """The changes as a unified diff."""
    without_place: tuple[str, ...]
    """Changed files that could not be written, because something else is at their path."""

    def share(self, tests: Sequence[str]) -> float:
        """Return the share of these tests that passed; 1 if ``tests`` is empty."""
        return sum(test in self.passed for test in tests) / len(tests) if tests else 1.0


async def grade(
    record: CodingRecord,
    hidden: HiddenTests,
    changes: Changes,
    *,
    sandbox_section: SandboxSection,
    section: CodingAgent,
) -> Verdict:
    """Run the record's tests on the checkout with the model's changes; hidden tests are placed last.

    Each test file runs in its own sandbox, so that one cannot affect another. All of them share the time
    limit ``section.tests_s``.

    Raises:
        SandboxError: a sandbox could not be prepared; no code of the model ran in it.
    """
    if isinstance(sandbox_section, SandboxLimits):
        # Reports of the tests come through the output, which therefore needs room for them.
        output_kib = max(sandbox_section.output_kib, REPORT_KIB)
        sandbox_section = sandbox_section.model_copy(update={"output_kib": output_kib})
    placed = {
        "files": {
            path: (base64.b64encode(one.content).decode(), one.is_executable)
            for path, one in changes.files.items()
        },
        "deleted": changes.deleted,
        "tests": {path: base64.b64encode(content).decode() for path, content in hidden.files.items()},
        "tests_deleted": hidden.deleted,
    }
    by_target: dict[str, list[str]] = {}
    for test in record.tests:
        by_target.setdefault(record.target(test), []).append(test)
    passed: set[str] = set()
    log: list[str] = []
    patch: str | None = None
    without_place: tuple[str, ...] = ()
    left_s = section.tests_s
    for target, tests in by_target.items():
        async with Sandbox(sandbox_section, workspace=record.checkout) as sandbox:
            patch, without_place = await _place(sandbox, json.dumps(placed).encode(), patch)
            if left_s > 0:
                began_s = time.perf_counter()
                of_target, words = await _run(sandbox, record, target, tests, limit_s=left_s)
                left_s -= time.perf_counter() - began_s
            else:
                of_target, words = set(), "not run: environment.tests_s had passed"
        passed |= of_target
        log.append(f"==== {target}: {len(of_target)} of {len(tests)} passed\n{words}\n")
    return Verdict(
        passed=frozenset(passed), log=_cut("".join(log)), patch=patch or "", without_place=without_place
    )


async def _place(sandbox: Sandbox, placed: bytes, patch: str | None) -> tuple[str, tuple[str, ...]]:
    """Bring a new sandbox to the state that is tested, without running any code of the model.

    Returns the diff of the changes, which is computed only if ``patch`` is None, and the changed files that
    could not be written.
    """
    folder = f".coding-{secrets.token_hex(8)}"
    changes, result = f"{folder}/changes", f"{folder}/difference"
    await sandbox.write(changes, placed)
    if patch is None:
        done = await sandbox.exec(
            run_command("changes", "difference", changes, result, MAX_DIFFERENCE_BYTES),
            timeout_s=DIFFERENCE_LIMIT_S,
        )
        if done.exit_code or done.timed_out:
            patch = f"# no difference was computed within {DIFFERENCE_LIMIT_S:g} s\n"
        else:
            read = await sandbox.read(result, max_bytes=MAX_DIFFERENCE_BYTES)
            patch = read.decode(errors="replace")
    done = await sandbox.exec(run_command("changes", "place", changes), timeout_s=PLACE_LIMIT_S)
    if done.exit_code or done.timed_out:
        raise SandboxError(f"the changes could not be put in place: {done.stderr.strip()[-300:]}")
    without_place = tuple(json.loads(done.stdout))
    await sandbox.exec(["rm", "-rf", folder], timeout_s=PLACE_LIMIT_S)
    return patch, without_place


async def _run(
    sandbox: Sandbox, record: CodingRecord, target: str, tests: Sequence[str], *, limit_s: float
) -> tuple[set[str], str]:
    """Run the tests of a target; return those that passed, and the log."""
    nonce = secrets.token_hex(16)
    path = f"/tmp/{secrets.token_hex(8)}"
    request = {
        "nonce": nonce,
        "runner": record.runner.value,
        "target": target,
        "tests": tests,
        "python_path": record.python_path,
    }
    await sandbox.write(path, json.dumps(request).encode())
    done = await sandbox.exec(run_command("run_tests", path), timeout_s=limit_s)
    passed, problem = _passed(list(_reports(done.stdout, nonce)), tests, done, record.runner)
    log = f"{done.stderr}\n[exit code {done.exit_code}, {done.duration_s:.1f} s]"
    if done.num_stderr_bytes_cut:
        log += f"\n[{done.num_stderr_bytes_cut} more bytes were cut]"
    return passed, log if problem is None else f"{log}\n[{problem}]"


def _cut(log: str) -> str:
    num_cut = len(log) - MAX_LOG_CHARACTERS
    return log if num_cut <= 0 else f"{log[:MAX_LOG_CHARACTERS]}\n[{num_cut} more characters were cut]\n"


def _reports(output: str, nonce: str) -> Iterator[Mapping[str, object]]:
    for line in output.split("\n"):
        mark, _, rest = line.partition(" ")
        if mark == nonce:
            try:
                report = json.loads(rest)
            except (ValueError, RecursionError):
                continue
            if isinstance(report, dict):
                yield report


def _passed(
    reports: Sequence[Mapping[str, object]], tests: Sequence[str], done: ExecResult, runner: TestRunner
) -> tuple[set[str], str | None]:
    """Return the tests that passed, and the problem of the process as a whole (None if there is none).

    Tests count only if the process reported its own end, because a solution can exit early with status 0.
    """
    if done.timed_out:
        return set(), "killed: environment.tests_s had passed"
    last = reports[-1] if reports else {}
    if done.exit_code or last.get("end") is not True:
        return set(), "the process ended before the tests did"
    if runner is TestRunner.PYTEST and last.get("status") not in _PYTEST_HAS_RUN:
        return set(), f"pytest ended with status {last.get('status')}"
    if replaced := [one["replaced"] for one in reports if one.get("replaced") is not None]:
        return set(), f"{replaced[0]} of the test runner was replaced"
    outcomes: dict[object, set[object]] = {}
    for report in reports[:-1]:
        outcomes.setdefault(report.get("test"), set()).add(report.get("outcome"))
    return {test for test in tests if outcomes.get(test) == {"passed"}}, None
