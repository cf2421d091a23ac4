"""Where infrastructure noise goes: files in the run's logs/ folder, never the terminal."""

import logging
import os
import sys
from collections import deque
from pathlib import Path

NOISY_LIBRARIES = ("monarch", "torchstore", "torchtitan", "vllm")
"""Loggers, with their children, that bring handlers of their own which print to the terminal."""


_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def redirect_process_output(path: Path) -> None:
    """Append everything this process and its later children print to ``path``.

    To be called inside an actor's process, before its engine starts. It works on file descriptors 1 and 2, so
    that output of native libraries (NCCL, gloo, Rust) goes along.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if descriptor > 2:
        os.close(descriptor)
    # New objects, since a framework may have put something else than the descriptors behind the old ones.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def separate_native_output(path: Path) -> None:
    """Keep this process's own printing on the terminal, and append what native libraries print to ``path``.

    Those write to file descriptors 1 and 2 directly; Python's streams move to copies of the old ones.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.stdout = open(os.dup(1), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    sys.stderr = open(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def configure_controller_logging(log_file: Path) -> None:
    """Send this process's Python logging and warnings to ``log_file`` (appended) instead of the terminal.

    Call it once the noisy libraries are imported: some attach their handlers on import. Calling it again
    replaces the file.
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


def last_lines(path: Path, n: int) -> str:
    """The last ``n`` lines of a log, for an error message. Raises FileNotFoundError where there is none."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return "".join(deque(file, maxlen=n)).rstrip("\n")
