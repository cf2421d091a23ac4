"""Procs as the programs that they are outside of tests."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from forgeasync.rollouts import is_running
from tests.support.app_runs import DEADLINE_S, REPOSITORY

pytestmark = pytest.mark.procs

REAL_PYTHON = str(Path(sys.prefix, "bin", "python"))

CONTROLLER = """
import os, sys
from monarch.actor import Actor, endpoint, this_host
from forgeasync.launch import spawn_role

class Asked(Actor):
    @endpoint
    def pid(self):
        return os.getpid()

procs = spawn_role(this_host(), "trainer", num_procs=1)
print(procs.spawn("asked", Asked).pid.call_one().get(), flush=True)
sys.stdin.read()
"""


def test_a_proc_is_a_program_and_ends_with_the_process_that_has_started_it() -> None:
    controller = subprocess.Popen(
        [REAL_PYTHON, "-c", CONTROLLER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    try:
        assert controller.stdout is not None
        pid = int(controller.stdout.readline())
        proc = psutil.Process(pid)
        assert proc.cmdline() == [REAL_PYTHON, "-m", "forgeasync.launch.bootstrap_main"]
        assert proc.ppid() == controller.pid
    finally:
        controller.kill()
        controller.wait()
    end_s = time.monotonic() + DEADLINE_S
    while is_running(pid):
        assert time.monotonic() < end_s, "a proc outlives the process that has started it"
        time.sleep(0.05)
