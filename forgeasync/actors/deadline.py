"""Deadlines of calls whose error says what took too long, and which key of the config allows more."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


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
