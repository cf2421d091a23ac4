"""The agent of a host: it keeps the run's folders in the host's shared memory and shows that the host is up.

Monarch 0.7.0 says nothing when a host is gone (tried: no supervision event within 90 s, calls hang), and
hosts outlive a controller that was killed. So the controller calls every agent all the time, and an agent
that nobody calls any more ends its host.
"""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from monarch.actor import Actor, concurrent_endpoint

from forgeasync.faults import read_stacks
from forgeasync.launch.bootstrap_main import HOST_DEVICES_VARIABLE
from forgeasync.launch.gpu_facts import GpuFacts, gather_gpu_facts
from forgeasync.launch.host_limits import HostLimits, gather_host_limits
from forgeasync.launch.hosts import remove_from
from forgeasync.launch.kill_tree import kill_tree
from forgeasync.observability import redirect_process_output
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

WATCH_S = 1.0
ANSWER_S = 1.0
"""Seconds for an answer to leave before its host ends."""


class HostAgent(Actor):
    """One proc on every host of a run, for as long as the run lasts."""

    def __init__(self, log_file: Path, max_silence_s: float) -> None:
        """Past ``max_silence_s`` without a call this host's worker, and all its procs with it, are ended."""
        redirect_process_output(log_file)
        self._folders: list[Path] = []
        self._max_silence_s = max_silence_s
        self._heard_s = time.monotonic()
        sweep_stale_folders()
        threading.Thread(target=self._watch, name="silence", daemon=True).start()

    @concurrent_endpoint
    async def beat(self) -> int:
        """The controller is there; the id of the process that is this host's worker."""
        self._heard_s = time.monotonic()
        return os.getppid()

    @concurrent_endpoint
    async def limits(self) -> HostLimits:
        """What this host has of memory, and what it lets its processes do with it."""
        return gather_host_limits()

    @concurrent_endpoint
    async def is_running(self, pid: int) -> bool:
        """Whether this host has a process of that id which has not ended."""
        return is_running(pid)

    @concurrent_endpoint
    async def kill(self, pid: int) -> None:
        """Kill a process of this host with all that it has started; no error if it has ended."""
        kill_tree(pid)

    @concurrent_endpoint
    async def read_stacks(self, pid: int) -> str:
        """Say what the Python threads of a process of this host are doing, or why that cannot be read."""
        # In a thread, as the controller goes on asking whether the host is up.
        return await asyncio.to_thread(read_stacks, pid)

    @concurrent_endpoint
    async def remove_files(self, files: Sequence[str]) -> None:
        """Remove files from the run's folders, whose writer is gone; no error if they are not there."""
        remove_from(self._folders, files)

    @concurrent_endpoint
    async def read_in_flight(self, folder: Path, group_ids: Sequence[int]) -> InFlightRead:
        """Read what a process of this host that is gone had in flight of some groups."""
        # In a thread, as the controller goes on asking whether the host is up.
        return await asyncio.to_thread(read_in_flight, folder, group_ids)

    @concurrent_endpoint
    async def remove_in_flight(self, folder: Path) -> None:
        """Remove what such a process has logged; no error if there is nothing."""
        await asyncio.to_thread(remove_in_flight, folder)

    @concurrent_endpoint
    async def keep_group(self, target: Path, facts: bytes, source: str) -> str | None:
        """Write a finished group, whose arrays lie in ``source``, to a disk; what prevents it, in words."""
        return await asyncio.to_thread(try_write_kept, target, facts, source)

    @concurrent_endpoint
    async def gpus(self) -> GpuFacts:
        """The GPUs that this host lets its procs use, whatever this one sees of them."""
        # In a thread, as the driver may take its time: the controller goes on asking whether the host is up.
        return await asyncio.to_thread(gather_gpu_facts, os.environ.get(HOST_DEVICES_VARIABLE))

    @concurrent_endpoint
    async def make_folder(self, num_bytes: int) -> Path:
        """A folder in this host's shared memory for ``num_bytes``.

        Raises:
            ValueError: the host has not that much left.
        """
        folder = create_run_folder(num_bytes)
        self._folders.append(folder)
        return folder

    @concurrent_endpoint
    async def remove_folders(self) -> None:
        """Remove everything of this run from the host's shared memory."""
        self._remove()

    @concurrent_endpoint
    async def end_host(self) -> None:
        """End this host's worker, and all its procs with it, once this has been answered."""
        try:
            self._remove()
        finally:
            threading.Timer(ANSWER_S, _end_host).start()

    def _remove(self) -> None:
        while self._folders:
            remove_run_folder(self._folders[-1])
            self._folders.pop()

    def _watch(self) -> None:
        while time.monotonic() - self._heard_s < self._max_silence_s:
            time.sleep(WATCH_S)
        print(f"nobody has called for {self._max_silence_s:.0f} s: the run is gone, and this host ends")
        try:
            self._remove()
        finally:
            _end_host()


def _end_host() -> None:
    # The procs of a host end with the process that started them.
    worker = os.getppid()
    # In a pod the worker is process 1, which the kernel lets nobody in the pod kill. SIGINT ends it: Python
    # handles that one, and Monarch's loop looks for it.
    os.kill(worker, signal.SIGINT if worker == 1 else signal.SIGKILL)
