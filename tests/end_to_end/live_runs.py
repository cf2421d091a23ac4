"""Runs that go on: what they have done so far, and their end."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.app_runs import DEADLINE_S, finish


def completed(process: subprocess.Popen[str], *, deadline_s: float = DEADLINE_S) -> str:
    """Wait until a run has ended well; return what it has written."""
    code, out, err = finish(process, deadline_s=deadline_s)
    assert code == 0, err
    return out


def until(process: subprocess.Popen[str], is_so: Callable[[], bool], *, limit_s: float = DEADLINE_S) -> None:
    """Wait for something that a run does while it goes on."""
    end_s = time.monotonic() + limit_s
    while not is_so():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end_s, is_so
        time.sleep(0.02)


def pid_of(run_dir: Path, role: str, rank: int = 0) -> int:
    """Process id of a role, as the run lists it now."""
    listed = json.loads((run_dir / "procs.json").read_text())["procs"]
    (pid,) = (one["pid"] for one in listed if (one["role"], one["rank"]) == (role, rank))
    return int(pid)
