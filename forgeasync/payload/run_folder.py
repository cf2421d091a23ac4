"""The folder in shared memory in which a run keeps its payloads: made, removed, and swept after a crash.

Its name says which process made it, so that any later run can tell whether that process still exists: one
killed by SIGKILL must not hold its host's memory until the next reboot.
"""

import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")

_PREFIX = "forgeasync_payloads"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-(\d+)-[0-9a-f]{{8}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Creator:
    """A process: pids are reused, and mean nothing in another pid namespace that shares /dev/shm."""

    pid_namespace: int
    pid: int
    start_ticks: int
    """Clock ticks from the host's boot to the process's start."""


def _start_ticks(pid: int) -> int | None:
    """When a process started; None where it has ended, also if nobody has waited for it yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command's name, in which anything may occur.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def _own_pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _new_name() -> str:
    pid = os.getpid()
    start_ticks = _start_ticks(pid)
    assert start_ticks is not None, "this process has not ended"
    return f"{_PREFIX}-{_own_pid_namespace()}-{pid}-{start_ticks}-{secrets.token_hex(4)}"


def _creator(folder: Path) -> _Creator | None:
    """Who made ``folder``; None for a name that ``_new_name`` did not give."""
    if (match := _NAME.fullmatch(folder.name)) is None:
        return None
    pid_namespace, pid, start_ticks = map(int, match.groups())
    return _Creator(pid_namespace=pid_namespace, pid=pid, start_ticks=start_ticks)


def _available_memory_bytes() -> int:
    """What the kernel could give away without swapping."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    (kib,) = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kib) * 1024


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
    available_bytes = _available_memory_bytes()
    if available_bytes < capacity_bytes:
        raise ValueError(
            f"payloads may take {capacity_bytes:,} bytes, but only {available_bytes:,} of memory are "
            "available on this host; lower the payload capacity"
        )
    folder = root / _new_name()
    folder.mkdir(mode=0o700)
    return folder


def remove_run_folder(folder: Path) -> None:
    """Remove a run's folder with all its payloads; arrays that were read as views stay valid."""
    assert _creator(folder) is not None, f"{folder} is not a folder of payloads"
    shutil.rmtree(folder)


def sweep_stale_folders(*, root: Path = SHARED_MEMORY) -> list[Path]:
    """Remove this user's folders whose creating process is gone; returns which."""
    removed = []
    for folder in sorted(root.glob(f"{_PREFIX}-*")):
        creator = _creator(folder)
        if creator is None or creator.pid_namespace != _own_pid_namespace():
            continue
        if _start_ticks(creator.pid) == creator.start_ticks:
            continue
        mine = root / _new_name()
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            folder.rename(mine)
        except FileNotFoundError:
            # Two runs may start at once: whoever renames the folder removes it. Should it die over that, the
            # folder is again one whose creator is gone.
            continue
        shutil.rmtree(mine)
        removed.append(folder)
    return removed
