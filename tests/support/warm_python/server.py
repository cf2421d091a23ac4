"""The server that warm processes are forked from: ``python -m tests.support.warm_python.server``.

The process that is started forks a server for each kind of fork that is asked for. That one imports the
libraries of its kind, answers those who ask, and tells them how their forks have ended. It has one thread:
another one might hold a lock when it forks. If it fails, the first process ends as well, and ``server.log``
in the session's folder says why.
"""

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from pathlib import Path

from tests.support.warm_python import MODULES
from tests.support.warm_python.fork import Request, become, die_with

SAFE_THREADS = {"jemalloc_bg_thd"}
"""pyarrow's allocator stops and starts its thread around a fork."""

MAX_DESCRIPTORS = 64

PASSED_ON = (signal.SIGINT, signal.SIGTERM)
"""Signals that whoever asks for a fork passes on to it."""


def main() -> None:
    """Fork the servers, and end when one of them has ended."""
    folder, life, *numbers = sys.argv[1:]
    die_with(int(life))
    os.environ.pop("WARM_ROOM")
    for number in PASSED_ON:
        # Whoever has started this one says when it ends.
        signal.signal(number, lambda number, frame: None)
    listeners = {kind: socket.socket(fileno=int(one)) for kind, one in zip(MODULES, numbers, strict=True)}
    selector = selectors.DefaultSelector()
    for kind, listener in listeners.items():
        selector.register(listener, selectors.EVENT_READ, kind)
    signal.signal(signal.SIGCHLD, _give_up)
    while True:
        for key, _ in selector.select():
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                selector.close()
                for kind, listener in listeners.items():
                    if kind != key.data:
                        listener.close()
                die_with(int(life))
                _serve(key.data, listeners[key.data], int(life), Path(folder))
            selector.unregister(key.fileobj)


def _give_up(number: int, frame: object) -> None:
    sys.exit(f"a server has ended: {os.wait()}")


def _serve(kind: str, listener: socket.socket, life: int, folder: Path) -> None:
    """Import, and fork for ever; in a fork, run what was asked for."""
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
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    links: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(reading, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if reading in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(reading, 4096)
                _tell_ends(links)
            if listener.fileno() not in ready:
                continue
            link, _ = listener.accept()
            if (request := _receive(link)) is None:
                link.close()
                continue
            # Signals are for what the fork is to become.
            signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
            if pid := os.fork():
                signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
                links[pid] = link
                _tell(link, pid=pid)
                request.close()
                continue
            signal.set_wakeup_fd(-1)
            for one in (*links.values(), link, listener):
                one.close()
            for number in (reading, writing, life):
                os.close(number)
            break
    become(request, folder=folder, set_by_imports=set_by_imports, unblocked=PASSED_ON)


def _tell_ends(links: dict[int, socket.socket]) -> None:
    """Tell how forks have ended to those who have asked for them."""
    while links:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with links.pop(pid) as link:
            _tell(link, status=status)


def _tell(link: socket.socket, **answer: int) -> None:
    """Answer a process, which may be gone."""
    with contextlib.suppress(OSError):
        link.sendall(json.dumps(answer).encode() + b"\n")


def _receive(link: socket.socket) -> Request | None:
    """Receive what is asked for; None from a process that is gone, or only waits for this server."""
    try:
        head, found, _, _ = socket.recv_fds(link, 4, MAX_DESCRIPTORS)
        body = b""
        while len(body) < int.from_bytes(head, "big"):
            body += (part := link.recv(1 << 16))
            if not part:
                return None
    except ConnectionResetError:
        return None
    return Request.read(body, found) if head else None


if __name__ == "__main__":
    main()
