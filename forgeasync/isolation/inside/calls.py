"""The process that watches over one call of a box.

It starts the command, sends its output to the host and ends it in time. The process is a subreaper, so
everything that the command starts, however detached, stays below it and can be killed. It exits with 0 if
nothing is left. After any other exit code, or if code in the box kills it, the supervisor kills all processes
of the box.

A call runs one command, or is a session: many runs, one after the other, by one process (a shell or a Python
interpreter). Each run of a session ends where both output streams show a mark that was made up for that run:
a random text, and on standard output the length of a report and the report itself (the exit code of a shell,
the value of Python).
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
"""How a run ends; broken: the host has closed the call, or a mark is followed by no valid report."""


def serve(sock: Any, settings: dict[str, Any]) -> None:
    """Serve the call at the other end of a socket; after an exception processes of it may still run."""
    setup.become_watcher()
    reader = Reader(sock)
    frames = reader.wait()
    if not frames:
        return
    request = marshal.loads(frames[0][1])
    outbox = Outbox(sock)
    try:
        command = Command(request, settings, outbox)
    except OSError as error:
        outbox.put(wire.FAILED, f"{type(error).__name__}: {error}".encode())
        outbox.send_all()
        reader.discard()
        return
    call = Call(command, reader, outbox)
    if request["session"]:
        call.run_session(frames[1:])
    else:
        call.run_command(request, frames[1:])


class Command:
    """A command that has been started, and what it has started."""

    def __init__(self, request: dict[str, Any], settings: dict[str, Any], outbox: Outbox) -> None:
        self.started = time.monotonic()
        stdin, self.stdin = os.pipe2(os.O_CLOEXEC)
        out, stdout = os.pipe2(os.O_CLOEXEC)
        err, stderr = os.pipe2(os.O_CLOEXEC)
        self.pid = os.fork()
        if self.pid == 0:
            _become(request, settings, (stdin, stdout, stderr))
        for fd in (stdin, stdout, stderr):
            os.close(fd)
        os.set_blocking(self.stdin, False)
        self.outputs = (Output(out, wire.STDOUT, outbox), Output(err, wire.STDERR, outbox))
        self.ended_fd = os.pidfd_open(self.pid)

    def exit_code(self) -> int:
        """Wait for the end of the command itself."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def end(self) -> None:
        """Kill the command and all that it has started; raises StillRunning if that takes too long."""
        tree.end_descendants(_END_LIMIT_S)


def _become(request: dict[str, Any], settings: dict[str, Any], fds: tuple[int, int, int]) -> None:
    """In the new process: become the command. Does not return."""
    try:
        os.setsid()
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        # Also what nobody thought of: a socket of ours in a command would be a way to the host.
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
    """As os.execvpe, which imports for 2 ms first."""
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
    """The runs of one process: one to its own end, or one after the other in a session."""

    def __init__(self, command: Command, reader: Reader, outbox: Outbox) -> None:
        self._command = command
        self._reader = reader
        self._outbox = outbox
        self._streams = tuple(_MarkedStream(output) for output in command.outputs)

    def run_command(self, request: dict[str, Any], frames: list[tuple[int, bytes]]) -> None:
        """Run the process to its end or its deadline. Frames are its standard input."""
        self._run(request, [payload for _, payload in frames], self._command.started)
        self._reader.discard()

    def run_session(self, frames: list[tuple[int, bytes]]) -> None:
        """Serve runs until the process ends, a deadline passes or the host closes the call."""
        while True:
            for _, payload in frames:
                request = marshal.loads(payload)
                if not self._run(request, [request["input"]], time.monotonic()):
                    self._reader.discard()
                    return
            frames = self._reader.wait()
            if not frames:
                self._command.end()
                return

    def _run(self, request: dict[str, Any], stdin: list[bytes], started: float) -> bool:
        """Serve one run; whether the session goes on."""
        nonce = request.get("nonce", b"")
        for stream, has_report in zip(self._streams, (True, False), strict=True):
            stream.start(nonce, request["output_bytes"], has_report=has_report)
        ending = self._pump(stdin, started + request["timeout_s"], is_session=bool(nonce))
        exit_code, report, goes_on = 0, b"", ending == _MARKED
        if goes_on:
            report = self._streams[0].report
        else:
            exit_code = self._command.exit_code() if ending == _PROCESS_ENDED else -tree.KILL
            # Before the host hears of the end, all that the process has started is gone.
            self._command.end()
            for stream in self._streams:
                stream.drain()
        seconds = time.monotonic() - started
        cut = [stream.output.num_cut for stream in self._streams]
        result = wire.RESULT.pack(exit_code, ending == _TIMED_OUT, goes_on, *cut, seconds)
        self._outbox.put(wire.DONE, result + report)
        self._outbox.send_all()
        return goes_on

    def _pump(self, stdin: list[bytes], deadline: float, *, is_session: bool) -> int:
        """Pass input and output on until the run ends; how it has ended."""
        while not all(stream.is_marked for stream in self._streams):
            if (left_s := deadline - time.monotonic()) <= 0:
                return _TIMED_OUT
            ready = self._poll(left_s, wants_input=bool(stdin))
            has_output = [stream for stream in self._streams if stream.output.fd in ready]
            if not all(stream.feed() for stream in has_output):
                return _BROKEN
            if stdin and self._command.stdin in ready:
                _feed(self._command, stdin)
            if self._reader.fileno() in ready:
                self._outbox.send()
                if ready[self._reader.fileno()] & (select.POLLIN | select.POLLHUP):
                    stdin += [payload for _, payload in self._reader.receive()]
                    if self._reader.ended:
                        return _BROKEN
            # In a session output comes first: a run may have marked its end before the process has ended.
            if self._command.ended_fd in ready and not (is_session and has_output):
                return _PROCESS_ENDED
        return _MARKED

    def _poll(self, left_s: float, *, wants_input: bool) -> dict[int, int]:
        poll = select.poll()
        poll.register(self._command.ended_fd, select.POLLIN)
        # A host that has gone is seen even while it is not read from.
        events = (0 if wants_input else select.POLLIN) | (0 if self._outbox.is_empty else select.POLLOUT)
        poll.register(self._reader.fileno(), events)
        if wants_input:
            poll.register(self._command.stdin, select.POLLOUT)
        if not self._outbox.is_full:
            for stream in self._streams:
                if not stream.is_marked and not stream.output.ended:
                    poll.register(stream.output.fd, select.POLLIN)
        return dict(poll.poll(left_s * 1000 + 1))


def _feed(command: Command, stdin: list[bytes]) -> None:
    """Write to the command's standard input; an empty part closes it."""
    if not stdin[0]:
        stdin.clear()
        os.close(command.stdin)
        return
    try:
        stdin[0] = stdin[0][os.write(command.stdin, stdin[0]) :]
    except BlockingIOError:
        return
    except BrokenPipeError:
        # The command does not read: take what comes, as a pipe without a reader would.
        stdin[0] = b""
    if not stdin[0]:
        del stdin[0]


class _MarkedStream:
    """An output stream in which the runs of a session are told apart by marks."""

    def __init__(self, output: Output) -> None:
        self.output = output
        self.is_marked = False
        self.report = b""
        self._nonce = b""
        self._has_report = False
        self._data = bytearray()
        """Read, and neither passed on nor part of a mark yet."""
        self._found = False

    def start(self, nonce: bytes, cap_bytes: int, *, has_report: bool) -> None:
        self.output.start(cap_bytes)
        self._nonce, self._has_report = nonce, has_report
        self.is_marked = self._found = False

    def feed(self) -> bool:
        """Read once; False if a mark is followed by no valid report."""
        if not self._nonce:
            self.output.pass_on(self.output.pump())
            return True
        self._data += self.output.pump()
        if not self._found:
            begin = self._data.find(self._nonce)
            self._found = begin >= 0
            # A mark may have come in part.
            end = begin if self._found else max(0, len(self._data) - len(self._nonce) + 1)
            self.output.pass_on(bytes(self._data[:end]))
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
        self.output.pass_on(bytes(self._data))
        self._data.clear()
        self.output.drain()


class Outbox:
    """Frames that wait for room in the socket."""

    def __init__(self, sock: Any) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._pending = bytearray()

    @property
    def is_full(self) -> bool:
        """Whether to stop reading output until the host has taken some."""
        return len(self._pending) > _MOST_PENDING_BYTES

    @property
    def is_empty(self) -> bool:
        return not self._pending

    def put(self, kind: int, payload: bytes) -> None:
        self._pending += wire.FRAME.pack(kind, len(payload)) + payload
        self.send()

    def send(self) -> None:
        """Send what fits now."""
        try:
            while self._pending:
                del self._pending[: self._sock.send(self._pending)]
        except BlockingIOError:
            return
        except ConnectionError:
            # The host has closed the call; the reader sees it too, and the command is ended.
            self._pending.clear()

    def send_all(self) -> None:
        """Wait until all is sent, or the host has closed the call."""
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLOUT)
        self.send()
        while self._pending:
            poll.poll()
            self.send()


class Output:
    """One of a command's output streams."""

    def __init__(self, fd: int, kind: int, outbox: Outbox) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.ended = False
        self.num_cut = 0
        self._kind = kind
        self._outbox = outbox
        self._room = 0

    def start(self, cap_bytes: int) -> None:
        """Begin a run, of which at most so many bytes are passed on."""
        self._room = cap_bytes
        self.num_cut = 0

    def pump(self) -> bytes:
        """Read once and return what was read; empty if there is nothing now, or the stream has ended."""
        try:
            data = os.read(self.fd, wire.CHUNK_BYTES)
        except BlockingIOError:
            return b""
        self.ended = not data
        return data

    def pass_on(self, data: bytes) -> None:
        """Send as much of ``data`` as there is room for, and count the rest."""
        if kept := data[: self._room]:
            self._outbox.put(self._kind, kept)
        self._room -= len(kept)
        self.num_cut += len(data) - len(kept)

    def drain(self) -> None:
        """Pass on what is in the pipe; a process that could not be ended may still fill it."""
        for _ in range(_MOST_READS_OF_A_PIPE):
            if not (data := self.pump()):
                return
            self.pass_on(data)


class Reader:
    """Frames that come from the host."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._data = bytearray()
        self.ended = False

    def fileno(self) -> int:
        return self._sock.fileno()

    def receive(self) -> list[tuple[int, bytes]]:
        """Take what has come; ``ended`` is set once the host has closed the socket."""
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
        """Wait for the next frames; none once the host has closed the socket."""
        while not self.ended:
            poll = select.poll()
            poll.register(self._sock.fileno(), select.POLLIN)
            poll.poll()
            if frames := self.receive():
                return frames
        return []

    def discard(self) -> None:
        """Throw away what comes until the host closes the socket.

        If this end closed first, with frames unread, the host would find its connection reset, and might lose
        what it has not read yet.
        """
        while self.wait():
            self._data.clear()
