"""Procs as the programs that they are outside of tests."""

import subprocess
import time

import psutil
import pytest

from forgeasync.rollouts import is_running
from tests.support.app_runs import END_S, REPOSITORY
from tests.support.warm_python import REAL_PYTHON

pytestmark = pytest.mark.procs

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
    end_s = time.monotonic() + END_S
    while is_running(pid) and time.monotonic() < end_s:
        time.sleep(0.05)
    outlives = is_running(pid)
    if outlives:
        proc.kill()
    assert not outlives
