"""The hosts of a run as the controller sees them: where roles are spawned, and who keeps their folders."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from monarch.actor import ProcMesh, this_host

from forgeasync.launch.gpu_facts import GpuFacts, gather_gpu_facts
from forgeasync.launch.host_limits import HostLimits, gather_host_limits
from forgeasync.launch.jobs import HostRole
from forgeasync.launch.placement import GpuAllocator, spawn_role
from forgeasync.rollouts.run_folder import (
    create_run_folder,
    is_running,
    remove_run_folder,
    sweep_stale_folders,
)

LOCAL_HOST_ID = "host-0"


class HostLost(RuntimeError):
    """A host of the run is gone, with all procs on it."""


class Host(Protocol):
    """One machine; procs of different ids share no memory."""

    id: str

    async def make_folder(self, num_bytes: int) -> Path:
        """A folder in its shared memory, there until the run ends.

        Raises:
            ValueError: the host has not that much left.
        """
        ...

    async def is_running(self, pid: int) -> bool:
        """Whether it has a process of that id."""
        ...


class Hosts(Protocol):
    """All machines of a run besides the controller's own processes."""

    async def open(self, tell: Callable[[str], None]) -> None:
        """Start them; to be called before anything is spawned. What they wait for is told in words."""
        ...

    def spawn(self, role: HostRole, name: str, num_procs: int, *, gpus_per_proc: int) -> ProcMesh:
        """Spread procs evenly over a role's hosts, in order; each proc sees its own GPUs only.

        Raises:
            ValueError: a host has not that many GPUs left.
        """
        ...

    def of_procs(self, role: HostRole, num_procs: int) -> Sequence[Host]:
        """Return the host of each proc of a role, by rank."""
        ...

    async def gpus(self, role: HostRole) -> Mapping[str, GpuFacts]:
        """What each host of a role says of its GPUs, by the host's name in the run."""
        ...

    def limits(self, role: HostRole) -> Mapping[str, HostLimits]:
        """What each host of a role had when it was opened, by the host's name in the run."""
        ...

    def master_address_is_ip(self) -> bool:
        """Whether the trainer's first host is to be found by its address instead of its name."""
        ...

    async def watch(self) -> None:
        """Show every host that the controller lives, for as long as each does the same.

        Raises:
            HostLost: one does not, always.
        """
        ...

    async def close(self) -> None:
        """Stop every proc and leave nothing behind, in any state.

        Raises:
            HostLost: one is, whatever the run has ended with.
        """
        ...


async def stop(mesh: ProcMesh) -> None:
    """Stop a mesh's procs."""
    await mesh.stop()


@dataclass(slots=True)
class LocalHost:
    """The controller's machine."""

    id: str
    folders: list[Path]

    async def make_folder(self, num_bytes: int) -> Path:
        if not self.folders:
            sweep_stale_folders()
        folder = create_run_folder(num_bytes)
        self.folders.append(folder)
        return folder

    async def is_running(self, pid: int) -> bool:
        return is_running(pid)


class LocalHosts:
    """One machine for all roles, which share its GPUs."""

    def __init__(self, *, trainer_id: str = LOCAL_HOST_ID) -> None:
        """With an id of its own the trainer reads nothing from shared memory, as on another machine."""
        self._folders: list[Path] = []
        self._meshes: list[ProcMesh] = []
        self._ids = {HostRole.TRAINER: trainer_id, HostRole.GENERATORS: LOCAL_HOST_ID}
        self._gpus = GpuAllocator(torch.cuda.device_count())

    async def open(self, tell: Callable[[str], None]) -> None:
        """See ``Hosts``."""

    def spawn(self, role: HostRole, name: str, num_procs: int, *, gpus_per_proc: int) -> ProcMesh:
        """See ``Hosts``."""
        gpus = [self._gpus.take(gpus_per_proc, role=role) for _ in range(num_procs)]
        mesh = spawn_role(this_host(), name, num_procs=num_procs, gpus_per_proc=gpus)
        self._meshes.append(mesh)
        return mesh

    def of_procs(self, role: HostRole, num_procs: int) -> Sequence[Host]:
        """See ``Hosts``."""
        return [LocalHost(self._ids[role], self._folders)] * num_procs

    async def gpus(self, role: HostRole) -> Mapping[str, GpuFacts]:
        """See ``Hosts``."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return {LOCAL_HOST_ID: await asyncio.to_thread(gather_gpu_facts, visible)}

    def limits(self, role: HostRole) -> Mapping[str, HostLimits]:
        """See ``Hosts``."""
        return {LOCAL_HOST_ID: gather_host_limits()}

    def master_address_is_ip(self) -> bool:
        """See ``Hosts``."""
        return False

    async def watch(self) -> None:
        """See ``Hosts``; this machine is the controller's own."""
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """See ``Hosts``; procs that are gone already are no error."""
        try:
            await asyncio.gather(*(stop(mesh) for mesh in self._meshes))
        finally:
            self._meshes.clear()
            while self._folders:
                remove_run_folder(self._folders.pop())
