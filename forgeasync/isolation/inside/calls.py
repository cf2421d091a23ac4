"""Watcher of one call in a sandbox: starts the command, sends its output and enforces its deadline.

The watcher is a subreaper, so all processes that the command starts, however detached, stay its descendants
and can be killed. It exits with 0 if no process is left. After any other exit code, or if code in the sandbox
kills the watcher, the supervisor kills all processes of the sandbox.

A call runs either one command or a session. A session is a sequence of runs by one process (a shell or a
Python interpreter). A run ends when both output streams contain the mark of that run, a random nonce. On
standard output the nonce is followed by the length of a report and the report itself (the exit code of a
shell command, or the value of Python code).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed has no _signal
import marshal
import os
import select
import time

from . import setup, tree, wire

TYPE_CHECKING = False  # typing itself takes 13 ms to import
if TYPE_CHECKING:
    from typing import Any

_END_LIMIT_S = 0.3
_EXIT_CODE_NOT_STARTED = 127
_ENOENT = 2
_MOST_DESCRIPTORS = 1 << 20
_SIGNALS_THAT_PYTHON_IGNORES = (13, 25)
_MOST_PENDING_BYTES = 4 * wire.CHUNK_BYTES
_MOST_READS_OF_A_PIPE = 32
"""The kernel lets ordinary users make a pipe of up to 1 MiB."""

_MARKED, _TIMED_OUT, _PROCESS_ENDED, _BROKEN = 1, 2, 3, 4
"""Endings of a run. Broken: the host has closed the call, or a mark is not followed by a valid report."""


def serve(sock: Any, settings: dict[str, Any]) -> None:
    """Serve the call at the other end of a socket. After an exception, processes of it may still run."""
    setup.become_watcher()
    reader = Reader(sock)
    frames = reader.wait()
    if not frames:
        return
    request = marshal.loads(frames[0][1])
    outbox = Outbox(sock)
    try:
        call = Call(request, settings, reader, outbox)
    except OSError as error:
        outbox.put(wire.FAILED, f"{type(error).__name__}: {error}".encode())
        outbox.send_all()
        reader.discard()
        return
    if request["session"]:
        call.run_session(frames[1:])
    else:
        call.run_command(request, frames[1:])


def _become(request: dict[str, Any], settings: dict[str, Any], fds: tuple[int, int, int]) -> None:
    """Turn the forked process into the command. Does not return."""
    try:
        os.setsid()
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        # Close all other descriptors, known or not: an inherited socket would give the command a way to the
        # host.
        os.closerange(len(fds), _MOST_DESCRIPTORS)
        for number in _SIGNALS_THAT_PYTHON_IGNORES:
            _signal.signal(number, _signal.SIG_DFL)
        setup.limit_resources(settings)
        os.chdir(request["folder"])
        _execute(request["argv"], request["env"])
    except OSError as error:
        os.write(2, f"{request['argv'][0]}: {error.strerror}\n".encode())
    finally:
        os._exit(_EXIT_CODE_NOT_STARTED)


def _execute(argv: list[str], env: dict[str, str]) -> None:
    """Execute a program found in PATH, like os.execvpe, whose imports take 2 ms."""
    name = argv[0]
    found = OSError(_ENOENT, os.strerror(_ENOENT))
    for folder in [""] if "/" in name else env.get("PATH", os.defpath).split(os.pathsep):
        try:
            os.execve(os.path.join(folder, name), argv, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            found = error
    raise found


class Call:
    """A running command: a single run until the process exits, or several in sequence in a session."""

    def __init__(
        self, request: dict[str, Any], settings: dict[str, Any], reader: Reader, outbox: Outbox
    ) -> None:
        self._reader = reader
        self._outbox = outbox
        self._started = time.monotonic()
        stdin, self._stdin = os.pipe2(os.O_CLOEXEC)
        out, stdout = os.pipe2(os.O_CLOEXEC)
        err, stderr = os.pipe2(os.O_CLOEXEC)
        self._pid = os.fork()
        if self._pid == 0:
            _become(request, settings, (stdin, stdout, stderr))
        for fd in (stdin, stdout, stderr):
            os.close(fd)
        os.set_blocking(self._stdin, False)
        self._outputs = (Output(out, wire.STDOUT, outbox), Output(err, wire.STDERR, outbox))
        self._ended_fd = os.pidfd_open(self._pid)

    def run_command(self, request: dict[str, Any], frames: list[tuple[int, bytes]]) -> None:
        """Run the process until it exits or its deadline passes. ``frames`` are its standard input."""
        self._run(request, [payload for _, payload in frames], self._started)
        self._reader.discard()

    def run_session(self, frames: list[tuple[int, bytes]]) -> None:
        """Serve runs until the process exits, a deadline passes or the host closes the call."""
        while True:
            for _, payload in frames:
                request = marshal.loads(payload)
                if not self._run(request, [request["input"]], time.monotonic()):
                    self._reader.discard()
                    return
            frames = self._reader.wait()
            if not frames:
                tree.end_descendants(_END_LIMIT_S)
                return

    def _run(self, request: dict[str, Any], stdin: list[bytes], started: float) -> bool:
        """Serve one run and send its result; returns whether the session continues."""
        nonce = request.get("nonce", b"")
        for output, has_report in zip(self._outputs, (True, False), strict=True):
            output.start(nonce, request["output_bytes"], has_report=has_report)
        ending = self._pump(stdin, started + request["timeout_s"], is_session=bool(nonce))
        exit_code, report, goes_on = 0, b"", ending == _MARKED
        if goes_on:
            report = self._outputs[0].report
        else:
            exit_code = -tree.KILL
            if ending == _PROCESS_ENDED:
                exit_code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            # All processes that the command started must be gone before the host learns of the end.
            tree.end_descendants(_END_LIMIT_S)
            for output in self._outputs:
                output.drain()
        seconds = time.monotonic() - started
        cut = [output.num_cut for output in self._outputs]
        result = wire.RESULT.pack(exit_code, ending == _TIMED_OUT, goes_on, *cut, seconds)
        self._outbox.put(wire.DONE, result + report)
        self._outbox.send_all()
        return goes_on

    def _pump(self, stdin: list[bytes], deadline: float, *, is_session: bool) -> int:
        """Forward input and output until the run ends; returns how it ended."""
        while not all(output.is_marked for output in self._outputs):
            if (left_s := deadline - time.monotonic()) <= 0:
                return _TIMED_OUT
            ready = self._poll(left_s, wants_input=bool(stdin))
            has_output = [output for output in self._outputs if output.fd in ready]
            if not all(output.feed() for output in has_output):
                return _BROKEN
            if stdin and self._stdin in ready:
                self._feed(stdin)
            if self._reader.fileno() in ready:
                self._outbox.send()
                if ready[self._reader.fileno()] & (select.POLLIN | select.POLLHUP):
                    stdin += [payload for _, payload in self._reader.receive()]
                    if self._reader.ended:
                        return _BROKEN
            # In a session, read the output first: it may contain the mark of a run that ended before the
            # process exited.
            if self._ended_fd in ready and not (is_session and has_output):
                return _PROCESS_ENDED
        return _MARKED

    def _poll(self, left_s: float, *, wants_input: bool) -> dict[int, int]:
        poll = select.poll()
        poll.register(self._ended_fd, select.POLLIN)
        # poll reports a hang-up of the host even when POLLIN is not requested.
        events = (0 if wants_input else select.POLLIN) | (0 if self._outbox.is_empty else select.POLLOUT)
        poll.register(self._reader.fileno(), events)
        if wants_input:
            poll.register(self._stdin, select.POLLOUT)
        if not self._outbox.is_full:
            for output in self._outputs:
                if not output.is_marked and not output.ended:
                    poll.register(output.fd, select.POLLIN)
        return dict(poll.poll(left_s * 1000 + 1))

    def _feed(self, stdin: list[bytes]) -> None:
        """Write the first part of ``stdin`` to the command's standard input; an empty part closes it."""
        if not stdin[0]:
            stdin.clear()
            os.close(self._stdin)
            return
        try:
            stdin[0] = stdin[0][os.write(self._stdin, stdin[0]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            # The command has closed its standard input: discard the data.
            stdin[0] = b""
        if not stdin[0]:
            del stdin[0]


class Outbox:
    """Queue of frames to the host that do not fit into the socket's buffer yet."""

    def __init__(self, sock: Any) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._pending = bytearray()

    @property
    def is_full(self) -> bool:
        """True if no more output should be read until the host has received some."""
        return len(self._pending) > _MOST_PENDING_BYTES

    @property
    def is_empty(self) -> bool:
        return not self._pending

    def put(self, kind: int, payload: bytes) -> None:
        self._pending += wire.FRAME.pack(kind, len(payload)) + payload
        self.send()

    def send(self) -> None:
        """Send as much as fits without blocking."""
        try:
            while self._pending:
                del self._pending[: self._sock.send(self._pending)]
        except BlockingIOError:
            return
        except ConnectionError:
            # The host has closed the call. The reader detects that too, and the command is killed.
            self._pending.clear()

    def send_all(self) -> None:
        """Block until everything is sent or the host has closed the call."""
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLOUT)
        self.send()
        while self._pending:
            poll.poll()
            self.send()


class Output:
    """One of a command's output streams. In a session, marks separate the runs."""

    def __init__(self, fd: int, kind: int, outbox: Outbox) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.ended = False
        self.num_cut = 0
        self.is_marked = False
        self.report = b""
        self._kind = kind
        self._outbox = outbox
        self._room = 0
        self._nonce = b""
        self._has_report = False
        self._data = bytearray()
        """Bytes that were read, but not yet forwarded or recognized as a mark."""
        self._found = False

    def start(self, nonce: bytes, cap_bytes: int, *, has_report: bool) -> None:
        """Start a run, of which at most ``cap_bytes`` bytes are forwarded."""
        self._room = cap_bytes
        self.num_cut = 0
        self._nonce, self._has_report = nonce, has_report
        self.is_marked = self._found = False

    def feed(self) -> bool:
        """Read once and forward output; returns False if a mark is not followed by a valid report."""
        if not self._nonce:
            self._pass_on(self._pump())
            return True
        self._data += self._pump()
        if not self._found:
            begin = self._data.find(self._nonce)
            self._found = begin >= 0
            # Keep the end, which may be the first part of a mark.
            end = begin if self._found else max(0, len(self._data) - len(self._nonce) + 1)
            self._pass_on(bytes(self._data[:end]))
            del self._data[:end]
        return not self._found or self._read_report()

    def _read_report(self) -> bool:
        if not self._has_report:
            del self._data[: wire.NONCE_CHARACTERS]
            self.is_marked = True
            return True
        if len(self._data) < wire.MARK_CHARACTERS:
            return True
        try:
            size = int(self._data[wire.NONCE_CHARACTERS : wire.MARK_CHARACTERS], 16)
        except ValueError:
            return False
        end = wire.MARK_CHARACTERS + size
        if not 0 <= size <= wire.MAX_PAYLOAD_BYTES // 2:
            return False
        if len(self._data) >= end:
            self.report = bytes(self._data[wire.MARK_CHARACTERS : end])
            del self._data[:end]
            self.is_marked = True
        return True

    def drain(self) -> None:
        """Forward the contents of the pipe; bounded, since a process that was not killed may still write."""
        self._pass_on(bytes(self._data))
        self._data.clear()
        for _ in range(_MOST_READS_OF_A_PIPE):
            if not (data := self._pump()):
                return
            self._pass_on(data)

    def _pump(self) -> bytes:
        """Read once and return the bytes; empty if none are available or the stream has ended."""
        try:
            data = os.read(self.fd, wire.CHUNK_BYTES)
        except BlockingIOError:
            return b""
        self.ended = not data
        return data

    def _pass_on(self, data: bytes) -> None:
        """Forward ``data`` up to the cap of the run, and count the rest as cut."""
        if kept := data[: self._room]:
            self._outbox.put(self._kind, kept)
        self._room -= len(kept)
        self.num_cut += len(data) - len(kept)


class Reader:
    """Reader of the frames that the host sends."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._data = bytearray()
        self.ended = False

    def fileno(self) -> int:
        return self._sock.fileno()

    def receive(self) -> list[tuple[int, bytes]]:
        """Return the complete frames that have arrived; sets ``ended`` if the host has closed the socket."""
        try:
            part = self._sock.recv(wire.CHUNK_BYTES)
        except BlockingIOError:
            return []
        except ConnectionError:
            part = b""
        self.ended = not part
        self._data += part
        frames = []
        while len(self._data) >= wire.FRAME.size:
            kind, size = wire.FRAME.unpack_from(self._data)
            end = wire.FRAME.size + size
            if len(self._data) < end:
                break
            frames.append((kind, bytes(self._data[wire.FRAME.size : end])))
            del self._data[:end]
        return frames

    def wait(self) -> list[tuple[int, bytes]]:
        """Block until the next frames arrive; returns no frames once the host has closed the socket."""
        while not self.ended:
            poll = select.poll()
            poll.register(self._sock.fileno(), select.POLLIN)
            poll.poll()
            if frames := self.receive():
                return frames
        return []

    def discard(self) -> None:
        """Discard frames until the host closes the socket.

        If this end closed first while frames were unread, the host's connection would be reset, and the host
        might lose data that it has not read yet.
        """
        while self.wait():
            self._data.clear()
