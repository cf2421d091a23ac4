"""Payloads of another host, read through Monarch's RDMABuffer (over TCP where there is no RDMA hardware).

The reader asks the owner for a handle, which is small, and moves the bytes past the actors' messages.
"""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import torch
from monarch.actor import ActorError
from monarch.rdma import RDMABuffer

from forgeasync.rollouts.payload_format import PayloadGone, PayloadRef, PayloadTorn, gone, read_from, torn
from forgeasync.rollouts.payload_store import PayloadWriter, map_payload

Expose = Callable[[PayloadRef], Awaitable[RDMABuffer]]
"""``PayloadServer.expose`` of a payload's owner, as an endpoint's ``call_one`` or directly."""


class PayloadServer:
    """Hands out handles for the payloads of one writer, and for those that other writers of its folder have
    left; lives in the writer's proc, inside an actor.

    A payload is registered when it is first asked for, and stays so until its file is freed. Measured over
    TCP on two cores: a registration takes 0.1 to 0.4 ms (the first one of a proc 17 ms), reading 16 MiB takes
    25 to 35 ms, and a buffer can only be read whole. One registration per file would save next to nothing and
    move the whole group for every payload of it. Registering ahead would map what nobody may ever ask for.
    """

    def __init__(self, writer: PayloadWriter) -> None:
        self._writer = writer
        self._buffers: dict[str, dict[str, RDMABuffer]] = {}

    def expose(self, ref: PayloadRef) -> RDMABuffer:
        """A handle for reading a payload's bytes, header included.

        Raises:
            PayloadGone: the file was freed, or is not of this writer's folder.
            PayloadTorn: the file is too short.
        """
        if not self._writer.holds(ref.file):
            raise gone(ref)
        buffers = self._buffers.setdefault(ref.file, {})
        if ref.payload_id not in buffers:
            # RDMA hardware registers memory for local writes too and refuses read-only pages.
            buffers[ref.payload_id] = RDMABuffer(map_payload(ref, is_writable=True))
        return buffers[ref.payload_id]

    async def free(self, file: str) -> None:
        """Free a group's file and its payloads' registrations; handles already given out stop working.

        The file of another writer, which is gone, is removed.
        """
        if self._writer.wrote(file):
            self._writer.free(file)
        else:
            self._writer.free_left(file)
        for buffer in self._buffers.pop(file, {}).values():
            await buffer.drop()


class RemotePayloadReader:
    """Reads payloads of other hosts, one at a time, into memory that it keeps."""

    def __init__(self, timeout_s: int) -> None:
        """``timeout_s`` bounds the transfer of one payload."""
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._bytes = torch.empty(0, dtype=torch.uint8)

    async def read(self, ref: PayloadRef, expose: Expose) -> dict[str, np.ndarray]:
        """A payload's arrays, each with memory of its own.

        Raises:
            PayloadGone: the file was freed, or never existed.
            PayloadTorn: the bytes that arrived are not those that were written.
            Exception: the transfer failed or took too long, although the payload is there; Monarch's own.
        """
        handle = await _expose(ref, expose)
        if handle.size() != ref.num_bytes:
            raise torn(ref, "length in bytes", expected=ref.num_bytes, found=handle.size())
        async with self._lock:
            if len(self._bytes) < ref.num_bytes:
                self._bytes = torch.empty(ref.num_bytes, dtype=torch.uint8)
            destination = self._bytes[: ref.num_bytes]
            try:
                await handle.read_into(destination, timeout=self._timeout_s)
            except BaseException as error:
                # What is still under way must not land in the next payload.
                self._bytes = torch.empty(0, dtype=torch.uint8)
                if isinstance(error, Exception):
                    # Where the file was freed since, Monarch raises a plain Exception; the owner says it.
                    await _expose(ref, expose)
                raise
            return read_from(destination.numpy().data, ref, copy=True)


async def _expose(ref: PayloadRef, expose: Expose) -> RDMABuffer:
    try:
        return await expose(ref)
    except ActorError as error:
        if isinstance(error.exception, PayloadGone | PayloadTorn):
            raise error.exception from error
        raise
