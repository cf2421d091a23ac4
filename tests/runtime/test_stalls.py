"""When a run has stalled, by random histories; what its tasks and threads wait for."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.runtime import (
    Frame,
    Progress,
    Resumed,
    Stall,
    StallPolicy,
    Thread,
    awaited_calls,
    describe,
    read_stacks,
)
from forgeasync.waiting import Monitor, happens_within
from tests.support.other_user import run_as_nobody, why_not
from tests.support.processes import wait_until
from tests.support.standing_still import CALL, standing_still

# As docs/failures.md says.
ALL_FACTOR, ALL_FLOOR_S = 5.0, 60.0
STEP_FACTOR, STEP_FLOOR_S = 10.0, 180.0
NUM_STEPS, FIRST_FLOOR_S = 3, 300.0

MAX_CALLS, MAX_THREADS, MAX_CHARACTERS = 8, 4, 1500


class Run:
    """A run that is looked at once a second."""

    def __init__(self) -> None:
        self.policy = StallPolicy()
        self._marks = dict.fromkeys(Progress, 0)
        assert self.policy.look(0.0, self._marks) is None

    def moves(self, *kinds: Progress) -> Stall | Resumed | None:
        for kind in kinds:
            self._marks[kind] += 1
        return self.policy.look(1.0, self._marks)

    def quiet(self, seconds: int) -> list[Stall | Resumed]:
        """What was found in so many looks without progress."""
        looks = (self.policy.look(1.0, self._marks) for _ in range(seconds))
        return [found for found in looks if found is not None]

    def steps(self, num: int, every_s: int) -> None:
        for _ in range(num):
            assert self.quiet(every_s - 1) == []
            assert self.moves(*Progress) is None


OTHERS = st.sampled_from([Progress.TOKENS, Progress.SCORES, Progress.WEIGHTS])


@given(st.lists(st.tuples(st.integers(0, int(ALL_FLOOR_S) - 2), st.booleans(), OTHERS), max_size=40))
def test_no_run_whose_quiet_times_are_below_the_floors_is_said_to_stand_still(
    moves: list[tuple[int, bool, Progress]],
) -> None:
    run, since_step_s = Run(), 0
    for quiet_s, is_step, other in moves:
        since_step_s += quiet_s + 1
        is_step = is_step or since_step_s > STEP_FLOOR_S - ALL_FLOOR_S
        assert run.quiet(quiet_s) == []
        assert run.moves(other, *([Progress.STEP] if is_step else [])) is None
        since_step_s = 0 if is_step else since_step_s
    assert run.policy.num_found == 0


@given(st.integers(1, 50), st.integers(0, 10))
def test_a_silence_is_told_once_and_when_it_is_far_longer_than_all_before(step_s: int, num_more: int) -> None:
    run = Run()
    run.steps(NUM_STEPS + 1 + num_more, step_s)
    limit_s = int(max(ALL_FLOOR_S, ALL_FACTOR * step_s))
    assert run.quiet(limit_s) == []
    (stall,) = run.quiet(1)
    assert isinstance(stall, Stall) and stall.is_whole and stall.longest_s == step_s
    assert set(stall.since_s.values()) == {stall.quiet_s} == {limit_s + 1.0}
    assert run.quiet(5 * limit_s) == [], "once"
    resumed = run.moves(Progress.TOKENS)
    assert isinstance(resumed, Resumed) and resumed.quiet_s == 6 * limit_s + 2
    run.moves(Progress.STEP)
    assert run.quiet(2 * limit_s) == [], "so long a silence is known by now"
    assert run.policy.num_found == 1


def test_steps_that_do_not_come_are_told_while_all_else_moves() -> None:
    run = Run()
    run.steps(NUM_STEPS + 5, 30)
    found = [run.moves(Progress.TOKENS, Progress.SCORES) for _ in range(1000)]
    (stall,) = [one for one in found if one is not None]
    assert isinstance(stall, Stall) and not stall.is_whole and stall.longest_s == 30
    assert stall.quiet_s == STEP_FACTOR * 30 + 1 and stall.since_s[Progress.TOKENS] == 0
    assert run.moves(Progress.TOKENS) is None, "tokens are no step"
    assert isinstance(run.moves(Progress.STEP), Resumed)


def test_the_first_steps_may_take_long_and_say_nothing_of_those_to_come() -> None:
    run = Run()
    assert run.quiet(int(FIRST_FLOOR_S) - 2) == []
    run.steps(NUM_STEPS, 2)
    run.steps(1, 2)
    assert run.quiet(int(ALL_FLOOR_S)) == [] and len(run.quiet(1)) == 1, "as if nothing had been slow"
    late = Run()
    assert len(late.quiet(int(FIRST_FLOOR_S) + 1)) == 1, "a run that never begins is told of too"


def test_time_in_which_a_fault_is_seen_to_does_not_count() -> None:
    run = Run()
    run.steps(NUM_STEPS + 1, 2)
    for _ in range(10):
        assert run.quiet(int(ALL_FLOOR_S) - 1) == []
        run.policy.rest()
    assert run.policy.num_found == 0


@asynccontextmanager
async def tasks_of(*coroutines: Coroutine[Any, Any, object]) -> "AsyncIterator[list[asyncio.Task[object]]]":
    """Tasks that wait within the body."""
    tasks = [asyncio.create_task(one) for one in coroutines]
    await asyncio.sleep(0)
    yield tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_call_is_named_with_its_line_and_with_how_many_wait_for_it() -> None:
    room: Monitor[list[int]] = Monitor([])
    calls = [room.until(lambda state: None) for _ in range(3)]
    # Tasks that sleep and code of others are left out.
    others = (happens_within(60, asyncio.sleep(60)), asyncio.Event().wait())
    async with tasks_of(*calls, happens_within(60, asyncio.Event().wait()), *others) as tasks:
        words = awaited_calls(tasks)
    assert awaited_calls(tasks) == "", "those that have ended wait for nothing"
    monitor, within = words.split("; ")
    assert monitor.startswith("Monitor.until (forgeasync/waiting.py:")
    assert monitor.endswith(": await changed) (3 of these)")
    assert within.startswith("happens_within (forgeasync/waiting.py:") and within.endswith(": await event)")


@pytest.fixture
def process() -> "Iterator[subprocess.Popen[bytes]]":
    """One that stands still."""
    process = standing_still()
    yield process
    process.kill()
    process.wait()


def test_a_stopped_process_shows_what_all_its_threads_are_doing(process: "subprocess.Popen[bytes]") -> None:
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    stopped, main, helper = read_stacks(process.pid).split("; ")
    assert stopped == "it was stopped by a signal"
    assert main.startswith(f"MainThread in {CALL} (<string>:")
    assert main.endswith(" < <module> (<string>:12)")
    assert helper.startswith("helper in helps (<string>:5) < Thread.run (threading.py:")
    assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "it was only looked at"


def test_what_keeps_a_stack_from_being_read_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "1000"])
    try:
        assert read_stacks(process.pid).startswith(
            "its stack is not known: py-spy says 'Error: Failed to find"
        )
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        assert read_stacks(process.pid) == f"its stack is not known: {tmp_path}/py-spy is not there (py-spy)"
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_that_the_kernel_refuses_it_is_said(process: "subprocess.Popen[bytes]") -> None:
    said = run_as_nobody("tests.support.standing_still", str(process.pid))
    assert said.startswith("its stack is not known: this user may not read its memory")


FRAMES = st.builds(
    Frame,
    name=st.text(max_size=300),
    filename=st.sampled_from(["/x/forgeasync/a.py", "/usr/lib/python3.11/threading.py"]),
    short_filename=st.none() | st.sampled_from(["threading.py", "forgeasync/a.py"]),
    line=st.integers(0, 10**6),
)
THREADS = st.builds(
    Thread,
    frames=st.lists(FRAMES, max_size=20).map(tuple),
    os_thread_id=st.none() | st.integers(1, 10**6),
    thread_name=st.none() | st.text(max_size=50),
    owns_gil=st.booleans(),
)


@given(st.lists(THREADS, max_size=12))
def test_words_have_a_bound_and_name_the_thread_that_computes_first(threads: list[Thread]) -> None:
    words = describe(threads)
    assert 0 < len(words) <= MAX_CHARACTERS
    busy = [one for one in threads if one.owns_gil]
    if len(busy) == 1 and busy[0].frames:
        name = busy[0].thread_name or f"thread {busy[0].os_thread_id}"
        assert words.startswith(f"{name} in ")


def test_the_runs_own_code_comes_before_libraries_that_wait() -> None:
    def thread(name: str, *files: str) -> Thread:
        frames = tuple(Frame(name="f", filename=f"/x/{one}", short_filename=one, line=1) for one in files)
        return Thread(frames=frames, thread_name=name)

    threads = [
        thread("waits", "threading.py"),
        thread("library", "torch/x.py"),
        thread("own", "torch/x.py", "forgeasync/trainer/step.py"),
        *(thread("pool", "concurrent/futures/thread.py") for _ in range(4)),
    ]
    own, library, waits, pool, *more = describe(threads).split("; ")
    assert (own.split()[0], library.split()[0]) == ("own", "library")
    assert (waits, pool) == ("waits waits for something to do", "pool waits for something to do (4 of these)")
    assert more == []
    many = [thread(f"computes{number}", "torch/x.py") for number in range(MAX_THREADS + 3)]
    assert describe([*threads, *many]).endswith("; and 10 more threads")
