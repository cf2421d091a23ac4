"""How people see a run: console lines and bar, log files, plots."""

import fcntl
import io
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.observability import (
    MAX_COLUMNS,
    MetricsWriter,
    RemainingTime,
    RunDir,
    StepConsole,
    StepLine,
    closing_lines,
    last_lines,
    plot,
)
from tests.support.step_records import NOW, make_config, make_held_out, make_step


def run_python(code: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True)


# --- console ---


def make_line(*, step: int, waited_for: str = "batch 1.2s", accuracy: float | None = None) -> StepLine:
    metrics = make_step(accuracy=accuracy).to_dict()
    return replace(StepLine.from_metrics(metrics, waited_for=waited_for), step=step)


def test_step_lines_are_aligned_and_short() -> None:
    plain = make_line(step=7).format(2000, MAX_COLUMNS)
    evaluated = make_line(step=1200, accuracy=0.5).format(2000, MAX_COLUMNS)
    assert plain.index("batch 1.2s") == evaluated.index("batch 1.2s")
    assert "eval 0.500" in evaluated and "eval" not in plain
    assert "step 1200/2000" in evaluated
    assert max(len(plain), len(evaluated)) <= MAX_COLUMNS


@given(
    max_steps=st.integers(1, 10**7),
    num_columns=st.integers(20, 200),
    accuracy=st.none() | st.floats(0, 1),
    waited_for=st.text(st.characters(categories=["L", "N"]), max_size=200),
    tokens_per_s=st.floats(0, 1e8),
    reward=st.floats(-1e4, 1e4),
    length=st.floats(0, 1e6),
    loss=st.none() | st.floats(),
)
def test_a_step_line_never_wraps(
    max_steps: int,
    num_columns: int,
    accuracy: float | None,
    waited_for: str,
    tokens_per_s: float,
    reward: float,
    length: float,
    loss: float | None,
) -> None:
    line = replace(
        make_line(step=max_steps, waited_for=waited_for, accuracy=accuracy),
        train_tokens_per_s=tokens_per_s,
        reward_mean=reward,
        response_length_mean=length,
        loss=loss,
    ).format(max_steps, num_columns)
    assert len(line) <= num_columns and "\n" not in line
    # At 20 columns the step itself may be all that there is.
    assert line.startswith("step ") and (num_columns < 60 or "reward" in line)


def test_eighty_columns_hold_what_is_worth_most() -> None:
    line = make_line(step=7, accuracy=0.5).format(60)
    assert all(name in line for name in ("step", "reward", "eval", "tok/s", "mismatch", "age"))
    assert len(line) <= 80 and "batch" not in line and "…" not in line
    assert "batch 1.2s" in make_line(step=7).format(60, MAX_COLUMNS)


def test_wide_lines_show_what_the_optimizer_does_and_narrow_ones_do_not() -> None:
    """Columns that a line has without these numbers stay, whatever its width."""
    without = replace(
        make_line(step=7, accuracy=0.5), loss=None, entropy=None, grad_norm=None, learning_rate=None
    )
    line = replace(without, loss=-0.00123, entropy=1.2345, grad_norm=12.5, learning_rate=1.5e-6)
    shown = "loss  -0.00123  entropy  1.234  grad     12.5  lr 1.5e-06"
    assert shown in line.format(60, MAX_COLUMNS) and "batch 1.2s" in line.format(60, MAX_COLUMNS)
    for num_columns in range(20, 200):
        wide, plain = (one.format(60, num_columns) for one in (line, without))
        assert len(wide) <= num_columns
        if num_columns <= 80:
            assert wide == plain
        else:
            assert re.sub(r"  (loss|entropy|grad|lr) +\S+", "", wide) == plain
    assert "loss" in line.format(60, 130) and "lr" not in line.format(60, 130)


def test_a_line_takes_these_numbers_from_the_metrics() -> None:
    metrics = make_step().to_dict() | {"learning_rate": 2e-5, "policy/entropy": 0.75}
    line = StepLine.from_metrics(metrics, waited_for="train")
    assert (line.loss, line.grad_norm, line.learning_rate, line.entropy) == (0.5, 1.5, 2e-5, 0.75)


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


def shown_on_a_terminal(show: Callable[[StepConsole], None], *, num_columns: int = 80) -> str:
    """What reaches a terminal whose last line is "done"."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, num_columns, 0, 0))
    with open(terminal, "w", encoding="utf-8") as stream:
        console = StepConsole(4, eval_every_steps=2, stream=stream)
        try:
            show(console)
        finally:
            console.stop()
            console.message("done")
            stream.flush()
            shown = b""
            while not shown.endswith(b"done\r\n"):  # one read need not return all; pytest's timeout ends it
                shown += os.read(controller, 1 << 16)
    os.close(controller)
    return shown.decode()


def test_terminal_gets_a_bar_and_its_cursor_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLUMNS", raising=False)

    def show(console: StepConsole) -> None:
        with pytest.raises(KeyboardInterrupt), console:
            console.step(make_line(step=1))
            raise KeyboardInterrupt

    text = shown_on_a_terminal(show)
    assert make_line(step=1).format(4, 80) in text
    assert "1/4" in text and "ETA 0:03:00" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_set_up_and_evaluation_show_their_name_and_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLUMNS", raising=False)

    def show(console: StepConsole) -> None:
        with console:
            console.phase("starting the trainer")
            console.phase("evaluating version 0", num_parts=8)
            for _ in range(3):
                console.part_done()

    text = shown_on_a_terminal(show)
    assert "starting the trainer" in text and "evaluating version 0" in text and "3/8" in text
    assert "ETA" not in text and "0/4" not in text and "training" not in text


def test_a_wide_terminal_shows_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLUMNS", raising=False)
    line = make_line(step=1)
    for num_columns in (60, 80, 200):
        text = shown_on_a_terminal(lambda console: console.step(line), num_columns=num_columns)
        assert line.format(4, min(num_columns, MAX_COLUMNS)) in text.splitlines()


# --- remaining time ---


@given(
    max_steps=st.integers(1, 60),
    every=st.none() | st.integers(1, 70),
    first_step=st.integers(1, 60),
    step_s=st.floats(0.1, 100.0),
    eval_s=st.floats(0.1, 1000.0),
)
def test_the_estimate_is_exact_where_times_are_constant(
    max_steps: int, every: int | None, first_step: int, step_s: float, eval_s: float
) -> None:
    """Against a run played to its end; one that was resumed has a clock that says anything at first."""
    first_step = min(first_step, max_steps)

    def eval_s_of(step: int) -> float:
        is_due = every is not None and (step % every == 0 or step == max_steps)
        return eval_s if is_due else 0.0

    ends_s: list[float] = []
    clock_s = 0.0 if first_step == 1 else 1234.5
    for step in range(first_step, max_steps + 1):
        clock_s += step_s + eval_s_of(step)
        ends_s.append(clock_s)
    remaining = RemainingTime(max_steps, every)
    if every is not None:
        remaining.add_evaluation(eval_s)
    for step, end_s in zip(range(first_step, max_steps + 1), ends_s, strict=True):
        spent_s = eval_s_of(step)
        remaining.add(step, elapsed_s=end_s, step_s=step_s + spent_s, eval_s=spent_s)
        assert remaining.estimate_s() == pytest.approx(ends_s[-1] - end_s, abs=1e-6 * ends_s[-1])


# --- logs ---


def test_redirected_process_prints_nothing_to_its_parent(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "actor.log"
    code = """
import os, subprocess, sys
from pathlib import Path
from forgeasync.observability.logs import redirect_process_output
redirect_process_output(Path(sys.argv[1]))
print("from python")
sys.stderr.write("from stderr\\n")
os.write(1, b"from native code\\n")
subprocess.run(["echo", "from a child"], check=True)
os._exit(0)  # without a flush at exit: lines have to be out already
"""
    for _ in range(2):
        completed = run_python(code, log)
        assert completed.stdout == completed.stderr == ""
    lines = ["from python", "from stderr", "from native code", "from a child"]
    assert log.read_text().splitlines() == lines * 2


def test_native_output_of_the_controller_goes_to_a_file(tmp_path: Path) -> None:
    log = tmp_path / "controller.log"
    code = """
import os, sys
from pathlib import Path
from forgeasync.observability.logs import separate_native_output
separate_native_output(Path(sys.argv[1]))
print("for people")
sys.stderr.write("an error\\n")
os.write(1, b"native\\n")
os.write(2, b"noise\\n")
"""
    completed = run_python(code, log)
    assert (completed.stdout, completed.stderr) == ("for people\n", "an error\n")
    assert log.read_text() == "native\nnoise\n"


def test_controller_logging_leaves_the_terminal_to_the_console(tmp_path: Path) -> None:
    log = tmp_path / "controller.log"
    code = """
import logging, sys, warnings
from pathlib import Path
from forgeasync.observability.logs import configure_controller_logging
logging.basicConfig()
noisy = logging.getLogger("vllm.engine")
noisy.addHandler(logging.StreamHandler())
noisy.propagate = False
configure_controller_logging(Path(sys.argv[1]))
configure_controller_logging(Path(sys.argv[1]))
noisy.warning("noise")
logging.getLogger("forgeasync").info("ours")
warnings.warn("careful")
print("for people")
"""
    completed = run_python(code, log)
    assert completed.stdout == "for people\n" and completed.stderr == ""
    text = log.read_text()
    for message in ("noise", "ours", "careful"):
        assert text.count(f": {message}") + text.count(f"Warning: {message}") >= 1
    assert text.count("noise") == 1


def test_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"one\ntwo\n\xff three\n")
    assert last_lines(log, 2) == "two\n\ufffd three"
    assert last_lines(log, 9).startswith("one\n")
    with pytest.raises(FileNotFoundError):
        last_lines(tmp_path / "none", 1)


# --- plot ---


def write_run(folder: Path) -> Path:
    run_dir = RunDir.create(make_config(folder), "", NOW)
    with MetricsWriter(run_dir.metrics, tensorboard_dir=None) as writer:
        writer.write_initial_evaluation(make_held_out(accuracy=0.1), eval_s=1.0)
        for step in range(1, 5):
            accuracy = 0.1 * step if step % 2 == 0 else None
            writer.write(make_step(step=step, elapsed_s=30.0 * step, accuracy=accuracy).to_dict())
    return folder


def test_plot_reads_what_the_writer_wrote(tmp_path: Path) -> None:
    run = plot.read_run(write_run(tmp_path / "sync"))
    assert run.name == "sync"
    assert run.accuracy.steps_N.tolist() == [0, 2, 4]
    assert run.accuracy.minutes_N.tolist() == [0.0, 1.0, 2.0]
    assert run.reward.steps_N.tolist() == [1, 2, 3, 4]


def test_plot_writes_a_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [str(write_run(tmp_path / name)) for name in ("sync", "async")]
    out = tmp_path / "compare.png"
    monkeypatch.setattr(sys, "argv", ["plot", *runs, "--out", str(out)])
    plot.main()
    assert out.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert out.stat().st_size > 10_000


def test_plot_of_nothing_ends_with_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["plot", str(tmp_path), "--out", str(tmp_path / "x.png")])
    with pytest.raises(SystemExit):
        plot.main()
    assert str(tmp_path / "metrics.jsonl") in capsys.readouterr().err


def test_moving_average_looks_back_only() -> None:
    averaged = plot.moving_average(np.array([1.0, 3.0, 5.0, 7.0]), 2)
    assert averaged.tolist() == [1.0, 2.0, 4.0, 6.0]


# --- the last words ---


def test_the_last_words_say_how_accuracy_went_and_how_to_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "a run")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    sentence, curves = closing_lines(RunDir(path=Path("a run")))
    assert sentence == "held-out accuracy went from 10.0% to 40.0% in 4 steps, which took 2.0 minutes"
    command = curves.removeprefix("its curves: ")
    assert command.startswith("bin/python -m")
    # The link is not the environment that has our packages: the same arguments, run as a test runs them.
    monkeypatch.setattr(sys, "argv", shlex.split(command)[2:])
    plot.main()
    assert (tmp_path / "a run" / "learning.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("accuracies", "words"),
    [
        ([None, None], "accuracy is unknown"),
        ([0.25, None], "accuracy was 25.0% at step 0, and measured only then"),
        ([None, 0.25], "accuracy was 25.0% at step 1, and measured only then"),
        ([0.5, 0.5], "from 50.0% to 50.0% in 1 step,"),
    ],
)
def test_the_last_words_where_little_was_measured(
    tmp_path: Path, accuracies: list[float | None], words: str
) -> None:
    lines = [
        {"step": step, "time/elapsed_s": 60.0 * step, "eval/accuracy": one}
        for step, one in enumerate(accuracies)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert words in closing_lines(RunDir(path=tmp_path))[0]


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
    assert log == ["one", "nobody reads the console any more: Broken pipe", "two", "three"]
