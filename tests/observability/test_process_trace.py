"""Traces: states, lines and what is read of them, for any order of events; and those of real processes."""

import errno
import itertools
import math
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.observability import (
    ORDER,
    SHORTEST_S,
    Alive,
    Changed,
    Lane,
    Line,
    Opened,
    Pending,
    Span,
    State,
    StateClock,
    UnknownTrace,
    close_trace,
    decode,
    doing,
    encode,
    named_lanes,
    open_trace,
    process_trace,
    shares,
    span,
    started,
)
from tests.support.disks import Disk, install

# --- states and lines ---


STATES = st.sampled_from(ORDER)
MOMENTS = st.floats(min_value=0.0, max_value=2e9).map(lambda value: round(value, 6))
WORDS = st.text(max_size=20)
FACTS = st.dictionaries(WORDS, WORDS | st.integers(-(1 << 60), 1 << 60), max_size=3)
LINES = st.one_of(
    st.builds(Opened, at_s=MOMENTS, proc=WORDS, pid=st.integers(1, 1 << 30), host=WORDS, state=STATES),
    st.builds(Changed, at_s=MOMENTS, state=STATES),
    st.builds(Span, begin_s=MOMENTS, took_s=MOMENTS, name=WORDS, facts=FACTS),
    st.builds(Alive, at_s=MOMENTS, num_lost=st.integers(0, 1 << 40)),
)


@given(st.lists(st.tuples(STATES, st.booleans()), max_size=60))
def test_the_state_is_the_first_of_all_that_is_in_flight(steps: list[tuple[State, bool]]) -> None:
    clock, in_flight = StateClock(State.WAITING_FOR_ROOM), []
    for state, begins in steps:
        if begins:
            clock.begin(state)
            in_flight.append(state)
        elif state in in_flight:
            clock.end(state)
            in_flight.remove(state)
        assert clock.state is min(in_flight, key=ORDER.index, default=State.WAITING_FOR_ROOM)


@given(LINES)
def test_a_line_says_what_was_written(line: Line) -> None:
    data = encode(line)
    assert data.count(b"\n") == 1 and data.endswith(b"\n")
    assert decode(data[:-1]) == line


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no line"),
        (b"[1]", "no line"),
        (b'{"at": "now"}', "no line"),
        (b'{"at": 1, "state": "asleep"}', "asleep"),
        (b'{"at": 1, "trace": 2, "proc": "x", "state": "starting"}', "format 2; this version reads 1"),
        (b'{"at": 1, "trace": 1, "state": "starting"}', "proc"),
        (b"[" * 100_000, "no line"),
    ],
)
def test_other_lines_are_refused_with_their_reason(data: bytes, words: str) -> None:
    with pytest.raises(UnknownTrace, match=words):
        decode(data)


@given(st.lists(st.tuples(st.floats(0.0, 3 * SHORTEST_S), STATES, st.booleans(), st.booleans()), max_size=80))
def test_only_states_that_are_too_short_are_left_out(events: list[tuple[float, State, bool, bool]]) -> None:
    pending, now_s = Pending(State.STARTING, max_lines=1000), 100.0
    true: list[tuple[float, State]] = [(0.0, State.STARTING)]
    written: list[Line] = []
    num_spans = 0
    for passed_s, state, has_span, is_taken in events:
        now_s += passed_s
        pending.change(now_s, state)
        true.append((now_s, state))
        if has_span:
            pending.add(Span(begin_s=now_s, took_s=0.0, name="x", facts={}))
            num_spans += 1
        if is_taken:
            written += pending.take(now_s, says_lived=False)
    written += pending.take(now_s, says_lived=False)
    changes = [line for line in written if isinstance(line, Changed)]
    assert sum(isinstance(line, Span) for line in written) == num_spans
    assert [line.at_s for line in changes] == sorted(line.at_s for line in changes)
    said = [State.STARTING, *(line.state for line in changes)]
    assert all(one is not other for one, other in itertools.pairwise(said))
    assert said[-1] is true[-1][1], "the newest state is never left out"
    # Wherever a state has lasted for long enough, the lines say it at the end of that time.
    true.append((now_s + 1.0, State.STARTING))
    for (begin_s, state), (end_s, _) in itertools.pairwise(true):
        if end_s - begin_s > 2 * SHORTEST_S:
            moment_s = math.nextafter(end_s, 0.0)
            at_then = [line.state for line in changes if line.at_s <= moment_s]
            assert (at_then or [State.STARTING])[-1] is state


def test_what_is_too_much_is_counted_and_the_newest_state_is_said() -> None:
    pending = Pending(State.STARTING, max_lines=3)
    for number in range(10):
        pending.change(float(number), ORDER[number % 2 + 1])
        pending.add(Span(begin_s=float(number), took_s=0.5, name="x", facts={}))
    *kept, newest, lost = pending.take(20.0, says_lived=False)
    assert [type(line) for line in kept] == [Changed] * 3 + [Span] * 3
    assert newest == Changed(at_s=20.0, state=ORDER[2])
    assert lost == Alive(at_s=20.0, num_lost=7 + 7)
    assert pending.take(21.0, says_lived=True) == [Alive(at_s=21.0, num_lost=0)]


# --- lanes ---


IDLE, BUSY = State.WAITING_FOR_BATCH, State.COMPUTING


def lane_of(*lines: Line, proc: str = "generator-0", begin_s: float = 10.0) -> Lane:
    opened = Opened(at_s=begin_s, proc=proc, pid=7, host="here", state=State.STARTING)
    return lane_from(*(encode(line)[:-1] for line in (opened, *lines)))


def lane_from(*lines: bytes) -> Lane:
    lane = Lane()
    for line in lines:
        lane.add(line)
    return lane


@given(
    st.lists(st.tuples(st.floats(0.001, 5.0), st.sampled_from(ORDER)), min_size=1, max_size=30),
    st.lists(st.floats(0.0, 200.0), min_size=2, max_size=20, unique=True),
)
def test_each_second_lies_in_one_state(changes: list[tuple[float, State]], edges: list[float]) -> None:
    now_s, lines = 10.0, []
    for passed_s, state in changes:
        now_s += passed_s
        lines.append(Changed(at_s=round(now_s, 6), state=state))
    lane = lane_of(*lines)
    seconds = lane.seconds_N(np.array(sorted(edges)))
    lived = np.diff(np.clip(sorted(edges), lane.begin_s, lane.end_s))
    assert seconds.min() >= 0.0
    assert seconds.sum(axis=0) == pytest.approx(lived, abs=1e-6)
    assert sum(end - begin for _, begin, end in lane.stretches()) == pytest.approx(lane.end_s - lane.begin_s)


def test_a_file_without_its_first_line_is_no_lane() -> None:
    headless = lane_from(encode(Changed(at_s=1.0, state=BUSY))[:-1])
    assert headless.opened is None and headless.num_damaged == 1
    assert named_lanes([headless]) == {}


# --- processes ---


def lane_in(folder: Path) -> Lane:
    (file,) = folder.glob("*.trace.jsonl")
    lane = lane_from(*file.read_bytes().splitlines())
    assert lane.num_damaged == 0
    return lane


def test_states_and_spans_reach_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_trace, "SHORTEST_S", 0.0)
    open_trace(tmp_path / "logs", "scorer-0", idle=IDLE)
    started()
    with doing(BUSY), span("score", {"group": 5}), doing(State.FETCHING):
        pass
    with pytest.raises(KeyError), doing(State.SWAPPING), span("fails"):
        raise KeyError
    close_trace()
    lane = lane_in(tmp_path / "logs")
    states = [State.STARTING, IDLE, BUSY, IDLE, State.SWAPPING, IDLE]
    assert [state for state, _, _ in lane.stretches()] == states
    assert [(one.name, dict(one.facts)) for one in lane.spans] == [("score", {"group": 5}), ("fails", {})]
    (computed_s,) = (end - begin for state, begin, end in lane.stretches() if state is BUSY)
    assert computed_s >= lane.spans[0].took_s - 1e-5


def test_threads_share_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_trace, "SHORTEST_S", 0.0)
    open_trace(tmp_path, "scorer-0", idle=IDLE)
    started()

    def work(_: int) -> None:
        for _ in range(200):
            with doing(BUSY), span("x"):
                pass

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    close_trace()
    lane = lane_in(tmp_path)
    assert len(lane.spans) == 800 and lane.num_lost == 0
    assert lane.state is IDLE


def test_without_its_folder_a_process_has_no_trace(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A process without a trace records nothing."""
    (tmp_path / "logs").write_text("a file")
    open_trace(tmp_path / "logs", "buffer-0", idle=IDLE)
    assert "buffer-0 has no trace" in capfd.readouterr().err
    with doing(State.COMPUTING), span("x"):
        started()
    assert [one.name for one in tmp_path.iterdir()] == ["logs"]


def test_what_a_full_disk_refuses_comes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk(Disk):
        def pwrite(self, descriptor: int, data: bytes, position: int) -> int:
            try:
                return super().pwrite(descriptor, data, position)
            finally:
                if position >= self.room:
                    has_refused.set()

    disk, has_refused = FullDisk(room=1 << 20), threading.Event()
    install(monkeypatch, disk)
    monkeypatch.setattr(process_trace, "WRITE_EVERY_S", 0.01)
    open_trace(tmp_path, "buffer-0", idle=IDLE)
    disk.room = 0
    with span("kept"):
        pass
    has_refused.wait()
    assert b"kept" not in next(tmp_path.iterdir()).read_bytes()
    disk.room = 1 << 20
    close_trace()
    assert [one.name for one in lane_in(tmp_path).spans] == ["kept"]


def test_a_disk_that_refuses_for_good_ends_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    disk = Disk(room=1 << 20)
    install(monkeypatch, disk)
    open_trace(tmp_path, "buffer-0", idle=IDLE)
    disk.room, disk.error = 0, errno.EROFS
    with span("x"):
        pass
    close_trace()
    assert "this process's trace ends here" in capfd.readouterr().err


def test_a_killed_process_leaves_what_it_did(tmp_path: Path) -> None:
    program = f"""
import sys, time
from pathlib import Path
from forgeasync.observability import State, doing, open_trace, started
open_trace(Path({str(tmp_path)!r}), "generator-0", idle=State.WAITING_FOR_ROOM)
started()
with doing(State.COMPUTING):
    print("half", flush=True)
    time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"half\n"
    while b"computing" not in next(tmp_path.iterdir()).read_bytes():
        time.sleep(0.01)
    child.kill()
    child.wait()
    child.stdout.close()
    lane = lane_in(tmp_path)
    assert lane.state is State.COMPUTING
    assert shares([lane], lane.begin_s, lane.end_s)
