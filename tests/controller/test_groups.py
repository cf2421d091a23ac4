"""Finished groups on the disk of a run: written, removed when they are not needed, and found again."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from forgeasync.buffer import START, LostSteps, SkipReason, Submission
from forgeasync.checkpoints import RUN_FILE, RunState, checkpoint_name
from forgeasync.config import RunConfig
from forgeasync.controller import GroupSpiller, find_groups, groups, remove_others
from forgeasync.rollouts import SUFFIX, Group, PayloadWriter, Score, StoredRollout, file_name, read_spilled
from forgeasync.runtime import LOCAL_HOST_ID, LocalHost
from tests.support.buffer_world import make_snapshot, make_task
from tests.support.loops import make_config, make_prepared
from tests.support.payloads import MIB, make_payload
from tests.support.rollouts import make_stored_rollout

KEEP, K = "buffer.keep_groups=true", "max_off_policy_steps=1"
HEARTBEATS = ("buffer.heartbeat_s=9", "episodes.heartbeat_s=9", "trainer.recovery.heartbeat_s=9")
SCORES = (Score(1.0, True), Score(0.0, False))


class World:
    """A spiller beside a payload store; the disk has as much room as ``free_bytes`` says."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.config = make_config(KEEP, K, *overrides)
        self.folder, self.checkpoints, shared = (folder / name for name in ("payloads", "checkpoints", "shm"))
        self.checkpoints.mkdir()
        shared.mkdir()
        self.writer = PayloadWriter(shared, LOCAL_HOST_ID, MIB)
        self.told: list[str] = []
        host = LocalHost(LOCAL_HOST_ID, [])
        self.spiller = GroupSpiller(
            self.folder,
            make_prepared(self.config),
            checkpoints=self.checkpoints,
            generators=SimpleNamespace(pool=SimpleNamespace(hosts=[host])),
            tell=self.told.append,
        )

    def group(self, prompt: int) -> Group:
        """A group whose arrays are in shared memory."""
        prompt_ref, *responses = self.writer.write_group([make_payload(prompt, 10)] * 3)

        def stored(index: int) -> StoredRollout:
            rollout = make_stored_rollout((2, 0, 4), text=f"{prompt} {index}")
            branch = dataclasses.replace(rollout.branches[0], prompt=prompt_ref, response=responses[index])
            return dataclasses.replace(rollout, branches=(branch,))

        return Group(
            group_id=100 + prompt, draw_id=prompt, task=make_task(prompt), rollouts=(stored(0), stored(1))
        )

    def keep(self, group: Group) -> None:
        self.spiller.keep(group, (1.0, 0.0), (0, 1), SCORES)

    def add_checkpoint(self, step: int) -> None:
        folder = self.checkpoints / checkpoint_name(step)
        folder.mkdir()
        (folder / RUN_FILE).touch()

    def on_disk(self) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob(f"*{SUFFIX}"))

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(0.01)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        loop = asyncio.create_task(self.spiller.loop())
        try:
            yield
        finally:
            loop.cancel()
            assert isinstance((await asyncio.gather(loop, return_exceptions=True))[0], asyncio.CancelledError)


async def test_groups_stay_until_a_checkpoint_has_their_step(tmp_path: Path) -> None:
    world = World(tmp_path)

    async with world.running():
        groups = [world.group(prompt) for prompt in range(5)]
        for group in groups:
            world.keep(group)
        await world.until(lambda: world.on_disk() == [0, 1, 2, 3, 4])
        spilled = read_spilled(world.folder / file_name(3)).group
        assert [one.text for one in spilled.rollouts] == ["3 0", "3 1"]
        world.spiller.trained(1, groups[:2])
        world.spiller.trained(2, groups[2:3])
        world.spiller.forget([groups[4].group_id])
        await world.until(lambda: world.on_disk() == [0, 1, 2, 3])
        world.add_checkpoint(1)
        world.spiller.forget([])
        await world.until(lambda: world.on_disk() == [2, 3])
        metrics = world.spiller.metrics()
        assert metrics["buffer/num_kept_groups"] == 2 and metrics["buffer/num_unkept_groups"] == 0
        assert metrics["buffer/kept_behind_s"] > world.spiller.metrics()["buffer/kept_behind_s"] == 0.0
        await world.spiller.end()
    assert not world.folder.exists() and world.told == []


@pytest.mark.parametrize("is_host_gone", [True, False])
async def test_a_group_without_its_arrays_is_told_others_are_kept(tmp_path: Path, is_host_gone: bool) -> None:
    world = World(tmp_path)
    gone, there = world.group(0), world.group(1)
    first, second = gone.rollouts
    (branch,) = first.branches
    if is_host_gone:
        elsewhere = dataclasses.replace(branch.response, host_id="host-9")
        branch = dataclasses.replace(branch, response=elsewhere)
        first = dataclasses.replace(first, branches=(branch,))
    else:
        world.writer.free(branch.response.file)
    async with world.running():
        world.keep(dataclasses.replace(gone, rollouts=(first, second)))
        world.keep(there)
        await world.until(lambda: world.on_disk() == [1])
        assert world.spiller.metrics()["buffer/num_unkept_groups"] == 1
    why = "(host host-9, which has its arrays, is gone)" if is_host_gone else "its arrays freed"
    assert why in world.told[0]


async def test_without_checkpoints_groups_that_were_dropped_or_trained_on_go_at_once(tmp_path: Path) -> None:
    """One that is dropped before its turn is not written."""
    world = World(tmp_path, "checkpoint.every_steps=null")
    groups = [world.group(prompt) for prompt in range(3)]
    for group in groups:
        world.keep(group)
    world.spiller.forget([groups[0].group_id])
    async with world.running():
        await world.until(lambda: world.on_disk() == [1, 2])
        world.spiller.trained(1, groups[1:2])
        await world.until(lambda: world.on_disk() == [2])


async def test_a_disk_without_room_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for the next checkpoint is not touched."""
    world = World(tmp_path)
    free = 10**5
    monkeypatch.setattr(groups.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))

    async with world.running():
        world.keep(world.group(0))
        world.keep(world.group(1))
        await world.until(lambda: world.spiller.metrics()["buffer/num_unkept_groups"] == 2)
        free = 10**15
        world.keep(world.group(2))
        await world.until(lambda: world.on_disk() == [2] and len(world.told) == 2)
    refused, again = world.told
    assert "100,000 bytes left, and the next checkpoint and the trained model take" in refused
    assert refused.startswith("warning: finished groups cannot be kept") and "kept on the disk again" in again


async def written(folder: Path, num_groups: int) -> World:
    """Groups of prompts 0, 1, ... sampled under version 2."""
    world = World(folder)
    async with world.running():
        for prompt in range(num_groups):
            world.keep(world.group(prompt))
        await world.until(lambda: len(world.on_disk()) == num_groups)
    return world


def state(config: RunConfig) -> RunState:
    pending = [Submission(submission_id=prompt, task=make_task(prompt)) for prompt in (0, 1)]
    snapshot = make_snapshot(2, num_submitted=2, next_group_id=9, pending=pending)
    saved = config.model_dump(mode="json")
    return RunState(step=2, elapsed_s=1.0, model={}, config=saved, problems="", buffer=snapshot, ledger=START)


LOST = LostSteps(batches=((0, 1),), first_attempts={})


async def test_found_groups_are_those_that_are_whole_and_fit(tmp_path: Path) -> None:
    world = await written(tmp_path, 4)
    torn = world.folder / file_name(3)
    torn.write_bytes(torn.read_bytes()[:-1])
    (world.folder / ".half.group.partial").touch()
    found = find_groups(world.folder, state(world.config), world.config, LOST)
    assert [one.group.draw_id for one in found.groups] == [0, 1, 2] and found.batches == ((0, 1),)
    assert found.num_left_out == found.left_out[SkipReason.TORN] == 1 and found.num_prompts == 3
    assert list(found.messages(2)) == [
        "3 finished groups are restored from disk; steps 3 to 3 are repeated",
        "1 finished groups are sampled again (torn 1)",
    ]
    remove_others(world.folder, [one.group.draw_id for one in found.groups])
    assert sorted(path.name for path in world.folder.iterdir()) == [file_name(one) for one in (0, 1, 2)]


async def test_groups_of_another_config_or_without_a_ledger_are_sampled_again(tmp_path: Path) -> None:
    world = await written(tmp_path, 2)
    before = state(world.config)
    assert find_groups(world.folder, before, world.config, None).left_out == {SkipReason.NO_LEDGER: 2}
    changed = make_config(KEEP, K, "sampling.temperature=0.5", "algorithm.group_size=8")
    found = find_groups(world.folder, before, changed, LOST)
    assert found.groups == () and list(found.messages(2)) == [
        "2 finished groups are sampled again (other_config 2): algorithm.group_size, sampling.temperature "
        "changed"
    ]
    same = make_config(K, "max_steps=9", "timeouts.score_s=1", *HEARTBEATS)
    assert len(find_groups(world.folder, before, same, LOST).groups) == 2
