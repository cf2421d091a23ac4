"""Files that survive crashes and full disks, JSON lines, locks, and the mark on everything that a run starts.

The kernel does not list the processes that a dead controller had started. Therefore every run has a mark. It
is an environment variable, which programs inherit, and a part of the names of the run's files in shared
memory. A later start finds both by it.
"""

import contextlib
import errno
import fcntl
import json
import multiprocessing.process
import multiprocessing.shared_memory
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

REFUSALS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""Errors after which the same write can succeed later."""

UNFINISHED_SUFFIX = ".partial"
"""Suffix of files that ``replacing`` has not completed."""

LOOK_S = 0.05
"""Seconds between two attempts to lock a file."""

RUN_MARK = "FORGEASYNC_RUN"
"""Environment variable that holds the mark."""

SHARED_MEMORY = Path("/dev/shm")

_NAMES = "forgeasync-"

_MARK = re.compile(r"[0-9a-f]{32}")

_NUM_RANDOM_CHARACTERS = 16

_CHUNK_BYTES = 1 << 16


def is_refusal(error: BaseException) -> bool:
    """Whether an error says that a disk is full or fails, so that the same write can succeed later."""
    return isinstance(error, OSError) and error.errno in REFUSALS


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A write that the disk refuses, and may accept later."""

    path: str
    reason: str


class AppendedFile:
    """A file that one process appends to, on a disk that may be full or fail for a while.

    After a refused write the file ends with the last complete ``write``. The refused bytes are kept,
    and the next call writes them first, so that nothing is lost or duplicated. After a failed flush, all
    bytes since the last successful one are kept, because Linux marks pages as written that are not.
    """

    def __init__(self, descriptor: int, *, is_flushed: bool) -> None:
        """Append to a file that is open for writing, without O_APPEND.

        ``is_flushed``: each write is on the disk when it returns.
        """
        self._descriptor = descriptor
        self._is_flushed = is_flushed
        self._end = os.lseek(descriptor, 0, os.SEEK_END)
        self._kept = b""

    @classmethod
    def open(cls, path: Path) -> "AppendedFile":
        """Open or create a file. What was written survives the death of the process, not of the machine."""
        return cls(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644), is_flushed=False)

    @property
    def num_kept_bytes(self) -> int:
        """Number of bytes that the disk has refused and that wait to be written."""
        return len(self._kept)

    def write(self, data: bytes) -> None:
        """Append the kept bytes and ``data``.

        Raises:
            OSError: the disk refuses. All bytes are kept, and the file ends as before.
        """
        self._kept += data
        left, position = memoryview(self._kept), self._end
        try:
            while left:
                num_written = os.pwrite(self._descriptor, left, position)
                left, position = left[num_written:], position + num_written
            if self._is_flushed:
                os.fsync(self._descriptor)
        except OSError:
            # No partial line may stay. If truncating fails too, the next call overwrites it.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise
        self._end, self._kept = position, b""

    def close(self) -> None:
        """Close the file. Kept bytes are lost."""
        os.close(self._descriptor)


class JsonLines:
    """Appends objects to a file of JSON lines, each by one write, so that a process can die at any time.

    Lines that the disk refuses are kept in memory, and written when it accepts them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: AppendedFile | None = AppendedFile.open(path)

    def append(self, record: Mapping[str, object]) -> None:
        """Append a line, now or once the disk takes it.

        Raises:
            ValueError: the record has a number that is not finite.
            OSError: the file can never be written.
        """
        self._write(json.dumps(record, allow_nan=False).encode() + b"\n")

    def flush(self) -> Refusal | None:
        """Write the kept lines; return why the disk refuses them, or None."""
        return self._write(b"")

    def _write(self, data: bytes) -> Refusal | None:
        assert self._file is not None, "not after it was closed"
        try:
            self._file.write(data)
        except OSError as error:
            if not is_refusal(error):
                raise
            return Refusal(path=str(self._path), reason=error.strerror or str(error))
        return None

    def close(self) -> None:
        """Close the file; a second call does nothing.

        Raises:
            OSError: lines are missing that the disk has refused to the end.
        """
        if self._file is None:
            return
        refusal, num_bytes = self.flush(), self._file.num_kept_bytes
        self._file.close()
        self._file = None
        if refusal is not None:
            raise OSError(f"{self._path} lacks its last {num_bytes} bytes: {refusal.reason}")


def whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a file with their newlines, without a last line that has none.

    Such a line is still being written, or a crash has cut it.
    """
    lines = path.read_bytes().splitlines(keepends=True)
    return lines if not lines or lines[-1].endswith(b"\n") else lines[:-1]


def last_line(descriptor: int) -> bytes:
    """Read the last line of an open file from its end, with its newline if it has one."""
    size, tail = os.fstat(descriptor).st_size, b""
    while len(tail) < size and b"\n" not in tail[:-1]:
        num_bytes = min(_CHUNK_BYTES, size - len(tail))
        tail = os.pread(descriptor, num_bytes, size - len(tail) - num_bytes) + tail
    return tail[tail.rfind(b"\n", 0, -1) + 1 :]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines, without a last line that is being written or was cut.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not a JSON object. The message names the file and the line.
    """
    records = []
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            # Not msgspec: texts of a model can have lone surrogates, which it refuses.
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: not a JSON object")
        records.append(record)
    return records


def flush(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path, *, is_flushed: bool = False) -> Iterator[BinaryIO]:
    """Yield an empty file that gets the name ``path`` once the body has completed it.

    Until then its name is ``.<name>.partial``, and an existing file ``path`` is unchanged. If the body or the
    disk fails, the partial file is removed. A process that is killed leaves it behind. With ``is_flushed``,
    the file and its name are on the disk afterwards.

    Raises:
        OSError: the disk refuses. Nothing has changed, unless only the last flush, that of the name, failed.
    """
    partial = path.with_name(f".{path.name}{UNFINISHED_SUFFIX}")
    try:
        with partial.open("wb") as file:
            yield file
            if is_flushed:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        # The disk that refused the file may refuse this too.
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    if is_flushed:
        flush(path.parent)


def publish_folder(partial: Path, folder: Path) -> None:
    """Rename a folder after all of it is on the disk, so that a folder with the name ``folder`` is complete.

    Files in its subfolders must have been flushed before.
    """
    for path in (*partial.iterdir(), partial):
        flush(path)
    partial.rename(folder)
    flush(folder.parent)


class FileLocked(RuntimeError):
    """Another process has locked the file."""


def lock(descriptor: int, *, wait_s: float) -> bool:
    """Lock an open file (flock). The kernel releases the lock when the process ends for any reason.

    Returns whether the file system supports locks; some network file systems do not.

    Raises:
        FileLocked: another process still has the lock after ``wait_s`` seconds.
    """
    end_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end_s:
                raise FileLocked from None
            time.sleep(LOOK_S)
        except OSError:
            return False
        else:
            return True


def mark_this_run() -> str:
    """Create a new mark, put it into the environment of this process, and return it."""
    mark = secrets.token_hex(16)
    os.environ[RUN_MARK] = mark
    name_shared_memory()
    return mark


def own_prefix() -> str | None:
    """Return the prefix of this run's files in shared memory; None if this process has no mark."""
    mark = os.environ.get(RUN_MARK)
    return None if mark is None else f"{_NAMES}{mark}-"


def name_shared_memory() -> None:
    """Name this process's semaphores and shared memory after the mark, if there is one.

    Python removes both when a process ends in order, or from a process that outlives it. SIGKILL of all of
    them leaves ``/dev/shm/sem.mp-...`` and ``/dev/shm/psm_...``, which could belong to any program. Spawned
    processes inherit the prefix of semaphores, but not that of shared memory. Python 3.11 has no public way
    to set either.
    """
    if (prefix := own_prefix()) is None:
        return
    process = multiprocessing.process.current_process()
    # typeshed declares public attributes alone.
    process._config["semprefix"] = f"/{prefix.removesuffix('-')}"  # type: ignore[attr-defined]
    memory = multiprocessing.shared_memory
    memory._SHM_NAME_PREFIX = f"/{prefix}"  # type: ignore[attr-defined]
    memory._SHM_SAFE_NAME_LENGTH = len(f"/{prefix}") + _NUM_RANDOM_CHARACTERS  # type: ignore[attr-defined]


def files_of(mark: str) -> Iterator[Path]:
    """Find the files of a run in shared memory, and those of its engines in the folder for temporary files.

    The locked folders of ``forgeasync.rollouts.run_folder`` are not included.
    """
    if _MARK.fullmatch(mark) is None:
        return
    yield from SHARED_MEMORY.glob(f"sem.{_NAMES}{mark}-*")
    yield from SHARED_MEMORY.glob(f"{_NAMES}{mark}-*")
    yield from Path(tempfile.gettempdir()).glob(f"{_NAMES}{mark}-*")


def remove_files_of(mark: str) -> list[Path]:
    """Remove the files of a run whose processes have all ended, except for this one; returns the files.

    Files that this process has mapped stay. It removes them when it ends.
    """
    used = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    removed = []
    for file in files_of(mark):
        if str(file) not in used:
            file.unlink(missing_ok=True)
            removed.append(file)
    return removed
