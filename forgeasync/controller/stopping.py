"""Ctrl-C and SIGTERM: the first one ends a run in order, a second one ends it at once.

Schedulers stop a job with SIGTERM and kill it some time later. Both signals cancel the app's coroutine, which
ends its processes and cleans up; who wants to do more for the one than for the other asks
``received_signal()``.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from forgeasync.faults import remove_files_of
from forgeasync.launch import STOP_SIGNALS
from forgeasync.observability import claimed_marks, release_claims
from forgeasync.rollouts import remove_own_folders

SAME_S = 1.0
"""Two signals so close to each other count as one: schedulers send them to a process on several ways."""

SHOW_CURSOR = b"\x1b[?25h"


@dataclass(slots=True)
class _Stop:
    """The signal that this process received, and the task that it tells."""

    received: signal.Signals | None = None
    received_s: float = 0.0
    main: asyncio.Task[None] | None = None
    """Task that is cancelled; None if no coroutine runs."""
    listeners: list[Callable[[signal.Signals], None]] = field(default_factory=list)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.received is not None:
            if now_s - self.received_s >= SAME_S:
                _end_at_once(self.received)
            return
        self.received, self.received_s = signal.Signals(number), now_s
        if self.main is None:
            raise KeyboardInterrupt
        # The handler must not print: it may have interrupted a print to the same stream.
        self.main.get_loop().call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        assert self.received is not None
        try:
            for listener in self.listeners:
                listener(self.received)
        finally:
            if self.main is not None:
                self.main.cancel()


_stop = _Stop()


def received_signal() -> signal.Signals | None:
    """What told this process to stop; None: nothing has."""
    return _stop.received


def install_handlers() -> None:
    """Handle both signals as this module says from now on, whatever the parent process had set."""
    for number in STOP_SIGNALS:
        signal.signal(number, _stop.on_signal)


def run_main(main: Coroutine[Any, Any, None]) -> None:
    """Run an app's coroutine; a signal to stop cancels it.

    Raises:
        asyncio.CancelledError: it was cancelled.
    """

    async def body() -> None:
        _stop.main = asyncio.current_task()
        try:
            await main
        finally:
            _stop.main = None

    asyncio.run(body())


@contextmanager
def telling(listener: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call ``listener`` as soon as a signal to stop has come, before anything is cancelled."""
    _stop.listeners.append(listener)
    try:
        yield
    finally:
        _stop.listeners.remove(listener)


def _end_at_once(first: signal.Signals) -> None:
    """End this process without waiting for anything; its procs end with it."""
    remove_own_folders()
    # Whoever uses these ends with this process.
    for mark in claimed_marks():
        remove_files_of(mark)
    release_claims()
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            os.write(stream.fileno(), SHOW_CURSOR)
    os.write(sys.stderr.fileno(), b"ended at once by a second signal\n")
    os._exit(128 + first)
