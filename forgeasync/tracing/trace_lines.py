"""The lines of a trace file: what one process did, and when.

The first line says whose trace it is. Then come changes of state, spans that have ended, and signs of life
while nothing else happens. Times are seconds since 1970: by the host's clock when the process began, and from
then on by a clock that never jumps. Hosts differ by as much as their clocks do.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from forgeasync.tracing.states import State

FORMAT = 1
"""Raised whenever older readers would misread a file."""

SHORTEST_S = 0.001
"""A state that lasts for less counts as the one after it: a busy loop would write a line for every call."""

Facts = Mapping[str, int | str]
"""What a span is about, such as a version or a group."""


class UnknownTrace(ValueError):
    """A line that no trace of this version has; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The first line."""

    at_s: float
    proc: str
    """Its role and number, such as ``generator-0``."""
    pid: int
    host: str
    state: State


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """The process is in another state from now on."""

    at_s: float
    state: State


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A span that has ended."""

    at_s: float
    """When it began."""
    took_s: float
    name: str
    facts: Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Lived:
    """The process lived at this moment; it had to leave out so many lines since the last such line."""

    at_s: float
    num_lost: int


Line = Opened | Changed | Ended | Lived


class _Wire(msgspec.Struct, omit_defaults=True):
    """One object a line."""

    at: float
    trace: int | None = None
    proc: str | None = None
    pid: int = 0
    host: str = ""
    state: State | None = None
    span: str | None = None
    s: float = 0.0
    facts: dict[str, int | str] = {}
    lost: int = 0


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(_Wire)


def encode(line: Line) -> bytes:
    """Return the line with its newline."""
    at = round(line.at_s, 6)
    match line:
        case Opened():
            wire = _Wire(at=at, trace=FORMAT, proc=line.proc, pid=line.pid, host=line.host, state=line.state)
        case Changed():
            wire = _Wire(at=at, state=line.state)
        case Ended():
            wire = _Wire(at=at, span=line.name, s=round(line.took_s, 6), facts=dict(line.facts))
        case Lived():
            wire = _Wire(at=at, lost=line.num_lost)
    return _ENCODER.encode(wire) + b"\n"


def decode(data: bytes) -> Line:
    """Return what a line without its newline says.

    Raises:
        UnknownTrace: it is no line of a trace, or the first one of a trace of another version.
    """
    try:
        wire = _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UnknownTrace(f"no line of a trace: {error}") from None
    if wire.trace is not None:
        if wire.trace != FORMAT:
            raise UnknownTrace(f"a trace of format {wire.trace}; this version reads {FORMAT}")
        if wire.proc is None or wire.state is None:
            raise UnknownTrace("a first line without proc or state")
        return Opened(at_s=wire.at, proc=wire.proc, pid=wire.pid, host=wire.host, state=wire.state)
    if wire.state is not None:
        return Changed(at_s=wire.at, state=wire.state)
    if wire.span is not None:
        return Ended(at_s=wire.at, took_s=wire.s, name=wire.span, facts=wire.facts)
    return Lived(at_s=wire.at, num_lost=wire.lost)


class Pending:
    """Lines that were not written yet; changes of state that follow too fast are one. Pure."""

    def __init__(self, state: State, *, max_lines: int) -> None:
        """``state`` is the one that the file says so far."""
        self._written = state
        self._changes: list[Changed] = []
        self._spans: list[Ended] = []
        self._max_lines = max_lines
        self._num_lost = 0
        self._unsaid: State | None = None
        """The newest state, if the changes since the last ``take`` were too many."""

    def change(self, at_s: float, state: State) -> None:
        """Note a change of state."""
        changes = self._changes
        if changes and at_s - changes[-1].at_s < SHORTEST_S:
            at_s = changes.pop().at_s
        if len(changes) >= self._max_lines:
            self._unsaid = state
            self._num_lost += 1
        elif state is not (changes[-1].state if changes else self._written):
            changes.append(Changed(at_s=at_s, state=state))

    def add(self, span: Ended) -> None:
        """Note a span; counted instead where too many lines wait for a disk."""
        if len(self._spans) < self._max_lines:
            self._spans.append(span)
        else:
            self._num_lost += 1

    def take(self, at_s: float, *, says_lived: bool) -> list[Line]:
        """Return what is to be written now, and forget it; with ``says_lived`` at least a sign of life."""
        lines: list[Line] = [*self._changes, *self._spans]
        if self._changes:
            self._written = self._changes[-1].state
        if self._unsaid is not None:
            lines.append(Changed(at_s=at_s, state=self._unsaid))
            self._written, self._unsaid = self._unsaid, None
        self._changes, self._spans = [], []
        if self._num_lost or (says_lived and not lines):
            lines.append(Lived(at_s=at_s, num_lost=self._num_lost))
            self._num_lost = 0
        return lines
