"""Tells the controller of responses that have ended while others of their group go on."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from monarch.actor import Channel, Port, PortReceiver

from forgeasync.actors.stored_groups import FinishedResponse
from forgeasync.environments import Response
from forgeasync.waiting import forget

OnFinished = Callable[[int, Response], None]
"""Is told of a response and of its place in its group."""


@contextmanager
def told_of_finished(on_finished: OnFinished | None) -> Iterator[Port[FinishedResponse] | None]:
    """While it lasts, ``on_finished`` is called for what is sent to the port; None where nobody wants it."""
    if on_finished is None:
        yield None
        return
    port, receiver = Channel[FinishedResponse].open()
    telling = asyncio.create_task(_tell(receiver, on_finished))
    try:
        yield port
    finally:
        telling.cancel()
        telling.add_done_callback(forget)


async def _tell(receiver: PortReceiver[FinishedResponse], on_finished: OnFinished) -> None:
    while True:
        one = await receiver.recv()
        on_finished(one.index, one.response)
