"""A Python process that stands in a call of a known name: what reads stacks from outside has to find it.

python -m tests.support.standing_still PID      # prints what is read of that process
"""

import subprocess
import sys
from collections.abc import Mapping

from forgeasync.runtime import read_stacks

CALL = "stands_still"

PROGRAM = f"""
import threading, time

def helps():
    time.sleep(1000)

def {CALL}():
    print("ready", flush=True)
    time.sleep(1000)

threading.Thread(target=helps, name="helper", daemon=True).start()
{CALL}()
"""


def standing_still(*, child: bool = False, env: Mapping[str, str] | None = None) -> "subprocess.Popen[bytes]":
    """Start one, and wait until it is in its call; with ``child`` it has started a process of its own."""
    python = [sys.executable, "-I", "-S", "-c", PROGRAM]
    command = ["sh", "-c", 'sleep 1000 >/dev/null & exec "$@"', "sh", *python] if child else python
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.stdout.close()
    return process


if __name__ == "__main__":
    print(read_stacks(int(sys.argv[1])))
