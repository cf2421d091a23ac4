"""A replay buffer whose process dies or stops is noticed, and named."""

import asyncio
import os
import signal
import subprocess

import pytest

from forgeasync.actors import ActorDied, BufferWatch, buffer, supervised
from forgeasync.faults import FaultLog, Role
from tests.support.standing_still import CALL, standing_still

NUM_ANSWERS = 5


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer, "LOOK_S", 0.01)
    monkeypatch.setattr(supervised, "BEAT_S", 0.01)


async def _watched(number: signal.Signals | None, *, heartbeat_s: float) -> FaultLog:
    process = standing_still()
    num_answers = 0
    told: list[str] = []
    faults = FaultLog(tell=told.append)
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def answer() -> None:
        nonlocal num_answers
        if number is signal.SIGSTOP:
            await never
        num_answers += 1

    watch = BufferWatch(answer, pid=process.pid, heartbeat_s=heartbeat_s, faults=faults)
    watching = asyncio.create_task(watch.watch())
    try:
        if number is not None:
            os.kill(process.pid, number)
            with pytest.raises(ActorDied, match=rf"the buffer \(process {process.pid}\) is gone"):
                await watching
            assert process.wait() < 0, "it was killed, if it was not dead"
            assert (f"MainThread in {CALL} (" in told[0]) == (number is signal.SIGSTOP)
        else:
            while num_answers < NUM_ANSWERS:
                await asyncio.sleep(0.01)
            assert not watching.done()
    finally:
        watching.cancel()
        await watch.close()
        process.kill()
        process.wait()
    return faults


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
def test_a_buffer_that_is_gone_is_a_fault_that_ends_the_run(number: signal.Signals) -> None:
    faults = asyncio.run(_watched(number, heartbeat_s=0.1 if number is signal.SIGSTOP else 3600.0))
    (fault,) = faults.open
    assert fault.role is Role.BUFFER
    expected = "has not answered for buffer.heartbeat_s = 0.1 s" if number is signal.SIGSTOP else "has died"
    assert fault.what == expected


def test_a_buffer_that_answers_is_left_alone() -> None:
    assert not asyncio.run(_watched(None, heartbeat_s=0.1)).open


def test_a_death_that_ended_the_run_in_another_way_is_noted_at_the_end() -> None:
    """A call to the buffer fails before anybody looks at its process."""

    async def close_after_death() -> FaultLog:
        process = subprocess.Popen(["sleep", "1000"])
        faults = FaultLog()
        watch = BufferWatch(lambda: asyncio.sleep(0), pid=process.pid, heartbeat_s=8.0, faults=faults)
        process.kill()
        process.wait()
        await watch.close()
        await watch.close()
        return faults

    assert [fault.role for fault in asyncio.run(close_after_death()).open] == [Role.BUFFER]
