"""How a call ends: its output and its result, or what is known if the box's code has broken the call."""

import asyncio
from dataclasses import dataclass

from forgeasync.environments.sandboxes.connection import CallChannel, CallLost, Connection
from forgeasync.environments.sandboxes.inside import wire
from forgeasync.environments.sandboxes.results import KilledBy, SandboxClosed, SandboxError

GRACE_S = 0.3
"""How long after the deadline a result may come. Then all processes of the box are killed: its code has
stopped the one that watches over the call."""

_CAUSES = {
    wire.LOST_TAMPERED: KilledBy.TAMPERING,
    wire.LOST_MEMORY: KilledBy.MEMORY,
    wire.LOST_PROCESSES: KilledBy.PROCESSES,
    wire.LOST_ASKED: KilledBy.ANOTHER_CALL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A call's end."""

    stdout: bytes
    stderr: bytes
    exit_code: int
    timed_out: bool
    goes_on: bool
    """Whether the session can be used again."""
    num_stdout_bytes_cut: int
    num_stderr_bytes_cut: int
    duration_s: float
    killed_by: KilledBy | None
    report: bytes
    """What the session's process says of the run; the box's code may have forged it."""


async def receive_ending(connection: Connection, channel: CallChannel, *, timeout_s: float) -> Ending:
    """Collect output until the call ends, and make sure that it does.

    Raises:
        SandboxClosed: the box was closed meanwhile.
        SandboxError: the box could not start a process.
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
            raise SandboxClosed("the box was closed during the call") from None
        if lost.cause == wire.LOST_NO_PROCESS:
            raise SandboxError("the box has no room for another process (max_processes)") from None
        cause = KilledBy.DEADLINE if loop.time() - started >= timeout_s else _CAUSES[lost.cause]
    stdout, stderr = (bytes(outputs[kind]) for kind in (wire.STDOUT, wire.STDERR))
    if done is None:
        return Ending(
            stdout=stdout,
            stderr=stderr,
            exit_code=-9,
            timed_out=cause is KilledBy.DEADLINE,
            goes_on=False,
            num_stdout_bytes_cut=0,
            num_stderr_bytes_cut=0,
            duration_s=loop.time() - started,
            killed_by=cause,
            report=b"",
        )
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
        killed_by=KilledBy.DEADLINE if timed_out else None,
        report=done[wire.RESULT.size :],
    )


def text(data: bytes) -> str:
    """Output as text; what is not UTF-8, or was cut in the middle of a character, is replaced."""
    return data.decode("utf-8", errors="replace")
