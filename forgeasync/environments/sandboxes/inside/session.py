"""A call that serves many runs, one after the other, by one process: a shell or a Python interpreter.

Each run ends where both of its output streams show a mark that was made up for it: a random text, and on
standard output the length of a report and the report itself (the shell's exit code, Python's value).
"""

from __future__ import annotations

import marshal
import os
import select
import time

from . import tree, wire
from .outbox import Outbox, Output, Reader

TYPE_CHECKING = False  # typing itself takes 13 ms to import
if TYPE_CHECKING:
    from typing import Any

    from .calls import Command


class Session:
    """The runs of one process."""

    def __init__(self, command: Command, reader: Reader, outbox: Outbox) -> None:
        self._command = command
        self._reader = reader
        self._outbox = outbox
        self._streams = tuple(_MarkedStream(output) for output in command.outputs)

    def run(self, frames: list[tuple[int, bytes]]) -> None:
        """Serve runs until the process ends, a deadline passes or the host closes the call."""
        while True:
            for _, payload in frames:
                if not self._run(marshal.loads(payload)):
                    self._reader.discard()
                    return
            frames = self._reader.wait()
            if not frames:
                self._command.end()
                return

    def _run(self, request: dict[str, Any]) -> bool:
        """Serve one run; whether the session goes on."""
        started = time.monotonic()
        for stream, has_report in zip(self._streams, (True, False), strict=True):
            stream.start(request["nonce"], request["output_bytes"], has_report=has_report)
        ending = self._pump_until_marked(request["input"], started + request["timeout_s"])
        exit_code, report, goes_on = 0, b"", ending == _MARKED
        if goes_on:
            report = self._streams[0].report
        else:
            exit_code = self._command.exit_code() if ending == _PROCESS_ENDED else -tree.KILL
            # Before the host hears that the deadline has passed, all that the session has started is gone.
            self._command.end()
            for stream in self._streams:
                stream.drain()
        seconds = time.monotonic() - started
        cut = [stream.output.num_cut for stream in self._streams]
        result = wire.RESULT.pack(exit_code, ending == _TIMED_OUT, goes_on, *cut, seconds)
        self._outbox.put(wire.DONE, result + report)
        self._outbox.send_all()
        return goes_on

    def _pump_until_marked(self, left: bytes, deadline: float) -> int:
        while not all(stream.is_marked for stream in self._streams):
            if (left_s := deadline - time.monotonic()) <= 0:
                return _TIMED_OUT
            ready = self._poll(left_s, wants_input=bool(left))
            for stream in self._streams:
                if stream.output.fd in ready and not stream.feed():
                    return _FORGED
            if left and self._command.stdin in ready:
                left = self._write(left)
            if self._reader.fileno() in ready:
                self._outbox.send()
                if ready[self._reader.fileno()] & (select.POLLIN | select.POLLHUP):
                    self._reader.receive()
                    if self._reader.ended:
                        return _FORGED
            # Output first: a process that ends has marked nothing, but may have written.
            if self._command.ended_fd in ready and not any(one.output.fd in ready for one in self._streams):
                return _PROCESS_ENDED
        return _MARKED

    def _poll(self, left_s: float, *, wants_input: bool) -> dict[int, int]:
        poll = select.poll()
        poll.register(self._command.ended_fd, select.POLLIN)
        events = select.POLLIN | (0 if self._outbox.is_empty else select.POLLOUT)
        poll.register(self._reader.fileno(), events)
        if wants_input:
            poll.register(self._command.stdin, select.POLLOUT)
        if not self._outbox.is_full:
            for stream in self._streams:
                if not stream.is_marked and not stream.output.ended:
                    poll.register(stream.output.fd, select.POLLIN)
        return dict(poll.poll(left_s * 1000 + 1))

    def _write(self, left: bytes) -> bytes:
        try:
            return left[os.write(self._command.stdin, left) :]
        except BlockingIOError:
            return left
        except BrokenPipeError:
            return b""  # It does not read: it ends, or its deadline passes.


_MARKED, _TIMED_OUT, _PROCESS_ENDED, _FORGED = 1, 2, 3, 4


class _MarkedStream:
    """An output stream in which runs are told apart by marks."""

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
