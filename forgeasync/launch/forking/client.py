"""The side of the process that starts others: has a server, and says how a process is started as its fork."""

import atexit
import contextlib
import functools
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from forgeasync.faults import RUN_MARK
from forgeasync.launch.forking import proxy
from forgeasync.launch.forking.fork import NO_MARK
from forgeasync.launch.forking.import_sets import ImportSet
from forgeasync.launch.forking.server import SERVER_NAME

logger = logging.getLogger(__name__)

ADDRESS = "FORGEASYNC_FORK_SERVER"
"""Variable with the address of a server that a process is given by the one that has started it."""

_NOT_COMPARED = ("FORGEASYNC_", "HYPERACTOR_", "MONARCH_", "PYTEST_", "TORCHINDUCTOR_CACHE_DIR")
"""Beginnings of variables that no import of a server depends on: ours, Monarch's, which only forks import,
pytest's, and one that torch sets when it is imported."""

OF_A_PROC = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Variables of procs without GPUs: two threads in each of several procs on few cores are several times slower
than one."""


END_S = 5.0
"""Seconds for killed servers to be gone: the kernel takes their memory back first."""

IMPORT_S = 300.0
"""Longest wait for a set to be imported."""


class ForkServer:
    """A server that imports as this process would now; its own one ends with this process."""

    def __init__(self, address: str) -> None:
        """``address`` is one that answers already."""
        self._address = address
        self._environment = dict(os.environ)
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._first: psutil.Process | None = None
        """The same: it knows whether its id has become another process's."""
        self._output: int | None = None

    @classmethod
    def start(cls, begun_with: Sequence[ImportSet]) -> "ForkServer":
        """Start one. What is ``begun_with`` is imported at once, all else with the first process that needs
        it."""
        server = cls(f"forgeasync-{secrets.token_hex(8)}")
        server._output = os.memfd_create("forgeasync-fork-server")
        # Here, not in the server: proxies can connect at once, and wait.
        listeners = {one: server._listener(one) for one in ImportSet}
        command = [sys.executable, "-m", "forgeasync.launch.forking.server", "--life", str(own_life())]
        for one, listener in listeners.items():
            command += ["--listener", one, str(listener.fileno())]
        for one in begun_with:
            command += ["--begin", one]
        try:
            server._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=server._output,
                stderr=server._output,
                env={**os.environ, **OF_A_PROC, RUN_MARK: NO_MARK},
                pass_fds=[own_life(), *(one.fileno() for one in listeners.values())],
            )
        finally:
            for listener in listeners.values():
                listener.close()
        server._first = psutil.Process(server._process.pid)
        return server

    def _listener(self, one: ImportSet) -> socket.socket:
        # An abstract socket leaves no file.
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._socket_name(one))
        listener.listen(128)
        return listener

    def _socket_name(self, one: ImportSet) -> str:
        return f"\0{self._address}-{one}"

    @property
    def address(self) -> str:
        """For the environment of a process that this one starts, as ``ADDRESS``."""
        return self._address

    @property
    def can_be_used(self) -> bool:
        """Whether it is there, and imports as this process would now; says why not."""
        if self._owner != os.getpid():
            return False
        now, then = _relevant(os.environ), _relevant(self._environment)
        if now != then:
            names = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
            logger.warning("procs are forked from a new server: these variables differ: %s", ", ".join(names))
            return False
        try:
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(self._socket_name(ImportSet.COMMON))
        except OSError:
            words = (
                "" if self._output is None else os.pread(self._output, 1 << 20, 0).decode(errors="replace")
            )
            logger.warning("the server that procs are forked from has ended: %s", words.strip()[-2000:])
            return False
        return True

    def arguments(
        self, wanted: ImportSet, *, lives: Sequence[int] | None = (), kept: Sequence[int] = ()
    ) -> list[str]:
        """Arguments of Python that start a proxy, to be followed by those of the process's own program.

        The process is killed when one of the pipes ``lives`` ends, or, with None, when the one that has
        started the proxy is gone. It has the descriptors ``kept``; the proxy has to inherit all of them.
        """
        numbers = [",".join(map(str, some)) or "-" for some in (lives or (), kept)]
        if lives is None:
            numbers[0] = proxy.PARENT
        return ["-I", "-S", str(Path(proxy.__file__)), f"{self._address}-{wanted}", *numbers]

    def wait(self, wanted: ImportSet) -> None:
        """Wait until a set is imported and its server answers, or will not, or takes too long, which it
        says."""
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(IMPORT_S)
            try:
                link.connect(self._socket_name(wanted))
                link.shutdown(socket.SHUT_WR)
                link.recv(1)
            except TimeoutError:
                logger.warning("the imports of %s procs have not ended after %.0f s", wanted, IMPORT_S)
            except OSError:
                # It is gone; what is started then imports its libraries itself, and says so.
                return

    def processes(self) -> set[int]:
        """Ids of the processes that are servers, and not forks of them; none of one that another process
        started."""
        if self._first is None or self._owner != os.getpid() or not self._first.is_running():
            return set()
        found = {self._first.pid}
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in self._first.children():
                # A fork may have ended meanwhile.
                with contextlib.suppress(psutil.NoSuchProcess):
                    if one.name() == SERVER_NAME:
                        found.add(one.pid)
        return found

    def end(self) -> None:
        """End the server, if it was started here, and wait until it is gone; its forks go on."""
        processes = self.processes()
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        end_s = time.monotonic() + END_S
        while any(map(_is_running, processes)) and time.monotonic() < end_s:
            time.sleep(0.01)
        if left := [pid for pid in processes if _is_running(pid)]:
            logger.warning("servers that procs are forked from do not end: processes %s", left)
        if self._process is not None and self._owner == os.getpid():
            self._process.poll()
            self._process = self._first = None
        if self._output is not None:
            os.close(self._output)
            self._output = None


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@functools.cache
def own_life() -> int:
    """The end for reading of a pipe that ends with this process, which alone has the other end."""
    reading, _ = os.pipe()
    # Proxies, which Monarch starts, hand it on.
    os.set_inheritable(reading, True)
    return reading


def _relevant(environment: Mapping[str, str]) -> dict[str, str]:
    variables = {**environment, **OF_A_PROC}
    return {name: value for name, value in variables.items() if not name.startswith(_NOT_COMPARED)}


_server: ForkServer | None = None
"""That of this process."""


def fork_server(begun_with: Sequence[ImportSet] = ()) -> ForkServer:
    """The server of this process: the one that it was given, or one that it starts, if that cannot be
    used."""
    global _server
    if _server is None and (address := os.environ.pop(ADDRESS, None)) is not None:
        _server = ForkServer(address)
    if _server is not None:
        if _server.can_be_used:
            return _server
        _server.end()
    _server = ForkServer.start(begun_with)
    # The pipe ends it too, but only after this process is gone.
    atexit.register(_server.end)
    return _server


def server_processes() -> set[int]:
    """Ids of the processes that are this process's servers, and not forks of them."""
    return set() if _server is None else _server.processes()


NVIDIA_DEVICE = Path("/dev/nvidiactl")

AHEAD = (ImportSet.GENERATOR, ImportSet.CONTROLLER, ImportSet.TRAINER)
"""What a run needs. Generators come first: their imports take longest, in a server of their own."""

WITHOUT_PROCS = {"-h", "--help", "--dry-run", "--supervise"}
"""Options of apps with which a command starts no procs by itself."""


def has_gpus() -> bool:
    """Whether this machine has NVIDIA GPUs, found without importing anything."""
    return NVIDIA_DEVICE.exists()


def fork_app(command: Sequence[str]) -> None:
    """Have a fork of a server be the app, so that it shares what it imports with its procs.

    This process, which has imported nothing yet, passes signals on and ends as the app does.

    ``command`` is the whole command line (``sys.orig_argv``). Returns where this process is to be the app
    itself: with GPUs, where procs are no forks; for a command without procs; in such a fork; where Python was
    started in another way than with ``-m`` alone, as debuggers and profilers do. In the last two cases the
    libraries of procs are imported by the server meanwhile.
    """
    if WITHOUT_PROCS & set(command) or has_gpus():
        return
    is_given = ADDRESS in os.environ
    server = fork_server(AHEAD)
    main = sys.modules["__main__"].__spec__
    if is_given or main is None or list(command[1:3]) != ["-m", main.name]:
        return
    server.wait(ImportSet.CONTROLLER)
    os.environ[ADDRESS] = server.address
    try:
        status = proxy.stand_for(
            f"{server.address}-{ImportSet.CONTROLLER}", lives=[], kept=[], arguments=list(command[1:])
        )
    except proxy.NoFork as reason:
        del os.environ[ADDRESS]
        logger.warning("this process imports its libraries itself: %s", reason)
        return
    server.end()
    proxy.end_as(status)
