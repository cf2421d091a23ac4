"""Transports move published weights from the trainer's ranks into a generator's own memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from monarch.actor import ProcMesh

from forgeasync.weights.manifest import BLOCK_BYTES

ByteRange = tuple[int, int]
"""First byte, and the byte after the last one."""

Arrived = Callable[[ByteRange], None]
"""Called for every part of the ranges as soon as it has arrived; may be called from any thread."""

SpawnProc = Callable[[str], ProcMesh]
"""Starts a proc of this name on the controller's machine; it ends with the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStaging:
    """The staging buffers of one trainer rank, as that rank sees them; fields by slot where there are two."""

    rank: int
    host_id: str
    paths: tuple[Path, ...]
    """Files in this host's shared memory."""
    buffers: tuple[torch.Tensor, ...]
    """The bytes of ``paths`` as tensors, uint8; their addresses stay the same for the whole run."""
    generator_hosts: frozenset[str]
    """Hosts of the generators that will read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingSource:
    """How to reach the staging buffers of one rank; sent to the generators."""

    host_id: str
    paths: tuple[Path, ...]
    """Files of that host, by slot."""
    address: object = None
    """Address that the transport's ``open`` returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSource:
    """The staging buffers of one trainer rank, as one generator sees them."""

    rank: int
    num_bytes: int
    """Bytes of each buffer."""
    staging: StagingSource
    generator_host: str
    """The host that reads."""
    lease_timeout_s: float
    """A fetch that takes longer may find that the trainer has begun to write the next version."""


class Transport(ABC):
    """Moves bytes out of staging buffers; one class has both the trainer's side and the generator's.

    A trainer rank has two staging buffers (slots). It copies each version into a slot that nobody reads, and
    generators fetch it from there and check every block against its checksum. A transport only moves bytes:
    others decide which slot is written, which ranges are needed and what is fetched again.

    Every process that takes part makes an object of its own:

    ==========================================  =================================  =========================
    where                                       what is called                     how often
    ==========================================  =================================  =========================
    the controller                              ``start``                          once
    each trainer rank                           ``open``                           once, after ``start``
    each trainer rank                           ``staged``                         for every version
    each generator, an object per trainer rank  ``connect``                        once, after ``open``
    each generator, an object per trainer rank  ``read``                           for every version
    ==========================================  =================================  =========================

    **Write your own.** Make a class, put its module where the run's processes can import it, and name it:

    .. code-block:: yaml

        weights:
          transport: {kind: python, factory: my_transport.FolderTransport, options: {folder: /mnt/weights}}

    This one goes through files in a folder that all hosts mount:

    .. code-block:: python

        import asyncio
        from collections.abc import Sequence
        from pathlib import Path

        import torch

        from forgeasync.weights.transports.transport import (
            Arrived,
            ByteRange,
            RankSource,
            RankStaging,
            Transport,
        )


        class FolderTransport(Transport):
            def __init__(self, folder: str) -> None:
                self._folder = Path(folder)

            def _file(self, slot: int) -> Path:
                return self._folder / f"rank-{self._rank}-slot-{slot}"

            async def open(self, staging: RankStaging) -> None:
                self._rank, self._buffers = staging.rank, staging.buffers

            async def staged(self, slot: int) -> None:
                await asyncio.to_thread(self._file(slot).write_bytes, self._buffers[slot].numpy().data)

            def connect(self, source: RankSource) -> None:
                self._rank = source.rank

            async def read(
                self, slot: int, ranges: Sequence[ByteRange], received: torch.Tensor, arrived: Arrived
            ) -> None:
                await asyncio.to_thread(self._copy, slot, ranges, received.numpy().data, arrived)

            def _copy(
                self, slot: int, ranges: Sequence[ByteRange], received: memoryview, arrived: Arrived
            ) -> None:
                with self._file(slot).open("rb") as file:
                    for start, stop in ranges:
                        file.seek(start)
                        file.readinto(received[start:stop])
                        arrived((start, stop))

    Rules for a transport:

    - Making an object is cheap and has no effect: the check of a config makes one too. The keywords of
      ``__init__`` are the section's ``options``.
    - Generators wait for ``staged``, and so does the next version; training goes on. After it the slot's
      bytes stay as they are while a generator leases the version; only a generator that outlives its lease
      can see them change.
    - ``read`` calls ``arrived`` for every byte of the ranges. Bytes that are torn, late or wrong are found by
      their checksum and asked for again; an exception ends the run.
    - Both sides run in an actor's event loop. Run blocking calls in ``asyncio.to_thread``, so that decoding
      goes on, and the trainer takes its next call.
    """

    granularity: int = BLOCK_BYTES
    """Bytes: ranges passed to ``read`` start and stop at multiples of it, or at the buffer's end.
    A multiple of ``BLOCK_BYTES``; ``connect`` may set it."""

    crosses_hosts: bool = True
    """Whether it reaches generators on other hosts than the trainer's. If not, such runs are refused."""

    async def start(self, spawn: SpawnProc) -> None:  # noqa: B027
        """Start what the whole run shares; ``spawn`` gives it procs. Needs nothing by default."""

    @abstractmethod
    async def open(self, staging: RankStaging) -> object:
        """Make this rank's buffers ready to be read; every generator gets the result as ``address``.

        The result must be picklable.
        """

    async def staged(self, slot: int) -> None:  # noqa: B027
        """Called when a version is complete in a slot of this rank. Does nothing by default."""

    @abstractmethod
    def connect(self, source: RankSource) -> None:
        """Prepare to read one trainer rank's buffers.

        Raises:
            ValueError: they cannot be reached from here.
        """

    @abstractmethod
    async def read(
        self, slot: int, ranges: Sequence[ByteRange], received: torch.Tensor, arrived: Arrived
    ) -> None:
        """Copy ``ranges`` of a slot into the same places of ``received`` (uint8, as long as the buffer)."""
