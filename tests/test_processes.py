"""Functions in processes of their own: fresh every time, and none is left behind."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from forgeasync.processes import is_running
from tests.support.processes import ProcessFailed, call_in_processes, wait_until_gone

pytestmark = pytest.mark.processes

CALLS: list[str] = []
"""What a process has been asked so far."""


def call(num: int, function: Any, *arguments: object) -> list[Any]:
    environments = [os.environ | {"INDEX": str(index)} for index in range(num)]
    return call_in_processes("torchtitan", function, arguments, environments=environments)


def remember(text: str) -> tuple[list[str], str, str]:
    CALLS.append(text)
    os.environ["LEFT"] = text
    return CALLS, os.environ["INDEX"], os.getcwd()


def left(_: str) -> str | None:
    return os.environ.get("LEFT")


def fail_or_wait(folder: Path, how: str) -> None:
    """The second process fails, the first would wait for ever."""
    (folder / os.environ["INDEX"]).write_text(str(os.getpid()))
    if os.environ["INDEX"] == "1":
        while not (folder / "0").exists():
            time.sleep(0.01)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "aborts":
            os.write(2, b"a library's last words\n")
            os.abort()
        raise ValueError("what was wrong")
    time.sleep(600)


def test_processes_know_nothing_of_earlier_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for text in ("first", "second"):
        folder = tmp_path / text
        folder.mkdir()
        monkeypatch.chdir(folder)
        found = call(2, remember, text)
        assert found == [([text], "0", str(folder)), ([text], "1", str(folder))]
    assert call(1, left, "") == [None]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raises", "what was wrong"),
        ("killed", "killed by signal 9"),
        ("aborts", "killed by signal 6(?s:.*)a library's last words(?s:.*)Aborted(?s:.*)fail_or_wait"),
    ],
)
def test_one_that_fails_is_told_and_ends_the_others(tmp_path: Path, how: str, says: str) -> None:
    with pytest.raises(ProcessFailed, match=f"process 1 of 2(?s:.*){says}"):
        call(2, fail_or_wait, tmp_path, how)
    wait_until_gone(int((tmp_path / "0").read_text()))


class CutOff(Exception):
    """What a test's time limit raises in the midst of a call."""


def test_a_call_that_is_cut_off_leaves_nothing(tmp_path: Path) -> None:
    def cut_off(number: int, frame: object) -> None:
        raise CutOff

    def signal_when_started() -> None:
        while not (tmp_path / "0").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, cut_off)
    waiting = threading.Thread(target=signal_when_started)
    try:
        waiting.start()
        with pytest.raises(CutOff):
            call(1, fail_or_wait, tmp_path, "")
    finally:
        waiting.join()
        signal.signal(signal.SIGUSR1, before)
    wait_until_gone(int((tmp_path / "0").read_text()))


def test_a_process_that_began_too_late_only_has_the_id() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            now_s = time.time()
            assert is_running(process.pid) and is_running(process.pid, by_s=now_s + 2.0)
            assert not is_running(process.pid, by_s=now_s - 60.0)
        finally:
            process.kill()
    assert not is_running(process.pid) and not is_running(process.pid, by_s=time.time())
