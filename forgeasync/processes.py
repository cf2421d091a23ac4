"""Processes of this machine: whether they run, which ones a run or a worker has started, how to end them.

The kernel does not list the processes that a dead process had started. Therefore a run
(``forgeasync.files.RUN_MARK``), each environment worker and each scorer has a mark, an environment variable
that programs inherit.

The peak memory of a process and its descendants, and the memory that a machine has available, come from
/proc.
"""

import asyncio
import contextlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from forgeasync.files import RUN_MARK

WORKER_MARK = "FORGEASYNC_ENVIRONMENT_WORKER"
"""Environment variable that holds the mark of a worker."""

END_S = 10.0
"""Time limit for processes to end after SIGKILL."""

LOOK_AGAIN_S = 0.02
"""Seconds between two searches for processes."""


class NotEnded(RuntimeError):
    """A process of a run that is over does not end, although it was killed."""


def start_ticks(pid: int) -> int | None:
    """Return the clock ticks from the host's boot to a process's start. An id and its ticks name one process.

    None if the process has ended, even if its parent has not waited for it yet.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command's name, in which anything may occur.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def is_running(pid: int, *, by_s: float | None = None) -> bool:
    """Whether this host has a process with this id that has not ended.

    With ``by_s``, in seconds since 1970, it must have started by then: another one may get its id later.
    """
    try:
        if start_ticks(pid) is None:
            return False
        return by_s is None or psutil.Process(pid).create_time() <= by_s
    except psutil.NoSuchProcess:
        return False
    except (PermissionError, psutil.AccessDenied):
        # Another user's: it is there, but cannot be looked at.
        return True


def mark_this_process() -> str:
    """Put a new mark into the environment of this process, and return it."""
    mark = secrets.token_hex(16)
    os.environ[WORKER_MARK] = mark
    return mark


def own_mark() -> dict[str, str]:
    """Return the variables with the marks of this process and its run, for programs that do not inherit
    them."""
    return {name: os.environ[name] for name in (WORKER_MARK, RUN_MARK) if name in os.environ}


def with_descendants(pid: int) -> list[psutil.Process]:
    """Return a process and all that it has started, directly or not; empty if it has ended."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def marked_processes(mark: str, variable: str = WORKER_MARK) -> list[psutil.Process]:
    """Return the processes that carry a mark in a variable of their environment, with all that they have
    started; takes some milliseconds.
    """
    wanted = f"{variable}={mark}".encode()
    found: dict[int, psutil.Process] = {}
    for pid in psutil.pids():
        # Those of other users cannot be read, and others end meanwhile.
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                # Children that have another environment are found by their parents.
                found |= {one.pid: one for one in with_descendants(pid)}
    return list(found.values())


def started_by(native_id: int) -> list[psutil.Process]:
    """Return the running processes that a thread of this process has started, directly or not.

    Empty if the thread has ended, because the kernel does not list the processes of a dead thread.
    """
    try:
        started = Path(f"/proc/self/task/{native_id}/children").read_text().split()
    except OSError:
        return []
    return [process for pid in started for process in with_descendants(int(pid))]


def kill(processes: Iterable[psutil.Process]) -> int:
    """Kill processes; return the number of those that still ran."""
    num_killed = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                num_killed += 1
    return num_killed


def close_pipes(process: asyncio.subprocess.Process) -> None:
    """Close the pipes to a subprocess, and kill it if it still runs.

    asyncio closes them by itself once every process that inherited them has ended, which may be never. Pipes
    that are open when their event loop closes fail later, in the garbage collector of CPython 3.11
    (``BaseSubprocessTransport.__del__``). ``asyncio.subprocess.Process`` has no public way to close them.
    """
    process._transport.close()  # type: ignore[attr-defined]


def end_all(
    find: Callable[[], Iterable[psutil.Process]], *, linger_s: float = 0.0, limit_s: float = END_S
) -> int:
    """Kill what ``find`` still finds after ``linger_s``, until it finds nothing twice in a row.

    A process that is just becoming another program has no mark for a moment, and one that is killed may have
    started another. Returns the number of processes that were killed.

    Raises:
        NotEnded: a process does not end within ``limit_s``.
    """
    linger_end_s = time.monotonic() + linger_s
    while time.monotonic() < linger_end_s and any(True for _ in find()):
        time.sleep(LOOK_AGAIN_S)
    killed: set[int] = set()
    num_empty_looks = 0
    end_s = time.monotonic() + limit_s
    while num_empty_looks < 2:
        running = [one for one in find() if one.pid != os.getpid() and kill([one])]
        killed |= {one.pid for one in running}
        num_empty_looks = 0 if running else num_empty_looks + 1
        if time.monotonic() > end_s:
            pids = ", ".join(str(one.pid) for one in running)
            raise NotEnded(
                f"processes {pids} of a run that is over do not end within {limit_s:g} s of SIGKILL"
            )
        time.sleep(LOOK_AGAIN_S)
    return len(killed)


_PROC = Path("/proc")


_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def available_host_bytes() -> int:
    """Return the memory that this machine can still give without swapping, at most a container's limit."""
    found = [psutil.virtual_memory().available]
    for file in map(Path, _CGROUP_LIMITS):
        if file.is_file() and (text := file.read_text(encoding="ascii").strip()).isdecimal():
            found.append(int(text))
    return min(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPeak:
    """Peak memory of a single process, or the maximum over several processes."""

    resident_bytes: int
    """Peak resident set size, including the pages of shared memory that the process touched."""
    gpu_bytes: int = 0
    """Peak memory reserved by PyTorch's allocator on the process's GPU; 0 if it used none."""

    def metrics(self, role: str) -> dict[str, float]:
        """Return metrics by their names in metrics.jsonl. ``role`` is part of the names."""
        metrics = {f"memory/{role}_gib": self.resident_bytes / 2**30}
        if self.gpu_bytes:
            metrics[f"memory/{role}_gpu_gib"] = self.gpu_bytes / 2**30
        return metrics


def largest(peaks: Iterable[MemoryPeak | None]) -> MemoryPeak | None:
    """Return the maximum resident set size and the maximum GPU memory of all peaks; None if all are None."""
    measured = [peak for peak in peaks if peak is not None]
    if not measured:
        return None
    return MemoryPeak(
        resident_bytes=max(peak.resident_bytes for peak in measured),
        gpu_bytes=max(peak.gpu_bytes for peak in measured),
    )


class MemoryMonitor:
    """Tracks the peak memory of this process. A measurement takes about a millisecond."""

    def __init__(self, *, with_descendants: bool, every_s: float = 0.0) -> None:
        """Create a watch without a measurement.

        Args:
            with_descendants: Whether to include all processes that this process started, directly or
                indirectly. A process that has ended counts with its last measurement. If the kernel does not
                list children (CONFIG_PROC_CHILDREN), descendants are ignored.
            every_s: Minimum seconds between two measurements. In between, ``peak`` returns the last result.
        """
        self._with_descendants = with_descendants
        self._every_s = every_s
        self._peak = MemoryPeak(resident_bytes=0)
        self._looks_again_at = 0.0

    def peak(self) -> MemoryPeak:
        """Measure if a measurement is due, and return the peak so far."""
        if (now_s := time.monotonic()) < self._looks_again_at:
            return self._peak
        self._looks_again_at = now_s + self._every_s
        pids = [os.getpid()]
        if self._with_descendants:
            pids += _descendants(pids[0])
        now = MemoryPeak(resident_bytes=max(map(_peak_resident_bytes, pids)), gpu_bytes=_reserved_bytes())
        found = largest((self._peak, now))
        assert found is not None
        self._peak = found
        return found


def _peak_resident_bytes(pid: int) -> int:
    """Return the peak resident set size of a process; 0 if it has ended."""
    with suppress(OSError):
        for line in (_PROC / str(pid) / "status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _descendants(pid: int) -> Iterator[int]:
    children: list[int] = []
    # Each thread has its own list of children. Threads and processes can end while they are read.
    with suppress(OSError):
        for thread in (_PROC / str(pid) / "task").iterdir():
            with suppress(OSError):
                children += map(int, (thread / "children").read_text(encoding="ascii").split())
    for child in children:
        yield child
        yield from _descendants(child)


def _reserved_bytes() -> int:
    # Must not import torch or initialize CUDA. A process that has done neither has reserved nothing.
    torch = sys.modules.get("torch")
    return torch.cuda.max_memory_reserved() if torch is not None and torch.cuda.is_initialized() else 0
