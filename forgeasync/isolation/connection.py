"""Host side of a sandbox's supervisor: starts it, sends calls, receives their results, and ends the sandbox.

Supervisors are forks of a launcher: a Python process without installed packages that runs the modules of
``inside``, which are compiled here and sent to it. All sandboxes of this process share one launcher, which
exits with the process.

Blocking operations (starting a process, waiting for its exit) run in threads to keep the event loop free. A
connection belongs to the event loop that opened it.
"""

import asyncio
import contextlib
import functools
import marshal
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from typing import Any, ParamSpec, TypeVar

from forgeasync.isolation.backend import KilledBy, SandboxClosed, SandboxError, SandboxUnavailable
from forgeasync.isolation.inside import wire

P = ParamSpec("P")
R = TypeVar("R")

START_LIMIT_S = 30.0
"""Time limit for a supervisor, or the process of a session, to start."""
END_LIMIT_S = 0.5
"""Time limit for the cause of a lost call to arrive, and for a supervisor without a ``Holder`` to exit."""
_ANSWER_LIMIT_S = 0.3
"""Time limit for a supervisor to confirm that it killed all processes; then the whole sandbox is ended."""
_FULL_PAUSE_S = 0.005
_MAX_ERROR_BYTES = 4096
_NUM_THREADS = 8
GRACE_S = 0.3
"""Time after the deadline in which a result may still arrive. After that all processes of the sandbox are
killed, because code in the sandbox must have stopped the call's watcher."""

_MODULES = ("wire", "tree", "seccomp", "setup", "calls", "supervisor")
"""Modules of ``inside`` in import order: each one imports only modules before it."""

_BOOT = """
import marshal, posix, sys
def read(size):
    data = b""
    while len(data) < size:
        part = posix.read(0, size - len(data))
        if not part:
            posix._exit(0)
        data += part
    return data
def module(name, code):
    made = sys.modules[name] = type(sys)(name)
    made.__package__ = "inside"
    exec(code, made.__dict__)
    return made
package = module("inside", "__path__ = []")
for name, code in marshal.loads(read(int.from_bytes(read(4), "little"))):
    setattr(package, name, module("inside." + name, code))
package.supervisor.main()
"""
_HEADER_BYTES = 4
_CLOSED = (BrokenPipeError, ConnectionResetError, ConnectionRefusedError)


class Launcher:
    """A running launcher process."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [os.path.realpath(sys.executable), "-I", "-S", "-c", _BOOT],
                stdin=subprocess.PIPE,
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                env={"PATH": os.defpath, "LANG": "C.UTF-8"} | kept,
                cwd="/",
                start_new_session=True,
            )
        program = compiled_program()
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(len(program).to_bytes(_HEADER_BYTES, "little") + program)

    def launch(self, settings: Mapping[str, object], control: socket.socket) -> bool:
        """Start a supervisor and pass it the socket ``control``; returns False if the launcher is gone."""
        try:
            socket.send_fds(self._socket, [marshal.dumps(dict(settings))], [control.fileno()])
        except _CLOSED:
            self._socket.close()
            self._process.wait()
            return False
        return True


_lock = threading.Lock()
_launchers: list[Launcher] = []


def _forget() -> None:
    # A launcher belongs to the process that started it.
    global _lock
    _lock = threading.Lock()
    _launchers.clear()


os.register_at_fork(after_in_child=_forget)


def launch(settings: Mapping[str, object], control: socket.socket) -> None:
    """Start a supervisor with ``settings``. Blocks; the first call also waits for the launcher to start."""
    with _lock:
        if not _launchers:
            _launchers.append(Launcher())
        if not _launchers[0].launch(settings, control):
            # The launcher was killed: start another one.
            _launchers[0] = Launcher()
            if not _launchers[0].launch(settings, control):
                raise SandboxUnavailable("the launcher of sandboxes ends as soon as it is started")


@functools.cache
def compiled_program() -> bytes:
    """Return the modules of ``inside``, compiled and marshalled for this version of Python."""
    folder = resources.files("forgeasync.isolation.inside")
    sources = [(name, folder.joinpath(f"{name}.py").read_text(encoding="utf-8")) for name in _MODULES]
    return marshal.dumps([(name, compile(text, f"<{name}>", "exec")) for name, text in sources])


@functools.cache
def _threads() -> ThreadPoolExecutor:
    # A separate pool, because blocking steps of environments may occupy all threads of the event loop's. The
    # threads must live as long as this process: a sandbox is killed when the thread that started it exits.
    return ThreadPoolExecutor(max_workers=_NUM_THREADS, thread_name_prefix="sandbox")


os.register_at_fork(after_in_child=_threads.cache_clear)


async def in_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a blocking function in the thread pool of the sandboxes."""
    return await asyncio.get_running_loop().run_in_executor(
        _threads(), functools.partial(function, *args, **kwargs)
    )


class CallLost(Exception):
    """Raised when a call has ended without a result."""

    def __init__(self, cause: int) -> None:
        super().__init__(f"call lost ({cause})")
        self.cause = cause
        """One of the ``LOST_*`` constants of wire.py."""


class CallChannel:
    """Channel of one call: sends frames to the watcher of the call and receives frames from it."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        lost: "asyncio.Future[int]",
        on_close: Callable[[], object],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._lost = lost
        self._on_close = on_close

    async def send(self, kind: int, payload: bytes) -> None:
        """Send a frame; waits while the socket's buffer is full. Does not raise if the call has died."""
        self._writer.write(wire.FRAME.pack(kind, len(payload)) + payload)
        # If the call has died, receive() raises CallLost.
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def send_object(self, request: Mapping[str, object]) -> None:
        """Send a frame of kind ``REQUEST``."""
        await self.send(wire.REQUEST, marshal.dumps(dict(request)))

    async def receive(self) -> tuple[int, bytes]:
        """Return the next frame.

        Raises:
            CallLost: the call has died.
            SandboxError: the sandbox sent an invalid frame, or could not start the command.
        """
        try:
            kind, size = wire.FRAME.unpack(await self._reader.readexactly(wire.FRAME.size))
            if size > wire.MAX_PAYLOAD_BYTES:
                raise SandboxError(f"the sandbox sent a frame of {size} bytes")
            payload = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise CallLost(await self._cause()) from None
        if kind == wire.FAILED:
            raise SandboxError(f"the sandbox could not start a process: {payload.decode(errors='replace')}")
        return kind, payload

    async def _cause(self) -> int:
        try:
            return await asyncio.wait_for(asyncio.shield(self._lost), END_LIMIT_S)
        except TimeoutError:
            return wire.LOST_TAMPERED

    def close(self) -> None:
        """End the call; the watcher then kills all processes that the call started."""
        self._writer.close()
        self._on_close()


class Connection:
    """Connection to the supervisor of one sandbox; made by ``open``."""

    def __init__(self, control: socket.socket, end_sandbox: Callable[[], None] | None) -> None:
        self._control = control
        self._end_sandbox = end_sandbox
        self._lost: dict[int, asyncio.Future[int]] = {}
        self._next_call = 0
        self._one_end = threading.Lock()
        self._ended = False
        self._listener: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, settings: Mapping[str, object], *, limit_s: float, end_sandbox: Callable[[], None] | None = None
    ) -> "Connection":
        """Start a supervisor and wait until it has set up the sandbox.

        ``end_sandbox`` ends the whole sandbox from outside; it is also called if ``open`` fails. Without it,
        the supervisor itself kills the processes that it can find.

        Raises:
            SandboxUnavailable: the sandbox could not be set up, or was not ready within ``limit_s``.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        connection = cls(ours, end_sandbox)
        try:
            with theirs:
                await in_thread(launch, settings, theirs)
            async with asyncio.timeout(limit_s):
                answer = await asyncio.get_running_loop().sock_recv(ours, _MAX_ERROR_BYTES)
        except TimeoutError:
            await connection.close()
            raise SandboxUnavailable(f"the sandbox was not ready within {limit_s} s") from None
        except BaseException:
            await connection.close()
            raise
        if answer != wire.READY:
            await connection.close()
            text = answer.removeprefix(wire.FAILED_SETUP).decode(errors="replace") or "its supervisor died"
            raise SandboxUnavailable(f"the sandbox could not be set up: {text}")
        connection._listener = asyncio.create_task(connection._listen())
        return connection

    async def _listen(self) -> None:
        """Receive the causes of lost calls until the supervisor exits; then end the sandbox and all calls."""
        loop = asyncio.get_running_loop()
        data = b""
        while True:
            try:
                part = await loop.sock_recv(self._control, wire.CHUNK_BYTES)
            except OSError:
                part = b""
            if not part:
                break
            data += part
            while len(data) >= wire.LOST.size:
                number, cause = wire.LOST.unpack_from(data)
                data = data[wire.LOST.size :]
                if (lost := self._lost.get(number)) is not None and not lost.done():
                    lost.set_result(cause)
        # Code in the sandbox has killed the supervisor. All other processes end before a call learns of it.
        await asyncio.shield(in_thread(self._end))
        self._mark_ended(wire.LOST_TAMPERED)

    def _mark_ended(self, cause: int) -> None:
        self._ended = True
        for lost in self._lost.values():
            if not lost.done():
                lost.set_result(cause)

    @property
    def has_ended(self) -> bool:
        """True once the supervisor is gone."""
        return self._ended

    async def call(self) -> CallChannel:
        """Start the watcher of a new call and return the call's channel; closing the channel ends the call.

        Raises:
            SandboxClosed: the supervisor is gone.
        """
        if self._ended:
            raise SandboxClosed("the sandbox has ended")
        ours, theirs = socket.socketpair()
        try:
            number, self._next_call = self._next_call, self._next_call + 1
            lost = self._lost[number] = asyncio.get_running_loop().create_future()
            try:
                await self._ask(wire.ASK_CALL, number, theirs)
            finally:
                theirs.close()
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            self._lost.pop(number, None)
            raise
        return CallChannel(reader, writer, lost, on_close=functools.partial(self._lost.pop, number, None))

    async def _ask(self, what: int, number: int, attached: socket.socket | None = None) -> None:
        fds = [] if attached is None else [attached.fileno()]
        while True:
            try:
                socket.send_fds(self._control, [wire.ASK.pack(what, number)], fds)
                return
            except BlockingIOError:
                await asyncio.sleep(_FULL_PAUSE_S)
            except OSError:
                raise SandboxClosed("the sandbox has ended") from None

    async def end_all(self) -> None:
        """Kill all processes of calls; ends the whole sandbox if the supervisor does not confirm the kill."""
        waiting = [one for one in self._lost.values() if not one.done()]
        await self._ask(wire.ASK_END_ALL, 0)
        if waiting:
            done, _ = await asyncio.wait(
                waiting, timeout=_ANSWER_LIMIT_S, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                await self.close()

    async def close(self) -> None:
        """End the supervisor and all processes of the sandbox; returns when they are gone."""
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait([self._listener])
        self._mark_ended(wire.LOST_CLOSED)
        # The thread finishes even if this task is cancelled, so nothing is left behind.
        await asyncio.shield(in_thread(self._end))

    def _end(self) -> None:
        with self._one_end:
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_WR)
            if self._end_sandbox is None:
                _wait_for_end(self._control)
            else:
                self._end_sandbox()
            self._control.close()


def _wait_for_end(control: socket.socket) -> None:
    """Wait, at most ``END_LIMIT_S`` per read, until the supervisor has killed its processes and exited."""
    if control.fileno() < 0:
        return
    control.settimeout(END_LIMIT_S)
    with contextlib.suppress(OSError):
        while control.recv(wire.CHUNK_BYTES):
            pass


_CAUSES = {
    wire.LOST_TAMPERED: KilledBy.TAMPERING,
    wire.LOST_MEMORY: KilledBy.MEMORY,
    wire.LOST_PROCESSES: KilledBy.PROCESSES,
    wire.LOST_ASKED: KilledBy.ANOTHER_CALL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Result of a call, or of one run of a session, before it is decoded."""

    stdout: bytes
    stderr: bytes
    exit_code: int
    timed_out: bool
    goes_on: bool
    """True if the session can run more."""
    num_stdout_bytes_cut: int
    num_stderr_bytes_cut: int
    duration_s: float
    killed_by: KilledBy | None
    report: bytes
    """Report of the session's process about the run; code in the sandbox may have forged it."""

    def outcome(self) -> dict[str, Any]:
        """Return the fields shared by the results of commands and of sessions."""
        return {
            "stdout": text(self.stdout),
            "stderr": text(self.stderr),
            "timed_out": self.timed_out,
            "num_stdout_bytes_cut": self.num_stdout_bytes_cut,
            "num_stderr_bytes_cut": self.num_stderr_bytes_cut,
            "duration_s": self.duration_s,
            "killed_by": self.killed_by,
        }


async def receive_ending(connection: Connection, channel: CallChannel, *, timeout_s: float) -> Ending:
    """Collect output until the call, or the run of a session, ends; return its result.

    If no result arrives within ``timeout_s`` plus ``GRACE_S``, all processes of the sandbox are killed.

    Raises:
        SandboxClosed: the sandbox was closed during the call.
        SandboxError: the sandbox could not start a process, or sent an invalid frame.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    outputs = {wire.STDOUT: bytearray(), wire.STDERR: bytearray()}
    cause: KilledBy | None = None
    done: bytes | None = None
    try:
        async with asyncio.timeout(timeout_s + GRACE_S):
            while done is None:
                kind, payload = await channel.receive()
                if kind == wire.DONE:
                    done = payload
                else:
                    outputs[kind] += payload
    except TimeoutError:
        cause = KilledBy.DEADLINE
        await connection.end_all()
    except CallLost as lost:
        if lost.cause == wire.LOST_CLOSED:
            raise SandboxClosed("the sandbox was closed during the call") from None
        if lost.cause == wire.LOST_NO_PROCESS:
            raise SandboxError("the sandbox has no room for another process (max_processes)") from None
        cause = KilledBy.DEADLINE if loop.time() - started >= timeout_s else _CAUSES[lost.cause]
    stdout, stderr = (bytes(outputs[kind]) for kind in (wire.STDOUT, wire.STDERR))
    if done is None:
        done = wire.RESULT.pack(-9, cause is KilledBy.DEADLINE, False, 0, 0, loop.time() - started)
    exit_code, timed_out, goes_on, cut_out, cut_err, seconds = wire.RESULT.unpack_from(done)
    return Ending(
        stdout=stdout,
        stderr=stderr,
        exit_code=exit_code,
        timed_out=bool(timed_out),
        goes_on=bool(goes_on),
        num_stdout_bytes_cut=cut_out,
        num_stderr_bytes_cut=cut_err,
        duration_s=seconds,
        killed_by=KilledBy.DEADLINE if timed_out else cause,
        report=done[wire.RESULT.size :],
    )


def text(data: bytes) -> str:
    """Decode output as UTF-8; replaces invalid bytes and a character that was cut in the middle."""
    return data.decode("utf-8", errors="replace")
