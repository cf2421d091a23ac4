"""The one thing that transports do: bring ranges of a rank's staging buffer into a generator's own memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from monarch.rdma import RDMABuffer

from forgeasync.config.weights_schema import TransportChoice

ByteRange = tuple[int, int]
"""First byte and the one after the last."""

Arrived = Callable[[ByteRange], None]
"""Called for every part of the ranges as soon as it is there; may be called from any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingSource:
    """How the staging buffers of one rank can be reached; fields by slot."""

    host_id: str
    paths: tuple[Path, ...]
    segments: tuple[tuple[RDMABuffer, ...], ...] = ()
    """Handles of consecutive ``SEGMENT_BYTES``; empty where no generator is on another host."""


class Transport(Protocol):
    """Reads the staging buffers of one trainer rank."""

    granularity: int
    """Ranges start and stop at multiples of it, in bytes, or at the buffer's end."""

    async def read(
        self, slot: int, ranges: Sequence[ByteRange], landing: torch.Tensor, arrived: Arrived
    ) -> None:
        """Copy ``ranges`` of a slot into the same places of ``landing`` (uint8, as long as the buffer)."""
        ...


def choose_transport(choice: TransportChoice, *, trainer_host: str, generator_host: str) -> TransportChoice:
    """What a pair of procs uses.

    Raises:
        ValueError: shared memory is asked for between two hosts.
    """
    is_local = trainer_host == generator_host
    if choice is TransportChoice.AUTO:
        return TransportChoice.SHARED_MEMORY if is_local else TransportChoice.RDMA
    if choice is TransportChoice.SHARED_MEMORY and not is_local:
        raise ValueError(
            f"weights.transport = {choice.value!r}, but trainer on host {trainer_host} and generator "
            f"on {generator_host}; must be auto, rdma or torchstore"
        )
    return choice
