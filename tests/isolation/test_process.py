"""Processes that answer requests: what ends them, and that only what is over its limit is killed."""

import gc
import os
import sys
import time
from pathlib import Path

import pytest

from forgeasync.isolation import ContainedProcess, ProcessExited
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


def test_a_request_that_is_larger_than_the_pipe_arrives_or_is_late() -> None:
    request = {"text": "x" * 2**20}
    process = started("for line in requests:\n    write_line(replies, {'size': len(line)})")
    assert process.ask(request, limit_s=300.0) == {"size": 2**20 + 13}
    with pytest.raises(ProcessExited) as gone:
        started("time.sleep(600)").ask(request, limit_s=0.5)
    assert gone.value.is_late and gone.value.exit_code == -9


def test_a_reply_that_came_is_followed_by_no_kill() -> None:
    """Replies come all around their limits; whoever was killed was killed within its request."""
    process, num_late = ContainedProcess(["cat"], env=os.environ), 0
    for number in range(300):
        try:
            assert process.ask({"number": number}, limit_s=number % 10 * 0.0001) == {"number": number}
        except ProcessExited as gone:
            assert gone.is_late
            process, num_late = ContainedProcess(["cat"], env=os.environ), num_late + 1
    process.stop()
    assert 0 < num_late < 300
