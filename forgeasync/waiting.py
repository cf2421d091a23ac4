"""Waiting in one event loop: for a condition of a shared state machine, and with a deadline."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

S = TypeVar("S")

T = TypeVar("T")


class Monitor(Generic[S]):
    """Wraps a pure state machine: loops change it, and wait until something holds of it.

    Nothing is awaited in the middle of a change, so that nobody sees half of one. All callers must be in one
    event loop.
    """

    def __init__(self, state: S) -> None:
        self.state = state
        self._waiting: list[asyncio.Future[None]] = []
        """Waiters; the one that has waited longest comes first."""

    def change(self, act: Callable[[S], T]) -> T:
        """Call ``act``, and have everyone who waits look at the state again; returns what ``act`` does."""
        result = act(self.state)
        self._wake()
        return result

    async def until(
        self, attempt: Callable[[S], T | None], *, look_at_s: Callable[[S], float | None] = lambda state: None
    ) -> T:
        """Wait until ``attempt`` returns something other than None and False; returns that.

        An attempt that succeeds may change the state: the others look at it again. ``look_at_s`` may name a
        time (of the event loop) at which the next attempt is due even without a change.
        """
        loop = asyncio.get_running_loop()
        while (result := attempt(self.state)) is None or result is False:
            changed: asyncio.Future[None] = loop.create_future()
            at_s = look_at_s(self.state)
            timer = None if at_s is None else loop.call_at(at_s, _finish, changed)
            self._waiting.append(changed)
            try:
                await changed
            finally:
                self._waiting.remove(changed)
                if timer is not None:
                    timer.cancel()
        self._wake()
        return result

    def _wake(self) -> None:
        for changed in self._waiting:
            _finish(changed)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def comes_within(limit_s: float, event: Awaitable[object]) -> bool:
    """Wait for something for at most ``limit_s`` seconds; return whether it came."""
    try:
        async with asyncio.timeout(limit_s) as timeout:
            await event
    except TimeoutError:
        if not timeout.expired():
            raise
        return False
    return True


def forget(ended: "asyncio.Future[T]") -> None:
    """Retrieve an error that nobody will read, so that asyncio does not warn about it; a done callback."""
    if not ended.cancelled():
        ended.exception()


class DeadlineExceeded(TimeoutError):
    """A call took longer than the config allows."""


@asynccontextmanager
async def deadline(limit_s: float, *, call: str, key: str) -> AsyncIterator[None]:
    """End the body after ``limit_s`` seconds.

    ``call`` names role, call and group or step, as the subject of a sentence ("scoring group 17"); ``key`` is
    the config key that sets the limit ("timeouts.score_s").

    Raises:
        DeadlineExceeded: the body took longer. Another TimeoutError that the body raises passes unchanged.
    """
    try:
        async with asyncio.timeout(limit_s) as timeout:
            yield
    except TimeoutError as error:
        if not timeout.expired() or isinstance(error, DeadlineExceeded):
            raise
        raise DeadlineExceeded(f"{call} took longer than {limit_s:g} s; {key} sets this limit") from error
