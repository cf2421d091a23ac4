"""What this process does and when, written to a file of the run beside its log.

One process has one trace, as it has one log: ``open_trace`` begins it, and ``doing`` and ``span`` may be used
anywhere in any thread. Without a trace (tests, somebody's own process) they do nothing. A thread of its own
writes, so that neither a slow disk nor a full one holds anything up.
"""

import atexit
import os
import socket
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType

from forgeasync.faults import AppendedFile, is_refusal
from forgeasync.observability import say_on_stderr
from forgeasync.tracing.states import State, StateClock
from forgeasync.tracing.trace_lines import Ended, Facts, Opened, Pending, encode

SUFFIX = ".trace.jsonl"

WRITE_EVERY_S = 1.0

ALIVE_EVERY_S = 5.0
"""A sign of life is written after so long without a line; a killed process's trace ends with its last one."""

MAX_PENDING = 20_000
"""Spans that wait for a disk; further ones are counted."""

MAX_KEPT_BYTES = 4 << 20
"""Bytes that a disk has refused; until it takes them, nothing further is handed to it."""


class ProcTrace:
    """One trace. Safe for threads."""

    def __init__(self, path: Path, proc: str, *, idle: State) -> None:
        """Begin it, in the state STARTING, which ``started`` ends.

        Raises:
            OSError: there can be no such file.
        """
        self._zero_s = time.time() - time.perf_counter()
        self._lock = threading.Lock()
        self._clock = StateClock(idle)
        self._clock.begin(State.STARTING)
        self._pending = Pending(State.STARTING, max_lines=MAX_PENDING)
        self._file = AppendedFile.open(path)
        self._is_closed = threading.Event()
        opened = Opened(
            at_s=self._unix_s(),
            proc=proc,
            pid=os.getpid(),
            host=socket.gethostname(),
            state=State.STARTING,
        )
        self._write(encode(opened))
        self._written_s = opened.at_s
        self._writer = threading.Thread(target=self._serve, name="trace", daemon=True)
        self._writer.start()

    def begin(self, state: State) -> None:
        """Something of this state is under way."""
        with self._lock:
            self._clock.begin(state)
            self._pending.change(self._unix_s(), self._clock.state)

    def end(self, state: State) -> None:
        """One of them has ended."""
        with self._lock:
            self._clock.end(state)
            self._pending.change(self._unix_s(), self._clock.state)

    def add_span(self, name: str, facts: Facts, start_s: float) -> None:
        """A span that began at ``start_s`` by ``time.perf_counter`` and ends now."""
        now_s = time.perf_counter()
        span = Ended(at_s=self._zero_s + start_s, took_s=now_s - start_s, name=name, facts=facts)
        with self._lock:
            self._pending.add(span)

    def close(self) -> None:
        """Write what there is and end the trace."""
        self._is_closed.set()
        self._writer.join()
        self._file.close()

    def _unix_s(self) -> float:
        return self._zero_s + time.perf_counter()

    def _serve(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_closed.wait(WRITE_EVERY_S)
            if self._file.num_kept_bytes > MAX_KEPT_BYTES:
                # Lines stay pending, and are counted once there are too many.
                lines = []
            else:
                with self._lock:
                    now_s = self._unix_s()
                    is_silent = is_last or now_s - self._written_s >= ALIVE_EVERY_S
                    lines = self._pending.take(now_s, says_lived=is_silent)
            if not (lines or self._file.num_kept_bytes):
                continue
            try:
                self._write(b"".join(map(encode, lines)))
            except OSError as error:
                say_on_stderr(f"this process's trace ends here: {error}")
                return
            self._written_s = now_s

    def _write(self, data: bytes) -> None:
        """Write; what a disk refuses for a while is kept.

        Raises:
            OSError: it refuses for good.
        """
        try:
            self._file.write(data)
        except OSError as error:
            if not is_refusal(error):
                raise


_traces: list[ProcTrace] = []
"""The trace of this process, if it has one."""


def open_trace(folder: Path, proc: str, *, idle: State) -> None:
    """Begin this process's trace in the folder of the run's logs; ``idle`` is its state with nothing to do.

    Where the file cannot be made, the log says so, and there is no trace.
    """
    close_trace()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # With the time: a resumed run's process may have the number of an earlier one.
        name = f"{proc}-{os.getpid()}-{time.time():.0f}{SUFFIX}"
        _traces.append(ProcTrace(folder / name, proc, idle=idle))
    except OSError as error:
        say_on_stderr(f"{proc} has no trace: {error}")


def close_trace() -> None:
    """End this process's trace, if it has one."""
    while _traces:
        _traces.pop().close()


# Processes that end in order write their last second.
atexit.register(close_trace)


def started() -> None:
    """This process can do what it is for."""
    for trace in _traces:
        trace.end(State.STARTING)


def doing(state: State) -> AbstractContextManager[object]:
    """Something of this state is under way during the block."""
    return _Doing(_traces[0], state) if _traces else nullcontext()


def span(name: str, facts: Facts | None = None) -> AbstractContextManager[object]:
    """The block is a span of the trace; spans may overlap."""
    return _Span(_traces[0], name, {} if facts is None else facts) if _traces else nullcontext()


class _Doing:
    __slots__ = ("_state", "_trace")

    def __init__(self, trace: ProcTrace, state: State) -> None:
        self._trace, self._state = trace, state

    def __enter__(self) -> None:
        self._trace.begin(self._state)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._trace.end(self._state)


class _Span:
    __slots__ = ("_facts", "_name", "_start_s", "_trace")

    def __init__(self, trace: ProcTrace, name: str, facts: Facts) -> None:
        self._trace, self._name, self._facts = trace, name, facts

    def __enter__(self) -> None:
        self._start_s = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._trace.add_span(self._name, self._facts, self._start_s)
