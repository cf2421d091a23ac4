"""Traces of a run's processes: the state of each process over time, and spans.

Each process has one trace, a file beside its log. ``open_trace`` begins it. ``doing`` and ``span`` may be
used anywhere in any thread; without a trace, as in tests, they do nothing. A separate thread writes the file,
so a slow or full disk delays nothing.

The first line of the file identifies the process. It is followed by changes of state, spans that have ended,
and signs of life while nothing else happens. Times are seconds since 1970. They start from the host's clock
when the trace begins, and advance by a monotonic clock. Clocks of different hosts can differ.

``Lane`` reads a trace. Shape suffix: N edges between which time is measured.
"""

import atexit
import os
import socket
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

import msgspec
import numpy as np

from forgeasync.files import AppendedFile, is_refusal
from forgeasync.observability.run_log import say_on_stderr

SUFFIX = ".trace.jsonl"
"""End of the names of trace files."""

FORMAT = 1
"""Version of the file format. Increase it whenever older readers would misread a file."""

SHORTEST_S = 0.001
"""Duration in seconds below which a state is merged into the next one.

Otherwise a busy loop would write a line for every call.
"""

WRITE_EVERY_S = 1.0

ALIVE_EVERY_S = 5.0
"""Seconds without a line after which a sign of life is written.

The trace of a killed process ends with its last line, so it is complete up to this time.
"""

MAX_PENDING = 20_000
"""Maximum number of spans in memory, and of changes of state. Further ones are only counted."""

MAX_KEPT_BYTES = 4 << 20
"""Maximum number of bytes kept while the disk is full or fails. Beyond it, lines stay pending."""


# --- states ---


class State(StrEnum):
    """State of a process at a moment.

    If activities of several states are in flight, the first one in this order is the state of the process.
    """

    STARTING = "starting"
    """The process loads libraries, a model or an environment."""
    SWAPPING = "swapping"
    """Decoding is paused for new weights."""
    COMPUTING = "computing"
    """The process samples, scores, runs episodes or makes an optimizer step, including waits for ranks."""
    EVALUATING = "evaluating"
    """The process samples only for an evaluation. In the controller: training waits for an evaluation."""
    PUBLISHING = "publishing"
    """The process checks, copies and checksums weights for the generators."""
    FETCHING = "fetching"
    """The process reads weights or arrays of rollouts, and does nothing else."""
    WAITING_FOR_BATCH = "waiting for a batch"
    """The process has nothing to train on, to score or to run."""
    WAITING_FOR_ROOM = "waiting for room"
    """The process has nothing to sample, because the buffer lets no further group start."""


ORDER = tuple(State)
"""All states, in order of precedence. Arrays refer to states by their index here."""

NOT_THERE = len(ORDER)
"""Index for no state: the process had not begun, or had ended."""


class StateClock:
    """Counts the activities in flight by state, and derives the state of the process. Pure."""

    def __init__(self, idle: State) -> None:
        """``idle`` is the state while nothing is in flight."""
        self._idle = idle
        self._num_in_flight: Counter[State] = Counter()

    @property
    def state(self) -> State:
        """State that the process is in; the first in ``ORDER`` if several apply."""
        return next((state for state in ORDER if self._num_in_flight[state]), self._idle)

    def begin(self, state: State) -> None:
        """Record that an activity of this state begins."""
        self._num_in_flight[state] += 1

    def end(self, state: State) -> None:
        """Record that an activity of this state has ended."""
        assert self._num_in_flight[state] > 0, f"{state} was not begun"
        self._num_in_flight[state] -= 1


# --- lines of a file ---

Facts = Mapping[str, int | str]
"""Details of a span by name, such as a version or a group."""


class UnknownTrace(ValueError):
    """The line is not one of a trace of this version."""


class Opened(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    rename={"at_s": "at"},
    tag_field="trace",
    tag=FORMAT,
):
    """First line of a trace, which identifies the process."""

    at_s: float
    proc: str
    """Role and number of the process, such as ``generator-0``."""
    pid: int = 0
    host: str = ""
    state: State


class Changed(msgspec.Struct, frozen=True, kw_only=True, rename={"at_s": "at"}):
    """The state of the process changed at ``at_s``."""

    at_s: float
    state: State


class Span(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    rename={"begin_s": "at", "name": "span", "took_s": "s"},
):
    """Named interval of a process's activity, such as a call."""

    begin_s: float
    name: str
    took_s: float = 0.0
    facts: Facts = msgspec.field(default_factory=dict)


class Alive(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    rename={"at_s": "at", "num_lost": "lost"},
):
    """Sign of life. ``num_lost`` counts the lines left out since the last such line."""

    at_s: float
    num_lost: int = 0


Line = Opened | Changed | Span | Alive
"""A line of a trace file."""

_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(dict[str, object])


def encode(line: Line) -> bytes:
    """Return the line with its newline."""
    return _ENCODER.encode(line) + b"\n"


def decode(data: bytes) -> Line:
    """Decode a line without its newline.

    Raises:
        UnknownTrace: This is not a line of a trace, or the first line of a trace of another version.
    """
    try:
        found = _DECODER.decode(data)
        if "trace" in found:
            if found["trace"] != FORMAT:
                raise UnknownTrace(f"a trace of format {found['trace']}; this version reads {FORMAT}")
            return msgspec.convert(found, Opened)
        if "state" in found:
            return msgspec.convert(found, Changed)
        return msgspec.convert(found, Span) if "span" in found else msgspec.convert(found, Alive)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UnknownTrace(f"no line of a trace: {error}") from None


class Pending:
    """Lines that are not written yet, with changes of state in quick succession merged. Pure."""

    def __init__(self, state: State, *, max_lines: int) -> None:
        """``state`` is the last one in the file. ``max_lines`` limits spans, and changes of state."""
        self._written = state
        self._changes: list[Changed] = []
        self._spans: list[Span] = []
        self._max_lines = max_lines
        self._num_lost = 0
        self._unsaid: State | None = None
        """Newest state, if there were too many changes since the last ``take``; None otherwise."""

    def change(self, at_s: float, state: State) -> None:
        """Add a change of state."""
        changes = self._changes
        if changes and at_s - changes[-1].at_s < SHORTEST_S:
            at_s = changes.pop().at_s
        if len(changes) >= self._max_lines:
            self._unsaid = state
            self._num_lost += 1
        elif state is not (changes[-1].state if changes else self._written):
            changes.append(Changed(at_s=at_s, state=state))

    def add(self, span: Span) -> None:
        """Add a span, or count it as lost if too many are pending."""
        if len(self._spans) < self._max_lines:
            self._spans.append(span)
        else:
            self._num_lost += 1

    def take(self, at_s: float, *, says_lived: bool) -> list[Line]:
        """Return the lines to write now, and forget them.

        With ``says_lived``, there is at least a sign of life.
        """
        lines: list[Line] = [*self._changes, *self._spans]
        if self._changes:
            self._written = self._changes[-1].state
        if self._unsaid is not None:
            lines.append(Changed(at_s=at_s, state=self._unsaid))
            self._written, self._unsaid = self._unsaid, None
        self._changes, self._spans = [], []
        if self._num_lost or (says_lived and not lines):
            lines.append(Alive(at_s=at_s, num_lost=self._num_lost))
            self._num_lost = 0
        return lines


# --- writing the trace of this process ---


class _ProcessTrace:
    """Trace of this process, with its writer thread. Thread-safe."""

    def __init__(self, path: Path, proc: str, *, idle: State) -> None:
        """Begin the trace in the state STARTING, which ``started`` ends.

        Raises:
            OSError: The file cannot be created.
        """
        self._zero_s = time.time() - time.perf_counter()
        self._lock = threading.Lock()
        self._clock = StateClock(idle)
        self._clock.begin(State.STARTING)
        self._pending = Pending(State.STARTING, max_lines=MAX_PENDING)
        self._file = AppendedFile.open(path)
        self._is_closed = threading.Event()
        self._written_s = self._now_s()
        self._write(
            Opened(
                at_s=self._written_s,
                proc=proc,
                pid=os.getpid(),
                host=socket.gethostname(),
                state=State.STARTING,
            )
        )
        self._writer = threading.Thread(target=self._serve, name="trace", daemon=True)
        self._writer.start()

    def begin(self, state: State) -> None:
        """Record that an activity of this state begins."""
        with self._lock:
            self._clock.begin(state)
            self._pending.change(self._now_s(), self._clock.state)

    def end(self, state: State) -> None:
        """Record that an activity of this state has ended."""
        with self._lock:
            self._clock.end(state)
            self._pending.change(self._now_s(), self._clock.state)

    def add_span(self, name: str, facts: Facts, start_s: float) -> None:
        """Add a span that began at ``start_s`` of ``time.perf_counter`` and ends now."""
        took_s = round(time.perf_counter() - start_s, 6)
        span = Span(begin_s=round(self._zero_s + start_s, 6), took_s=took_s, name=name, facts=dict(facts))
        with self._lock:
            self._pending.add(span)

    def close(self) -> None:
        """Write the pending lines and end the trace."""
        self._is_closed.set()
        self._writer.join()
        self._file.close()

    def _now_s(self) -> float:
        return round(self._zero_s + time.perf_counter(), 6)

    def _serve(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_closed.wait(WRITE_EVERY_S)
            if self._file.num_kept_bytes > MAX_KEPT_BYTES:
                # Lines stay pending. When there are too many, further ones are only counted.
                lines = []
            else:
                with self._lock:
                    now_s = self._now_s()
                    is_silent = is_last or now_s - self._written_s >= ALIVE_EVERY_S
                    lines = self._pending.take(now_s, says_lived=is_silent)
            if not (lines or self._file.num_kept_bytes):
                continue
            try:
                self._write(*lines)
            except OSError as error:
                say_on_stderr(f"this process's trace ends here: {error}")
                return
            self._written_s = now_s

    def _write(self, *lines: Line) -> None:
        """Write lines. While the disk is full or fails, they are kept for the next call.

        Raises:
            OSError: The file cannot be written, for a reason that a retry cannot remove.
        """
        try:
            self._file.write(b"".join(map(encode, lines)))
        except OSError as error:
            if not is_refusal(error):
                raise


_trace: _ProcessTrace | None = None
"""Trace of this process, if it has one."""


def open_trace(folder: Path, proc: str, *, idle: State) -> None:
    """Begin this process's trace in the folder of the run's logs, and end an earlier one.

    If the file cannot be created, prints a line to stderr, and there is no trace.

    Args:
        folder: Folder of the run's logs.
        proc: Role and number of the process, such as ``generator-0``.
        idle: State of the process while no activity is in flight.
    """
    global _trace
    close_trace()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The time makes the name unique, because a resumed run's process may have the pid of an earlier one.
        name = f"{proc}-{os.getpid()}-{time.time():.0f}{SUFFIX}"
        _trace = _ProcessTrace(folder / name, proc, idle=idle)
    except OSError as error:
        say_on_stderr(f"{proc} has no trace: {error}")


def close_trace() -> None:
    """End this process's trace, if it has one."""
    global _trace
    trace, _trace = _trace, None
    if trace is not None:
        trace.close()


# Processes that exit normally write the lines of their last second.
atexit.register(close_trace)


def started() -> None:
    """Record that this process has finished starting."""
    if _trace is not None:
        _trace.end(State.STARTING)


@contextmanager
def doing(state: State) -> Iterator[None]:
    """Record an activity of this state during the block."""
    trace = _trace
    if trace is None:
        yield
        return
    trace.begin(state)
    try:
        yield
    finally:
        trace.end(state)


@contextmanager
def span(name: str, facts: Facts | None = None) -> Iterator[None]:
    """Record the block as a span of the trace. Spans may overlap."""
    trace, start_s = _trace, time.perf_counter()
    try:
        yield
    finally:
        if trace is not None:
            trace.add_span(name, facts or {}, start_s)


# --- reading traces ---


class Lane:
    """Reader of one process's trace. Add lines in the order of the file."""

    def __init__(self) -> None:
        self.opened: Opened | None = None
        """First line of the trace; None until it was read."""
        self.end_s = 0.0
        """Time at which the process is last known to have lived, in seconds since 1970."""
        self.spans: list[Span] = []
        self.num_lost = 0
        """Number of lines that the process left out."""
        self.num_damaged = 0
        self.first_damage: str | None = None
        self._begins = array("d")
        self._states = bytearray()

    def add(self, line: bytes) -> None:
        """Add a line without its newline. Invalid lines are counted."""
        try:
            read = decode(line)
        except UnknownTrace as problem:
            self._damaged(str(problem))
            return
        match read:
            case Opened():
                self.opened = read
                self._change(read.at_s, read.state)
            case _ if self.opened is None:
                self._damaged("the first line does not say whose trace it is")
                return
            case Changed():
                self._change(read.at_s, read.state)
            case Span():
                self.spans.append(read)
                self.end_s = max(self.end_s, read.begin_s + read.took_s)
            case Alive():
                self.num_lost += read.num_lost
                self.end_s = max(self.end_s, read.at_s)

    def _damaged(self, problem: str) -> None:
        self.num_damaged += 1
        if self.first_damage is None:
            self.first_damage = problem

    def _change(self, at_s: float, state: State) -> None:
        # np.interp needs times of changes that never decrease.
        self._begins.append(max(at_s, self._begins[-1]) if self._begins else at_s)
        self._states.append(ORDER.index(state))
        self.end_s = max(self.end_s, at_s)

    @property
    def begin_s(self) -> float:
        """Time at which the trace begins, in seconds since 1970."""
        assert self.opened is not None, "a lane without a line"
        return self.opened.at_s

    @property
    def state(self) -> State:
        """Newest state."""
        return ORDER[self._states[-1]]

    def stretches(self) -> Iterator[tuple[State, float, float]]:
        """Yield each state in turn with its begin and end, in seconds since 1970."""
        ends = [*self._begins[1:], self.end_s]
        for place, begin_s, end_s in zip(self._states, self._begins, ends, strict=True):
            yield ORDER[place], begin_s, end_s

    def seconds_N(self, edges_N: np.ndarray) -> np.ndarray:
        """Return the seconds in each state of ``ORDER`` between successive edges, [states, N - 1]."""
        begins = np.array(self._begins)
        ends = np.append(begins[1:], max(self.end_s, begins[-1]))
        states = np.frombuffer(bytes(self._states), dtype=np.uint8)
        found = np.empty((len(ORDER), len(edges_N) - 1))
        knots = np.append(begins, ends[-1])
        for number in range(len(ORDER)):
            passed = np.concatenate([[0.0], np.cumsum(np.where(states == number, ends - begins, 0.0))])
            found[number] = np.diff(np.interp(edges_N, knots, passed))
        return found


def named_lanes(lanes: Sequence[Lane]) -> dict[str, list[Lane]]:
    """Return the lanes by process name, such as ``generator-0``, each list in the order of their begins.

    Names are sorted by role and number.
    """
    found: dict[str, list[Lane]] = {}
    for lane in sorted((one for one in lanes if one.opened is not None), key=lambda one: one.begin_s):
        assert lane.opened is not None
        found.setdefault(lane.opened.proc, []).append(lane)
    return dict(sorted(found.items(), key=lambda item: _place(item[0])))


_ROLES = ("controller", "trainer", "generator", "teacher", "scorer", "environment", "buffer")


def _place(name: str) -> tuple[int, str, int, str]:
    role, _, number = name.rpartition("-")
    known = next((place for place, one in enumerate(_ROLES) if name.startswith(one)), len(_ROLES))
    return (known, role, int(number), "") if number.isdecimal() else (known, name, 0, name)


def states_between(lanes: Sequence[Lane], edges_N: np.ndarray) -> np.ndarray:
    """Return the index in ``ORDER`` of the longest state between successive edges, [N - 1].

    It is ``NOT_THERE`` if no process existed for longer than each state lasted. ``lanes`` are successive
    processes of one name, which do not overlap.
    """
    seconds = sum((lane.seconds_N(edges_N) for lane in lanes), np.zeros((len(ORDER), len(edges_N) - 1)))
    absent = np.diff(edges_N) - seconds.sum(axis=0)
    return np.vstack([seconds, absent]).argmax(axis=0)


def shares(lanes: Sequence[Lane], begin_s: float, end_s: float) -> Mapping[State, float]:
    """Return the share of each state in the time in which the processes existed; empty if they did not."""
    seconds = sum((lane.seconds_N(np.array([begin_s, end_s]))[:, 0] for lane in lanes), np.zeros(len(ORDER)))
    total = float(seconds.sum())
    if total <= 0.0:
        return {}
    return {state: float(seconds[place]) / total for place, state in enumerate(ORDER)}
