"""Snapshots of one trainer rank in its host's shared memory, for a trainer that is started again.

A rank has two files and writes them in turn, so that the snapshot before stays whole while the next one is
written. Files outlive the process; ``forgeasync.trainer.snapshot_format`` says what is in them.

The thread that trains begins a snapshot after an optimizer step and goes on with the next forward and
backward pass; a thread here writes. ``until_written`` has to return before the collective that ends the next
step: who passes that collective knows that every rank has the snapshot before, and may overwrite the one
before that.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from forgeasync.trainer.run_checkpoint import State
from forgeasync.trainer.snapshot_format import (
    Part,
    finish,
    invalidate,
    lay_out,
    newest_common,
    read_version,
    slot_of,
)
from forgeasync.weights import DeviceCopies, SharedFile, StartedCopies, page_lock

NUM_SLOTS = 2


def local_parts(state: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """This rank's own part of every tensor, by name; shares their memory."""
    return [
        (name, (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach())
        for name, tensor in state.items()
    ]


def snapshot_bytes(state: Mapping[str, torch.Tensor]) -> int:
    """Bytes of shared memory that the snapshots of this rank take."""
    return NUM_SLOTS * lay_out(local_parts(state)).num_bytes


class Snapshots:
    """The two files of this rank."""

    def __init__(self, folder: Path, state: State, *, every_steps: int) -> None:
        """Make the files in ``folder`` of this host, or open those of the process that was here before.

        A snapshot is taken of versions that ``every_steps`` divides. ``state`` shows what one holds.

        Raises:
            ValueError: the host has not that much shared memory left.
        """
        self._every_steps = every_steps
        self._layout = lay_out(local_parts(state))
        self._digest = self._layout.digest
        paths = [folder / f"snapshot-{dist.get_rank()}-{slot}" for slot in range(NUM_SLOTS)]
        self._files = [
            SharedFile(path, self._layout.num_bytes, is_new=not path.exists(), reserve=True) for path in paths
        ]
        for file in self._files:
            page_lock(file.bytes)
        self._copies = DeviceCopies()
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._written: Future[None] | None = None
        self.newest: int | None = None
        """Version of the newest whole snapshot that this process has written or gone on from."""

    @torch.no_grad()
    def restore(self, state: State, *, at_most: int) -> int | None:
        """Fill ``state`` from the newest snapshot that all ranks have, not after ``at_most``; collective.

        Returns its version; None if there is none, and ``state`` is as it was.
        """
        found = {
            version: file
            for file in self._files
            if (version := read_version(file.memory, digest=self._digest)) is not None
        }
        by_rank: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(by_rank, sorted(found))
        version = newest_common(by_rank, at_most=at_most)
        if version is not None:
            for part, (_, tensor) in zip(self._layout.parts, local_parts(state), strict=True):
                tensor.copy_(_stored(found[version], part))
            self.newest = version
        return version

    @torch.no_grad()
    def roll_back(self, state: State) -> None:
        """Fill ``state`` from the newest snapshot of this rank, which is whole.

        Raises:
            RuntimeError: the memory has changed since it was written.
        """
        assert self.newest is not None, "there is one"
        file = self._files[slot_of(self.newest, every_steps=self._every_steps)]
        found = read_version(file.memory, digest=self._digest)
        if found != self.newest:
            raise RuntimeError(f"the snapshot of version {self.newest} is damaged: its checksum is wrong")
        for part, (_, tensor) in zip(self._layout.parts, local_parts(state), strict=True):
            tensor.copy_(_stored(file, part))

    def begin_if_due(self, version: int, state: State) -> None:
        """Begin to write a snapshot if it is this version's turn; to be called by the thread that trains.

        The tensors must not change before ``until_written`` has returned.
        """
        if version % self._every_steps:
            return
        self.until_written()
        file = self._files[slot_of(version, every_steps=self._every_steps)]
        targets = [_stored(file, part) for part in self._layout.parts]
        sources = [tensor for _, tensor in local_parts(state)]
        # From here on a kill leaves the other file.
        invalidate(file.memory)
        self._written = self._writing.submit(
            self._write, version, file, targets, sources, self._start_copies(targets, sources)
        )

    def _start_copies(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> StartedCopies | None:
        """Begin to copy what lies on a device."""
        on_device = [
            (target.view(-1), source)
            for target, source in zip(targets, sources, strict=True)
            if source.device.type != "cpu"
        ]
        if not on_device:
            return None
        device_targets, device_sources = zip(*on_device, strict=True)
        return self._copies.start(device_targets, device_sources)

    @torch.no_grad()
    def _write(
        self,
        version: int,
        file: SharedFile,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        copies: StartedCopies | None,
    ) -> None:
        for target, source in zip(targets, sources, strict=True):
            if source.device.type == "cpu":
                target.copy_(source)
        if copies is not None:
            copies.wait()
        finish(file.memory, version=version, digest=self._digest)
        self.newest = version

    def until_written(self) -> float:
        """Wait until the snapshot that was begun is whole; returns the seconds, or raises what went wrong."""
        start_s = time.perf_counter()
        if self._written is not None:
            self._written.result()
        return time.perf_counter() - start_s


def _stored(file: SharedFile, part: Part) -> torch.Tensor:
    """A tensor's place in a file, as a tensor."""
    return file.bytes[part.offset : part.offset + part.num_bytes].view(part.dtype).view(part.shape)
