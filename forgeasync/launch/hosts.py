"""The hosts of a run as the controller sees them: where roles are spawned, and who keeps their folders."""

import asyncio
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from monarch.actor import ProcMesh, this_host
from monarch.config import configure

from forgeasync.faults import read_stacks
from forgeasync.launch import MONARCH_LIMITS  # type: ignore[attr-defined]  # the stub lists other rooms' names
from forgeasync.launch.gpu_facts import GpuFacts, gather_gpu_facts
from forgeasync.launch.host_limits import HostLimits, gather_host_limits
from forgeasync.launch.jobs import HostRole
from forgeasync.launch.kill_tree import kill_tree
from forgeasync.launch.placement import GpuAllocator, spawn_role
from forgeasync.rollouts import (
    InFlightRead,
    create_run_folder,
    is_running,
    read_in_flight,
    remove_in_flight,
    remove_run_folder,
    sweep_stale_folders,
    try_write_kept,
)

LOCAL_HOST_ID = "host-0"

configure(**MONARCH_LIMITS)


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

    async def kill(self, pid: int) -> None:
        """Kill a process of the run with all that it has started; no error if it has ended."""
        ...

    async def read_stacks(self, pid: int) -> str:
        """Say in one line what the Python threads of a process are doing, or why that cannot be read."""
        ...

    async def remove_files(self, files: Sequence[str]) -> None:
        """Remove files from the run's folders, whose writer is gone; no error if they are not there."""
        ...

    async def read_in_flight(self, folder: Path, group_ids: Sequence[int]) -> InFlightRead:
        """Read what a process of this host that is gone had in flight of some groups."""
        ...

    async def remove_in_flight(self, folder: Path) -> None:
        """Remove what such a process has logged; no error if there is nothing."""
        ...

    async def keep_group(self, target: Path, facts: bytes, source: str) -> str | None:
        """Write a finished group, whose arrays lie in ``source``, to a disk; what prevents it, in words."""
        ...


class Hosts(Protocol):
    """All machines of a run besides the controller's own processes."""

    async def open(self, tell: Callable[[str], None]) -> None:
        """Start them; to be called before anything is spawned. What they wait for is told in words."""
        ...

    def spawn(self, role: HostRole, name: str, num_procs: int, *, gpus_per_proc: int) -> ProcMesh:
        """Spread procs evenly over a role's hosts, in order; each proc sees its own GPUs only.

        A role that is spawned once more, after its procs have ended, gets the same GPUs.

        Raises:
            ValueError: a host has not that many GPUs left.
        """
        ...

    def allot(self, role: HostRole, num_procs: int, *, gpus_per_proc: int) -> None:
        """Keep places and GPUs for procs of a role that ``spawn_one`` will spawn, as ``spawn`` spreads them.

        Raises:
            ValueError: a host has not that many GPUs left.
        """
        ...

    def allot_more(self, role: HostRole, *, gpus_per_proc: int) -> Host:
        """Keep a place and GPUs for one more proc of a role, which gets the next rank; returns its host.

        Raises:
            ValueError: there is no such place, or not that many GPUs are left.
        """
        ...

    def spawn_one(self, role: HostRole, name: str, rank: int) -> ProcMesh:
        """Spawn one proc at the place of that rank of the role, which is free or has ended."""
        ...

    async def stop_one(self, mesh: ProcMesh) -> None:
        """Stop what ``spawn_one`` has returned; waits until the proc answers, unless it was killed."""
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


def remove_from(folders: Sequence[Path], files: Sequence[str]) -> None:
    """Remove files from folders of a run; no error if they are not there."""
    for file in map(Path, files):
        assert file.parent in folders, f"{file} is in none of the run's folders"
        file.unlink(missing_ok=True)


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

    async def kill(self, pid: int) -> None:
        kill_tree(pid)

    async def read_stacks(self, pid: int) -> str:
        return await asyncio.to_thread(read_stacks, pid)

    async def remove_files(self, files: Sequence[str]) -> None:
        remove_from(self.folders, files)

    async def read_in_flight(self, folder: Path, group_ids: Sequence[int]) -> InFlightRead:
        # In a thread: the log of a busy engine has hundreds of MiB.
        return await asyncio.to_thread(read_in_flight, folder, group_ids)

    async def remove_in_flight(self, folder: Path) -> None:
        await asyncio.to_thread(remove_in_flight, folder)

    async def keep_group(self, target: Path, facts: bytes, source: str) -> str | None:
        return await asyncio.to_thread(try_write_kept, target, facts, source)


class LocalHosts:
    """One machine for all roles, which share its GPUs."""

    def __init__(self, *, trainer_id: str = LOCAL_HOST_ID, reserved_gpus: Collection[int] = ()) -> None:
        """With an id of its own the trainer reads nothing from shared memory, as on another machine.

        ``reserved_gpus`` are places, among the GPUs that the run may use, that no role gets.
        """
        self._folders: list[Path] = []
        self._meshes: list[ProcMesh] = []
        self._ids = {role: LOCAL_HOST_ID for role in HostRole} | {HostRole.TRAINER: trainer_id}
        self._gpus = GpuAllocator(torch.cuda.device_count(), reserved_gpus)
        self._gpus_of: dict[HostRole, list[list[int]]] = {}
        """GPUs of each proc of the roles that were spawned."""

    async def open(self, tell: Callable[[str], None]) -> None:
        """See ``Hosts``; this machine is there."""

    def spawn(self, role: HostRole, name: str, num_procs: int, *, gpus_per_proc: int) -> ProcMesh:
        """See ``Hosts``."""
        if role not in self._gpus_of:
            self.allot(role, num_procs, gpus_per_proc=gpus_per_proc)
        assert len(self._gpus_of[role]) == num_procs, "as many procs as before"
        return self._spawn(name, self._gpus_of[role])

    def allot(self, role: HostRole, num_procs: int, *, gpus_per_proc: int) -> None:
        """See ``Hosts``."""
        self._gpus_of[role] = [self._gpus.take(gpus_per_proc, role=role) for _ in range(num_procs)]

    def allot_more(self, role: HostRole, *, gpus_per_proc: int) -> Host:
        """See ``Hosts``."""
        self._gpus_of[role].append(self._gpus.take(gpus_per_proc, role=role))
        return LocalHost(self._ids[role], self._folders)

    def spawn_one(self, role: HostRole, name: str, rank: int) -> ProcMesh:
        """See ``Hosts``."""
        return self._spawn(name, [self._gpus_of[role][rank]])

    async def stop_one(self, mesh: ProcMesh) -> None:
        """See ``Hosts``."""
        if mesh in self._meshes:
            self._meshes.remove(mesh)
        await stop(mesh)

    def _spawn(self, name: str, gpus: list[list[int]]) -> ProcMesh:
        mesh = spawn_role(this_host(), name, num_procs=len(gpus), gpus_per_proc=gpus)
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
