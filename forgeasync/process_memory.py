"""How much memory a process and those that it has started have used so far, and how much is available."""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

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
    """The most that any single process has used at any time so far."""

    resident_bytes: int
    """Peak resident set, with the pages of shared memory that the process has touched."""
    gpu_bytes: int = 0
    """Most that PyTorch's allocator has reserved on the process's GPU; 0 where it has used none."""

    def metrics(self, role: str) -> dict[str, float]:
        """Under their names in metrics.jsonl."""
        metrics = {f"memory/{role}_gib": self.resident_bytes / 2**30}
        if self.gpu_bytes:
            metrics[f"memory/{role}_gpu_gib"] = self.gpu_bytes / 2**30
        return metrics


def largest(peaks: Iterable[MemoryPeak | None]) -> MemoryPeak | None:
    """The largest process's resident set, and the most of any GPU; None where nobody has measured."""
    measured = [peak for peak in peaks if peak is not None]
    if not measured:
        return None
    return MemoryPeak(
        resident_bytes=max(peak.resident_bytes for peak in measured),
        gpu_bytes=max(peak.gpu_bytes for peak in measured),
    )


class MemoryWatch:
    """Keeps the peak of this process; looking costs about a millisecond."""

    def __init__(self, *, with_descendants: bool, every_s: float = 0.0) -> None:
        """With descendants the processes that it has started count too, and theirs.

        One that has ended counts by what it had used when it was last seen, and not at all where the kernel
        does not list children (CONFIG_PROC_CHILDREN). Who asks again within ``every_s`` gets what was seen
        last.
        """
        self._with_descendants = with_descendants
        self._every_s = every_s
        self._peak = MemoryPeak(resident_bytes=0)
        self._looks_again_at = 0.0

    def peak(self) -> MemoryPeak:
        """The most so far."""
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
    """0 of a process that has ended meanwhile."""
    with suppress(OSError):
        for line in (_PROC / str(pid) / "status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _descendants(pid: int) -> Iterator[int]:
    children: list[int] = []
    # Every thread has a list of its own; threads and processes end while they are read.
    with suppress(OSError):
        for thread in (_PROC / str(pid) / "task").iterdir():
            with suppress(OSError):
                children += map(int, (thread / "children").read_text(encoding="ascii").split())
    for child in children:
        yield child
        yield from _descendants(child)


def _reserved_bytes() -> int:
    # Neither imports torch nor starts CUDA: a process that has not done so has reserved nothing.
    torch = sys.modules.get("torch")
    return torch.cuda.max_memory_reserved() if torch is not None and torch.cuda.is_initialized() else 0
