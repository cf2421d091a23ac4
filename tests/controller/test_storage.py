"""Checkpoints and the export of a run whose disk refuses them for a while."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from monarch.actor import ActorError

from forgeasync.checkpoint.folders import CheckpointLost, CheckpointNotWritten
from forgeasync.controller import checkpointing, exporting
from forgeasync.controller.exporting import export
from forgeasync.faults.fault_log import FaultLog
from forgeasync.faults.storage import StorageFaults
from forgeasync.models.hf_folder import FolderNotWritten
from tests.support.loops import MAX_STEPS, Fleet, Trainer, make_config, make_problem, make_run


class RefusedTrainer(Trainer):
    """Its first checkpoints cannot be written."""

    def __init__(self, num_refused: int, error: type[Exception] = CheckpointNotWritten) -> None:
        super().__init__()
        self.num_refused = num_refused
        self._error = error
        self._is_begun = False

    async def begin_checkpoint(self, folder: Path, *, run_state: bytes, keep: int) -> None:
        await super().begin_checkpoint(folder, run_state=run_state, keep=keep)
        self._is_begun = True

    async def finish_checkpoint(self) -> None:
        was_begun, self._is_begun = self._is_begun, False
        if was_begun and self.num_refused:
            self.num_refused -= 1
            # As it comes from the trainer's proc.
            raise ActorError(self._error("checkpoint could not be written: no space left"))


def run_with(trainer: Trainer, tmp_path: Path, *overrides: str) -> float:
    run = make_run(make_config(tmp_path, *overrides), trainer=trainer, held_out=[make_problem(10)])
    run.checkpoints.folder = tmp_path
    asyncio.run(run.run(Fleet()))
    counts = run.faults.metrics()
    assert counts["faults/detected_storage"] == counts["faults/recovered_storage"]
    return counts["faults/detected_storage"]


def steps_of(trainer: Trainer) -> list[int]:
    return [int(name.removeprefix("step-")) for name, _ in trainer.checkpoints]


def test_a_checkpoint_that_was_refused_is_begun_again_at_a_later_step(tmp_path: Path) -> None:
    trainer = RefusedTrainer(num_refused=2)
    assert run_with(trainer, tmp_path, "max_steps=12", "checkpoint.every_steps=6") == 1, "one outage"
    # That of step 6 is found refused after step 7, and tried after one step, then after two.
    assert steps_of(trainer) == [6, 8, 11, 12]


def test_a_checkpoint_that_was_lost_with_its_trainer_is_begun_again_at_once_and_no_disk_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "WAIT_S", 0.001)
    trainer = RefusedTrainer(num_refused=1, error=CheckpointLost)
    assert run_with(trainer, tmp_path, "max_steps=12", "checkpoint.every_steps=6") == 0
    assert steps_of(trainer) == [6, 7, 12]
    trainer = RefusedTrainer(num_refused=1, error=CheckpointLost)
    assert run_with(trainer, tmp_path, f"checkpoint.every_steps={MAX_STEPS}") == 0
    assert steps_of(trainer) == [MAX_STEPS] * 2, "the last one is waited for"


def test_the_last_checkpoint_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing, "WAIT_S", 0.001)
    trainer = RefusedTrainer(num_refused=2)
    assert run_with(trainer, tmp_path, f"checkpoint.every_steps={MAX_STEPS}") == 1
    assert steps_of(trainer) == [MAX_STEPS] * 3


def test_a_last_checkpoint_that_fails_with_room_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "WAIT_S", 0.001)
    with pytest.raises(ExceptionGroup) as raised:
        run_with(RefusedTrainer(num_refused=100), tmp_path, f"checkpoint.every_steps={MAX_STEPS}")
    assert f"the checkpoint of step {MAX_STEPS} cannot be written" in str(raised.value.exceptions)


def exporter(*errors: Exception) -> tuple[SimpleNamespace, list[Path]]:
    """Fails with these errors first; also return the folders that it was asked for."""
    asked: list[Path] = []
    left = list(errors)

    async def save_hf(folder: Path, *, source: Path) -> int:
        asked.append(folder)
        if left:
            raise left.pop(0)
        return 1

    return SimpleNamespace(save_hf=save_hf), asked


REFUSED = FolderNotWritten("final could not be written: no space left")


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(exporting, "WAIT_S", 0.001)
    monkeypatch.setattr(exporting, "export_bytes", lambda config, facts: 1000)
    return SimpleNamespace(config=None, facts=None, model_path=tmp_path)


def free(monkeypatch: pytest.MonkeyPatch, room: Callable[[], int]) -> None:
    monkeypatch.setattr(exporting.shutil, "disk_usage", lambda folder: SimpleNamespace(free=room()))


def test_an_export_waits_for_its_room(
    tmp_path: Path, prepared: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it is refused where there is none."""
    looks = iter([0] * 5 + [2000] + [0] * 7 + [2000] + [0, 0, 2000] + [0, 2000] + [2000] * 10)
    free(monkeypatch, lambda: next(looks))
    trainer, asked = exporter(*[ActorError(REFUSED)] * 4)
    log = FaultLog()
    asyncio.run(export(trainer, tmp_path / "final", prepared, StorageFaults(log)))  # type: ignore[arg-type]
    assert asked == [tmp_path / "final"] * 5
    counts = log.metrics()
    assert counts["faults/detected_storage"] == counts["faults/recovered_storage"] == 1


@pytest.mark.parametrize(
    ("errors", "num_asked"), [([REFUSED] * 5, exporting.MAX_FAILURES), ([ValueError("nan")], 1)]
)
def test_what_is_not_for_want_of_room_is_raised(
    errors: list[Exception],
    num_asked: int,
    tmp_path: Path,
    prepared: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free(monkeypatch, lambda: 2000)
    trainer, asked = exporter(*errors)
    with pytest.raises(type(errors[0])):
        asyncio.run(export(trainer, tmp_path / "final", prepared, StorageFaults(FaultLog())))  # type: ignore[arg-type]
    assert len(asked) == num_asked
