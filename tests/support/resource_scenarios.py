"""Commands that take all they can get: each scenario runs one in a small box and says how it ended.

``python -m tests.support.resource_scenarios`` runs all of them and prints the outcomes as JSON.
"""

import asyncio
import json
import os
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import psutil

from forgeasync.config import Bubblewrap
from forgeasync.isolation import KilledBy, Sandbox, SandboxClosed

DEADLINE_S = 0.5
"""For what only a deadline ends; nothing else depends on how late it comes."""
AMPLE_S = 300.0
"""For what ends in another way."""
SMALL = Bubblewrap(memory_mib=96, disk_mib=8, max_files=500, max_processes=24, output_kib=16)
_LAG_INTERVAL_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a scenario did to the host and to its box."""

    exit_code: int
    stdout: str
    num_cut: int
    timed_out: bool
    killed_by: str | None
    largest_lag_s: float
    """Longest time for which the event loop of the host did not run."""
    memory_growth_mib: float
    """Growth of the host process's peak memory."""
    num_left: int
    """Processes with the scenario's mark that the host still has once the result is there."""
    box_works: bool
    """Whether the same box runs another command."""
    num_left_after_close: int


FORK = "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.001)\n"
STUBBORN = (
    "import os, signal, sys, time\n"
    "for number in range(1, 65):\n"
    "    try: signal.signal(number, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\n"
    "if os.fork() == 0:\n    os.setsid()\n    if os.fork() != 0: os._exit(0)\n"
    "time.sleep(600)\n"
)
SHARED = (
    "import mmap, os, time\n"
    "for _ in range(4):\n"
    "    if os.fork() == 0: break\n"
    "memory = mmap.mmap(-1, 64 << 20)\n"
    "for begin in range(0, 64 << 20, 4096): memory[begin] = 1\n"
    "time.sleep(600)\n"
)
STOP_WATCHER = "import os, signal, time\nos.kill(os.getppid(), signal.SIGSTOP)\ntime.sleep(600)\n"
KILL_WATCHER = "import os, signal, time\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(600)\n"
STOP_ALL = "import os, signal, time\nos.kill(-1, signal.SIGSTOP)\ntime.sleep(600)\n"
FILES = (
    "import os\nnum = 0\n"
    "try:\n    for num in range(100_000): open(f'/tmp/{num}', 'w').close()\n"
    "except OSError as error: print(num, error.strerror)\n"
)


def python(code: str) -> Callable[[str], list[str]]:
    return lambda mark: ["python3", "-c", code, mark]


def shell(text: str) -> Callable[[str], list[str]]:
    return lambda mark: ["sh", "-c", text, mark]


COMMANDS: dict[str, Callable[[str], list[str]]] = {
    "fork": python(FORK),
    "memory": python("data = b'x' * (1 << 30)"),
    "shared_memory": python(SHARED),
    "disk": shell(
        "for folder in /work /tmp /dev/shm; do head -c 20000000 /dev/zero > $folder/file; done; "
        "cat /work/file /tmp/file /dev/shm/file | wc -c"
    ),
    "files": python(FILES),
    "long_output": shell("head -c 5000000 /dev/zero | tr '\\0' y"),
    "long_errors": shell("head -c 5000000 /dev/zero | tr '\\0' y >&2"),
    "endless_output": shell("yes"),
    "endless_errors": shell("yes >&2"),
    "ignored_signals": python(STUBBORN),
    "deleted_folder": shell("rm -rf /work /work/* /tmp /usr/bin 2>/dev/null; pwd"),
    "background": shell('sh -c "sleep 600" "$0" & setsid sh -c "sleep 600" "$0" & echo started'),
    "stop_watcher": python(STOP_WATCHER),
    "kill_watcher": python(KILL_WATCHER),
    "stop_all": python(STOP_ALL),
    "kill_all": shell("kill -9 -1"),
}


def processes_with(mark: str) -> int:
    """Processes of the host whose command has a mark; this one's own aside."""
    return sum(mark in " ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"]))


async def _largest_lag(stop: asyncio.Event) -> float:
    largest = 0.0
    while not stop.is_set():
        begin = time.monotonic()
        await asyncio.sleep(_LAG_INTERVAL_S)
        largest = max(largest, time.monotonic() - begin - _LAG_INTERVAL_S)
    return largest


async def _works(box: Sandbox) -> bool:
    try:
        done = await box.exec(
            "rm -rf /work/* /tmp/* /dev/shm/* && echo x > y && echo works", timeout_s=AMPLE_S
        )
    except SandboxClosed:
        return False
    return done.stdout == "works\n"


async def run(name: str) -> Outcome:
    """Run one scenario."""
    mark = "mark-" + os.urandom(8).hex()
    stop = asyncio.Event()
    lag = asyncio.create_task(_largest_lag(stop))
    async with Sandbox(SMALL) as box:
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        timeout_s = DEADLINE_S if KilledBy.DEADLINE in ENDED_BY[name] else AMPLE_S
        done = await box.exec(COMMANDS[name](mark), timeout_s=timeout_s)
        num_left = processes_with(mark)
        growth_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
        box_works = await _works(box)
    stop.set()
    return Outcome(
        exit_code=done.exit_code,
        stdout=done.stdout[:2000],
        num_cut=done.num_stdout_bytes_cut + done.num_stderr_bytes_cut,
        timed_out=done.timed_out,
        killed_by=done.killed_by,
        largest_lag_s=await lag,
        memory_growth_mib=growth_kib / 1024,
        num_left=num_left,
        box_works=box_works,
        num_left_after_close=processes_with(mark),
    )


def run_all() -> dict[str, Outcome]:
    return {name: asyncio.run(run(name)) for name in COMMANDS}


ENDED_BY: dict[str, tuple[KilledBy | None, ...]] = dict.fromkeys(COMMANDS, (None,)) | {
    "fork": (KilledBy.DEADLINE,),
    "shared_memory": (KilledBy.MEMORY,),
    "endless_output": (KilledBy.DEADLINE,),
    "endless_errors": (KilledBy.DEADLINE,),
    "ignored_signals": (KilledBy.DEADLINE,),
    "stop_watcher": (KilledBy.DEADLINE,),
    "kill_watcher": (KilledBy.TAMPERING,),
    "stop_all": (KilledBy.DEADLINE, KilledBy.TAMPERING),
    "kill_all": (KilledBy.TAMPERING,),
}
"""How each may end; None: by itself."""


if __name__ == "__main__":
    print(json.dumps({name: asdict(outcome) for name, outcome in run_all().items()}))
