"""Creates and removes the folder in shared memory that holds a run's payloads, also after a crash.

The process that creates a folder holds a lock on it (flock) for as long as it lives. The kernel releases the
lock when the process ends for any reason. The lock is visible to every container that shares ``/dev/shm``,
unlike process ids. A folder whose lock is free therefore belongs to no process, and any later run removes it.
Otherwise a run killed by SIGKILL would occupy its host's memory until the next reboot.
"""

import fcntl
import os
import re
import secrets
import shutil
from pathlib import Path

from forgeasync.files import RUN_MARK, SHARED_MEMORY, remove_files_of
from forgeasync.processes import available_host_bytes

_PREFIX = "forgeasync_payloads"

_NAME = re.compile(rf"{_PREFIX}-\d+-[0-9a-f]{{16}}(?:-([0-9a-f]{{32}}))?")
"""Pattern of folder names. A name ends with the run's mark if the process that creates the folder has one."""

_held: dict[Path, int] = {}
"""Folders that this process created, each with the descriptor that holds its lock."""


def _is_same(folder: Path, descriptor: int) -> bool:
    """Whether the path still refers to the folder that was opened."""
    try:
        return os.path.samestat(os.stat(folder, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _try_lock(folder: Path) -> int | None:
    """Lock a folder, and return the descriptor that holds the lock.

    Returns None if another process holds the lock, the folder is gone, or it belongs to another user.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between opening and locking, the process that held the lock may have removed the folder.
        if os.fstat(descriptor).st_uid == os.getuid() and _is_same(folder, descriptor):
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None


def _make_locked(root: Path) -> Path:
    """Create a folder whose lock this process holds."""
    mark = os.environ.get(RUN_MARK)
    while True:
        name = f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(8)}"
        folder = root / (name if mark is None else f"{name}-{mark}")
        folder.mkdir(mode=0o700)
        # A sweep of another process may remove the folder before it is locked. Then create another one.
        if (descriptor := _try_lock(folder)) is not None:
            _held[folder] = descriptor
            return folder


def create_run_folder(capacity_bytes: int, *, root: Path = SHARED_MEMORY) -> Path:
    """Create and lock this host's folder of a run. The calling process must live as long as the run.

    ``capacity_bytes`` is the total capacity of all writers to the folder.

    Raises:
        ValueError: ``root`` has less free space than the capacity, or the host less available memory.
    """
    filesystem = os.statvfs(root)
    free_bytes = filesystem.f_bavail * filesystem.f_frsize
    if free_bytes < capacity_bytes:
        raise ValueError(
            f"payloads may take {capacity_bytes:,} bytes of {root}, but only {free_bytes:,} are free there; "
            "lower the payload capacity, or give the machine more shared memory (docker run --shm-size=...)"
        )
    # A tmpfs can be larger than the host's memory. Filling it would make the kernel kill processes.
    available_bytes = available_host_bytes()
    if available_bytes < capacity_bytes:
        raise ValueError(
            f"payloads may take {capacity_bytes:,} bytes, but only {available_bytes:,} of memory are "
            "available on this host; lower the payload capacity"
        )
    return _make_locked(root)


def remove_run_folder(folder: Path) -> None:
    """Remove a folder that this process created, with all payloads. Existing views of arrays stay valid."""
    assert folder in _held, f"{folder} is not a folder of payloads that this process has made"
    shutil.rmtree(folder)
    os.close(_held.pop(folder))


def remove_own_folders() -> None:
    """Remove every folder that this process created, and ignore errors. Meant for exits."""
    for folder in list(_held):
        shutil.rmtree(folder, ignore_errors=True)


def sweep_stale_folders(*, root: Path = SHARED_MEMORY) -> list[Path]:
    """Remove this user's folders whose creating process is gone, with other files of their runs.

    The other files are those named after a run's mark, unless another folder of that run remains. Several
    processes may sweep at the same time, while others create folders.

    Returns:
        The removed paths.
    """
    removed = []
    marks: set[str] = set()
    for folder in sorted(root.glob(f"{_PREFIX}-*")):
        match = _NAME.fullmatch(folder.name)
        if match is None or (descriptor := _try_lock(folder)) is None:
            continue
        # If this process dies here, or a process of the dead run still writes, the folder remains without a
        # lock, so a later sweep removes it.
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
        if not folder.exists():
            removed.append(folder)
            if match[1] is not None:
                marks.add(match[1])
    # A run has one folder per host, and several "hosts" can be processes of this machine. If one of the run's
    # folders remains, the run may be alive.
    living = {match[1] for folder in root.glob(f"{_PREFIX}-*") if (match := _NAME.fullmatch(folder.name))}
    for mark in marks - living:
        removed += remove_files_of(mark)
    return removed
