"""Checkpoints and the export of a run whose disk refuses them for a while."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from monarch.actor import ActorError

from forgeasync.checkpoint import CheckpointLost, CheckpointNotWritten
from forgeasync.controller import MAX_RETRY_S, CheckpointTurns, checkpoints, export
from forgeasync.faults import FaultLog, Refusal, StorageFaults
from forgeasync.models import FolderNotWritten
from forgeasync.testing import VirtualTime
from forgeasync.trainer import StepResult
from tests.support.loops import MAX_STEPS, Fleet, Recorder, Trainer, make_config, make_problem, make_run

STEP_S = 4.0


class RefusedTrainer(Trainer):
    """Its first checkpoints cannot be written."""

    def __init__(self, num_refused: int, error: type[Exception] = CheckpointNotWritten) -> None:
        super().__init__()
        self.num_refused = num_refused
        self._error = error
        self._is_begun = False

    async def train_items(self, *arguments: object, **keywords: object) -> StepResult:
        await asyncio.sleep(STEP_S)
        return await super().train_items(*arguments, **keywords)

    async def begin_checkpoint(self, folder: Path, *, run_state: bytes, keep: int) -> None:
        await super().begin_checkpoint(folder, run_state=run_state, keep=keep)
        self._is_begun = True

    async def finish_checkpoint(self) -> None:
        was_begun, self._is_begun = self._is_begun, False
        if was_begun and self.num_refused:
            self.num_refused -= 1
            # As it comes from the trainer's proc.
            raise ActorError(self._error("checkpoint could not be written: no space left"))


def run_with(
    trainer: Trainer, tmp_path: Path, *overrides: str, recorder: Recorder | None = None
) -> tuple[float, float]:
    """Run to the end; return the number of outages, and the seconds that it took."""
    config = make_config(tmp_path, *overrides)
    run = make_run(config, trainer=trainer, held_out=[make_problem(10)], recorder=recorder)
    run.checkpoints.folder = tmp_path
    time = VirtualTime()
    time.run(run.run(Fleet()))
    counts = run.faults.metrics()
    assert counts["faults/detected_storage"] == counts["faults/recovered_storage"]
    return counts["faults/detected_storage"], time.now_s()


def steps_of(trainer: Trainer) -> list[int]:
    return [int(name.removeprefix("step-")) for name, _ in trainer.checkpoints]


def test_a_checkpoint_that_was_refused_is_begun_again_beside_training_some_seconds_later(
    tmp_path: Path,
) -> None:
    trainer = RefusedTrainer(num_refused=2)
    outages, took_s = run_with(trainer, tmp_path, "max_steps=12", "checkpoint.every_steps=6")
    assert outages == 1
    # That of step 6 is found refused after step 7, and that of step 8 after step 9: a second later, then two.
    assert steps_of(trainer) == [6, 8, 10, 12]
    assert took_s == 12 * STEP_S, "no step waits for a checkpoint"


def test_the_pause_between_attempts_at_a_checkpoint_is_bounded_and_counts_seconds_not_steps() -> None:
    turns = CheckpointTurns(20, last_step=50)
    assert [step for step in range(1, 51) if turns.is_turn(step)] == [20, 40, 50]
    pauses_s, now_s = [], 100.0
    for _ in range(7):
        turns.refused(now_s)
        pause_s = next(number / 2 for number in range(1000) if turns.is_retry_due(now_s + number / 2))
        pauses_s.append(pause_s)
        now_s += pause_s
    assert pauses_s == [1.0, 2.0, 4.0, 8.0, 16.0, MAX_RETRY_S, MAX_RETRY_S]
    turns.written()
    assert not turns.is_owed and not turns.is_retry_due(1e9)
    turns.refused(0.0)
    assert not turns.is_retry_due(0.5) and turns.is_retry_due(1.0), "a new outage begins with a short pause"
    turns.lost(0.0)
    assert turns.is_retry_due(0.0)
    never = CheckpointTurns(None, last_step=50)
    assert not any(never.is_turn(step) for step in range(1, 51))


class FullDisk:
    """Refuses a file of the run for a minute, from a moment on."""

    def __init__(self, *, from_s: float) -> None:
        self.from_s = from_s

    def flush(self) -> Refusal | None:
        now_s = asyncio.get_running_loop().time()
        return (
            Refusal(path="metrics.jsonl", reason="full") if self.from_s <= now_s < self.from_s + 60 else None
        )


def test_an_outage_beside_a_checkpoint_that_is_owed_is_told_as_a_fault_of_its_own(tmp_path: Path) -> None:
    """Otherwise nothing says why training stands still: what is said of the checkpoint holds up no step."""
    trainer, recorder = RefusedTrainer(num_refused=6), Recorder()
    # The checkpoint of step 6 is found refused after step 7.
    recorder.files = [FullDisk(from_s=8 * STEP_S)]
    outages, took_s = run_with(
        trainer, tmp_path, "max_steps=30", "checkpoint.every_steps=6", recorder=recorder
    )
    assert outages == 2
    assert took_s == pytest.approx(30 * STEP_S + 60, abs=1), "the wait ends as soon as there is room"
    assert recorder.counters[-1]["faults/storage_wait_s"] == pytest.approx(60, abs=1)


def test_a_checkpoint_that_was_lost_with_its_trainer_is_begun_again_at_once_and_no_disk_is_blamed(
    tmp_path: Path,
) -> None:
    trainer = RefusedTrainer(num_refused=1, error=CheckpointLost)
    assert run_with(trainer, tmp_path, "max_steps=12", "checkpoint.every_steps=6")[0] == 0
    assert steps_of(trainer) == [6, 7, 12]
    trainer = RefusedTrainer(num_refused=1, error=CheckpointLost)
    assert run_with(trainer, tmp_path, f"checkpoint.every_steps={MAX_STEPS}")[0] == 0
    assert steps_of(trainer) == [MAX_STEPS] * 2, "the last one is waited for"


@pytest.mark.parametrize("every_steps", [MAX_STEPS, MAX_STEPS - 1, 1000])
def test_the_last_step_has_a_checkpoint_which_is_waited_for(tmp_path: Path, every_steps: int) -> None:
    trainer = RefusedTrainer(num_refused=0)
    assert run_with(trainer, tmp_path, f"checkpoint.every_steps={every_steps}")[0] == 0
    assert steps_of(trainer)[-1] == MAX_STEPS
    trainer = RefusedTrainer(num_refused=2)
    assert run_with(trainer, tmp_path, f"checkpoint.every_steps={MAX_STEPS}")[0] == 1
    assert steps_of(trainer) == [MAX_STEPS] * 3


def test_without_checkpoints_the_last_step_has_none_either(tmp_path: Path) -> None:
    trainer = RefusedTrainer(num_refused=0)
    run_with(trainer, tmp_path, "checkpoint.every_steps=null")
    assert not trainer.checkpoints


def test_a_last_checkpoint_that_fails_with_room_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        run_with(RefusedTrainer(num_refused=100), tmp_path, f"checkpoint.every_steps={MAX_STEPS}")
    assert f"the checkpoint of step {MAX_STEPS} cannot be written" in str(raised.value.exceptions)


def test_a_run_that_is_told_to_stop_writes_a_checkpoint_also_after_one_that_was_refused(
    tmp_path: Path,
) -> None:
    trainer = RefusedTrainer(num_refused=1)
    run = make_run(make_config(tmp_path), trainer=trainer, held_out=[make_problem(10)])
    run.checkpoints.folder = tmp_path

    async def stop() -> None:
        await run.checkpoints.begin(0)
        assert await run.checkpoints.write_now() == 0

    VirtualTime().run(stop())
    assert steps_of(trainer) == [0, 0]


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
    monkeypatch.setattr(checkpoints, "WAIT_S", 0.001)
    monkeypatch.setattr(checkpoints, "export_bytes", lambda config, facts: 1000)
    return SimpleNamespace(config=None, facts=None, model_path=tmp_path)


def free(monkeypatch: pytest.MonkeyPatch, room: Callable[[], int]) -> None:
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda folder: SimpleNamespace(free=room()))


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
    ("errors", "num_asked"), [([REFUSED] * 5, checkpoints.MAX_FAILURES), ([ValueError("nan")], 1)]
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
