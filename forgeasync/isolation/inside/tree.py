"""Functions on the processes of a sandbox: list descendants, measure memory, kill and reap."""

import os
import time

KILL = 9
_PAUSE_S = 0.002
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def all_pids() -> list[int]:
    """Return the process ids in /proc."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(root: int) -> list[int]:
    """Return the process ids of all descendants of ``root``, without zombies."""
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                # The program's name is in parentheses and may contain any character.
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue  # The process has ended.
        if state not in b"ZX":
            children.setdefault(int(parent), []).append(pid)
    found, front = [], [root]
    while front:
        front = [child for parent in front for child in children.get(parent, ())]
        found += front
    return found


def reap() -> bool:
    """Reap children that have exited; returns whether children are left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


class StillRunning(Exception):
    """Raised when processes could not be killed in time."""


def end_descendants(limit_s: float) -> None:
    """Kill all descendants of this process, which must be a subreaper; raises StillRunning after ``limit_s``.

    A subreaper adopts orphaned descendants, so all are gone once it has no children. Until then, descendants
    may have forked more processes, so the search repeats.
    """
    end = time.monotonic() + limit_s
    while reap():
        for pid in descendants(os.getpid()):
            try:
                os.kill(pid, KILL)
            except OSError:
                continue  # The process has ended.
        if time.monotonic() > end:
            raise StillRunning
        time.sleep(_PAUSE_S)


def end_all_of_namespace() -> None:
    """Kill all processes of this pid namespace except the first one and this one; no fork escapes."""
    if os.getppid() != 0:
        # The parent is in the same namespace, so this is the host's namespace: the kill would hit all
        # processes of the user.
        raise RuntimeError("this is not the supervisor of a sandbox")
    try:
        os.kill(-1, KILL)
    except ProcessLookupError:
        pass


def resident_bytes(pids: list[int], *, shared_once: bool) -> int:
    """Return the resident memory of processes in bytes.

    With ``shared_once``, a page that several processes share counts once, which takes longer to compute.
    """
    total = 0
    for pid in pids:
        try:
            total += _proportional(pid) if shared_once else _resident(pid)
        except OSError:
            continue  # The process has ended.
    return total


def _resident(pid: int) -> int:
    with open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


def _proportional(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except PermissionError:
        pass  # The process has made itself unreadable: count all its pages.
    return _resident(pid)
