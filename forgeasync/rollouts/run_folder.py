"""The folder in shared memory where a run keeps its payloads: made, removed, and swept after a crash.

The process that makes a folder holds a lock on it (flock) for as long as it lives. The kernel releases the
lock when that process ends, in whatever way, and shows it to every container that shares ``/dev/shm``, where
a process id would mean nothing. So a folder whose lock can be taken belongs to nobody, and any later run
removes it: a run killed by SIGKILL must not hold its host's memory until the next reboot.
"""

import fcntl
import os
import re
import secrets
import shutil
from pathlib import Path

from forgeasync.files import RUN_MARK, SHARED_MEMORY, remove_files_of
from forgeasync.process_memory import available_host_bytes

_PREFIX = "forgeasync_payloads"

_NAME = re.compile(rf"{_PREFIX}-\d+-[0-9a-f]{{16}}(?:-([0-9a-f]{{32}}))?")
"""Ends with the mark of the run, if the process that makes the folder has one."""

_held: dict[Path, int] = {}
"""This process's folders, each with the descriptor that holds its lock."""


def _is_same(folder: Path, descriptor: int) -> bool:
    """Whether the folder is still the one that was opened."""
    try:
        return os.path.samestat(os.stat(folder, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _try_lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None where another process has it, or the folder is gone.

    Also None for a folder of another user, whatever its permissions say.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between opening and locking, the one that had the lock may have removed the folder.
        if os.fstat(descriptor).st_uid == os.getuid() and _is_same(folder, descriptor):
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None


def _make_locked(root: Path) -> Path:
    """A new folder whose lock this process holds."""
    mark = os.environ.get(RUN_MARK)
    while True:
        name = f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(8)}"
        folder = root / (name if mark is None else f"{name}-{mark}")
        folder.mkdir(mode=0o700)
        # A sweeper may see the folder before its lock is taken, and remove it: then another one is made.
        if (descriptor := _try_lock(folder)) is not None:
            _held[folder] = descriptor
            return folder


def create_run_folder(capacity_bytes: int, *, root: Path = SHARED_MEMORY) -> Path:
    """Make this host's folder of a run, in a process of that host which lives as long as the run.

    ``capacity_bytes`` is the sum over all writers into the folder.

    Raises:
        ValueError: ``root`` has less free space than that, or the host less memory available.
    """
    filesystem = os.statvfs(root)
    free_bytes = filesystem.f_bavail * filesystem.f_frsize
    if free_bytes < capacity_bytes:
        raise ValueError(
            f"payloads may take {capacity_bytes:,} bytes of {root}, but only {free_bytes:,} are free there; "
            "lower the payload capacity, or give the machine more shared memory (docker run --shm-size=...)"
        )
    # A tmpfs may be larger than the memory behind it: filling it then ends in the kernel killing processes.
    available_bytes = available_host_bytes()
    if available_bytes < capacity_bytes:
        raise ValueError(
            f"payloads may take {capacity_bytes:,} bytes, but only {available_bytes:,} of memory are "
            "available on this host; lower the payload capacity"
        )
    return _make_locked(root)


def remove_run_folder(folder: Path) -> None:
    """Remove a folder that this process has made, with all its payloads; views of arrays stay valid."""
    assert folder in _held, f"{folder} is not a folder of payloads that this process has made"
    shutil.rmtree(folder)
    os.close(_held.pop(folder))


def remove_own_folders() -> None:
    """Remove every folder that this process has made, in a hurry: what cannot be removed is left behind."""
    for folder in list(_held):
        shutil.rmtree(folder, ignore_errors=True)


def sweep_stale_folders(*, root: Path = SHARED_MEMORY) -> list[Path]:
    """Remove this user's folders whose creating process is gone, and what their runs have named after
    themselves; returns what was removed.

    Several may sweep at once, beside others that make folders.
    """
    removed = []
    marks: set[str] = set()
    for folder in sorted(root.glob(f"{_PREFIX}-*")):
        match = _NAME.fullmatch(folder.name)
        if match is None or (descriptor := _try_lock(folder)) is None:
            continue
        # If this process dies here, or a process of the dead run still writes, the folder stays unlocked.
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
        if not folder.exists():
            removed.append(folder)
            if match[1] is not None:
                marks.add(match[1])
    # Another host of a run whose folder is still there may be a process of this machine, and live.
    living = {match[1] for folder in root.glob(f"{_PREFIX}-*") if (match := _NAME.fullmatch(folder.name))}
    for mark in marks - living:
        removed += remove_files_of(mark)
    return removed
