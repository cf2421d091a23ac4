"""Checkpoints and exports whose trainer is lost, by trainers that are plain objects."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from forgeasync.algorithms import Loss
from forgeasync.checkpoints import RUN_FILE, CheckpointLost, partial_folder
from forgeasync.config import RecoverySection, TimeoutSection
from forgeasync.observability import FaultLog
from forgeasync.runtime import ActorDied, TrainerRecovery, trainer_recovery
from forgeasync.trainer import StepResult, TrainerSetup


@dataclass
class Mesh:
    """A trainer that does what it is told; ``opens_at`` is the version of its snapshots."""

    opens_at: int = 0
    num_procs: int = 1
    members: tuple[()] = ()
    weight_layout: None = None
    calls: list[tuple[str, object]] = field(default_factory=list)
    is_exporting: asyncio.Event = field(default_factory=asyncio.Event)
    answers_export: bool = True

    async def _nothing(self, *arguments: object) -> None:
        pass

    async def _no_items(self, *arguments: object) -> list[int]:
        return []

    connect = finish_snapshot = finish_checkpoint = _nothing
    snapshot_bytes = reopen_staging = _no_items

    async def open_snapshots(self, folders: list[Path], *, every_steps: int, at_most: int) -> int:
        return min(self.opens_at, at_most)

    async def train_items(self, minibatches: object, *, step: int) -> StepResult:
        self.calls.append(("step", step))
        return StepResult(
            policy_version=step,
            num_targets=1,
            num_padding_tokens=0,
            train_s=0.0,
            metrics={},
            skip_reason=None,
        )

    async def begin_checkpoint(self, folder: Path, *, run_state: bytes, keep: int) -> None:
        """Leave its files in the writing."""
        self.calls.append(("checkpoint", folder.name))
        partial_folder(folder).mkdir()

    async def policy_version(self) -> int:
        return 7

    async def save_hf(self, folder: Path, *, source: Path) -> int:
        self.calls.append(("export", folder.name))
        folder.mkdir()
        self.is_exporting.set()
        if not self.answers_export:
            await asyncio.Event().wait()
        return 7


@dataclass
class World:
    first: Mesh
    second: Mesh
    recovery: TrainerRecovery = field(init=False)
    told: list[str] = field(default_factory=list)
    set_up_with: list[TrainerSetup] = field(default_factory=list)
    """What the second trainer was set up with."""

    async def lose(self) -> None:
        """Lose the first trainer, and wait for the second one."""
        life = self.recovery._life
        life.state._lose("trainer rank 0", "has died", ActorDied("trainer rank 0 has ended"))
        await life.until(lambda one: one.mesh is self.second or None)

    async def step(self, number: int) -> None:
        await self.recovery.train_items([], step=number)


@asynccontextmanager
async def trainers(
    first: Mesh, second: Mesh, *, resume_from: Path | None = None, first_version: int = 0
) -> AsyncIterator[World]:
    """A trainer, which the second one replaces."""
    world = World(first, second)

    async def nothing(*arguments: object, **keywords: object) -> list[object]:
        return []

    async def spawn(*arguments: object, **keywords: object) -> Mesh:
        return second

    async def set_up(trainer: Mesh, setup: TrainerSetup) -> None:
        world.set_up_with.append(setup)

    world.recovery = TrainerRecovery(
        SimpleNamespace(faults=FaultLog(), peers=[], owned=set(), closing=[], log_dir=Path()),  # type: ignore[arg-type]
        TrainerSetup(
            section=SimpleNamespace(recovery=RecoverySection()),  # type: ignore[arg-type]
            facts=None,  # type: ignore[arg-type]
            temperature=1.0,
            loss=Loss(),
            seed=0,
            checkpoint=None,
            resume_from=resume_from,
        ),
        TimeoutSection(),
        trainer=first,  # type: ignore[arg-type]
        generators=SimpleNamespace(  # type: ignore[arg-type]
            pool=SimpleNamespace(add_listener=lambda act: None), reconnect_weights=nothing
        ),
        first_version=first_version,
        tell=world.told.append,
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in ("make_folders", "kill_trainer"):
            patch.setattr(trainer_recovery, name, nothing)
        patch.setattr(trainer_recovery, "set_up_trainer", set_up)
        patch.setattr(trainer_recovery, "spawn_trainer", spawn)
        await world.recovery.start()
        try:
            yield world
        finally:
            await world.recovery.close()


@pytest.mark.parametrize("version", [2, 0])
async def test_a_checkpoint_that_was_lost_with_its_trainer_is_written_again_or_not_taken_for_written(
    tmp_path: Path, version: int
) -> None:
    """The snapshots are of the step after it, or of one before, from which the trainer comes by its step."""
    async with trainers(Mesh(), Mesh(opens_at=version)) as world:
        await world.step(1)
        await world.recovery.begin_checkpoint(tmp_path / "step-00000001", run_state=b"", keep=1)
        await world.step(2)
        await world.lose()
        if version == 0:
            await world.recovery.finish_checkpoint()
            assert world.second.calls == [("step", 1), ("checkpoint", "step-00000001"), ("step", 2)]
            return
        with pytest.raises(CheckpointLost, match="step-00000001 was not finished: the trainer was lost"):
            await world.recovery.finish_checkpoint()
        await world.recovery.finish_checkpoint()
        assert "checkpoint step-00000001 was not finished: there is none of its step" in world.told
        assert not any(tmp_path.iterdir()), "its room may be needed"
        assert world.second.calls == []


async def test_a_checkpoint_that_is_being_written_outlives_the_beginning_of_the_next(tmp_path: Path) -> None:
    """What a lost trainer has left of its own checkpoint goes; nothing else does."""
    first, second = tmp_path / "step-00000001", tmp_path / "step-00000002"
    async with trainers(Mesh(), Mesh(opens_at=2)) as world:
        await world.step(1)
        await world.recovery.begin_checkpoint(first, run_state=b"", keep=1)
        await world.step(2)
        partial_folder(second).mkdir()
        await world.recovery.begin_checkpoint(second, run_state=b"", keep=1)
        assert partial_folder(first).is_dir()
        await world.lose()
        assert world.second.calls == [("checkpoint", "step-00000002")], "its remains were removed"
        assert partial_folder(first).is_dir()


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_resumed_run_survives_its_trainer_when_its_first_checkpoint_is_gone(
    tmp_path: Path, is_there: bool
) -> None:
    """Newer checkpoints replace the one that it was resumed from."""
    checkpoint = tmp_path / "step-00000004"
    if is_there:
        checkpoint.mkdir()
        (checkpoint / RUN_FILE).touch()
    async with trainers(Mesh(), Mesh(opens_at=5), resume_from=checkpoint, first_version=4) as world:
        await world.step(5)
        await world.lose()
        (setup,) = world.set_up_with
        assert setup.resume_from == (checkpoint if is_there else None)


async def test_an_export_that_is_all_written_is_not_written_again(tmp_path: Path) -> None:
    """The trainer is lost between the last file and its answer. A folder of somebody else is none of its."""
    async with trainers(Mesh(answers_export=False), Mesh()) as world:
        exporting = asyncio.create_task(world.recovery.save_hf(tmp_path / "final", source=tmp_path))
        await world.first.is_exporting.wait()
        await world.lose()
        assert await exporting == 7
        assert world.second.calls == []
        (tmp_path / "other").mkdir()
        with pytest.raises(FileExistsError):
            await world.recovery.save_hf(tmp_path / "other", source=tmp_path)
