"""The board of a wide terminal: what it says, when it is there, and that it leaves a terminal clean."""

import fcntl
import os
import pty
import re
import struct
import termios
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forgeasync.observability import MIN_COLUMNS, MIN_LINES, Board, StepConsole, StepLine, board_lines
from tests.support.step_records import make_step

METRICS = {
    **make_step(accuracy=0.5).to_dict(),
    "step": 7,
    "load/trainer_wait_share": 0.25,
    "generator/num_healthy": 2,
    "generator/num_suspect": 0,
    "generator/num_starting": 1,
    "faults/detected_generator": 2,
    "faults/recovered_generator": 2,
    "stall/num_found": 0,
    "memory/trainer_gib": 1.25,
    "memory/generator_gpu_gib": 60.0,
}


def words(metrics: dict[str, float | int], **changed: float) -> dict[str, str]:
    lines = board_lines({**metrics, **changed}, max_steps=60, left_s=750.0, age_s=3.2)
    return {line.label: line.words for line in lines}


def test_it_says_how_the_run_is_doing() -> None:
    said = words(METRICS)
    assert said["step"].startswith("7 of 60") and said["step"].endswith("made 3 s ago   0:12:30 left")
    assert said["waits"].startswith("trainer 25% of the step for its batch")
    bounds = {
        key: words(METRICS, **{key: 1.0})["waits"].split("   ")[0]
        for key in ("load/trainer_waits", "load/generators_wait")
    }
    assert [*bounds.values()] == ["sampling and scoring bound the run", "the trainer bounds the run"]
    assert said["generators"] == "2 healthy   1 starting", "what is 0 needs no room"
    assert said["faults"] == "2 noticed"
    assert said["memory"] == "trainer 1.2 GiB   generator gpu 60.0 GiB"
    assert "held-out accuracy 0.500" in said["learning"]


def test_what_is_wrong_is_an_alarm() -> None:
    def alarms(**changed: float) -> list[str]:
        lines = board_lines({**METRICS, **changed}, max_steps=60, left_s=1.0, age_s=1.0)
        return [f"{line.label} {line.words}" for line in lines if line.is_alarm]

    assert alarms() == []
    assert alarms(**{"faults/detected_trainer": 1}) == ["faults 3 noticed   1 open"]
    assert alarms(**{"generator/num_healthy": 0}) == ["generators 0 healthy   1 starting"]
    assert words(METRICS, **{"stall/num_found": 1})["faults"] == "2 noticed   1 times without progress"


COUNTS = sorted(key for key in METRICS if key.startswith(("faults/", "stall/")))


@given(
    st.dictionaries(st.sampled_from(sorted(METRICS.keys() - set(COUNTS))), st.floats()),
    st.dictionaries(st.sampled_from(COUNTS), st.integers(0, 10**6)),
    st.none() | st.floats(0, 1e9),
    st.floats(0, 1e7),
)
@example({"load/trainer_wait_share": 1e307}, {}, None, 0.0)
def test_any_metrics_make_a_board(
    metrics: dict[str, float], counts: dict[str, int], left_s: float | None, age_s: float
) -> None:
    for line in board_lines({**metrics, **counts}, max_steps=10, left_s=left_s, age_s=age_s):
        assert line.words and "\n" not in line.words and not re.search(r"\b(nan|inf)", line.words)


def test_between_steps_the_time_left_runs_down_and_new_values_are_shown() -> None:
    now_s = 100.0
    board = Board(60, clock=lambda: now_s)
    board.now(METRICS)
    assert board.lines() == [], "before the first step nothing is known"
    board.stepped(90.0)
    now_s = 130.0
    board.now({"generator/num_healthy": 1})
    said = {line.label: line.words for line in board.lines()}
    assert said["step"].endswith("made 30 s ago   0:01:00 left")
    assert said["generators"].startswith("1 healthy")
    now_s = 500.0
    assert board.lines()[0].words.endswith("0 s left"), "never less"


def shown(act: Callable[[StepConsole], None], *, num_columns: int, num_lines: int) -> str:
    """What reaches a terminal whose last line is "done"."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", num_lines, num_columns, 0, 0))
    with open(terminal, "w", encoding="utf-8") as stream:
        console = StepConsole(60, stream=stream)
        try:
            act(console)
        finally:
            console.stop()
            console.message("done")
            stream.flush()
            read = b""
            while not read.endswith(b"done\r\n"):
                read += os.read(controller, 1 << 16)
    os.close(controller)
    return read.decode()


def screen(text: str) -> list[str]:
    """The lines that are left on a terminal, by the few commands that the display uses."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r\n|\n|\r|[^\x1b\r\n]+", text):
        if part in ("\r\n", "\n"):
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif match := re.fullmatch(r"\x1b\[(\d+)A", part):
            row = max(0, row - int(match[1]))
        elif not part.startswith(("\x1b", "\r")):
            lines[row] += part
    return [line.rstrip() for line in lines if line.strip()]


@pytest.fixture(autouse=True)
def on_xterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLUMNS", raising=False)


def step(console: StepConsole) -> None:
    console.now(METRICS)
    console.step(replace(StepLine.from_metrics(METRICS, waited_for="batch"), step=7))


@pytest.mark.parametrize("ending", [None, KeyboardInterrupt, ValueError])
def test_lines_scroll_above_it_and_nothing_of_it_is_left(ending: type[BaseException] | None) -> None:
    def act(console: StepConsole) -> None:
        with console:
            step(console)
            console.alarm("generator 0 has died")
            if ending is not None:
                raise ending

    def show(console: StepConsole) -> None:
        if ending is None:
            act(console)
        else:
            with pytest.raises(ending):
                act(console)

    text = shown(show, num_columns=120, num_lines=40)
    assert "2 healthy" in text and "7/60" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is back"
    line, died, done = screen(text)
    assert line.startswith("step  7/60") and (died, done) == ("generator 0 has died", "done")


@pytest.mark.parametrize(("num_columns", "num_lines"), [(MIN_COLUMNS - 1, 40), (120, MIN_LINES - 1)])
def test_a_small_terminal_has_the_bars_alone(num_columns: int, num_lines: int) -> None:
    def show(console: StepConsole) -> None:
        with console:
            step(console)

    text = shown(show, num_columns=num_columns, num_lines=num_lines)
    assert "healthy" not in text and "7/60" in text
