"""A process's time as its trace tells it: states one after the other, and spans."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forgeasync.tracing.states import ORDER, State
from forgeasync.tracing.trace_lines import Changed, Ended, Facts, Lived, Opened, UnknownTrace, decode

NOT_THERE = len(ORDER)
"""Stands for no state where a process had not begun, or had ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that a process did, in seconds since 1970."""

    begin_s: float
    took_s: float
    name: str
    facts: Facts


class Lane:
    """One process. Lines are added in the order of its file."""

    def __init__(self) -> None:
        self.opened: Opened | None = None
        """Whose trace it is; None until the first line was read."""
        self.end_s = 0.0
        """When the process is last known to have lived."""
        self.spans: list[Span] = []
        self.num_lost = 0
        """Lines that the process could not write."""
        self.num_damaged = 0
        self.first_damage: str | None = None
        self._begins = array("d")
        self._states = bytearray()

    def add(self, line: bytes) -> None:
        """Take in a line without its newline; one that is none of a trace is counted."""
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
            case Ended():
                self.spans.append(
                    Span(begin_s=read.at_s, took_s=read.took_s, name=read.name, facts=read.facts)
                )
                self.end_s = max(self.end_s, read.at_s + read.took_s)
            case Lived():
                self.num_lost += read.num_lost
                self.end_s = max(self.end_s, read.at_s)

    def _damaged(self, problem: str) -> None:
        self.num_damaged += 1
        if self.first_damage is None:
            self.first_damage = problem

    def _change(self, at_s: float, state: State) -> None:
        # Spans carry their beginnings, changes never go back.
        self._begins.append(max(at_s, self._begins[-1]) if self._begins else at_s)
        self._states.append(ORDER.index(state))
        self.end_s = max(self.end_s, at_s)

    @property
    def begin_s(self) -> float:
        """When its trace begins."""
        assert self.opened is not None, "a lane without a line"
        return self.opened.at_s

    @property
    def state(self) -> State:
        """The newest state."""
        return ORDER[self._states[-1]]

    def stretches(self) -> Iterator[tuple[State, float, float]]:
        """Yield every state with its beginning and its end, in seconds since 1970."""
        ends = [*self._begins[1:], self.end_s]
        for place, begin_s, end_s in zip(self._states, self._begins, ends, strict=True):
            yield ORDER[place], begin_s, end_s

    def seconds_N(self, edges_N: np.ndarray) -> np.ndarray:
        """Return [states, N - 1]: how long it was in each of ``ORDER`` between edges, in seconds."""
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
    """Return the processes of each proc, such as ``generator-0``, which follow each other; by name."""
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
    """Return [N - 1]: the state, by its place in ``ORDER``, that takes most of the time between two edges.

    ``NOT_THERE`` where none of the processes was there for most of it. ``lanes`` follow each other.
    """
    seconds = sum((lane.seconds_N(edges_N) for lane in lanes), np.zeros((len(ORDER), len(edges_N) - 1)))
    absent = np.diff(edges_N) - seconds.sum(axis=0)
    return np.vstack([seconds, absent]).argmax(axis=0)


def shares(lanes: Sequence[Lane], begin_s: float, end_s: float) -> Mapping[State, float]:
    """Return the share of each state in the time that the processes were there; empty if they were not."""
    seconds = sum((lane.seconds_N(np.array([begin_s, end_s]))[:, 0] for lane in lanes), np.zeros(len(ORDER)))
    total = float(seconds.sum())
    if total <= 0.0:
        return {}
    return {state: float(seconds[place]) / total for place, state in enumerate(ORDER)}
