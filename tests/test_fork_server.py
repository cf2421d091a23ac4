"""Forks of a server: fresh every time, and none is left behind."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forgeasync.rollouts import is_running
from tests.support.fork_server import ForkServer, ProcessFailed

CALLS: list[str] = []
"""What a process has been asked so far."""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """One that imports nothing to speak of."""
    server = ForkServer("json")
    yield server
    server._end()


def environments(num: int) -> list[dict[str, str]]:
    return [os.environ | {"INDEX": str(index)} for index in range(num)]


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


def assert_gone(file: Path) -> None:
    pid = int(file.read_text())
    assert not is_running(pid)


def test_forks_know_their_index_and_nothing_of_earlier_ones(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for text in ("first", "second"):
        folder = tmp_path / text
        folder.mkdir()
        monkeypatch.chdir(folder)
        found = server.run(remember, [text], environments=environments(2))
        assert found == [([text], "0", str(folder)), ([text], "1", str(folder))]
    assert server.run(left, [""], environments=environments(1)) == [None]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raises", "what was wrong"),
        ("killed", "killed by signal 9"),
        ("aborts", "killed by signal 6(?s:.*)a library's last words(?s:.*)Aborted(?s:.*)fail_or_wait"),
    ],
)
def test_one_that_fails_is_told_and_ends_the_others(
    server: ForkServer, tmp_path: Path, how: str, says: str
) -> None:
    with pytest.raises(ProcessFailed, match=f"process 1 of 2(?s:.*){says}"):
        server.run(fail_or_wait, [tmp_path, how], environments=environments(2))
    assert_gone(tmp_path / "0")
    assert server.run(left, [""], environments=environments(1)) == [None], "it goes on"


class CutOff(Exception):
    """What a test's time limit raises in the midst of a call."""


def test_a_call_that_is_cut_off_leaves_nothing_and_the_next_one_starts_afresh(
    server: ForkServer, tmp_path: Path
) -> None:
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
            server.run(fail_or_wait, [tmp_path, ""], environments=environments(1))
    finally:
        waiting.join()
        signal.signal(signal.SIGUSR1, before)
    while is_running(int((tmp_path / "0").read_text())):
        time.sleep(0.01)
    assert server.run(left, [""], environments=environments(1)) == [None]
