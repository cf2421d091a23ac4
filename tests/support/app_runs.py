"""Runs of the command as a user starts them, and what they leave."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.support.metrics import check_keys
from tests.support.processes import run_apart
from tests.support.tiers import Starts, starts

REPOSITORY = Path(__file__).parents[2]
NEVER_ENDING = "max_steps=100000"
DEADLINE_S = 240.0


@starts(Starts.PROCS)
def start(config_file: Path, *overrides: str, search_path: Path | None = None) -> subprocess.Popen[str]:
    """``search_path`` has modules of the user's own."""
    more = {} if search_path is None else {"PYTHONPATH": str(search_path)}
    return subprocess.Popen(
        [sys.executable, "-m", "apps.grpo", "--config", str(config_file), *overrides],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A process group of its own, as a shell gives its jobs: signals reach only this run.
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], *, deadline_s: float = DEADLINE_S) -> tuple[int, str, str]:
    """Wait for the end; whatever happens, nothing is left running."""
    try:
        out, err = process.communicate(timeout=deadline_s)
    finally:
        left = session_processes(process.pid)
        for orphan in left:
            orphan.kill()
    assert not left, f"left behind: {[orphan.cmdline() for orphan in left]}"
    return process.returncode, out, err


def run_here(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command where it starts nothing: the imports it needs are there.

    ``folder`` takes what it writes.
    """
    out, err = folder / "stdout", folder / "stderr"
    code = run_apart(_run_main, arguments, out, err)
    return code, out.read_text(), err.read_text()


def _run_main(arguments: tuple[str, ...], out: Path, err: Path) -> int:
    for stream, file in ((sys.stdout, out), (sys.stderr, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream.fileno())
    sys.argv = ["apps/grpo.py", *arguments]
    from apps.grpo import main

    code = main()
    sys.stdout.flush()
    return code


def session_processes(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def read_lines(file: Path) -> list[dict[str, float]]:
    """The records of a file; those of metrics.jsonl hold what the definitions say."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    if file.name == "metrics.jsonl":
        for line in lines:
            check_keys(line)
    return lines


def wait_for_step(run_dir: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    metrics = run_dir / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 2):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no step was made"
        time.sleep(0.2)
