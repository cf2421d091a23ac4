"""Waiting in one event loop, for a condition of a shared state machine or with a deadline."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

S = TypeVar("S")

T = TypeVar("T")


class Monitor(Generic[S]):
    """Shares a pure state machine between tasks, which change it and wait for conditions on it.

    A change contains no await, so no task sees an intermediate state. All callers must be in one event loop.
    """

    def __init__(self, state: S) -> None:
        self.state = state
        self._waiting: list[asyncio.Future[None]] = []
        """Futures of waiting tasks, the longest wait first."""

    def change(self, act: Callable[[S], T]) -> T:
        """Call ``act`` on the state, and return its result. Waiting tasks check the state again."""
        result = act(self.state)
        self.wake()
        return result

    async def until(
        self, attempt: Callable[[S], T | None], *, look_at_s: Callable[[S], float | None] = lambda state: None
    ) -> T:
        """Wait until ``attempt`` returns something other than None or False, and return that.

        A successful attempt may change the state, so it wakes the other waiting tasks.

        Args:
            attempt: Function that is called now and after each change.
            look_at_s: Function that returns the event loop's time at which the next attempt is due even
                without a change, or None.
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
        self.wake()
        return result

    def wake(self) -> None:
        """Let waiting tasks check the state again, after a change that ``change`` did not make."""
        for changed in self._waiting:
            _finish(changed)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def happens_within(limit_s: float, event: Awaitable[object]) -> bool:
    """Wait for ``event`` for at most ``limit_s`` seconds; return whether it came."""
    try:
        async with asyncio.timeout(limit_s) as timeout:
            await event
    except TimeoutError:
        if not timeout.expired():
            raise
        return False
    return True


def forget(ended: "asyncio.Future[T]") -> None:
    """Done callback that retrieves an error without a reader, so that asyncio does not warn about it."""
    if not ended.cancelled():
        ended.exception()


class DeadlineExceeded(TimeoutError):
    """A call took longer than the config allows."""


@asynccontextmanager
async def deadline(limit_s: float, *, call: str, key: str) -> AsyncIterator[None]:
    """Cancel the body after ``limit_s`` seconds.

    Args:
        limit_s: Time limit in seconds.
        call: Description of the body for the error message, as a noun phrase ("scoring group 17").
        key: Config key that sets the limit ("timeouts.score_s").

    Raises:
        DeadlineExceeded: The body took longer. A TimeoutError that the body itself raises passes unchanged.
    """
    try:
        async with asyncio.timeout(limit_s) as timeout:
            yield
    except TimeoutError as error:
        if not timeout.expired() or isinstance(error, DeadlineExceeded):
            raise
        raise DeadlineExceeded(f"{call} took longer than {limit_s:g} s; {key} sets this limit") from error
