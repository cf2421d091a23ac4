"""A server that warm processes of a kind are forked from: ``python -m tests.support.warm_python.server``.

When it is asked for the first fork it imports the libraries of its kind. It answers those who ask, and tells
them how their forks have ended. It has one thread: another one might hold a lock when it forks. If it fails,
its log in the session's folder says why.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from tests.support.warm_python import MODULES
from tests.support.warm_python.executable import PASSED_ON
from tests.support.warm_python.fork import become, die_with

SAFE_THREADS = {"jemalloc_bg_thd"}
"""pyarrow's allocator stops and starts its thread around a fork."""

MAX_REQUEST_BYTES, MAX_DESCRIPTORS = 1 << 18, 64


def main() -> None:
    """Import, and fork for ever; in a fork, run what was asked for."""
    kind, folder, life, number = sys.argv[1:]
    die_with(int(life))
    os.environ.pop("WARM_ROOM")
    for passed_on in PASSED_ON:
        # Whoever has started this one says when it ends.
        signal.signal(passed_on, lambda number, frame: None)
    listener = socket.socket(fileno=int(number))
    select.select([listener], [], [])
    variables = dict(os.environ)
    for module in MODULES[kind]:
        importlib.import_module(module)
    names = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    threads = [name for name in names if name not in SAFE_THREADS]
    assert len(threads) == 1, f"importing {kind} has started threads: {threads}"
    set_by_imports = {name: value for name, value in os.environ.items() if variables.get(name) != value}
    # Forks neither look at what was imported when they collect garbage nor copy its pages.
    gc.collect()
    gc.freeze()
    request, files = _serve(listener, int(life))
    become(request, files[0], files[1:], folder=Path(folder), set_by_imports=set_by_imports)


def _serve(listener: socket.socket, life: int) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each that asks; returns in the forks, with what was asked for and its open files."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    links: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listener, reading], [], [])
        if reading in ready:
            os.read(reading, 4096)
            _tell_ends(links)
        if listener not in ready:
            continue
        link, _ = listener.accept()
        try:
            text, files, _, _ = socket.recv_fds(link, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
        except ConnectionResetError:
            text = b""
        if not text:
            # The process is gone, or only waits for this server.
            link.close()
            continue
        # Signals are for what the fork is to become.
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        if pid := os.fork():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
            links[pid] = link
            _tell(link, pid)
            for one in files:
                os.close(one)
            continue
        signal.set_wakeup_fd(-1)
        for one in (*links.values(), link, listener):
            one.close()
        for number in (reading, writing, life):
            os.close(number)
        return json.loads(text), files


def _tell_ends(links: dict[int, socket.socket]) -> None:
    """Tell how forks have ended to those who have asked for them."""
    while links:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with links.pop(pid) as link:
            _tell(link, status)


def _tell(link: socket.socket, number: int) -> None:
    """Answer a process, which may be gone."""
    with contextlib.suppress(OSError):
        link.send(number.to_bytes(4, "big"))


if __name__ == "__main__":
    main()
