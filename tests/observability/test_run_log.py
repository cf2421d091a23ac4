"""Where the output of processes and libraries goes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forgeasync.plugins.viewer import DEMO_RUN
from forgeasync.testing import write_tiny_model
from tests.support.app_runs import write_tiny_run

REPOSITORY = Path(__file__).resolve().parents[2]

BEGIN = """
import logging, os, subprocess, sys, warnings
from pathlib import Path
from forgeasync import observability
log = Path(sys.argv[1])
"""


def run_python(code: str, log: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BEGIN + code, str(log)]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def test_redirected_process_prints_nothing_to_its_parent(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "actor.log"
    code = """
observability.redirect_process_output(log)
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
observability.separate_native_output(log)
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
logging.basicConfig()
noisy = logging.getLogger("vllm.engine")
noisy.addHandler(logging.StreamHandler())
noisy.propagate = False
for _ in range(2):
    observability.configure_controller_logging(log)
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


# --- the end of a program ---


def end_without_reader(*words: object) -> tuple[int, str]:
    """Run an app whose reader has closed the pipe; its exit code and what it says."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as closed:
        command = [sys.executable, "-m", *map(str, words)]
        done = subprocess.run(command, cwd=REPOSITORY, stdout=closed, stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("apps.verify", DEMO_RUN),
        ("apps.show", DEMO_RUN),
        ("apps.view", DEMO_RUN, "--status"),
        ("forgeasync.observability.metric_definitions",),
    ],
)
def test_apps_end_quietly_if_their_reader_closes_the_pipe(words: tuple[object, ...]) -> None:
    assert end_without_reader(*words) == (141, "")


@pytest.mark.exhaustive
def test_tables_of_rich_end_quietly_too(tmp_path: Path) -> None:
    """rich catches the broken pipe and ends the program itself."""
    assert end_without_reader("apps.grpo", "--config", write_tiny_run(tmp_path), "--dry-run") == (141, "")


@pytest.mark.exhaustive
def test_checks_of_a_template_end_quietly_too(tmp_path: Path) -> None:
    words = ("--model", write_tiny_model(tmp_path), "--conversations", "1")
    assert end_without_reader("forgeasync.environments.check_template", *words) == (141, "")


def test_other_broken_pipes_are_errors() -> None:
    code = """
def main():
    raise BrokenPipeError("of a socket")
observability.exit_with(main)
"""
    done = subprocess.run([sys.executable, "-c", BEGIN + code, "log"], capture_output=True, text=True)
    assert done.returncode == 1 and "BrokenPipeError: of a socket" in done.stderr
