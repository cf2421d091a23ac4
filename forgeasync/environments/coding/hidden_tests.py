"""The files that a record's ``test_patch`` makes of those in its checkout."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forgeasync.environments.coding.record import CodingRecord, TestRunner, is_plain_path

GIT_LIMIT_S = 60.0
_RENAMED = re.compile(r"^(?:rename|copy) from (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenTests:
    """What is put into a grader's box after the model's changes."""

    files: Mapping[str, bytes]
    deleted: tuple[str, ...]
    listed: frozenset[str]
    """Files with tests that the record lists, whether the patch changes them or not."""

    @property
    def paths(self) -> frozenset[str]:
        """Files that only the record decides about."""
        return self.listed.union(self.files, self.deleted)


def hidden_tests(record: CodingRecord) -> HiddenTests:
    """Apply the test patch to copies of the files that it names. ``git apply`` does it, outside of any
    repository; the patch is the data set's own.

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
                # What it leads to would be read here, on the host.
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
        # The others too: a package would be imported in place of the module of the same name.
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
    # Neither the settings of a user nor a repository around the folder may change what a patch means.
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
