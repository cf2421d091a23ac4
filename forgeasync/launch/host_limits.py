"""What a host has of memory and shared memory, what it lets its processes lock, and whether a run fits that.

Every host is asked once, right after it has started; the judge is pure.
"""

import os
import re
import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forgeasync.planning import HostNeeds, available_host_bytes
from forgeasync.rollouts import SHARED_MEMORY
from forgeasync.schema import Problem

RDMA_DEVICES = Path("/sys/class/infiniband")
"""Where Linux shows the devices that ibverbs can use."""

CAP_IPC_LOCK = 14
"""A process with this capability may lock memory without a limit (capabilities(7))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """Facts of one host, as its agent's process sees them."""

    machine: str
    """What the host calls itself."""
    shared_bytes: int
    """Size of /dev/shm."""
    shared_free_bytes: int
    available_bytes: int
    """Memory that the host can still give, also within its container's limit."""
    lockable_bytes: int | None
    """Memory that one process may lock (RLIMIT_MEMLOCK); None: as much as there is."""
    num_rdma_devices: int


def gather_host_limits() -> HostLimits:
    """This host's limits."""
    shared = os.statvfs(SHARED_MEMORY)
    return HostLimits(
        machine=socket.gethostname(),
        shared_bytes=shared.f_blocks * shared.f_frsize,
        shared_free_bytes=shared.f_bavail * shared.f_frsize,
        available_bytes=available_host_bytes(),
        lockable_bytes=_lockable_bytes(),
        num_rdma_devices=len(list(RDMA_DEVICES.iterdir())) if RDMA_DEVICES.is_dir() else 0,
    )


def _lockable_bytes() -> int | None:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (effective,) = re.findall(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if int(effective, 16) >> CAP_IPC_LOCK & 1 or limit == resource.RLIM_INFINITY:
        return None
    return limit


def check_host_limits(host: str, limits: HostLimits, needs: HostNeeds) -> Iterator[Problem]:
    """Compare one host with what its role needs there.

    ``host`` is its name in the run. Allowances for processes are left out: a host is refused only for what
    config and model certainly fill.
    """
    name = _named(host, limits)
    if limits.shared_free_bytes < needs.shared_bytes:
        yield Problem(
            field=f"host {name}: {SHARED_MEMORY}",
            value=f"{_gib(limits.shared_free_bytes)} GiB free of {_gib(limits.shared_bytes)}",
            remedy=f"must have {_gib(needs.shared_bytes)} GiB free for weights and payloads; enlarge it "
            "(mount -o remount,size=..., docker run --shm-size=..., launcher.shared_memory_size on "
            "Kubernetes), or lower payload.capacity_gib",
        )
    if limits.available_bytes < needs.buffer_bytes:
        yield Problem(
            field=f"host {name}: memory",
            value=f"{_gib(limits.available_bytes)} GiB available",
            remedy=f"must be {_gib(needs.buffer_bytes)} GiB and more for weights, payloads and copies for "
            "checkpoints alone; ask for more (launcher.mem, launcher.resources), or spread the role over "
            "more hosts (launcher.hosts)",
        )
    if limits.num_rdma_devices and is_lock_too_small(limits, needs):
        yield Problem(
            field=f"host {name}: locked memory",
            value=_locked(limits),
            remedy=f"{_lock_remedy(needs)}: its RDMA devices use locked memory only",
        )


def lock_warning(host: str, limits: HostLimits, needs: HostNeeds) -> str | None:
    """Words about a host with GPUs whose limit may stand in the way; None: there is nothing to say.

    NVIDIA's open driver for Linux pins pages without counting them (``os_lock_user_pages`` in
    ``kernel-open/nvidia/os-mlock.c``), so without RDMA devices a low limit is no reason to refuse a host.
    """
    if limits.num_rdma_devices or not is_lock_too_small(limits, needs):
        return None
    limit = f"host {_named(host, limits)}: locked memory = {_locked(limits)}"
    return f"{limit}: {_lock_remedy(needs)}, if CUDA refuses to lock it"


def is_lock_too_small(limits: HostLimits, needs: HostNeeds) -> bool:
    """Whether one process may lock less than it is to."""
    return limits.lockable_bytes is not None and limits.lockable_bytes < needs.locked_bytes


def _named(host: str, limits: HostLimits) -> str:
    return host if limits.machine == host else f"{host} ({limits.machine})"


def _locked(limits: HostLimits) -> str:
    assert limits.lockable_bytes is not None
    return f"{_gib(limits.lockable_bytes)} GiB for each process"


def _lock_remedy(needs: HostNeeds) -> str:
    return (
        f"one process locks {_gib(needs.locked_bytes)} GiB for weights and payloads; raise the limit "
        "(ulimit -l unlimited, LimitMEMLOCK=infinity of slurmd or sshd, docker run --ulimit memlock=-1)"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g}"
