"""What every supervised pool does when a process dies, stops, hangs, starts slowly or cannot be started."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

from forgeasync.config import GeneratorSection
from forgeasync.generator import EngineStats
from forgeasync.observability import Role
from forgeasync.processes import marked_processes
from forgeasync.runtime import (
    LOCAL_HOST_ID,
    MAX_FAILED_STARTS,
    ActorDied,
    BufferProcess,
    GeneratorPool,
    Heartbeat,
    LocalHost,
    ProcessLost,
    RestartsFail,
    SupervisedPool,
    WorkerReport,
    supervised,
)
from tests.runtime.supervised_world import SupervisedWorld, answers, scorers, workers
from tests.runtime.supervised_world import started as started_pool
from tests.support.standing_still import CALL

SILENCE_S = 1.0
NUM_PLACES, MAX_RESTARTS = 2, 3

Pool = SupervisedPool[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A role that is filled by a pool."""

    role: Role
    build: Callable[[SupervisedWorld, float], Pool]
    """Given the limit of its heartbeat."""
    key: str
    """Config key of that limit."""
    who: str
    """What its messages call the first process."""
    gives_up: str
    """What the pool says after ``num_failures`` starts that fail in a row, after a loss."""
    num_failures: int = MAX_RESTARTS
    answer: object = None
    """To a heartbeat."""


def engines(role: Role, title: str, *, key: str) -> User:
    def build(world: SupervisedWorld, heartbeat_s: float) -> Pool:
        section = GeneratorSection(
            num_replicas=NUM_PLACES, heartbeat_s=heartbeat_s, max_restarts=MAX_RESTARTS
        )
        hosts = [LocalHost(LOCAL_HOST_ID, [])] * NUM_PLACES
        names = {"role": role, "title": title, "key": key}
        return GeneratorPool(world.spawn, world, section, hosts, **names)

    return User(
        role=role,
        build=build,
        key=f"{key}.heartbeat_s",
        who=f"{title} 0",
        gives_up=rf"{title} 0: 3 consecutive engines .*\({key}.max_restarts = 3\); the last one: ",
        answer=EngineStats(num_generated_tokens=10, busy_s=1.0),
    )


USERS = {
    "generator": engines(Role.GENERATOR, "generator", key="generator"),
    "teacher": engines(Role.TEACHER, "teacher t", key="teachers.t.engine"),
    "scorer": User(
        role=Role.SCORER,
        build=lambda world, heartbeat_s: scorers(
            world, num_replicas=NUM_PLACES, heartbeat_s=heartbeat_s, max_restarts=MAX_RESTARTS
        ),
        key="scorer.heartbeat_s",
        who="scorer 0",
        gives_up=r"scorer 0 was restarted 3 times .*\(scorer.max_restarts\); .* could not be started: ",
    ),
    "environment": User(
        role=Role.ENVIRONMENT,
        build=lambda world, heartbeat_s: workers(world, num_workers=NUM_PLACES, heartbeat_s=heartbeat_s),
        key="episodes.heartbeat_s",
        who="environment worker 0",
        gives_up=r"environment worker \d+ cannot be started: ",
        num_failures=MAX_FAILED_STARTS,
        answer=WorkerReport(num_stuck=0, num_killed_processes=0, serving=None),
    ),
}


def started(user: User, heartbeat_s: float = 3600.0) -> AbstractAsyncContextManager[SupervisedWorld]:
    return started_pool(
        lambda world: user.build(world, heartbeat_s),
        NUM_PLACES,
        script=lambda process: SimpleNamespace(
            beat=answers(process, user.answer), work=answers(process, user.answer)
        ),
        are_ended_by_monarch=user.role in (Role.GENERATOR, Role.TEACHER),
    )


@pytest.fixture(params=USERS)
def user(request: pytest.FixtureRequest) -> User:
    return USERS[request.param]


def never() -> Coroutine[None, None, bool]:
    return asyncio.Event().wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
async def test_a_process_that_is_gone_is_named_killed_and_replaced(
    user: User, number: signal.Signals
) -> None:
    is_stopped = number is signal.SIGSTOP
    async with started(user, SILENCE_S if is_stopped else 3600.0) as world:
        first = world.pool.at(0)
        calls = [asyncio.ensure_future(first.call(never)) for _ in range(2)]
        other = asyncio.ensure_future(world.pool.at(1).call(never))
        await asyncio.sleep(0)
        world.kill(number)
        await asyncio.wait(calls)
        for call in calls:
            with pytest.raises(ProcessLost, match=rf"{user.who} \(process {first.pid}\) is gone"):
                call.result()
        with pytest.raises(ProcessLost):
            await first.call(never)
        first.lose("is lost, which is no news")
        await world.until(lambda: not world.faults.open and world.num_stopped == 1)
        assert not other.done(), "calls to others go on"
        assert await world.pool.at(0).call(world.pool.at(0).actor.work.call_one) == user.answer
        counts = world.faults.metrics()
        role = user.role.value
        assert counts[f"faults/detected_{role}"] == counts[f"faults/recovered_{role}"] == 1
        why = f"has not answered for {user.key} = 1 s" if is_stopped else "has died"
        assert f"{user.who} (process {first.pid}) {why}" in world.told[0]
        assert (f"MainThread in {CALL} (" in world.told[0]) == is_stopped
        assert f"was replaced by process {world.pids()[0]}" in world.told[1]
        assert {one.rank: one.pid for one in world.listing.entries} == world.pids()
        (dead,) = (one for one in world.started if one.process.pid == first.pid)
        assert dead.process.wait() < 0, "also one that had stopped"
        assert not marked_processes(dead.mark), "nothing that it has started is left"
        other.cancel()


async def test_a_call_that_fails_with_its_process_is_a_loss(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Monarch knows of an end that nothing else shows."""
    monkeypatch.setattr(supervised, "DEATH_SEEN_S", 0.0)

    async def fails() -> None:
        raise SupervisionError("the proc has stopped")

    async with started(user) as world:
        with pytest.raises(ProcessLost):
            await world.pool.at(0).call(fails)
        assert "did not survive a failed call" in world.told[0]
        await world.until(lambda: not world.faults.open)


async def test_a_call_that_fails_by_itself_is_no_loss(user: User) -> None:
    async def fails() -> None:
        raise ValueError("one response")

    async with started(user) as world:
        with pytest.raises(ValueError, match="one response"):
            await world.pool.at(0).call(fails)
        assert not world.told


async def test_a_start_that_fails_is_repeated(user: User) -> None:
    async with started(user) as world:
        world.fails_to_start = lambda number: number == NUM_PLACES
        world.kill()
        await world.until(lambda: world.num_spawned == NUM_PLACES + 2 and not world.faults.open)
        assert len(world.pids()) == NUM_PLACES


async def test_starts_that_fail_again_and_again_end_the_run(user: User) -> None:
    async with started(user) as world:
        world.fails_to_start = lambda number: True
        world.kill()
        assert world.watching is not None
        with pytest.raises(RestartsFail, match=user.gives_up + "no such module"):
            await world.watching
        assert world.num_spawned == NUM_PLACES + user.num_failures
        assert [one.rank for one in world.listing.entries] == [1], "a lost process is not listed"
        assert len(world.faults.open) == 1, "it was not recovered from"


async def test_the_first_start_that_fails_is_told_as_it_is(user: User) -> None:
    world = SupervisedWorld(lambda world: user.build(world, 3600.0))
    world.fails_to_start = lambda number: number == 1
    with pytest.raises(ValueError, match="no such module"):
        await world.pool.start(NUM_PLACES)
    await world.pool.close()
    for one in world.started:
        await LocalHost(LOCAL_HOST_ID, []).kill(one.process.pid)
        one.process.wait()


async def test_a_process_that_is_starting_is_ended_with_the_others(user: User) -> None:
    async with started(user) as world:
        world.starts_slowly = True
        world.kill()
        await world.until(lambda: len(world.started) == NUM_PLACES + 1)


async def test_a_process_that_is_silent_at_the_end_is_killed(user: User) -> None:
    async with started(user) as world:
        silent = world.pool.at(0)
        world.kill(signal.SIGSTOP)
        await world.until(lambda: silent.heartbeat.is_late)
    assert not world.told, "which is no loss"


async def test_a_call_that_the_end_cuts_off_is_no_loss(user: User) -> None:
    async with started(user) as world:
        assert world.watching is not None
        world.watching.cancel()
        has_ended = asyncio.Event()

        async def cut_off() -> None:
            await has_ended.wait()
            raise SupervisionError("the proc has stopped")

        call = asyncio.ensure_future(world.pool.at(0).call(cut_off))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(world.pool.close())
        await asyncio.sleep(0)
        has_ended.set()
        await closing
        call.cancel()
        with contextlib.suppress(ProcessLost, asyncio.CancelledError):
            await call
        assert not world.told and world.num_spawned == NUM_PLACES


# --- Heartbeats ---


async def test_a_heartbeat_counts_silence_and_not_a_controller_that_stood_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(supervised.time, "monotonic", lambda: now_s)
    num_answers, is_well, has_answers = 0, True, asyncio.Event()

    async def beat() -> int:
        nonlocal num_answers
        if not is_well:
            await has_answers.wait()
        num_answers += 1
        return num_answers

    heard: list[int] = []
    heartbeat = Heartbeat(beat, limit_s=8.0, key="a.heartbeat_s", heard=heard.append)

    async def look(passed_s: float) -> str | None:
        nonlocal now_s
        now_s += passed_s
        what = heartbeat.look()
        for _ in range(3):
            await asyncio.sleep(0)
        return what

    for _ in range(100):
        assert await look(supervised.LOOK_S) is None
    assert heard[-1] > 10, "asked again and again"
    is_well = False
    for _ in range(5):
        # As after a stop of this process for an hour.
        assert await look(3600.0) is None
    silent = [await look(supervised.LOOK_S) for _ in range(16)]
    assert silent[0] is None and silent[-1] == "has not answered for a.heartbeat_s = 8 s"
    has_answers.set()
    await asyncio.sleep(0)
    await look(supervised.LOOK_S)
    assert await look(supervised.LOOK_S) is None, "it has answered"


# --- The buffer ---


def watched_buffer(heartbeat_s: float) -> AbstractAsyncContextManager[SupervisedWorld]:
    def build(world: SupervisedWorld) -> Pool:
        return BufferProcess(world.spawn, world, heartbeat_s=heartbeat_s)

    return started_pool(build, 1, are_ended_by_monarch=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_buffer_that_is_gone_is_a_fault_that_ends_the_run(number: signal.Signals) -> None:
    is_stopped = number is signal.SIGSTOP
    async with watched_buffer(SILENCE_S if is_stopped else 3600.0) as world:
        (pid,) = world.pids().values()
        world.kill(number)
        with pytest.raises(ActorDied, match=rf"the buffer \(process {pid}\) is gone"):
            await world.watching
        (fault,) = world.faults.open
        silent = "has not answered for buffer.heartbeat_s = 1 s"
        assert (fault.role, fault.what) == (Role.BUFFER, silent if is_stopped else "has died")


async def test_a_buffer_that_has_just_ended_the_run_in_another_way_is_noted_at_the_end() -> None:
    """A call to the buffer fails before anybody looks at its process."""
    async with watched_buffer(3600.0) as world:
        world.watching.cancel()
        world.kill()
        while psutil.Process(world.started[0].process.pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.01)
        await world.pool.close()
        await world.pool.close()
        assert [fault.role for fault in world.faults.open] == [Role.BUFFER]
