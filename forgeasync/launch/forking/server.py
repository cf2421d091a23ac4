"""The server that procs are forked from.

    python -m forgeasync.launch.forking.server

Started by ``client.py``, which gives it a listening socket for every import set and a pipe that ends with the
process that has started it. The first server imports what all procs need. Then it imports other sets, or
forks servers that do (``import_sets.py`` says which), as soon as a proxy asks for them, or at once and in
their order those that are named. Between two sets it answers the proxies that wait. A server has one thread,
which waits for proxies and collects forks that have ended. Where importing has started another thread,
nothing is forked: it might hold a lock just then. Proxies are told so.
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import traceback
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from forgeasync.faults import RUN_MARK
from forgeasync.launch.forking.fork import COMM, PASSED_ON, Request, become
from forgeasync.launch.forking.import_sets import MODULES, OF_FIRST_SERVER, ImportSet
from forgeasync.launch.forking.life import die_with

SAFE_THREADS = {"jemalloc_bg_thd"}
"""pyarrow's allocator stops and starts its thread around a fork."""

ASK_S = 10.0
"""Seconds for a proxy to say what it wants."""

MAX_DESCRIPTORS = 16

MAX_LOST = 3
"""So often a server may end before its set is given up."""

SERVER_NAME = "fork-server"
"""Name of the processes that are servers, as ps shows them."""


class Server:
    """One process: the listening sockets that it still answers for, and its forks."""

    def __init__(
        self, listeners: Mapping[ImportSet, socket.socket], life: int, variables: Mapping[str, str]
    ) -> None:
        """``life`` is the descriptor of a pipe that all servers end with. ``variables`` is the
        environment before a set was imported."""
        self._listeners = dict(listeners)
        self._life = life
        self._variables = variables
        self._own = OF_FIRST_SERVER
        """Sets that this server imports."""
        self._imported: set[ImportSet] = set()
        self._forked: Request | ImportSet | None = None
        """In a fork, until it goes its own way: what it is to become."""
        self._servers: dict[int, ImportSet] = {}
        """Import sets of servers that were forked, by process id."""
        self._links: dict[int, socket.socket] = {}
        """Connections to the proxies of forks, by process id."""
        self._num_lost: Counter[ImportSet] = Counter()
        self._refusals: dict[ImportSet, str] = {}
        """Why nothing is forked with an import set, in words."""

    @property
    def set_by_imports(self) -> dict[str, str]:
        """Environment variables that importing has set."""
        return {name: value for name, value in os.environ.items() if self._variables.get(name) != value}

    def serve(self, begun_with: Sequence[ImportSet]) -> Request:
        """Answer proxies for ever; returns in every fork, with what that one is to become."""
        to_begin = deque([ImportSet.COMMON, *begun_with])
        self._listen()
        while True:
            for key, _ in self._selector.select(0 if to_begin else None):
                if self._forked is None:
                    key.data()
            if self._forked is None and to_begin:
                self._begin(to_begin.popleft())
            match self._forked:
                case Request() as request:
                    os.close(self._life)
                    return request
                case ImportSet() as own:
                    # This process is a server too, for proxies that want this set.
                    self._own, self._forked, to_begin = frozenset({own}), None, deque([own])
                    die_with(self._life)
                    self._listen()

    def _begin(self, wanted: ImportSet) -> None:
        """Import a set, or fork a server that does, unless that was done."""
        if wanted in self._imported or wanted in self._refusals or wanted in self._servers.values():
            return
        # What all need comes first, also where another set was asked for meanwhile.
        if wanted is not ImportSet.COMMON:
            self._begin(ImportSet.COMMON)
        if (refusal := self._refusals.get(ImportSet.COMMON)) is not None:
            self._refusals[wanted] = refusal
        elif wanted in self._own:
            self._import(wanted)
        else:
            self._fork_server(wanted)

    def _import(self, wanted: ImportSet) -> None:
        try:
            for module in MODULES[wanted]:
                importlib.import_module(module)
        except Exception as error:
            traceback.print_exc()
            self._refusals[wanted] = f"importing has failed ({type(error).__name__}: {error})"
        names = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
        if len([name for name in names if name not in SAFE_THREADS]) > 1:
            reason = f"importing has started threads: {', '.join(names)}"
            self._refusals.update(dict.fromkeys({*self._own, ImportSet.COMMON}, reason))
        self._imported.add(wanted)
        # Forks neither look at what was imported when they collect garbage nor copy its pages.
        gc.collect()
        gc.freeze()

    def _listen(self) -> None:
        self._selector = selectors.DefaultSelector()
        for one in self._listeners:
            self._wait_for_proxies(one)
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup = (reading, writing)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._selector.register(reading, selectors.EVENT_READ, self._collect)

    def _wait_for_proxies(self, wanted: ImportSet) -> None:
        answer = partial(self._on_proxy, wanted)
        self._selector.register(self._listeners[wanted], selectors.EVENT_READ, answer)

    def _on_proxy(self, wanted: ImportSet) -> None:
        """Fork for the proxy that waits at a socket; in the fork ``_forked`` says so."""
        if wanted not in self._imported and wanted not in self._refusals:
            # It waits on, until the set is imported or the server that is begun now answers.
            self._begin(wanted)
            return
        link, _ = self._listeners[wanted].accept()
        try:
            request = _receive(link)
        except (OSError, ValueError, KeyError) as error:
            print(f"a proxy has asked for nothing that could be read: {error}", file=sys.stderr)
            link.close()
            return
        if request is None:
            link.close()
            return
        if wanted in self._refusals:
            _tell(link, refused=self._refusals[wanted])
            link.close()
        elif (pid := _fork()) == 0:
            link.close()
            self._become_fork(request)
            return
        else:
            # A proxy that is gone has taken its fork with it.
            _tell(link, pid=pid)
            self._links[pid] = link
        request.close()

    def _fork_server(self, wanted: ImportSet) -> None:
        """Fork a server that imports a set and answers its proxies; in the fork ``_forked`` says so."""
        listener = self._listeners[wanted]
        self._selector.unregister(listener)
        if pid := os.fork():
            self._servers[pid] = wanted
        else:
            del self._listeners[wanted]
            self._become_fork(wanted)
            self._listeners = {wanted: listener}

    def _become_fork(self, forked: Request | ImportSet) -> None:
        """In a fork: let go of what is the server's."""
        signal.set_wakeup_fd(-1)
        self._selector.close()
        for descriptor in self._wakeup:
            os.close(descriptor)
        for one in (*self._links.values(), *self._listeners.values()):
            one.close()
        self._links.clear()
        self._servers.clear()
        self._forked = forked

    def _lose(self, wanted: ImportSet, status: int) -> None:
        """A server has ended: the next proxy begins another one, unless importing may be what ends it."""
        self._num_lost[wanted] += 1
        if self._num_lost[wanted] == MAX_LOST:
            self._refusals[wanted] = (
                f"its server has ended {MAX_LOST} times, at last with wait status {status}"
            )
        self._wait_for_proxies(wanted)

    def _collect(self) -> None:
        """Tell proxies how their forks have ended."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup[0], 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (wanted := self._servers.pop(pid, None)) is not None:
                self._lose(wanted, status)
            elif (link := self._links.pop(pid, None)) is not None:
                _tell(link, status=status)
                link.close()


def _fork() -> int:
    """Fork, with the signals of proxies blocked in the fork: they are for what it is to become."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    if pid := os.fork():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    return pid


def _tell(link: socket.socket, **answer: int | str) -> None:
    """Answer a proxy, which may be gone."""
    with contextlib.suppress(OSError):
        link.sendall(json.dumps(answer).encode() + b"\n")


def _receive(link: socket.socket) -> Request | None:
    """Receive what a proxy asks for; None from one that only waits for this server, and is gone before it
    asks.

    Raises:
        ValueError: it is something else, cut off, or from another user.
        OSError: the proxy is gone or takes too long.
    """
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        raise ValueError(f"it is of user {user}")
    link.settimeout(ASK_S)
    head, found, _, _ = socket.recv_fds(link, 4, MAX_DESCRIPTORS)
    if not head:
        return None
    try:
        body = b""
        while len(body) < int.from_bytes(head, "big") and (part := link.recv(1 << 16)):
            body += part
        words = json.loads(body)
        numbers = (*range(3), *words["kept"])
        streams, lives, kept = found[:3], found[3 : 3 + words["num_lives"]], found[3 + words["num_lives"] :]
        return Request(
            environment=words["environment"],
            folder=words["folder"],
            arguments=words["arguments"],
            starter=words["starter"],
            leads_group=words["leads_group"],
            group=words["group"],
            descriptors=dict(zip(numbers, (*streams, *kept), strict=True)),
            lives=lives,
        )
    except BaseException:
        for descriptor in found:
            os.close(descriptor)
        raise


def main() -> None:
    """Serve; in every fork, become what was asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--life", type=int, required=True)
    parser.add_argument("--listener", action="append", nargs=2, metavar=("IMPORT_SET", "DESCRIPTOR"))
    parser.add_argument("--begin", action="append", default=[], type=ImportSet)
    arguments = parser.parse_args()
    die_with(arguments.life)
    COMM.write_text(SERVER_NAME)
    for number in PASSED_ON:
        # As its proxies: whoever has started it says when it ends.
        signal.signal(number, lambda number, frame: None)
    # The place for the mark of a run: forks are of runs of their own.
    os.environ.pop(RUN_MARK)
    listeners = {
        ImportSet(name): socket.socket(fileno=int(descriptor)) for name, descriptor in arguments.listener
    }
    server = Server(listeners, arguments.life, dict(os.environ))
    become(server.serve(arguments.begin), set_by_imports=server.set_by_imports)


if __name__ == "__main__":
    main()
