"""Supervisor of a sandbox, and the launcher that forks one supervisor per sandbox.

The launcher is one Python process that has loaded all modules, because starting Python in every sandbox would
take longer than the rest of the setup. A fork of it joins the namespaces that bubblewrap has made, before any
code of the sandbox runs, sets up the sandbox from inside and becomes its supervisor. The supervisor forks a
watcher for each call, reaps processes, and monitors memory and the number of processes.

A supervisor reads no data written by code in the sandbox. That code runs as the same user and can kill or
stop the supervisor. The host then ends the sandbox through its first process, which that code cannot reach.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed has no _signal
import _socket
import marshal
import os
import select
import sys
import time

from . import calls, setup, tree, wire

TYPE_CHECKING = False  # typing itself takes 13 ms to import
if TYPE_CHECKING:
    from typing import Any

WATCH_INTERVAL_S = 0.05
_END_LIMIT_S = 0.3
_MAX_SETTINGS_BYTES = 1 << 16


def main() -> None:
    """Run the launcher: fork a supervisor for each request until the host closes the socket."""
    host = _socket.socket(fileno=os.dup(1))
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    # A supervisor is a grandchild: when the process in between exits, the launcher adopts and later reaps it.
    setup.become_subreaper()
    # Otherwise "pkill python" in a sandbox would kill its supervisor.
    setup.rename("forgeasync-box")
    _signal.signal(_signal.SIGCHLD, lambda number, frame: tree.reap())
    # The host handles Ctrl-C.
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    while True:
        data, ancillary, _, _ = host.recvmsg(
            _MAX_SETTINGS_BYTES, _socket.CMSG_LEN(4), _socket.MSG_CMSG_CLOEXEC
        )
        if not data:
            os._exit(0)
        control = int.from_bytes(ancillary[0][2][:4], sys.byteorder)
        if os.fork() == 0:
            host.close()
            _launch(control, marshal.loads(data))
        os.close(control)


def _launch(control_fd: int, settings: dict[str, Any]) -> None:
    """Turn the forked process into the supervisor of a sandbox. Does not return."""
    try:
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        control = _socket.socket(fileno=control_fd)
        try:
            # Joining a pid namespace takes effect for the next fork only.
            final_user = setup.join(settings["holder"]) if settings["isolated"] else None
            if os.fork() != 0:
                os._exit(0)
            os.setsid()
            setup.enter(settings, final_user)
        except Exception as error:
            # The host raises the error.
            failure = wire.FAILED_SETUP + f"{type(error).__name__}: {error}".encode()
            control.sendall(failure)
            os._exit(1)
        control.sendall(wire.READY)
        Supervisor(control, settings).run()
    finally:
        # After any exception, this process must not continue as a second launcher.
        os._exit(0)


def _receive(sock: Any, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            sys.exit(0)
        data += part
    return data


class Supervisor:
    """Main loop of a supervisor: serves requests of the host, reaps processes and enforces limits."""

    def __init__(self, control: Any, settings: dict[str, Any]) -> None:
        self._control = control
        self._settings = settings
        self._calls: dict[int, int] = {}
        """Number of each call by the process id of its watcher."""
        self._next_watch = 0.0
        self._pid = os.getpid()
        self._wake_up, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        _signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        _signal.signal(_signal.SIGCHLD, lambda number, frame: None)

    def run(self) -> None:
        """Serve until the host closes the control socket."""
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        poll.register(self._wake_up, select.POLLIN)
        while True:
            watching = self._settings["isolated"] and bool(self._calls)
            for fd, _ in poll.poll(WATCH_INTERVAL_S * 1000 if watching else None):
                if fd == self._wake_up:
                    os.read(self._wake_up, 4096)
                elif not self._serve_ask():
                    self._end_all(wire.LOST_ASKED)
                    return
            self._reap()
            if watching and time.monotonic() >= self._next_watch:
                self._watch()
                self._next_watch = time.monotonic() + WATCH_INTERVAL_S

    def _serve_ask(self) -> bool:
        data, ancillary, _, _ = self._control.recvmsg(
            wire.ASK.size, _socket.CMSG_LEN(4), _socket.MSG_CMSG_CLOEXEC
        )
        if not data:
            return False
        ask, number = wire.ASK.unpack(data + _receive(self._control, wire.ASK.size - len(data)))
        if ask == wire.ASK_END_ALL:
            self._end_all(wire.LOST_ASKED)
            return True
        (_, _, fds) = ancillary[0]
        call_fd = int.from_bytes(fds[:4], sys.byteorder)
        try:
            pid = os.fork()
        except OSError:
            self._tell_lost(number, wire.LOST_NO_PROCESS)
            os.close(call_fd)
            return True
        if pid == 0:
            self._become_call(call_fd)
        os.close(call_fd)
        self._calls[pid] = number
        return True

    def _become_call(self, call_fd: int) -> None:
        code = 1
        try:
            _signal.set_wakeup_fd(-1)
            _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
            for fd in (self._wake_up, self._woken):
                os.close(fd)
            self._control.detach()
            calls.serve(_socket.socket(fileno=call_fd), self._settings)
            code = 0
        finally:
            # After any exception, this process must not continue as a second supervisor.
            os._exit(code)

    def _reap(self) -> None:
        tampered = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in self._calls and status == 0:
                del self._calls[pid]
            tampered |= pid in self._calls
        if tampered:
            # The processes of that call have lost their watcher and cannot be told apart from those of other
            # calls.
            self._end_all(wire.LOST_TAMPERED)

    def _watch(self) -> None:
        pids = [pid for pid in tree.all_pids() if pid != self._pid]
        most_bytes = self._settings["memory_bytes"]
        if len(pids) > self._settings["max_processes"] + setup.RESERVED_PROCESSES:
            self._end_all(wire.LOST_PROCESSES)
        elif (
            tree.resident_bytes(pids, shared_once=False) > most_bytes
            and tree.resident_bytes(pids, shared_once=True) > most_bytes
        ):
            self._end_all(wire.LOST_MEMORY)

    def _end_all(self, cause: int) -> None:
        if self._settings["isolated"]:
            tree.end_all_of_namespace()
            try:
                while True:
                    os.waitpid(-1, 0)
            except ChildProcessError:
                pass
        else:
            try:
                tree.end_descendants(_END_LIMIT_S)
            except tree.StillRunning:
                pass  # Without a namespace there is no stronger way; see docs/sandboxes.md.
        lost, self._calls = self._calls, {}
        for number in lost.values():
            self._tell_lost(number, cause)

    def _tell_lost(self, number: int, cause: int) -> None:
        try:
            self._control.sendall(wire.LOST.pack(number, cause))
        except OSError:
            return  # The host is gone; the loop ends when it next reads from the socket.
