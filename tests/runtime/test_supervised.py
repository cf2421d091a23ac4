"""What every supervised pool does when a process dies, stops, hangs, starts slowly or cannot be started.

The processes are real, and the actors beside them are scripted.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

from forgeasync.config import EpisodesSection, GeneratorSection, ScorerSection
from forgeasync.generator import EngineStats
from forgeasync.observability import FaultLog, ProcessListFile, Role
from forgeasync.processes import WORKER_MARK, marked_processes
from forgeasync.runtime import (
    LOCAL_HOST_ID,
    MAX_FAILED_STARTS,
    ActorDied,
    BufferProcess,
    EnvironmentPool,
    GeneratorPool,
    Heartbeat,
    LocalHost,
    ProcessLost,
    RestartsFail,
    Scorers,
    Spawned,
    SupervisedPool,
    WorkerReport,
    supervised,
)
from tests.support.loops import Endpoint
from tests.support.standing_still import CALL, standing_still

SILENCE_S = 1.0
NUM_PLACES, MAX_RESTARTS = 2, 3

Pool = SupervisedPool[Any]
Build = Callable[[Callable[..., Awaitable[Any]], float, FaultLog, ProcessListFile], Pool]


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A role that is filled by a pool."""

    role: Role
    key: str
    """Config key of its heartbeat."""
    build: Build
    who: str
    """What its messages call the first process."""
    num_failures: int
    """Starts that fail in a row, after a loss, until the pool gives up."""
    gives_up: str
    """What the pool says then."""
    answer: object = None
    """To a heartbeat."""


def generators(role: Role, title: str) -> Build:
    def build(
        spawn: Callable[..., Any], heartbeat_s: float, faults: FaultLog, listing: ProcessListFile
    ) -> Pool:
        section = GeneratorSection(
            num_replicas=NUM_PLACES, heartbeat_s=heartbeat_s, max_restarts=MAX_RESTARTS
        )
        hosts = [LocalHost(LOCAL_HOST_ID, [])] * NUM_PLACES
        return GeneratorPool(spawn, section, hosts, faults=faults, listing=listing, role=role, title=title)

    return build


def scorers(
    spawn: Callable[..., Any], heartbeat_s: float, faults: FaultLog, listing: ProcessListFile
) -> Pool:
    section = ScorerSection(num_replicas=NUM_PLACES, heartbeat_s=heartbeat_s, max_restarts=MAX_RESTARTS)
    return Scorers(spawn, section, limit_s=3600.0, faults=faults, listing=listing)


def workers(
    spawn: Callable[..., Any], heartbeat_s: float, faults: FaultLog, listing: ProcessListFile
) -> Pool:
    section = EpisodesSection(num_workers=NUM_PLACES, heartbeat_s=heartbeat_s)
    return EnvironmentPool(
        spawn,
        section,
        num_agents=1,
        tell=lambda line: None,
        faults=faults,
        listing=listing,
    )


STATS = EngineStats(num_generated_tokens=10, busy_s=1.0)
USERS = {
    "generator": User(
        role=Role.GENERATOR,
        key="generator.heartbeat_s",
        build=generators(Role.GENERATOR, "generator"),
        who="generator 0",
        num_failures=MAX_RESTARTS,
        gives_up=r"generator 0: 3 engines in a row .*\(generator.max_restarts = 3\); the last one: ",
        answer=STATS,
    ),
    "teacher": User(
        role=Role.TEACHER,
        key="generator.heartbeat_s",
        build=generators(Role.TEACHER, "teacher t"),
        who="teacher t 0",
        num_failures=MAX_RESTARTS,
        gives_up=r"teacher t 0: 3 engines in a row .*\(generator.max_restarts = 3\); the last one: ",
        answer=STATS,
    ),
    "scorer": User(
        role=Role.SCORER,
        key="scorer.heartbeat_s",
        build=scorers,
        who="scorer 0",
        num_failures=MAX_RESTARTS,
        gives_up=r"scorer 0 was restarted 3 times .*\(scorer.max_restarts\); .* could not be started: ",
    ),
    "environment": User(
        role=Role.ENVIRONMENT,
        key="episodes.heartbeat_s",
        build=workers,
        who="environment worker 0",
        num_failures=MAX_FAILED_STARTS,
        gives_up=r"environment worker \d+ cannot be started: ",
        answer=WorkerReport(num_stuck=0, num_killed_processes=0, serving=None),
    ),
}


class World:
    """A pool, and the processes that it has started."""

    def __init__(self, user: User, *, heartbeat_s: float) -> None:
        self.user = user
        self.told: list[str] = []
        self.faults, self.listing = FaultLog(tell=self.told.append), ProcessListFile()
        self.pool = user.build(self._spawn, heartbeat_s, self.faults, self.listing)
        self.processes: list[Any] = []
        self.num_spawned = self.num_stopped = 0
        self.fails_to_start: Callable[[int], bool] = lambda number: False
        self.starts_slowly: Callable[[int], bool] = lambda number: False
        self.watching: asyncio.Task[None] | None = None

    async def _spawn(self, rank: int, number: int) -> "Spawned[Any]":
        spawned, self.num_spawned = self.num_spawned, self.num_spawned + 1
        if self.fails_to_start(spawned):
            raise ValueError("no such module")
        mark = f"supervised-{os.getpid()}-{id(self)}-{len(self.processes)}"
        # The second process is what the first one has started, and does not end with it.
        process = standing_still(child=True, env=os.environ | {WORKER_MARK: mark})
        self.processes.append(SimpleNamespace(popen=process, pid=process.pid, mark=mark))
        if self.starts_slowly(spawned):
            try:
                await asyncio.Event().wait()
            finally:
                # As a real start does that is given up.
                process.kill()
                for one in marked_processes(mark):
                    one.kill()

        async def answer() -> object:
            status = psutil.STATUS_ZOMBIE
            with contextlib.suppress(psutil.Error):
                status = psutil.Process(process.pid).status()
            if status in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                await asyncio.Event().wait()
            return self.user.answer

        async def stop() -> None:
            self.num_stopped += 1

        actor = SimpleNamespace(beat=Endpoint(answer), work=Endpoint(answer))
        return Spawned(actor=actor, pid=process.pid, mark=mark, stop=stop)

    async def until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            assert self.watching is None or not self.watching.done(), self.watching
            await asyncio.sleep(0.01)

    def pids(self) -> dict[int, int]:
        """Process by place."""
        return {one.rank: one.pid for one in self.pool.replicas}


@contextlib.asynccontextmanager
async def started(user: User, *, heartbeat_s: float = 3600.0) -> AsyncIterator[World]:
    """A pool that is watched; nothing of it is left afterwards."""
    world = World(user, heartbeat_s=heartbeat_s)
    try:
        await world.pool.start(NUM_PLACES)
        world.watching = asyncio.create_task(world.pool.watch())
        yield world
    finally:
        if world.watching is not None:
            world.watching.cancel()
        await world.pool.close()
        num_spawned = world.num_spawned
        if user.role in (Role.GENERATOR, Role.TEACHER):
            # Monarch ends those that answer.
            for one in world.processes:
                if one.pid in world.pids().values():
                    await world.pool.replicas[0].host.kill(one.pid)
        for one in world.processes:
            assert one.popen.wait() is not None
            while marked_processes(one.mark):
                await asyncio.sleep(0.01)
        assert world.num_spawned == num_spawned, "nothing is started after the end"


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "LOOK_S", 0.01)
    monkeypatch.setattr(supervised, "BEAT_S", 0.01)
    monkeypatch.setattr(supervised, "RETRY_S", 0.0)


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
    async with started(user, heartbeat_s=SILENCE_S if is_stopped else 3600.0) as world:
        first = world.pool.at(0)
        calls = [asyncio.ensure_future(first.call(never)) for _ in range(2)]
        other = asyncio.ensure_future(world.pool.at(1).call(never))
        await asyncio.sleep(0)
        os.kill(first.pid, number)
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
        (dead,) = (one for one in world.processes if one.pid == first.pid)
        assert dead.popen.wait() < 0, "also one that had stopped"
        assert not marked_processes(dead.mark), "nothing that it has started is left"
        other.cancel()


async def test_a_call_that_fails_with_its_process_is_a_loss(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Monarch knows of an end that nothing else shows."""
    monkeypatch.setattr(supervised, "SEEN_S", 0.0)

    async def fails() -> None:
        raise SupervisionError("the proc has stopped")

    async with started(user) as world:
        with pytest.raises(ProcessLost):
            await world.pool.at(0).call(fails)
        assert "is gone, as a call has shown" in world.told[0]
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
        os.kill(world.pids()[0], signal.SIGKILL)
        await world.until(lambda: world.num_spawned == NUM_PLACES + 2 and not world.faults.open)
        assert len(world.pids()) == NUM_PLACES


async def test_starts_that_fail_again_and_again_end_the_run(user: User) -> None:
    async with started(user) as world:
        world.fails_to_start = lambda number: True
        os.kill(world.pids()[0], signal.SIGKILL)
        assert world.watching is not None
        with pytest.raises(RestartsFail, match=user.gives_up + "no such module"):
            await world.watching
        assert world.num_spawned == NUM_PLACES + user.num_failures
        assert len(world.faults.open) == 1, "it was not recovered from"


async def test_the_first_start_that_fails_is_told_as_it_is(user: User) -> None:
    world = World(user, heartbeat_s=3600.0)
    world.fails_to_start = lambda number: number == 1
    with pytest.raises(ValueError, match="no such module"):
        await world.pool.start(NUM_PLACES)
    await world.pool.close()
    for one in world.processes:
        await LocalHost(LOCAL_HOST_ID, []).kill(one.pid)
        one.popen.wait()


async def test_a_process_that_is_starting_is_ended_with_the_others(user: User) -> None:
    async with started(user) as world:
        world.starts_slowly = lambda number: True
        os.kill(world.pids()[0], signal.SIGKILL)
        await world.until(lambda: len(world.processes) == NUM_PLACES + 1)


async def test_a_process_that_is_silent_at_the_end_is_killed(user: User) -> None:
    async with started(user) as world:
        silent = world.pool.at(0)
        os.kill(silent.pid, signal.SIGSTOP)
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
    monkeypatch.undo()
    now_s = 1000.0
    monkeypatch.setattr(supervised.time, "monotonic", lambda: now_s)
    num_answers, is_well, answers = 0, True, asyncio.Event()

    async def beat() -> int:
        nonlocal num_answers
        if not is_well:
            await answers.wait()
        num_answers += 1
        return num_answers

    heartbeat = Heartbeat(beat, limit_s=8.0, key="a.heartbeat_s")

    async def look(passed_s: float) -> str | None:
        nonlocal now_s
        now_s += passed_s
        what = heartbeat.look()
        for _ in range(3):
            await asyncio.sleep(0)
        return what

    for _ in range(100):
        assert await look(supervised.LOOK_S) is None
    assert heartbeat.last is not None and heartbeat.last > 10, "asked again and again"
    is_well = False
    for _ in range(5):
        # As after a stop of this process for an hour.
        assert await look(3600.0) is None
    silent = [await look(supervised.LOOK_S) for _ in range(16)]
    assert silent[0] is None and silent[-1] == "has not answered for a.heartbeat_s = 8 s"
    answers.set()
    await asyncio.sleep(0)
    await look(supervised.LOOK_S)
    assert await look(supervised.LOOK_S) is None, "it has answered"


# --- The buffer ---


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_buffer_that_is_gone_is_a_fault_that_ends_the_run(number: signal.Signals) -> None:
    async with watched_buffer(SILENCE_S if number is signal.SIGSTOP else 3600.0) as (watch, faults, pid):
        watching = asyncio.create_task(watch.watch())
        os.kill(pid, number)
        with pytest.raises(ActorDied, match=rf"the buffer \(process {pid}\) is gone"):
            await watching
        (fault,) = faults.open
        silent = "has not answered for buffer.heartbeat_s = 1 s"
        assert fault.role is Role.BUFFER
        assert fault.what == (silent if number is signal.SIGSTOP else "has died")


async def test_a_buffer_that_has_just_ended_the_run_in_another_way_is_noted_at_the_end() -> None:
    """A call to the buffer fails before anybody looks at its process."""
    async with watched_buffer(3600.0) as (watch, faults, pid):
        os.kill(pid, signal.SIGKILL)
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.01)
        await watch.close()
        await watch.close()
        assert [fault.role for fault in faults.open] == [Role.BUFFER]


@contextlib.asynccontextmanager
async def watched_buffer(heartbeat_s: float) -> AsyncIterator[tuple[BufferProcess, FaultLog, int]]:
    process, faults = standing_still(), FaultLog()

    async def spawn(rank: int, number: int) -> "Spawned[Any]":
        async def answer() -> None:
            if psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                await asyncio.Event().wait()

        async def stop() -> None:
            return None

        return Spawned(actor=SimpleNamespace(beat=Endpoint(answer)), pid=process.pid, stop=stop)

    watch = BufferProcess(spawn, heartbeat_s=heartbeat_s, faults=faults, listing=ProcessListFile())
    try:
        await watch.start(1)
        yield watch, faults, process.pid
    finally:
        await watch.close()
        process.kill()
        process.wait()
