"""Processes of a box: who descends from whom, what they hold, and how all of them are ended."""

import os
import time

KILL = 9
_PAUSE_S = 0.002
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def all_pids() -> list[int]:
    """Process ids that /proc shows."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(root: int) -> list[int]:
    """Children of ``root`` and theirs, zombies left out."""
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                # The name of the program stands in parentheses and may hold any character.
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue  # ended since
        if state not in b"ZX":
            children.setdefault(int(parent), []).append(pid)
    found, front = [], [root]
    while front:
        front = [child for parent in front for child in children.get(parent, ())]
        found += front
    return found


def reap() -> bool:
    """Take the exit codes of children that have ended; whether there are children left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


class StillRunning(Exception):
    """Processes could not be ended in time."""


def end_descendants(limit_s: float) -> None:
    """Kill everything that this process, a subreaper, has started.

    Orphans become children of a subreaper, so having no child means that all are gone. Until then more may
    have been forked, and the search begins again. Raises StillRunning after ``limit_s``.
    """
    end = time.monotonic() + limit_s
    while reap():
        for pid in descendants(os.getpid()):
            try:
                os.kill(pid, KILL)
            except OSError:
                continue  # ended since
        if time.monotonic() > end:
            raise StillRunning
        time.sleep(_PAUSE_S)


def end_all_of_namespace() -> None:
    """Kill everything in this namespace but its first process and this one: no fork escapes that."""
    if os.getppid() != 0:
        # The parent is in the same namespace, so this is the host's: all that the user runs would be killed.
        raise RuntimeError("this is not the supervisor of a box")
    try:
        os.kill(-1, KILL)
    except ProcessLookupError:
        pass


def resident_bytes(pids: list[int], *, shared_once: bool) -> int:
    """Memory of processes; with ``shared_once`` pages of several processes count once, which takes longer."""
    total = 0
    for pid in pids:
        try:
            total += _proportional(pid) if shared_once else _resident(pid)
        except OSError:
            continue  # ended since
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
        pass  # It has made itself unreadable: all its pages count.
    return _resident(pid)
