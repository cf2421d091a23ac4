"""Shell and Python sessions: many runs by one process in a box."""

import asyncio
import secrets
import shlex
import struct
from importlib import resources

from forgeasync.environments.sandboxes.connection import CallChannel, Connection
from forgeasync.environments.sandboxes.endings import Ending, receive_ending, text
from forgeasync.environments.sandboxes.inside import wire
from forgeasync.environments.sandboxes.results import PythonResult, SandboxError, SessionEnded, ShellResult

START_LIMIT_S = 30.0


def python_program() -> str:
    """The text of the program that a Python session runs."""
    return resources.files("forgeasync.environments.sandboxes.inside").joinpath("interpreter.py").read_text()


class Session:
    """What both kinds of sessions share: one run at a time, and an end that is remembered."""

    def __init__(self, connection: Connection, channel: CallChannel, *, output_bytes: int) -> None:
        self._connection = connection
        self._channel = channel
        self._output_bytes = output_bytes
        self._one_run = asyncio.Lock()
        self._why_ended: str | None = None

    async def _run(self, nonce: bytes, piece: bytes, *, timeout_s: float) -> Ending:
        async with self._one_run:
            if self._why_ended is not None:
                raise SessionEnded(f"the session has ended: {self._why_ended}; start another")
            # Until the end is known: a run that is cancelled half way leaves nothing that can be used.
            self._why_ended = "a run was cancelled"
            request = {"input": piece, "nonce": nonce, "timeout_s": timeout_s}
            try:
                await self._channel.send_object(request | {"output_bytes": self._output_bytes})
                ending = await receive_ending(self._connection, self._channel, timeout_s=timeout_s)
            except BaseException:
                self._channel.close()
                raise
            if ending.goes_on:
                self._why_ended = None
            else:
                self._end(ending)
            return ending

    def _end(self, ending: Ending) -> None:
        if ending.killed_by is None:
            self._why_ended = f"its process has ended with exit code {ending.exit_code}"
        else:
            self._why_ended = f"its process was killed ({ending.killed_by})"
        self._channel.close()

    async def close(self) -> None:
        """Kill the session's process and all that it has started."""
        if self._why_ended is None:
            self._why_ended = "it was closed"
        self._channel.close()


class ShellSession(Session):
    """A shell in a box."""

    _prepare = "exec 8>&2 9>&1\n"
    """Before the first run: the shell writes its marks to descriptors that commands do not have."""

    async def start(self) -> None:
        """Wait for the shell; raises SandboxError if it does not start."""
        result = await self.run(":", timeout_s=START_LIMIT_S)
        if result.session_ended:
            raise SandboxError(f"the box could not start a shell: {result.stderr.strip()[-300:]}")

    async def run(self, command: str, *, timeout_s: float) -> ShellResult:
        """Run a command; see ``Shell``."""
        nonce = secrets.token_hex(wire.NONCE_CHARACTERS // 2)
        # "command" keeps a shell alive whose syntax error would end it. No braces around it: after such an
        # error bash 5.2 does not know them in the next line. Commands cannot read what follows.
        piece = (
            f"command eval {shlex.quote(command)} </dev/null 8>&- 9>&-; __code=$?; "
            f"printf %s {nonce} >&8; printf %s%08x%s {nonce} ${{#__code}} $__code >&9\n"
        )
        prepare, self._prepare = self._prepare, ""
        ending = await self._run(nonce.encode(), (prepare + piece).encode(), timeout_s=timeout_s)
        return ShellResult(
            exit_code=_exit_code(ending.report) if ending.goes_on else ending.exit_code,
            stdout=text(ending.stdout),
            stderr=text(ending.stderr),
            timed_out=ending.timed_out,
            num_stdout_bytes_cut=ending.num_stdout_bytes_cut,
            num_stderr_bytes_cut=ending.num_stderr_bytes_cut,
            duration_s=ending.duration_s,
            killed_by=ending.killed_by,
            session_ended=not ending.goes_on,
        )


def _exit_code(report: bytes) -> int:
    if not (report.isdigit() and len(report) <= 3):
        raise SandboxError(f"the shell reports {report[:20]!r} as an exit code")
    return int(report)


class InterpreterSession(Session):
    """A Python interpreter in a box."""

    async def start(self) -> None:
        """Wait for the interpreter; raises SandboxError if it does not start."""
        result = await self.run("", timeout_s=START_LIMIT_S)
        if result.session_ended:
            raise SandboxError(f"the box could not start Python: {result.stderr.strip()[-300:]}")

    async def run(self, code: str, *, timeout_s: float) -> PythonResult:
        """Run code; see ``PythonSession``."""
        nonce = secrets.token_hex(wire.NONCE_CHARACTERS // 2).encode()
        body = code.encode("utf-8", "surrogatepass")
        # Its report has two texts and must fit into a frame.
        cap = min(self._output_bytes, wire.MAX_PAYLOAD_BYTES // 8)
        header = b"%s %d %d\n" % (nonce, len(body), cap)
        ending = await self._run(nonce, header + body, timeout_s=timeout_s)
        value, traceback, num_cut = _read_report(ending.report)
        return PythonResult(
            stdout=text(ending.stdout),
            stderr=text(ending.stderr),
            value=value,
            traceback=traceback,
            timed_out=ending.timed_out,
            num_stdout_bytes_cut=ending.num_stdout_bytes_cut,
            num_stderr_bytes_cut=ending.num_stderr_bytes_cut,
            num_report_bytes_cut=num_cut,
            duration_s=ending.duration_s,
            killed_by=ending.killed_by,
            session_ended=not ending.goes_on,
            exit_code=None if ending.goes_on else ending.exit_code,
        )


def _read_report(report: bytes) -> tuple[str | None, str, int]:
    """Split a report into value, traceback and cut bytes; the code that ran may have forged it."""
    if not report:
        return None, "", 0
    try:
        has_value, value_size, traceback_size, num_cut = wire.PYTHON_REPORT.unpack_from(report)
    except struct.error:
        raise SandboxError("the interpreter's report is too short") from None
    texts = report[wire.PYTHON_REPORT.size :]
    if len(texts) != value_size + traceback_size:
        raise SandboxError("the interpreter's report has another length than it says")
    value = text(texts[:value_size]) if has_value else None
    return value, text(texts[value_size:]), num_cut
