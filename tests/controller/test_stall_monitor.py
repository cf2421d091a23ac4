"""A run whose trainer hangs while its processes answer: the real loops, and a process whose stack is read."""

import asyncio
from collections.abc import Mapping

import pytest

from apps.grpo import GrpoRun
from forgeasync.controller import stall_monitor
from forgeasync.observability import Role
from forgeasync.runtime import LOCAL_HOST_ID, LocalHost, Proc, stalls
from forgeasync.trainer import StepResult
from tests.support.loops import Console, Fleet, Recorder, Trainer, make_config, make_run
from tests.support.standing_still import CALL, standing_still

FLOOR_S = 0.5


class HangingTrainer(Trainer):
    """It never makes its third step until it is told to; only from then on a run can stand still."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = asyncio.Event()
        self.may_end = asyncio.Event()
        self.hangs = False

    async def train_items(self, minibatches: object, *, step: int) -> StepResult:
        if step == 3:
            self.hangs = True
            stalls.FIRST_FLOOR_S = FLOOR_S
            await self.goes_on.wait()
        if step > 3:
            await self.may_end.wait()
        return await super().train_items(minibatches, step=step)  # type: ignore[arg-type]


class ToldConsole(Console):
    def __init__(self) -> None:
        self.told: list[str] = []
        self.num_looks = 0

    def now(self, metrics: Mapping[str, float]) -> None:
        self.num_looks += 1

    def alarm(self, text: str) -> None:
        self.told.append(text)


def start(trainer: Trainer, console: Console) -> GrpoRun:
    recorder = Recorder()
    recorder.console = console
    return make_run(make_config("max_steps=4"), trainer=trainer, recorder=recorder)


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_monitor, "LOOK_S", 0.01)
    monkeypatch.setattr(stalls, "FIRST_FLOOR_S", 3600.0)


@pytest.mark.usefixtures("quickly")
async def test_a_loop_that_waits_for_ever_is_named_with_its_call_and_the_stacks() -> None:
    trainer, console, fleet = HangingTrainer(), ToldConsole(), Fleet()
    run = start(trainer, console)
    process = standing_still()
    host = LocalHost(LOCAL_HOST_ID, [])
    fleet.procs.append(Proc(role="scorer", rank=0, pid=process.pid, host=host))
    running = asyncio.ensure_future(run.run(fleet))  # type: ignore[arg-type]
    told = console.told
    try:
        while not (trainer.hangs and any(CALL in line for line in told)):
            assert not running.done(), running
            await asyncio.sleep(0.01)
        assert run.counters()["stall/num_found"] >= 1
        trainer.goes_on.set()
        while not any("stall: ended" in line for line in told):
            await asyncio.sleep(0.01)
        trainer.may_end.set()
        await running
    finally:
        process.kill()
        process.wait()
    assert any(
        line.startswith("stall: nothing has moved for ") and "the run keeps waiting" in line for line in told
    )
    (waits, *_) = [line for line in told if line.startswith("stall: the controller waits in ")]
    train = "GrpoRun.train (apps/grpo.py:"
    call = "result = await self.trainer.train_items(minibatches, step=step)"
    assert train in waits and call in waits
    assert "self.buffer.until(" in waits, "what the other loops wait for"
    assert any(f"MainThread in {CALL} (" in line and line.startswith("stall: scorer 0 (") for line in told)
    assert any(line.startswith("stall: ended after ") for line in told)


@pytest.mark.usefixtures("quickly")
async def test_a_run_that_is_held_up_by_a_known_fault_does_not_stand_still() -> None:

    trainer, console = HangingTrainer(), ToldConsole()
    run = start(trainer, console)
    fault = run.faults.detected(Role.TRAINER, "trainer rank 0", "has died")
    running = asyncio.ensure_future(run.run(Fleet()))  # type: ignore[arg-type]
    while not trainer.hangs:
        await asyncio.sleep(0.01)
    num_looks = console.num_looks
    while console.num_looks < num_looks + 2 * FLOOR_S / stall_monitor.LOOK_S:
        await asyncio.sleep(0.01)
    assert run.counters()["stall/num_found"] == 0 and not console.told
    run.faults.recovered(fault, "was replaced")
    trainer.goes_on.set()
    trainer.may_end.set()
    await running
