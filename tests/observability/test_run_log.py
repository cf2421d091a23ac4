"""Where the output of processes and libraries goes."""

import subprocess
import sys
from pathlib import Path

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
