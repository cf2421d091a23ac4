"""What a model has changed in its box, read back and sorted into what counts and what does not.

The box compares its files with the checkout's, whose digests are computed on the host. Nothing that the model
has made is asked about it, such as a git repository. The code that compares runs in the box too: whoever
deceived it would only lie about his own changes, which are judged in another box.
"""

import base64
import functools
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Any

from forgeasync.config import CodingAgent
from forgeasync.environments.coding.hidden_tests import HiddenTests
from forgeasync.environments.coding.protected import hides_module, is_protected
from forgeasync.environments.coding.record import CodingRecord, is_plain_path
from forgeasync.isolation import FileTooLarge, Sandbox, SandboxError

TAKE_LIMIT_S = 60.0
MAX_PATH_BYTES = 4096
_SKIPPED_FOLDERS = frozenset({".git", "__pycache__", ".pytest_cache"})
_SKIPPED_ENDS = (".pyc", ".pyo")


class Refusal(StrEnum):
    """Why a change does not count."""

    PROTECTED = "protected"
    """It could decide how the solution is tested."""
    HIDES_MODULE = "hides_module"
    """The file would be imported in place of a module of Python or of the test runner."""
    LINK = "link"
    """It is a symbolic link, a pipe, a socket or a device."""
    BINARY = "binary"
    """It is no UTF-8 text."""
    NAME = "name"
    """The path has characters that cannot be printed, or parts such as ``.git``."""
    NO_PLACE = "no_place"
    """There is a folder, file or link in its way that was not taken away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedFile:
    """A file as the model has left it."""

    content: bytes
    is_executable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What a model has changed."""

    files: Mapping[str, ChangedFile]
    deleted: tuple[str, ...]
    refused: Mapping[str, Refusal]
    """Changes that do not count, by path."""
    problem: str | None = None
    """Why there are no changes to judge, although the model has made some; None if nothing is wrong."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to judge."""
        return not self.files and not self.deleted

    @property
    def num_tampered(self) -> int:
        """Changes that could have decided how the solution is tested."""
        tampering = (Refusal.PROTECTED, Refusal.HIDES_MODULE)
        return sum(one in tampering for one in self.refused.values())


def program(name: str) -> str:
    """Return the text of a program that runs in a box."""
    return resources.files("forgeasync.environments.coding.inside").joinpath(f"{name}.py").read_text()


def run_command(name: str, *arguments: str | int) -> list[str]:
    """Return the command that runs such a program; the repository's modules are out of its reach."""
    return ["python3", "-I", "-c", program(name), *map(str, arguments)]


@functools.lru_cache(maxsize=64)
def manifest_of(checkout: Path) -> bytes:
    """Return kind, digest and mode of every file of a checkout, as JSON for the program ``take``."""
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
    box: Sandbox, record: CodingRecord, hidden: HiddenTests, section: CodingAgent
) -> Changes:
    """Read back what differs from the checkout. Nothing of the model's may still run in the box.

    Whatever the model has done to its box, this returns: ``problem`` says what cannot be judged.
    """
    folder = f".coding-{secrets.token_hex(8)}"
    listed, result = f"{folder}/list", f"{folder}/result"
    max_bytes, max_files = section.max_patch_kib * 2**10, section.max_changed_files
    try:
        await box.write(listed, manifest_of(record.checkout))
        done = await box.exec(
            run_command("take", listed, result, max_bytes, max_files), timeout_s=TAKE_LIMIT_S
        )
        if done.timed_out or done.exit_code:
            return _nothing(f"the workspace cannot be read: {done.stderr.strip()[-300:]}")
        read = await box.read(result, max_bytes=2 * max_bytes + max_files * MAX_PATH_BYTES + 2**16)
    except (FileNotFoundError, FileTooLarge, SandboxError) as error:
        return _nothing(f"the workspace cannot be read: {error}")
    try:
        return _sort(json.loads(read), record, hidden, section)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return _nothing(f"the list of changes cannot be read: {type(error).__name__}")


def _nothing(problem: str) -> Changes:
    return Changes(files={}, deleted=(), refused={}, problem=problem)


def _sort(taken: dict[str, Any], record: CodingRecord, hidden: HiddenTests, section: CodingAgent) -> Changes:
    limits = f"max_patch_kib = {section.max_patch_kib} or max_changed_files = {section.max_changed_files}"
    if taken["is_too_large"]:
        return _nothing(f"the changes exceed {limits}")
    files: dict[str, ChangedFile] = {}
    deleted: list[str] = []
    refused: dict[str, Refusal] = {}
    for path, (kind, encoded, is_executable) in taken["changed"].items():
        content = base64.b64decode(encoded, validate=True)
        if (refusal := _refusal(path, kind, content, record, hidden)) is None:
            files[path] = ChangedFile(content=content, is_executable=bool(is_executable))
        else:
            refused[path] = refusal
    for path in taken["deleted"]:
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
