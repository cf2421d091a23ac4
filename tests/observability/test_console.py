"""What people see of a run on a terminal or in a pipe: step lines, phases, bars and the board."""

import fcntl
import io
import os
import pty
import re
import struct
import termios
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forgeasync.observability import (
    MAX_COLUMNS,
    MIN_COLUMNS,
    MIN_LINES,
    ProgressDisplay,
    StepConsole,
    StepLine,
    progress_lines,
)
from tests.support.step_records import make_step

METRICS = {
    **make_step(accuracy=0.5),
    "step": 7,
    "load/trainer_wait_share": 0.25,
    "generator/num_healthy": 2,
    "generator/num_starting": 1,
    "faults/detected_generator": 2,
    "faults/recovered_generator": 2,
    "stall/num_found": 0,
    "memory/trainer_gib": 1.25,
    "memory/generator_gpu_gib": 60.0,
}


def make_line(*, step: int, waited_for: str = "batch 1.2s", **changed: float | None) -> StepLine:
    """Values of None take their key away."""
    metrics = {**make_step(step=step, accuracy=0.5), **changed}
    metrics = {key: value for key, value in metrics.items() if value is not None}
    return StepLine(metrics=metrics, waited_for=waited_for)


@pytest.fixture(autouse=True)
def on_xterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLUMNS", raising=False)


def shown(act: Callable[[StepConsole], None], *, num_columns: int = 80, num_lines: int = 24) -> str:
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
            while not read.endswith(b"done\r\n"):  # one read need not return all; pytest's timeout ends it
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


# --- step lines ---


@given(
    max_steps=st.integers(1, 10**7),
    num_columns=st.integers(20, 200),
    waited_for=st.text(st.characters(categories=["L", "N"]), max_size=200),
    values=st.fixed_dictionaries(
        {
            "eval/accuracy": st.none() | st.floats(0, 1),
            "throughput/train_tokens_per_s": st.floats(0, 1e8),
            "reward/mean": st.floats(-1e4, 1e4),
            "response/length_mean": st.floats(0, 1e6),
            "loss": st.none() | st.floats(),
        }
    ),
)
def test_a_step_line_never_wraps(
    max_steps: int, num_columns: int, waited_for: str, values: dict[str, float | None]
) -> None:
    line = make_line(step=max_steps, waited_for=waited_for, **values).format(max_steps, num_columns)
    assert len(line) <= num_columns and "\n" not in line
    # At 20 columns the step itself may be all that there is.
    assert line.startswith("step ") and (num_columns < 60 or "reward" in line)


def test_eighty_columns_hold_what_is_worth_most() -> None:
    line = make_line(step=7).format(60)
    assert all(name in line for name in ("step  7/60", "reward", "eval 0.500", "tok/s", "mismatch", "age"))
    assert len(line) <= 80 and "batch" not in line and "…" not in line
    wide = make_line(step=7).format(60, MAX_COLUMNS)
    without = make_line(step=7, **{"eval/accuracy": None}).format(60, MAX_COLUMNS)
    assert wide.index("batch 1.2s") == without.index("batch 1.2s"), "columns are aligned"
    assert "eval" not in without
    values = {"loss": -0.00123, "policy/entropy": 1.2345, "grad_norm": 12.5, "learning_rate": 1.5e-6}
    of_optimizer = "loss  -0.00123  entropy  1.234  grad     12.5  lr 1.5e-06"
    assert of_optimizer in make_line(step=7, **values).format(60, MAX_COLUMNS)


# --- a pipe ---


def test_pipe_gets_plain_lines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    logged: list[str] = []
    with StepConsole(3, stream=stream, log=logged.append) as console:
        console.message("starting [1] \x1b[31mgenerator\x1b[0m")
        console.phase("evaluating version 0", num_parts=2)
        console.part_done()
        console.end_phase()
        console.step(make_line(step=1))
        console.stop()
    lines = ["starting [1] generator", "evaluating version 0", make_line(step=1).format(3)]
    assert stream.getvalue().splitlines() == lines == logged


class GoneStream(io.StringIO):
    """A pipe that nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError("Broken pipe")


def test_a_console_that_nobody_reads_ends_no_run() -> None:
    log: list[str] = []
    with StepConsole(3, stream=GoneStream(), log=log.append) as console:
        console.message("one")
        console.phase("two", num_parts=2)
        console.part_done()
        console.end_phase()
        console.message("three")
    assert log == ["one", "the console has been closed: Broken pipe", "two", "three"]


# --- a terminal ---


def step(console: StepConsole) -> None:
    console.now(METRICS)
    console.step(StepLine(metrics=METRICS, waited_for="batch"))


@pytest.mark.parametrize("ending", [None, KeyboardInterrupt, ValueError])
def test_lines_scroll_above_board_and_bar_and_only_they_are_left(ending: type[BaseException] | None) -> None:
    def act(console: StepConsole) -> None:
        with nullcontext() if ending is None else pytest.raises(ending), console:
            step(console)
            console.alarm("generator 0 has died")
            if ending is not None:
                raise ending

    text = shown(act, num_columns=120, num_lines=40)
    assert "2 healthy" in text and "7/60" in text and "ETA 0:" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is back"
    line, died, done = screen(text)
    assert line.startswith("step  7/60") and (died, done) == ("generator 0 has died", "done")


@pytest.mark.parametrize(("num_columns", "num_lines"), [(MIN_COLUMNS - 1, 40), (120, MIN_LINES - 1)])
def test_a_small_terminal_has_the_bars_alone(num_columns: int, num_lines: int) -> None:
    text = shown(step, num_columns=num_columns, num_lines=num_lines)
    assert "healthy" not in text and "7/60" in text


def test_set_up_and_evaluation_show_their_name_and_no_steps() -> None:
    def show(console: StepConsole) -> None:
        with console:
            console.phase("starting the trainer")
            console.phase("evaluating version 0", num_parts=8)
            for _ in range(3):
                console.part_done()

    text = shown(show)
    assert "starting the trainer" in text and "evaluating version 0" in text and "3/8" in text
    assert "ETA" not in text and "0/60" not in text and "training" not in text


@pytest.mark.parametrize("first", [1, 31])
def test_the_time_left_is_at_the_mean_pace_of_this_process(first: int) -> None:
    """The clock of a resumed run includes what was before."""

    def act(console: StepConsole) -> None:
        with console:
            for number, (elapsed_s, step_s) in enumerate([(110.0, 10.0), (130.0, 20.0)]):
                changed = {"time/elapsed_s": elapsed_s, "time/step_s": step_s}
                console.step(make_line(step=first + number, **changed))

    left = timedelta(seconds=15 * (60 - first - 1))
    assert f"ETA {left}" in shown(act, num_columns=120)


# --- the board ---


def words(**changed: float) -> dict[str, str]:
    lines = progress_lines({**METRICS, **changed}, max_steps=60, left_s=750.0, age_s=3.2)
    return {line.label: line.words for line in lines}


def test_the_board_says_how_the_run_is_doing() -> None:
    said = words()
    assert said["step"].startswith("7 of 60") and said["step"].endswith("made 3 s ago   0:12:30 left")
    assert said["waits"].startswith("trainer 25% of the step for its batch")
    bounds = [words(**{f"load/{key}": 1.0})["waits"] for key in ("trainer_waits", "generators_wait")]
    assert bounds[0].startswith("sampling and scoring bound the run   ")
    assert bounds[1].startswith("the trainer bounds the run   ")
    assert said["generators"] == "2 healthy   1 starting", "what is 0 needs no room"
    assert said["faults"] == "2 noticed"
    assert said["memory"] == "trainer 1.2 GiB   generator gpu 60.0 GiB"
    assert "held-out accuracy 0.500" in said["learning"]


def test_what_is_wrong_is_an_alarm() -> None:
    def alarms(**changed: float) -> list[str]:
        lines = progress_lines({**METRICS, **changed}, max_steps=60, left_s=1.0, age_s=1.0)
        return [f"{line.label} {line.words}" for line in lines if line.is_alarm]

    assert alarms() == []
    assert alarms(**{"faults/detected_trainer": 1}) == ["faults 3 noticed   1 open"]
    assert alarms(**{"generator/num_healthy": 0}) == ["generators 0 healthy   1 starting"]
    assert words(**{"stall/num_found": 1})["faults"] == "2 noticed   1 times without progress"


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
    for line in progress_lines({**metrics, **counts}, max_steps=10, left_s=left_s, age_s=age_s):
        assert line.words and "\n" not in line.words and not re.search(r"\b(nan|inf)", line.words)


def test_between_steps_the_time_left_runs_down_and_new_values_are_shown() -> None:
    now_s = 100.0
    board = ProgressDisplay(60, clock=lambda: now_s)
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


@pytest.mark.parametrize("num_columns", [60, 200])
def test_step_lines_are_as_wide_as_the_terminal(num_columns: int) -> None:
    line = make_line(step=1)
    text = shown(lambda console: console.step(line), num_columns=num_columns)
    assert line.format(60, min(num_columns, MAX_COLUMNS)) in text.splitlines()
