"""``run.lock`` of a run folder: which process the run is, for as long as it is one.

That process keeps the file locked, and the kernel lets go of the lock when it ends, in whatever way: a run
that is dead keeps nobody out. A process that ends in order says so in the file: one that is free and does not
say so was left by a process that died.
"""

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from forgeasync.faults import FileLocked, lock

WAIT_S = 1.0
"""Time for a process that is just ending to be gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that a run is, or was."""

    pid: int
    host: str
    since_s: float
    """When it began, as ``time.time`` says it."""
    mark: str
    """What everything that it starts carries (``forgeasync.faults.files``)."""
    has_ended: bool = False
    """Whether it has ended in order."""

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since_s)
        return f"process {self.pid} on {self.host}, since {since:%Y-%m-%d %H:%M:%S}"


class RunInUse(RuntimeError):
    """Another process is the run in this folder at this moment; the text says which."""


class RunLock:
    """The lock of one run folder, held by this process until ``release`` or its end."""

    def __init__(self, descriptor: int, own: Holder, before: Holder | None) -> None:
        self._descriptor = descriptor
        self._own = own
        self.before = before
        """The process that had it before. None: none had, or the file system has no locks (some over a
        network have none), so that it may still be there."""

    @classmethod
    def take(cls, file: Path, mark: str) -> "RunLock":
        """Lock the file, which is made if it is not there, and write this process into it.

        Raises:
            RunInUse: another process has it.
        """
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                has_locks = lock(descriptor, wait_s=WAIT_S)
            except FileLocked:
                holder = _read(descriptor)
                raise RunInUse("another process" if holder is None else str(holder)) from None
            before = _read(descriptor) if has_locks else None
            own = Holder(pid=os.getpid(), host=socket.gethostname(), since_s=time.time(), mark=mark)
            _write(descriptor, own)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, own, before)

    @property
    def mark(self) -> str:
        """What everything that this process starts for the run carries."""
        return self._own.mark

    def release(self) -> None:
        """Say that this process ends in order, and let others have the folder."""
        try:
            _write(self._descriptor, replace(self._own, has_ended=True))
        finally:
            os.close(self._descriptor)


def _write(descriptor: int, holder: Holder) -> None:
    line = json.dumps(asdict(holder)).encode() + b"\n"
    os.pwrite(descriptor, line, 0)
    os.ftruncate(descriptor, len(line))


def _read(descriptor: int) -> Holder | None:
    """Read what the file says; None if that is nothing, or was cut."""
    try:
        return Holder(**json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError):
        return None
