"""Runs a coroutine on its own thread and event loop, so that a blocking call delays nothing else.

A thread cannot be killed. There are three ways to end it: cancel its coroutine, which reaches every await;
kill the processes that it has started, which ends every wait for them; and raise an exception in it, which
reaches Python code between two bytecodes. A thread that blocks in C after that continues.
"""

import asyncio
import concurrent.futures
import contextlib
import ctypes
import threading
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import psutil

from forgeasync.processes import started_by

R = TypeVar("R")


class ThreadCancelled(RuntimeError):
    """The coroutine was cancelled, by ``EpisodeThread.cancel`` or by itself."""


class ThreadInterrupted(BaseException):
    """Raised in a thread that has not ended after its coroutine was cancelled."""


class EpisodeThread(Generic[R]):
    """One coroutine on a thread. Its methods are called from other threads."""

    def __init__(self, work: Callable[[], Awaitable[R]], *, name: str) -> None:
        self._work = work
        self._ended: concurrent.futures.Future[R] = concurrent.futures.Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[R] | None = None
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> "asyncio.Future[R]":
        """Start the thread. Return a future on the caller's loop with the coroutine's result."""
        self._thread.start()
        return asyncio.wrap_future(self._ended)

    @property
    def is_alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def cancel(self) -> None:
        """Cancel the coroutine, wherever it awaits."""
        with self._lock:
            self._is_cancelled = True
            if self._loop is not None and self._task is not None:
                # A loop that has already closed raises RuntimeError.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._task.cancel)

    def processes(self) -> list[psutil.Process]:
        """Return the running processes that the thread has started, with all their descendants."""
        return [] if self._thread.native_id is None else started_by(self._thread.native_id)

    def interrupt(self) -> None:
        """Raise ``ThreadInterrupted`` in the thread's Python code."""
        if self._thread.ident is not None and self._thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread.ident), ctypes.py_object(ThreadInterrupted)
            )

    def _run(self) -> None:
        try:
            # This can return long after the result is set, for instance if calls in other threads still run.
            asyncio.run(self._main())
        except BaseException as error:
            if not self._ended.done():
                self._ended.set_exception(error)

    async def _main(self) -> None:
        with self._lock:
            self._loop = asyncio.get_running_loop()
            self._task = asyncio.current_task()
        try:
            if self._is_cancelled:
                raise asyncio.CancelledError
            self._ended.set_result(await self._work())
        except asyncio.CancelledError:
            self._ended.set_exception(ThreadCancelled("the coroutine was cancelled"))
        except BaseException as error:
            # The caller gets every exception of the coroutine.
            self._ended.set_exception(error)
