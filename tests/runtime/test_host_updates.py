"""Generators of one host take a version together: all fetch, then all stage, then all swap."""

import asyncio
from pathlib import Path

import pytest

from forgeasync.config import TimeoutSection
from forgeasync.runtime import MAX_FAILED_FETCHES, ReplicaState
from forgeasync.weights import HostShare
from tests.support.replicas import ReplicaWorld, generators_of, manifest_of

HOSTS = ("a", "b", "a", "a")
"""Of every rank; numbers are the same until one is lost."""


def called(world: ReplicaWorld, name: str) -> set[int]:
    return {number for call, number, _ in world.log if call == name}


async def test_each_act_starts_when_all_have_ended_the_one_before() -> None:
    async with generators_of(HOSTS) as world:
        report = await world.router.begin_update(0, manifest_of(7))
        assert report is not None and report.is_complete and report.num_bytes_needed == 100
        assert (report.num_bytes_moved, report.fetch_s) == (10 + 12 + 13, 3.0)
        swapped = await world.router.finish_update(0, 7)
        assert [(one.number, one.report.num_crossing) for one in swapped] == [(0, 0), (2, 2), (3, 3)]
        acts = ("begin_update", "stage_update", "finish_update")
        assert [name for name, _, _ in world.log] == [name for name in acts for _ in range(6)]
        assert all(called(world, name) == {0, 2, 3} for name in acts)
        of_host = [world.generators[number].shares for number in (0, 2, 3)]
        assert of_host == [[HostShare(index=index, count=3)] for index in range(3)]


async def test_a_share_that_never_arrives_stops_the_update_and_its_generator_is_replaced() -> None:
    async with generators_of(HOSTS) as world:
        world.generators[2].is_complete = False
        for _ in range(MAX_FAILED_FETCHES):
            assert world.state(2) is ReplicaState.HEALTHY
            assert not await world.update(0, 7)
            assert called(world, "abandon_update") == {0, 2, 3} and not called(world, "stage_update")
        assert world.state(2) is ReplicaState.DEAD and world.state(0) is ReplicaState.HEALTHY
        assert "5 consecutive fetches failed their checksums" in world.faults.open[0].what
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
        if is_swapped:
            # The others have the version: the new one takes it alone.
            world.log.clear()
            assert await world.update(0, 7) and called(world, "begin_update") == {4}
            assert world.generators[4].shares == [HostShare()]
        else:
            assert await world.update(0, 7) and called(world, "finish_update") == {0, 3, 4}
            assert world.generators[3].shares[-1] == HostShare(index=1, count=3)
        assert world.state(4) is ReplicaState.HEALTHY
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
