"""Requests to a run that goes on, and what it does for them."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from forgeasync.controller import ControlServer, Refused, ask, parse_change
from forgeasync.runtime import Host, LocalHost, ReplicaState
from tests.runtime.test_generator_pool import running, sample
from tests.support.replicas import ReplicaWorld, generators_of


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("generator=4", "'generator': must be generators=N"),
        ("generators", "'generators': must be generators=N"),
        ("generators=four", "generators=four: must be a whole number from 1 to 64"),
        ("generators=-1", "generators=-1: must be a whole number"),
        ("generators=0", "generators=0: must be a whole number"),
        ("generators=65", "generators=65: must be a whole number from 1 to 64"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(change: str, words: str) -> None:
    with pytest.raises(Refused, match=words):
        parse_change(change)


def test_a_run_that_is_not_there_or_has_ended_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"must be the folder of a running run; it has no procs\.json"):
        ask(tmp_path, 2)
    (tmp_path / "procs.json").write_text(json.dumps({"controller": 2**22 + 1, "procs": []}))
    with pytest.raises(Refused, match="its process 4194305 has ended"):
        ask(tmp_path, 2)


def server_of(world: ReplicaWorld, folder: Path, places: Iterator[Host]) -> ControlServer:
    def add_place() -> Host:
        try:
            return next(places)
        except StopIteration:
            raise ValueError("generators needs 1 GPUs, but 0 of this host's 8 are left") from None

    (folder / "procs.json").write_text(json.dumps({"controller": os.getpid(), "procs": []}))
    return ControlServer(folder / "control", world.pool, add_place=add_place, drain_s=60.0)


async def answer_of(server: ControlServer, folder: Path, num: int) -> tuple[bool, str]:
    asking = asyncio.ensure_future(asyncio.to_thread(ask, folder, num))
    while not asking.done():
        server.look()
        await asyncio.sleep(0.01)
    answer = asking.result()
    assert not list((folder / "control").iterdir()), "nothing is left behind"
    return answer.is_accepted, answer.words


async def test_generators_are_added_and_removed_by_draining(tmp_path: Path) -> None:

    async with generators_of(("a", "a")) as world:
        server = server_of(world, tmp_path, iter([LocalHost("a", [])]))
        # Where a scripted generator is started for a new rank.
        world.hosts.append("a")
        assert await answer_of(server, tmp_path, 3) == (True, "generators=3: starting generators [2]")
        await world.until(lambda: 2 in world.generators and world.state(2) is ReplicaState.HEALTHY)
        groups = [sample(world, group) for group in range(3)]
        await world.until(lambda: set(running(world).values()) == {0, 1, 2})
        accepted, words = await answer_of(server, tmp_path, 2)
        assert accepted and words.startswith("generators=2: ending generator 2 (process")
        assert world.state(2) is ReplicaState.DRAINING
        groups.append(sample(world, 3))
        await world.until(lambda: 3 in running(world))
        assert running(world)[3] != 2 and len(running(world)) == 4
        for one in world.generators.values():
            one.is_released.set()
        assert await asyncio.gather(*groups) == [()] * 4
        await world.until(lambda: world.state(2) is ReplicaState.REMOVED)
        assert world.generators[2].process.wait() is not None
        assert world.faults.metrics()["faults/detected_generator"] == 0, "nothing has failed"
        accepted, words = await answer_of(server, tmp_path, 4)
        assert not accepted and "generators=4: " in words and "GPUs" in words
        assert await answer_of(server, tmp_path, 2) == (
            True,
            "generators=2: as many are running already",
        )


async def test_a_hostile_request_is_refused_and_ends_nothing(tmp_path: Path) -> None:

    async with generators_of(("a",)) as world:
        server = server_of(world, tmp_path, iter([]))
        folder = tmp_path / "control"
        folder.mkdir()
        texts = ["{", "[]", '{"generators": true}', '{"generators": 1e9}', '{"x": 1}', " " * 5000]
        for index, text in enumerate(texts):
            (folder / f"request-{index:016x}.json").write_text(text)
        server.look()
        answers = [json.loads(file.read_text()) for file in sorted(folder.iterdir())]
        assert len(answers) == len(texts) and not any(one["is_accepted"] for one in answers)
