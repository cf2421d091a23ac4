"""Runs a function in processes of its own: on several gloo ranks, or alone."""

import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist

from forgeasync.processes import is_running
from tests.support.tiers import Starts, starts
from tests.support.warm_python import warm_python
from tests.support.warm_python.executable import CALL

R = TypeVar("R")

MAX_LAST_CHARS = 6000
"""Characters of a process's stderr that its failure repeats: one that dies of a signal says there why."""


class ProcessFailed(RuntimeError):
    """A process has raised or died; says which one, and how."""


def call_in_processes(
    kind: str,
    function: Callable[..., R],
    arguments: Sequence[object],
    *,
    environments: Sequence[dict[str, str]],
) -> list[R]:
    """The results of ``function(*arguments)``, called in as many processes as there are environments.

    They have imported what ``warm_python.MODULES`` says of their ``kind``. Each is as fresh as a
    program of its own, so that no test finds what another one has left: no process group, no cache, no seed.

    Raises:
        ProcessFailed: one of them has raised or died; the others are ended.
    """
    with tempfile.TemporaryDirectory() as out, ExitStack() as ending:
        folder = Path(out)
        (folder / "call").write_bytes(pickle.dumps(sys.path) + pickle.dumps((function, arguments)))
        processes = []
        for index, environment in enumerate(environments):
            with (folder / f"{index}.stderr").open("w") as errors:
                process = subprocess.Popen(
                    [warm_python(), "-m", CALL, kind, out, str(index)],
                    stdin=subprocess.DEVNULL,
                    stderr=errors,
                    env=environment,
                )
            processes.append(process)
            ending.callback(_end, process, folder / f"{index}.stderr")
        if (failed := _first_failed(processes)) is not None:
            code = processes[failed].returncode
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            # Another one may have been the reason and have ended a moment later.
            words = [file.read_text() for file in sorted(folder.glob("*.error"))]
            if not words:
                words = [(folder / f"{failed}.stderr").read_text(errors="replace")[-MAX_LAST_CHARS:]]
            raise ProcessFailed("\n".join([f"process {failed} of {len(processes)} {how}", *words]))
        return [pickle.loads((folder / str(index)).read_bytes()) for index in range(len(processes))]


def _first_failed(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait for all processes, or for the first that fails, and return its place."""
    running = {os.pidfd_open(process.pid): index for index, process in enumerate(processes)}
    try:
        while running:
            for ended in select.select(list(running), [], [])[0]:
                index = running.pop(ended)
                os.close(ended)
                if processes[index].wait() != 0:
                    return index
        return None
    finally:
        for left in running:
            os.close(left)


def _end(process: "subprocess.Popen[bytes]", errors: Path) -> None:
    process.kill()
    process.wait()
    sys.stderr.write(errors.read_text(errors="replace"))


def send_signal(processes: Iterable[psutil.Process], number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to every process that still exists: any of them can end, or be reaped, meanwhile."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def wait_until(is_so: Callable[[], bool]) -> None:
    """The test's own deadline bounds it."""
    while not is_so():
        time.sleep(0.01)


def wait_until_gone(pid: int) -> None:
    wait_until(lambda: not is_running(pid))


def free_port() -> int:
    """A port that nobody has, for a program that has to be told one.

    It is below the range that the kernel takes ports from, so no other program gets it by chance.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(lowest // 2, lowest)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _run_rank(function: Callable[..., Any], arguments: tuple[Any, ...]) -> object:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.autograd.set_multithreading_enabled(False)
    try:
        result = function(*arguments)
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()


@starts(Starts.PROCESSES)
def run_ranks(world_size: int, function: Callable[..., R], *arguments: object) -> list[R]:
    """The results of ``function(*arguments)`` on every rank; any rank's exception is raised."""
    # This process serves the store where ranks meet: a port for rank 0 could be taken before it listens.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(world_size),
    }
    environments = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    return call_in_processes("torchtitan", _run_rank, (function, arguments), environments=environments)


@starts(Starts.ENGINE)
def run_alone(function: Callable[..., R], *arguments: object) -> R:
    """The result of ``function(*arguments)`` in a process that has imported vLLM, without a process group.

    The result of a coroutine function is what its coroutine returns.
    """
    return call_in_processes("vllm", function, arguments, environments=[dict(os.environ)])[0]


@starts(Starts.PROCESSES)
def run_apart(function: Callable[..., R], *arguments: object) -> R:
    """The same in a process that has imported TorchTitan."""
    return call_in_processes("torchtitan", function, arguments, environments=[dict(os.environ)])[0]
