"""The process that simulates."""

import os
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

pytestmark = pytest.mark.procs


def test_it_ends_with_a_run_that_is_killed() -> None:
    """Its input stays open here: what is not answered yet would otherwise keep it."""
    script = """
        import subprocess, sys
        process = subprocess.Popen([sys.executable, "-m", "forgeasync.prediction.process"])
        print(process.pid, flush=True)
        process.wait()
    """
    read, write = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdin=read, stdout=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        simulating = psutil.Process(int(run.stdout.readline()))
        while simulating.nice() != 19:
            time.sleep(0.01)
        run.kill()
        run.wait()
        psutil.wait_procs([simulating])
    os.close(read)
    os.close(write)
