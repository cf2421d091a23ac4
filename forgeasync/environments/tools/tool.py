"""A tool: what the model is told of it, and what runs when the model calls it."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

import psutil
from pydantic_core import to_json

from forgeasync.environments.episode_thread import EpisodeThread, kill, started_by
from forgeasync.environments.messages import ToolSpec
from forgeasync.environments.tools.signature import Signature


class ToolFailed(Exception):
    """Raise it in a tool to tell the model that the call has failed, in exactly these words."""


class ToolTimeout(ToolFailed):
    """The call took too long for the tool itself; the text tells the model."""


class ToolServerLost(ToolFailed):
    """The server of a tool has ended or no longer answers; the text tells the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One tool.

    def add(a: int, b: int) -> int:
        '''Add two whole numbers.

        Args:
            a: The first one.
            b: The second one.
        '''
        return a + b

    tool = Tool.from_function(add)
    """

    spec: ToolSpec
    run: Callable[[Mapping[str, Any]], Awaitable[str]]
    """Calls it with the model's arguments, which nobody has checked, and returns what the model is told.
    Cancelling ends everything that the call has started. Raises BadArguments, ToolFailed, or anything else,
    which the model is told by its class and its text."""

    @classmethod
    def from_function(cls, function: Callable[..., object]) -> Self:
        """Make a tool of a function or a bound method with annotations and a docstring.

        A function is called on a thread of its own, so that it delays nothing else; a coroutine function
        runs on the episode's loop. Text that it returns is the result; everything else is written as JSON,
        and None as no text. Where the call is cut off, the processes that it has started are killed.

        Raises:
            ValueError: something cannot be described; names the function and the parameter.
        """
        signature = Signature(function)
        call = _call_coroutine if inspect.iscoroutinefunction(function) else _call_on_thread

        async def run(arguments: Mapping[str, Any]) -> str:
            given = signature.read(arguments)
            return _text(await call(function, given))

        return cls(spec=signature.spec, run=run)


async def _call_on_thread(function: Callable[..., object], arguments: Mapping[str, Any]) -> object:
    async def work() -> object:
        return function(**arguments)

    thread: EpisodeThread[object] = EpisodeThread(work, name=f"tool {function.__name__}"[:60])
    ended = thread.start()
    try:
        return await asyncio.shield(ended)
    finally:
        if not ended.done():
            # Nobody waits for it any more; its result is not looked at.
            ended.add_done_callback(_forget)
            thread.cancel()
            kill(thread.processes())
            thread.interrupt()
            _abandoned.append(thread)


_abandoned: list[EpisodeThread[object]] = []


def num_stuck_calls() -> int:
    """Return the number of this process's threads whose call was cut off and that nothing has ended."""
    _abandoned[:] = [thread for thread in _abandoned if thread.is_alive]
    return len(_abandoned)


class _Calls(threading.local):
    """The coroutine tools that run on this thread. Their processes have one parent, so that those which
    began during several calls cannot be told apart."""

    def __init__(self) -> None:
        self.num_running = 0
        self.doomed: list[psutil.Process] = []


_calls = _Calls()


async def _call_coroutine(function: Callable[..., object], arguments: Mapping[str, Any]) -> object:
    before = {process.pid for process in started_by(threading.get_native_id())}
    _calls.num_running += 1
    try:
        return await cast(Awaitable[object], function(**arguments))
    except asyncio.CancelledError:
        started = started_by(threading.get_native_id())
        _calls.doomed += [process for process in started if process.pid not in before]
        raise
    finally:
        _calls.num_running -= 1
        if not _calls.num_running:
            # With other calls under way they may be those of the others: they wait until these have ended.
            kill(_calls.doomed)
            _calls.doomed.clear()


def _text(result: object) -> str:
    if result is None:
        return ""
    return result if isinstance(result, str) else to_json(result, fallback=str).decode()


def _forget(ended: "asyncio.Future[object]") -> None:
    """Retrieve an error that nobody will read, so that asyncio does not warn about it."""
    if not ended.cancelled():
        ended.exception()
