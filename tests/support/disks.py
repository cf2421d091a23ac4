"""Disks that are full or fail."""

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class Disk:
    """``os.pwrite`` and ``os.fsync`` on a disk with room for some bytes.

    Bytes written over others take no further room.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        """The first byte of a file that has no room, as if there were one file."""
        self.flush_error: int | None = None
        """What the next flush fails with; the pages are lost then."""
        self.error = errno.ENOSPC
        self._pwrite, self._fsync = os.pwrite, os.fsync

    def pwrite(self, descriptor: int, data: bytes, position: int) -> int:
        if position >= self.room:
            raise OSError(self.error, os.strerror(self.error))
        return self._pwrite(descriptor, data[: self.room - position], position)

    def fsync(self, descriptor: int) -> None:
        if self.flush_error is not None:
            number, self.flush_error = self.flush_error, None
            raise OSError(number, os.strerror(number))
        self._fsync(descriptor)


def install(monkeypatch: pytest.MonkeyPatch, disk: Disk) -> None:
    monkeypatch.setattr(os, "pwrite", disk.pwrite)
    monkeypatch.setattr(os, "fsync", disk.fsync)


@contextlib.contextmanager
def small_disk(folder: Path, *, num_mib: int) -> Iterator[Path]:
    """A disk of a few MiB; skips the test where this machine lets nobody mount one."""
    folder.mkdir()
    tried = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={num_mib}m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        pytest.skip(f"this machine mounts no disk in memory: {tried.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, *, left_bytes: int) -> Path:
    """Leave so much room on a disk; returns the file that takes the rest."""
    filler = folder / "filler"
    with filler.open("wb") as file:
        file.write(bytes(shutil.disk_usage(folder).free - left_bytes))
    return filler


def fill_up(filler: Path) -> None:
    """Take all room that there is at this moment, also while others write."""
    with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
