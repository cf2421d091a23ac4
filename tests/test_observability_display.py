"""How people see a run: console lines and bar, log files, plots."""

import io
import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forgeasync.observability import plot
from forgeasync.observability.console import MAX_COLUMNS, StepConsole, StepLine
from forgeasync.observability.logs import last_lines
from forgeasync.observability.metrics import MetricsWriter
from forgeasync.observability.run_dir import RunDir
from tests.test_observability import NOW, make_config, make_held_out, make_step


def run_python(code: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)


# --- console ---


def make_line(*, step: int, waited_for: str = "batch 1.2s", accuracy: float | None = None) -> StepLine:
    metrics = make_step(accuracy=accuracy).to_dict()
    return replace(StepLine.from_metrics(metrics, waited_for=waited_for), step=step)


def test_step_lines_are_aligned_and_short() -> None:
    plain = make_line(step=7).format(2000)
    evaluated = make_line(step=1200, accuracy=0.5).format(2000)
    assert plain.index("batch 1.2s") == evaluated.index("batch 1.2s")
    assert "eval 0.500" in evaluated and "eval" not in plain
    assert "step 1200/2000" in evaluated
    assert max(len(plain), len(evaluated)) <= MAX_COLUMNS
    assert len(make_line(step=7, waited_for="x" * 200).format(2000)) == MAX_COLUMNS


def test_pipe_gets_plain_lines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    with StepConsole(3, stream=stream) as console:
        console.message("starting [1] \x1b[31mgenerator\x1b[0m")
        console.step(make_line(step=1))
        console.stop()
    assert stream.getvalue() == f"starting [1] generator\n{make_line(step=1).format(3)}\n"


def test_terminal_gets_a_bar_and_its_cursor_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    controller, terminal = pty.openpty()
    with open(terminal, "w", encoding="utf-8") as stream:
        with pytest.raises(KeyboardInterrupt):
            with StepConsole(4, stream=stream) as console:
                console.step(make_line(step=1))
                raise KeyboardInterrupt
        console.stop()
        console.message("done")
        stream.flush()
        shown = b""
        while not shown.endswith(b"done\r\n"):  # one read need not return all; pytest's timeout ends it
            shown += os.read(controller, 1 << 16)
    os.close(controller)
    text = shown.decode()
    assert make_line(step=1).format(4) in text
    assert "1/4" in text and "ETA 0:03:00" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


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
