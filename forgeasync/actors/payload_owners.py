"""The generators that a trainer rank asks for payloads of other hosts, while generators come and go."""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from forgeasync.actors.generator import GeneratorActor
from forgeasync.rollouts import Arrays, PayloadGone, PayloadRef, PayloadTorn, RemotePayloadReader
from forgeasync.waiting import comes_within, deadline, forget

logger = logging.getLogger(__name__)

AGAIN_S = 0.5
"""Seconds until the generators of a host are asked once more."""


class PayloadOwners:
    """Generators by host: any of a host shows what lies in its shared memory."""

    def __init__(self) -> None:
        self._generators: Mapping[str, Sequence[GeneratorActor]] = {}
        self._changed = asyncio.Event()

    def change(self, generators: Mapping[str, Sequence[GeneratorActor]]) -> None:
        """Set the generators that there are now; reads from others begin again."""
        self._generators = generators
        self._changed.set()
        self._changed = asyncio.Event()

    async def read(self, ref: PayloadRef, reader: RemotePayloadReader, *, limit_s: float) -> Arrays:
        """Read a payload by way of any generator of its host, as soon as one shows it.

        Raises:
            PayloadGone: the file was freed, or never existed.
            PayloadTorn: the bytes that arrived are not those that were written.
            DeadlineExceeded: no generator has shown it within ``limit_s``.
        """
        call = f"reading payload {ref.payload_id} of host {ref.host_id}"
        async with deadline(limit_s, call=call, key="timeouts.weights_s"):
            while True:
                changed = self._changed
                for owner in self._generators.get(ref.host_id, ()):
                    try:
                        return await _unless(changed, functools.partial(_read, ref, reader, owner))
                    except (PayloadGone, PayloadTorn):
                        raise
                    except _Changed:
                        break
                    except Exception:
                        # Whatever Monarch raises for an owner that is gone; its replacement shows the same.
                        logger.warning("cannot read payload %s; trying again", ref.payload_id, exc_info=True)
                await comes_within(AGAIN_S, changed.wait())


class _Changed(Exception):
    """The generators are others now."""


async def _read(ref: PayloadRef, reader: RemotePayloadReader, owner: GeneratorActor) -> Arrays:
    return await reader.read(ref, owner.expose_payload.call_one)


async def _unless(changed: asyncio.Event, call: Callable[[], Awaitable[Arrays]]) -> Arrays:
    reading = asyncio.ensure_future(call())
    other = asyncio.ensure_future(changed.wait())
    try:
        await asyncio.wait([reading, other], return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise _Changed
        return reading.result()
    finally:
        other.cancel()
        reading.add_done_callback(forget)
        reading.cancel()
