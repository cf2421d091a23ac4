"""Stacks that are read from outside: of stopped processes, of no Python, of other users' ones."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.faults import MAX_CHARACTERS, MAX_THREADS, Frame, Thread, describe, read_stacks
from tests.support.other_user import run_as_nobody, why_not
from tests.support.standing_still import CALL, standing_still


def test_a_stopped_process_shows_what_all_its_threads_are_doing() -> None:
    process = standing_still()
    try:
        os.kill(process.pid, signal.SIGSTOP)
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        stopped, main, helper = read_stacks(process.pid).split("; ")
        assert stopped == "it was stopped by a signal"
        assert main.startswith(f"MainThread in {CALL} (<string>:")
        assert main.endswith(" < <module> (<string>:12)")
        assert helper.startswith("helper in helps (<string>:5) < Thread.run (threading.py:")
        assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "it was only looked at"
    finally:
        process.kill()
        process.wait()


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
def test_that_the_kernel_refuses_it_is_said() -> None:
    process = standing_still()
    try:
        said = run_as_nobody("tests.support.standing_still", str(process.pid))
        assert said.startswith("its stack is not known: this user may not read its memory")
    finally:
        process.kill()
        process.wait()


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
