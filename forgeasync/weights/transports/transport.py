"""Base of the transports that move published weights from trainer ranks to the memory of generators.

``Transport`` is the base class of built-in and user-defined transports. ``build_transport`` makes the one
that ``weights.transport`` names.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from forgeasync.config import BUILT_IN_TRANSPORTS, LocalLauncher, RunConfig, TransportChoice, WeightsSection
from forgeasync.schema import Problem, PythonCode, load_code
from forgeasync.weights.layout import SEGMENT_BYTES, WeightLayout
from forgeasync.weights.ledger import BLOCK_BYTES

if TYPE_CHECKING:
    # Importing Monarch starts threads, and many processes that use this module do not need it.
    from monarch.actor import ProcMesh

ByteRange = tuple[int, int]
"""First byte, and the byte after the last one."""

Arrived = Callable[[ByteRange], None]
"""Called for every part of the ranges as soon as it has arrived; may be called from any thread."""

MAX_SEGMENTS_IN_FLIGHT = 4
"""Maximum number of segments in flight: enough to overlap the latency of one segment with the others."""

SpawnProc = Callable[[str], "ProcMesh"]
"""Starts a process with the given name on the controller's machine; it ends with the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStaging:
    """Staging buffers of one trainer rank, as seen by that rank; tuples are by slot."""

    rank: int
    host_id: str
    paths: tuple[Path, ...]
    """Files in this host's shared memory."""
    buffers: tuple[torch.Tensor, ...]
    """The bytes of ``paths`` as tensors, uint8; their addresses stay the same for the whole run."""
    generator_hosts: frozenset[str]
    """Hosts of the generators that read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingSource:
    """Addresses of the staging buffers of one rank, sent to the generators."""

    host_id: str
    paths: tuple[Path, ...]
    """Files of that host, by slot."""
    address: object = None
    """Address that the transport's ``open`` returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSource:
    """Staging buffers of one trainer rank, as seen by one generator."""

    rank: int
    num_bytes: int
    """Bytes of each buffer."""
    staging: StagingSource
    generator_host: str
    """Host of the generator."""
    lease_timeout_s: float
    """Seconds that a fetch may take; afterwards the trainer may overwrite the slot with the next version."""


class Transport(ABC):
    """Moves bytes out of staging buffers; one class has both the trainer's side and the generator's.

    A trainer rank has two staging buffers (slots). It copies each version into a slot without readers.
    Generators fetch it from there and check every block against its checksum. A transport only moves bytes.
    It does not decide which slot is written, which ranges are needed, or what is fetched again.

    Every process involved makes its own object:

    | where | what is called | how often |
    |---|---|---|
    | the controller | ``start`` | once |
    | each trainer rank | ``open`` | once, after ``start`` |
    | each trainer rank | ``staged`` | for every version |
    | each generator, an object per trainer rank | ``connect`` | once, after ``open`` |
    | each generator, an object per trainer rank | ``read`` | for every version |

    To write your own, put a class where the run's processes can import it, and name it in the config:

        weights:
          transport: {kind: python, factory: my_transport.FolderTransport, options: {folder: /mnt/weights}}

    This one goes through files in a folder that all hosts mount:

        import asyncio
        from collections.abc import Sequence
        from pathlib import Path

        import torch

        from forgeasync.weights import Arrived, ByteRange, RankSource, RankStaging, Transport


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

    - Making an object is cheap and has no effect; the check of a config also makes one. The keywords of
      ``__init__`` are the section's ``options``.
    - Generators and the next version wait for ``staged``; training continues. After ``staged``, the bytes
      of the slot do not change while a generator leases the version. Only a generator that outlives its lease
      can see changes.
    - ``read`` calls ``arrived`` for every byte of the ranges. Blocks with a wrong checksum are fetched again.
    - If the connection fails, ``read`` raises ``ConnectionError`` or ``TimeoutError``, and none of its
      threads writes after that. Missing blocks are fetched again. Other exceptions end the run.
    - Both sides run in an actor's event loop. Run blocking calls in ``asyncio.to_thread``, so that the engine
      keeps decoding and the trainer can handle its next call.
    """

    granularity: int = BLOCK_BYTES
    """Unit of the ranges passed to ``read``, in bytes.

    Ranges start and stop at multiples of it, or at the buffer's end. It is a multiple of ``BLOCK_BYTES``;
    ``connect`` may set it.
    """

    crosses_hosts: bool = True
    """Whether the transport reaches other hosts than the trainer's.

    If not, runs on several hosts are refused.
    """

    async def start(self, spawn: SpawnProc) -> None:  # noqa: B027
        """Start the processes that the whole run shares, with ``spawn``. Does nothing by default."""

    @abstractmethod
    async def open(self, staging: RankStaging) -> object:
        """Make this rank's buffers readable, and return their address.

        Every generator gets it as ``address`` of its ``StagingSource``, so it must be picklable.
        """

    async def staged(self, slot: int) -> None:  # noqa: B027
        """Handle the completion of a version in a slot of this rank. Does nothing by default."""

    @abstractmethod
    def connect(self, source: RankSource) -> None:
        """Prepare to read one trainer rank's buffers.

        Raises:
            ValueError: The buffers cannot be reached from here.
        """

    @abstractmethod
    async def read(
        self, slot: int, ranges: Sequence[ByteRange], received: torch.Tensor, arrived: Arrived
    ) -> None:
        """Copy ranges of a slot to the same offsets of ``received``.

        Args:
            slot: Slot of the staging buffers.
            ranges: First byte of each range, and the byte after its last one.
            received: uint8, as long as a staging buffer.
            arrived: Call it for every part of the ranges as soon as it is in ``received``.

        Raises:
            ConnectionError, TimeoutError: The trainer cannot be reached. The ranges are fetched again.
        """


async def move_segments(ranges: Iterable[ByteRange], move: Callable[[int, int], Awaitable[None]]) -> None:
    """Call ``move(first, last)`` for every segment of ``SEGMENT_BYTES`` in the ranges, a few concurrently."""
    limit = asyncio.Semaphore(MAX_SEGMENTS_IN_FLIGHT)

    async def run(first: int, last: int) -> None:
        async with limit:
            await move(first, last)

    async with asyncio.TaskGroup() as moves:
        for start, stop in ranges:
            for first in range(start, stop, SEGMENT_BYTES):
                moves.create_task(run(first, min(first + SEGMENT_BYTES, stop)))


def build_transport(choice: TransportChoice) -> Transport:
    """Build one process's side of a transport; imports its class.

    Raises:
        ValueError: The class does not exist, or cannot be built from these options.
    """
    code = choice if isinstance(choice, PythonCode) else PythonCode(factory=BUILT_IN_TRANSPORTS[choice])
    make = load_code(code)
    try:
        made = make(**code.options)
    except Exception as error:
        # Report any error of the user's class.
        raise ValueError(
            f"{code.factory} cannot be built with options {code.options} ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(made, Transport):
        raise ValueError(
            f"{code.factory} makes a {type(made).__name__}; must make a subclass of "
            f"{Transport.__module__}.{Transport.__name__}"
        )
    return made


def check_transport(config: RunConfig) -> Iterator[Problem]:
    """Yield problems of the transport of a run: it cannot be built, or does not reach the run's hosts."""
    choice = config.weights.transport
    value = choice.factory if isinstance(choice, PythonCode) else choice
    try:
        transport = build_transport(choice)
    except ValueError as error:
        yield Problem(field="weights.transport", value=value, remedy=str(error))
        return
    if not transport.crosses_hosts and not isinstance(config.launcher, LocalLauncher):
        yield Problem(
            field="weights.transport",
            value=value,
            remedy="must be one that crosses hosts (auto, rdma, tcp or torchstore) with launcher.kind = "
            f"{config.launcher.kind!r}: trainer and generators are on different hosts",
        )


def connect_transports(
    section: WeightsSection,
    layout: WeightLayout,
    sources: Sequence[StagingSource],
    *,
    generator_host: str,
) -> dict[int, Transport]:
    """Connect a generator's side of the transport to each trainer rank that publishes weights.

    Returns the transports by trainer rank.

    Raises:
        ValueError: A rank's buffers cannot be reached, or not be read in units of whole blocks.
    """
    transports: dict[int, Transport] = {}
    for rank, source in zip(layout.ranks, sources, strict=True):
        if not rank.num_bytes:
            continue
        transport = transports[rank.rank] = build_transport(section.transport)
        transport.connect(
            RankSource(
                rank=rank.rank,
                num_bytes=rank.buffer_bytes,
                staging=source,
                generator_host=generator_host,
                lease_timeout_s=section.lease_timeout_s,
            )
        )
        if transport.granularity < BLOCK_BYTES or transport.granularity % BLOCK_BYTES:
            raise ValueError(
                f"{type(transport).__name__}.granularity = {transport.granularity}; must be a multiple of "
                f"{BLOCK_BYTES}, the bytes of a block"
            )
    return transports
