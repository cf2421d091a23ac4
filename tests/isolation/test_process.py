"""Processes that answer requests: what ends them, and that only what is over its limit is killed."""

import gc
import os
import queue
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forgeasync.isolation import ContainedProcess, KillMonitor, ProcessExited
from forgeasync.processes import is_running


def started(code: str, scratch: Path | None = None) -> ContainedProcess:
    """A Python that runs code, to which ``replies`` and ``requests`` are its channel."""
    channel = "import os, subprocess, time\nfrom forgeasync.isolation import open_channel, write_line\n"
    channel += "requests, replies = open_channel()\n"
    folder = None if scratch is None else str(scratch)
    return ContainedProcess([sys.executable, "-c", channel + code], env=os.environ, scratch=folder)


def test_a_process_answers_and_what_it_prints_is_no_reply() -> None:
    code = "for line in requests:\n    print('noise')\n    write_line(replies, {'got': line.decode()})"
    process = started(code)
    for number in range(2):
        assert process.ask({"number": number}, limit_s=300.0) == {"got": f'{{"number": {number}}}\n'}
    process.stop()
    assert not is_running(process.pid)


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("replies.close(); time.sleep(0.2); os._exit(3)", 3),
        ("replies.write(b'{'); replies.flush(); os._exit(4)", 4),
        ("replies.write(b'x' * 100_000); replies.flush(); requests.read()", -9),
    ],
    ids=["ends", "ends within its reply", "says too much"],
)
def test_a_process_without_a_reply_is_gone_with_its_exit_code(code: str, exit_code: int) -> None:
    process = started(code)
    with pytest.raises(ProcessExited) as gone:
        process.ask({}, limit_s=300.0)
    assert gone.value.exit_code == exit_code and not gone.value.is_late
    assert not is_running(process.pid)


def test_a_process_over_its_limit_is_killed_with_all_that_it_has_started() -> None:
    code = "write_line(replies, {'pid': subprocess.Popen(['sleep', '600']).pid})\nrequests.read()"
    process = started(code)
    child = process.ask({}, limit_s=300.0)["pid"]
    with pytest.raises(ProcessExited) as gone:
        process.ask({}, limit_s=0.01)
    assert gone.value.is_late and gone.value.exit_code == -9
    while is_running(child):
        time.sleep(0.01)


def test_a_process_that_nobody_holds_is_stopped_and_its_folder_removed(tmp_path: Path) -> None:
    (scratch := tmp_path / "scratch").mkdir()
    process = started("write_line(replies, {})\nrequests.read()", scratch)
    process.ask({}, limit_s=300.0)
    pid = process.pid
    del process
    gc.collect()
    assert not is_running(pid) and not scratch.exists()


def test_only_what_is_over_its_limit_is_killed_and_in_order() -> None:
    watch, killed = KillMonitor(), queue.Queue[str]()
    with watch.limit(3600.0, lambda: killed.put("never")):
        while not watch._wakes_at:
            # The thread does not sleep yet.
            time.sleep(0.001)
        # Both are over before it would wake by itself.
        with watch.limit(0.2, lambda: killed.put("last")), watch.limit(0.05, lambda: killed.put("first")):
            assert [killed.get(), killed.get()] == ["first", "last"]
    assert killed.empty()


def test_nothing_is_killed_after_its_block() -> None:
    """Blocks end all around their deadlines; whoever was killed was killed within the block."""
    watch = KillMonitor()

    def one(number: int) -> bool:
        kills, is_open = list[bool](), True
        with watch.limit(0.002 + number % 5 * 0.0005, lambda: kills.append(is_open)):
            time.sleep(0.002 + number % 7 * 0.0003)
        is_open = False
        time.sleep(0.005)
        assert all(kills) and len(kills) <= 1
        return bool(kills)

    with ThreadPoolExecutor(8) as threads:
        outcomes = list(threads.map(one, range(400)))
    assert any(outcomes)


def test_an_error_of_the_block_comes_out_and_nothing_is_killed() -> None:
    watch, kills, is_open = KillMonitor(), list[bool](), True
    later = threading.Event()
    with pytest.raises(KeyError, match="of the block"), watch.limit(0.05, lambda: kills.append(is_open)):
        raise KeyError("of the block")
    is_open = False
    # After its deadline.
    with watch.limit(0.1, later.set):
        later.wait()
    assert all(kills), "at most by a machine that stood still in the block"


def test_a_kill_that_fails_is_told_and_the_others_are_watched(caplog: pytest.LogCaptureFixture) -> None:
    watch, is_killed = KillMonitor(), threading.Event()

    def fails() -> None:
        raise PermissionError("not ours")

    with watch.limit(0.01, fails), watch.limit(0.1, is_killed.set):
        is_killed.wait()
    assert "cannot be killed" in caplog.text and "not ours" in caplog.text
