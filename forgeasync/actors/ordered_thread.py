"""One thread that does an actor's work in the order in which its calls came.

What torch keeps for each thread (current device and stream, autograd settings, TorchTitan contexts) is then
the same in every call, and the actor's event loop stays free while the thread computes.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


class OrderedThread:
    """Runs functions one after the other; the callers are coroutines of one event loop.

    Monarch 0.7.0 starts concurrent endpoints in the order in which one caller has called them
    (``monarch.actor.concurrent_endpoint``), on every rank. A call that asks for its turn before it waits for
    anything else keeps that order, so that collectives of different calls meet on no rank in another order.
    """

    def __init__(self, name: str) -> None:
        self._turn = asyncio.Lock()
        """Wakes those who wait in the order in which they came."""
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # A thread that is stuck in a collective must not keep its process alive.
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until the calls that came before have ended; those that come later wait for the body."""
        async with self._turn:
            yield

    async def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the thread; to be called in one's turn. Raises what ``work`` raises.

        A coroutine that is cancelled here leaves ``work`` running: what comes later waits behind it.
        """
        assert self._turn.locked(), "a call that is not in its turn"
        result: Future[T] = Future()

        def do() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                found = work()
            except BaseException as error:
                # As in the standard executors: who waits gets it, whatever it is.
                result.set_exception(error)
            else:
                result.set_result(found)

        self._work.put(do)
        return await asyncio.wrap_future(result)

    async def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` in its turn."""
        async with self.turn():
            return await self.run(work)

    def _serve(self) -> None:
        while True:
            # Nothing is kept here of work that is done: its arguments may be large.
            self._work.get()()
