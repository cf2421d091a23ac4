"""An agent ends its host's worker where that is process 1, as in a pod."""

import shutil
import subprocess
import sys

import pytest

from tests.support.processes import free_port

pytestmark = pytest.mark.procs

WORKER = """
import os, signal, time
from pathlib import Path
# A pod starts with this handler. Under a shell's background job SIGINT would stay ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from monarch.actor import run_worker_loop_forever
from forgeasync.launch import agent
if os.fork() == 0:
    # 0A: a socket that listens (tcp_states.h). It is the worker's, as nobody else takes this port.
    while not any(
        fields[1].endswith(":PORT") and fields[3] == "0A"
        for fields in map(str.split, Path("/proc/net/tcp").read_text().splitlines())
    ):
        time.sleep(0.01)
    assert os.getppid() == 1
    agent._end_host()
    time.sleep(60.0)
    print("still here", flush=True)
    os._exit(0)
print("waits for the controller", flush=True)
run_worker_loop_forever(address="tcp://127.0.0.1:NUMBER", ca="trust_all_connections")
"""


def can_make_pid_namespaces() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_make_pid_namespaces(), reason="this machine makes no namespaces of processes")
def test_a_worker_that_is_process_one_is_ended() -> None:
    port = free_port()
    worker = WORKER.replace("PORT", f"{port:04X}").replace("NUMBER", str(port))
    ended = subprocess.run(
        ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", worker],
        capture_output=True,
        text=True,
    )
    assert ended.returncode != 0 and "KeyboardInterrupt" in ended.stderr, ended.stderr
    assert "waits for the controller" in ended.stdout and "still here" not in ended.stdout
