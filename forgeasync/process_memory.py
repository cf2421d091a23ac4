"""Peak memory of a process and its descendants, and the memory that a machine has available, from /proc."""

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
