"""Generators that die, stop answering and take versions together: real processes, scripted actors."""

import asyncio
import signal
from pathlib import Path

import numpy as np
import pytest
from monarch.actor import ActorError

from forgeasync.buffer import DropReason
from forgeasync.config import SamplingSection, TimeoutSection
from forgeasync.runtime import (
    CANCELLED,
    MAX_FAILED_FETCHES,
    GroupGivenUp,
    ProcessLost,
    RefusedGroup,
    ReplicaState,
    router,
)
from forgeasync.weights import HostShare
from tests.support.loops import Endpoint
from tests.support.replicas import ReplicaWorld, generators_of, manifest_of
from tests.support.rollouts import make_stored_rollout

SAMPLING = SamplingSection(max_response_tokens=8)
PROMPT = np.arange(3, dtype=np.int32)


def sample(world: ReplicaWorld, group_id: int) -> "asyncio.Task[object]":
    return asyncio.ensure_future(
        world.router.sample_group(group_id, PROMPT, num_samples=2, sampling=SAMPLING, seed=11)
    )


def running(world: ReplicaWorld) -> dict[int, int]:
    """Generator by group."""
    return {group: number for number, one in world.generators.items() for group in one.running}


async def replaced(world: ReplicaWorld, by: int = 2) -> None:
    """Wait for the generator that takes the place of a lost one."""
    await world.until(lambda: by in world.generators and world.state(by) is ReplicaState.HEALTHY)


async def finished(world: ReplicaWorld, groups: "list[asyncio.Task[object]]") -> None:
    """Let groups end, wherever they are."""
    for one in world.generators.values():
        one.is_released.set()
    assert await asyncio.gather(*groups) == [()] * len(groups)


async def test_groups_of_a_generator_that_is_gone_go_on_elsewhere() -> None:
    async with generators_of(("a", "a")) as world:
        groups = [sample(world, group) for group in range(4)]
        await world.until(lambda: len(running(world)) == 4)
        assert sorted(running(world).values()) == [0, 0, 1, 1]
        assert sum(one.num_generated_tokens for one in await world.router.stats()) == 20
        world.kill(0)
        await replaced(world)
        await finished(world, groups)
        # Each group was sampled with its own prompt and seed, those of the lost one twice.
        sampled = [call for call, _, when in world.log if call.startswith("sample")]
        assert sorted(sampled) == sorted(f"sample {group} [0, 1, 2] 11" for group in (0, 1, 2, 3, *(0, 2)))
        assert world.router.metrics()["generator/num_moved_groups"] == 2
        tokens = [one.num_generated_tokens for one in await world.router.stats()]
        assert sum(tokens) == 30, "those of the lost one still count"


async def test_one_that_does_not_answer_is_replaced() -> None:
    async with generators_of(("a", "a"), heartbeat_s=1000.0) as world:
        groups = [sample(world, group) for group in range(2)]
        await world.until(lambda: len(running(world)) == 2)
        world.kill(0, signal.SIGSTOP)
        replica = world.pool.replicas[0]
        await world.until(lambda: replica.heartbeat.is_late)
        # As if the answer had taken so long.
        replica.heartbeat.silent_s += 1200.0
        await world.until(lambda: world.state(0) is ReplicaState.DEAD)
        assert "has not answered for generator.heartbeat_s = 1000 s" in world.told[0]
        await replaced(world)
        await finished(world, groups)


@pytest.mark.parametrize("has_group", [False, True])
async def test_only_what_was_in_flight_is_said_to_be_lost(
    has_group: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A generator that ends in its start may not have begun its log."""
    async with generators_of(("a", "a"), folders=[tmp_path]) as world:
        for replica in world.pool.replicas:
            replica.spawned.in_flight = tmp_path / "nothing"
        groups = [sample(world, 5)] if has_group else []
        await world.until(lambda: len(running(world)) == len(groups))
        world.kill(0)
        await replaced(world)
        await finished(world, groups)
    assert ("what it had in flight is lost" in caplog.text) == has_group


async def test_a_group_that_ends_generators_is_given_up() -> None:
    async with generators_of(("a",), max_lost_per_group=2) as world:
        group = sample(world, 5)
        for number in range(2):
            await world.until(lambda number=number: running(world).get(5) == number)
            world.kill(number)
        answer = await group
        assert isinstance(answer, RefusedGroup) and answer.reason is DropReason.LOST
        assert answer.problem is not None and "sampling group 5" in answer.problem
        await replaced(world)


@pytest.mark.usefixtures("virtual_time")
async def test_a_late_group_is_cancelled_repeated_and_then_dropped() -> None:
    timeouts = TimeoutSection(generate_s=0.2)
    async with generators_of(("a", "a"), timeouts=timeouts) as world:
        answer = await sample(world, 17)
        assert isinstance(answer, RefusedGroup) and answer.reason is DropReason.LATE
        assert answer.problem is not None and "sampling group 17 took longer than 0.2 s" in answer.problem
        assert not running(world), "nothing goes on"
        assert len(world.log) == 1 + router.MAX_LATE and not world.pool.table.state.count(ReplicaState.DEAD)
        assert all(one.num_live == 0 for one in world.pool.table.state.present)
        assert world.router.metrics()["generator/num_late_groups"] == 1 + router.MAX_LATE


async def test_a_cancelled_group_is_not_sampled_again() -> None:
    """Also one that has lost its generator and waits for another."""
    async with generators_of(("a",)) as world:
        group = sample(world, 5)
        await world.until(lambda: 5 in running(world))
        await world.router.cancel_groups([5, 6])
        assert await group == CANCELLED
        world.generators[0].holds.add("cancel_groups")
        group = sample(world, 7)
        await world.until(lambda: 7 in running(world))
        cancelling = asyncio.ensure_future(world.router.cancel_groups([7]))
        await asyncio.sleep(0)
        world.kill(0)
        await cancelling
        assert await group == CANCELLED
        assert len([one for one in world.log if "sample 7" in one[0]]) == 1


async def test_a_response_that_loses_all_generators_is_told_to_who_asked() -> None:
    async with generators_of(("a",), max_lost_per_group=1) as world:
        world.generators[0].respond = Endpoint(lambda *arguments: asyncio.Event().wait())
        asked = asyncio.create_task(world.router.respond(PROMPT, num_samples=1, sampling=SAMPLING))
        await asyncio.sleep(0)
        world.kill(0)
        with pytest.raises(GroupGivenUp, match=r"answering .*: generator 0 .* is gone, the last of 1 lost"):
            await asked


async def test_what_a_lost_generator_has_left_is_freed(tmp_path: Path) -> None:
    async with generators_of(("a", "b"), folders=[tmp_path]) as world:
        rollouts = []
        for name in ("first", "second"):
            rollout = make_stored_rollout((0, 0, 4), text="said")
            ref = rollout.branches[0].response
            file = tmp_path / name
            file.touch()
            object.__setattr__(ref, "file", str(file))
            object.__setattr__(ref, "host_id", "a")
            rollouts.append(rollout)
        await world.router.free_payloads(rollouts[:1])
        assert world.generators[0].freed == [str(tmp_path / "first")]
        world.fails_to_start = lambda number: True
        world.generators[0].holds.add("free_payloads")
        freeing = asyncio.ensure_future(world.router.free_payloads(rollouts[1:]))
        await asyncio.sleep(0)
        world.kill(0)
        await freeing
        assert not (tmp_path / "second").exists(), "by its host"


async def test_a_dead_engine_in_a_process_that_lives_is_replaced() -> None:
    class EngineDeadError(Exception):
        """As vLLM's."""

    async with generators_of(("a",)) as world:
        error = ActorError.__new__(ActorError)
        error.exception = EngineDeadError()

        async def fails() -> None:
            raise error

        with pytest.raises(Exception, match="is gone"):
            await world.pool.replicas[0].call(fails)
        assert world.state(0) is ReplicaState.DEAD
        assert "an engine that has died" in world.told[0], world.told


async def test_one_whose_engine_stands_still_behind_its_event_loop_is_replaced() -> None:
    timeouts = TimeoutSection(generate_s=0.2)
    async with generators_of(("a",), timeouts=timeouts) as world:
        world.generators[0].store_episodes = Endpoint(lambda *arguments: asyncio.Event().wait())
        with pytest.raises(ProcessLost):
            await world.router.store_episodes(world.pool.replicas[0], 7, [])
        assert "the episodes of group 7 within timeouts.generate_s = 0.2 s" in world.told[0]
        await replaced(world, by=1)


# --- Updates: all generators of a host fetch, then all stage, then all swap ---


HOSTS = ("a", "b", "a", "a")
"""Of every rank; numbers are the same until one is lost."""


def called(world: ReplicaWorld, name: str) -> set[int]:
    return {number for call, number, _ in world.log if call == name}


async def test_generators_that_sleep_leave_their_gpus_to_a_step() -> None:
    async with generators_of(("a", "a"), colocated="sleep") as world:
        async with world.router.asleep():
            assert called(world, "sleep") == {0, 1} and not called(world, "wake")
            world.kill(0)
            await world.until(lambda: world.state(0) is ReplicaState.DEAD)
            await world.until(lambda: world.told != [])
            assert set(world.generators) == {0, 1}, "one that starts waits for its turn"
        assert called(world, "wake") == {1}
        await replaced(world)
        async with world.router.asleep():
            assert called(world, "sleep") == {0, 1, 2}
    async with generators_of(("a",)) as world:
        async with world.router.asleep():
            pass
        assert world.log == [], "generators that share their GPUs go on"


async def test_each_act_starts_when_all_have_ended_the_one_before() -> None:
    async with generators_of(HOSTS) as world:
        report = await world.router.begin_update(0, manifest_of(7))
        assert report is not None and report.is_complete and report.num_bytes_needed == 100
        assert (report.num_bytes_moved, report.fetch_s) == (10 + 12 + 13, 3.0)
        swapped = await world.router.finish_update(0, 7)
        assert {number: one.num_crossing for number, one in swapped.items()} == {0: 0, 2: 2, 3: 3}
        acts = ("begin_update", "stage_update", "finish_update")
        assert [name for name, _, _ in world.log] == [name for name in acts for _ in range(6)]
        assert all(called(world, name) == {0, 2, 3} for name in acts)
        of_host = [world.generators[number].shares for number in (0, 2, 3)]
        assert of_host == [[HostShare(index=index, count=3)] for index in range(3)]


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (None, "5 consecutive fetches failed their checksums"),
        ("ConnectionError: gone", "5 consecutive fetches did not arrive (ConnectionError: gone)"),
    ],
)
async def test_a_share_that_never_arrives_stops_the_update_and_its_generator_is_replaced(
    failure: str | None, reason: str
) -> None:
    async with generators_of(HOSTS) as world:
        world.generators[2].is_complete, world.generators[2].failure = False, failure
        for _ in range(MAX_FAILED_FETCHES):
            assert world.state(2) is ReplicaState.HEALTHY
            assert not await world.update(0, 7)
            assert called(world, "abandon_update") == {0, 2, 3} and not called(world, "stage_update")
        assert world.state(2) is ReplicaState.DEAD and world.state(0) is ReplicaState.HEALTHY
        assert reason in world.faults.open[0].what
        await world.until(lambda: 4 in world.generators and world.state(4) is ReplicaState.STALE)
        assert await world.update(0, 7) and world.state(4) is ReplicaState.HEALTHY


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize("act", ["begin_update", "stage_update", "finish_update"])
@pytest.mark.parametrize("is_late", [False, True])
async def test_one_that_is_lost_in_an_update_holds_nobody_up(act: str, is_late: bool) -> None:
    """Until all have staged the others keep their weights; after that they go on to the version."""
    timeouts = TimeoutSection(weights_s=0.5, generate_s=0.5) if is_late else TimeoutSection()
    async with generators_of(HOSTS, timeouts=timeouts) as world:
        world.generators[2].holds.add(act)
        updating = asyncio.create_task(world.update(0, 7))
        await world.until(lambda: (act, 2, "begins") in world.log)
        if not is_late:
            world.kill(2)
        is_swapped = await updating
        assert world.state(2) is ReplicaState.DEAD
        assert is_swapped == (act == "finish_update")
        abandoned = set() if is_swapped else {0, 3}
        assert called(world, "abandon_update") == abandoned
        await world.until(lambda: 4 in world.generators and world.state(4) is ReplicaState.STALE)
        assert world.faults.open, "it recovers with the version"
        if is_swapped:
            # The others have the version: the new one takes it alone.
            world.log.clear()
            assert await world.update(0, 7) and called(world, "begin_update") == {4}
            assert world.generators[4].shares == [HostShare()]
        else:
            assert await world.update(0, 7) and called(world, "finish_update") == {0, 3, 4}
            assert world.generators[3].shares[-1] == HostShare(index=1, count=3)
        assert world.state(4) is ReplicaState.HEALTHY and not world.faults.open
        assert {world.pool.table.state.of(number).version for number in (0, 3, 4)} == {7}
        # Afterwards all of them together again; who takes part decides about the shares.
        assert await world.update(0, 8)
        told = [world.generators[number].shares[-1] for number in (0, 3, 4)]
        together = [HostShare(index=index, count=3) for index in range(3)]
        assert told == (together if is_swapped else [None] * 3)


async def test_the_first_generator_of_a_host_makes_what_the_others_open() -> None:
    async with generators_of(HOSTS) as world:
        folders = [Path(f"/shm/{host}") for host in HOSTS]
        routes = await world.router.connect_weights(None, (), folders)  # type: ignore[arg-type]
        assert routes == ["as copies"], "each route once"
        joined = {number: one.joined for number, one in world.generators.items()}
        of_a = [[(HostShare(index=index, count=3), False)] for index in range(3)]
        assert [joined[number] for number in (0, 2, 3)] == of_a
        assert joined[1] == [(HostShare(index=0, count=1), False)]
        log = [(number, when) for _, number, when in world.log if number != 1]
        assert log == [(number, when) for number in (0, 2, 3) for when in ("begins", "ends")]
        world.kill(0)
        await world.until(lambda: 4 in world.generators and world.state(4) is ReplicaState.HEALTHY)
        assert world.generators[4].joined == [(HostShare(index=0, count=1), True)], "the files are there"
