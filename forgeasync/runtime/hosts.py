"""The controller's own machine as a host of a run.

``forgeasync.runtime.job_hosts`` has hosts that a job starts, with the same methods.
"""

import asyncio
import copy
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from monarch.actor import ProcMesh, this_host
from monarch.config import configure

from forgeasync.processes import is_running, kill, with_descendants
from forgeasync.rollouts import (
    InFlightRead,
    create_run_folder,
    read_in_flight,
    remove_in_flight,
    remove_run_folder,
    sweep_stale_folders,
    try_write_kept,
)
from forgeasync.runtime.host_checks import GpuFacts, HostLimits, gather_gpu_facts, gather_host_limits
from forgeasync.runtime.jobs import HostRole
from forgeasync.runtime.monarch_limits import MONARCH_LIMITS
from forgeasync.runtime.placement import GpuAllocator, spawn_role
from forgeasync.runtime.stalls import read_stacks

LOCAL_HOST_ID = "host-0"
"""Id of the controller's host."""

configure(**MONARCH_LIMITS)


class HostLost(RuntimeError):
    """A host of the run is lost, with all its processes."""


async def stop(mesh: ProcMesh) -> None:
    """Stop the processes of a mesh."""
    await mesh.stop()


@dataclass(slots=True)
class LocalHost:
    """The machine of this process, which is the controller or the agent of a host.

    Slow work runs in a thread, so that heartbeats continue.
    """

    id: str
    folders: list[Path]
    """Folders of the run in this machine's shared memory."""

    async def make_folder(self, num_bytes: int) -> Path:
        """Create a folder in the host's shared memory, which exists until the run ends.

        Raises:
            ValueError: the host has less than ``num_bytes`` left.
        """
        if not self.folders:
            sweep_stale_folders()
        folder = create_run_folder(num_bytes)
        self.folders.append(folder)
        return folder

    def remove_folders(self) -> None:
        """Remove all of the run's folders from shared memory."""
        while self.folders:
            remove_run_folder(self.folders[-1])
            self.folders.pop()

    async def is_running(self, pid: int) -> bool:
        """Return whether the host has a process with this id that has not ended."""
        return is_running(pid)

    async def kill(self, pid: int) -> None:
        """Kill a process of the run and its descendants; no error if it has ended."""
        kill(with_descendants(pid))

    async def read_stacks(self, pid: int) -> str:
        """Return the Python stacks of a process in one line, or why they cannot be read."""
        return await asyncio.to_thread(read_stacks, pid)

    async def remove_files(self, files: Sequence[str]) -> None:
        """Remove files of a dead writer from the run's folders; no error if they do not exist."""
        for file in map(Path, files):
            assert file.parent in self.folders, f"{file} is in none of the run's folders"
            file.unlink(missing_ok=True)

    async def read_in_flight(self, folder: Path, group_ids: Sequence[int]) -> InFlightRead:
        """Read the tokens that a dead process of this host had in flight for some groups."""
        return await asyncio.to_thread(read_in_flight, folder, group_ids)

    async def remove_in_flight(self, folder: Path) -> None:
        """Remove a dead process's log of tokens in flight; no error if there is none."""
        await asyncio.to_thread(remove_in_flight, folder)

    async def keep_group(self, target: Path, facts: bytes, source: str) -> str | None:
        """Write a finished group, whose arrays are in ``source``, to disk; return the problem, if any."""
        return await asyncio.to_thread(try_write_kept, target, facts, source)


class LocalHosts:
    """The controller's machine."""

    def __init__(
        self,
        *,
        trainer_id: str = LOCAL_HOST_ID,
        reserved_gpus: Collection[int] = (),
        share_gpu: bool = False,
    ) -> None:
        """With a different ``trainer_id`` the trainer does not use shared memory, as if on another machine.

        ``reserved_gpus`` are indices, among the GPUs visible to the run, that no role gets. With
        ``share_gpu`` each role gets GPUs from the first one on; otherwise no two processes share one.
        """
        self._host = LocalHost(LOCAL_HOST_ID, [])
        self._meshes: list[ProcMesh] = []
        self._ids = {role: LOCAL_HOST_ID for role in HostRole} | {HostRole.TRAINER: trainer_id}
        all_gpus = GpuAllocator(torch.cuda.device_count(), reserved_gpus)
        self._gpus = {role: copy.copy(all_gpus) if share_gpu else all_gpus for role in HostRole}
        self._gpus_of: dict[HostRole, list[list[int]]] = {}
        """GPUs of each process, by role."""

    async def open(self, tell: Callable[[str], None]) -> None:
        """Start the hosts, before anything is spawned; ``tell`` is called with what they wait for.

        This machine is already running.
        """

    def spawn(self, role: HostRole, name: str, num_procs: int, *, gpus_per_proc: int) -> ProcMesh:
        """Spread processes evenly over a role's hosts, in order. Each process sees only its own GPUs.

        A role that is spawned again after its processes have ended gets the same GPUs.

        Raises:
            ValueError: a host has too few GPUs left.
        """
        if role not in self._gpus_of:
            self.allot(role, num_procs, gpus_per_proc=gpus_per_proc)
        assert len(self._gpus_of[role]) == num_procs, "as many processes as before"
        return self._spawn(name, self._gpus_of[role])

    def allot(self, role: HostRole, num_procs: int, *, gpus_per_proc: int) -> None:
        """Reserve places and GPUs for processes that ``spawn_one`` will start, spread as ``spawn`` does.

        Raises:
            ValueError: a host has too few GPUs left.
        """
        self._gpus_of[role] = [self._gpus[role].take(gpus_per_proc, role=role) for _ in range(num_procs)]

    def allot_more(self, role: HostRole, *, gpus_per_proc: int) -> LocalHost:
        """Reserve a place and GPUs for one more process of a role, at the next rank; return its host.

        Raises:
            ValueError: there is no such place, or too few GPUs are left.
        """
        self._gpus_of[role].append(self._gpus[role].take(gpus_per_proc, role=role))
        (host,) = self.hosts_for(role, 1)
        return host

    def spawn_one(self, role: HostRole, name: str, rank: int) -> ProcMesh:
        """Spawn one process at a rank of the role that is free, or whose process has ended."""
        return self._spawn(name, [self._gpus_of[role][rank]])

    async def stop_one(self, mesh: ProcMesh) -> None:
        """Stop a mesh that ``spawn_one`` returned, and wait for its process unless it was killed."""
        if mesh in self._meshes:
            self._meshes.remove(mesh)
        await stop(mesh)

    def _spawn(self, name: str, gpus: list[list[int]]) -> ProcMesh:
        mesh = spawn_role(this_host(), name, num_procs=len(gpus), gpus_per_proc=gpus)
        self._meshes.append(mesh)
        return mesh

    def hosts_for(self, role: HostRole, num_procs: int) -> Sequence[LocalHost]:
        """Return the host of each process of a role, by rank."""
        return [LocalHost(self._ids[role], self._host.folders)] * num_procs

    async def gpus(self, role: HostRole) -> Mapping[str, GpuFacts]:
        """Return the GPUs of each host of a role, by the host's name in the run."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return {LOCAL_HOST_ID: await asyncio.to_thread(gather_gpu_facts, visible)}

    def limits(self, role: HostRole) -> Mapping[str, HostLimits]:
        """Return the limits of each host of a role at its start, by the host's name in the run."""
        return {LOCAL_HOST_ID: gather_host_limits()}

    def master_address_is_ip(self) -> bool:
        """Return whether others reach the trainer's first host by its IP address instead of its name."""
        return False

    async def watch(self) -> None:
        """Send heartbeats to every host until one of them is lost; the controller's own machine never is.

        Raises:
            HostLost: always, when a host does not answer.
        """
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """Stop every process and remove everything that the run has left, in any state.

        Raises:
            HostLost: a host is lost, even if the run has ended with another error.
        """
        try:
            await asyncio.gather(*(stop(mesh) for mesh in self._meshes))
        finally:
            self._meshes.clear()
            self._host.remove_folders()
