"""Checkpoints and exports, on disks that refuse them too; the newest weights of a run that ends early."""

import asyncio
import shutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import msgspec
import pytest
import torch
from monarch.actor import ActorError
from safetensors.torch import load_file

from forgeasync.checkpoints import CheckpointLost, CheckpointNotWritten, RunState
from forgeasync.config import TimeoutSection
from forgeasync.controller import Rescue, checkpoints, export, save_newest_weights
from forgeasync.files import Refusal
from forgeasync.models import FolderNotWritten
from forgeasync.observability import FaultLog, RunDir, StorageFaults
from forgeasync.runtime import ActorDied, HostLost
from forgeasync.testing import VirtualTime
from forgeasync.trainer import StepResult
from forgeasync.waiting import DeadlineExceeded
from forgeasync.weights import (
    Box,
    Manifest,
    Piece,
    RankLayout,
    StagedVersion,
    StagedWeights,
    StagingBuffers,
    StagingSource,
    VersionUnreadable,
    WeightLayout,
)
from tests.support.config_samples import FACTS
from tests.support.loops import MAX_STEPS, Fleet, Recorder, Trainer, make_config, make_run

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
    config = make_config(*overrides)
    run = make_run(config, trainer=trainer, recorder=recorder)
    run.checkpoints.folder = tmp_path
    time = VirtualTime()
    time.run(run.run(Fleet()))
    counts = run.faults.metrics()
    assert counts["faults/detected_storage"] == counts["faults/recovered_storage"]
    return counts["faults/detected_storage"], time.now_s()


def steps_of(trainer: Trainer) -> list[int]:
    return [int(name.removeprefix("step-")) for name, _ in trainer.checkpoints]


NOT_WRITTEN, LOST = CheckpointNotWritten, CheckpointLost


@pytest.mark.parametrize(
    ("num_failed", "error", "max_steps", "every_steps", "begun", "num_outages"),
    [
        # That of step 6 is found refused after step 7, 28 s after the start, and begun again 10 s later.
        (2, NOT_WRITTEN, 12, 6, [6, 10, 12], 1),
        # One that was lost with its trainer is begun again at once, and no disk is blamed.
        (1, LOST, 12, 6, [6, 7, 12], 0),
        # The last step has one, which is waited for.
        (0, NOT_WRITTEN, 3, 3, [3], 0),
        (0, NOT_WRITTEN, 3, 2, [2, 3], 0),
        (0, NOT_WRITTEN, 3, 1000, [3], 0),
        (2, NOT_WRITTEN, 3, 3, [3, 3, 3], 1),
        (1, LOST, 3, 3, [3, 3], 0),
        (0, NOT_WRITTEN, 3, "null", [], 0),
    ],
)
def test_a_checkpoint_that_fails_is_begun_again_beside_training(
    tmp_path: Path,
    num_failed: int,
    error: type[Exception],
    max_steps: int,
    every_steps: int | str,
    begun: list[int],
    num_outages: int,
) -> None:
    trainer = RefusedTrainer(num_failed, error)
    overrides = (f"max_steps={max_steps}", f"checkpoint.every_steps={every_steps}")
    outages, took_s = run_with(trainer, tmp_path, *overrides)
    assert outages == num_outages and steps_of(trainer) == begun
    if len(set(begun)) > 1:
        assert took_s == max_steps * STEP_S, "no step waits for a checkpoint"


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


def test_a_last_checkpoint_that_fails_with_room_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        run_with(RefusedTrainer(num_refused=100), tmp_path, f"checkpoint.every_steps={MAX_STEPS}")
    assert f"the checkpoint of step {MAX_STEPS} cannot be written" in str(raised.value.exceptions)


async def test_a_refused_checkpoint_is_written_on_a_stop(tmp_path: Path, virtual_time: VirtualTime) -> None:
    trainer = RefusedTrainer(num_refused=1)
    run = make_run(make_config(), trainer=trainer)
    run.checkpoints.folder = tmp_path

    await run.checkpoints.begin(0)
    assert await run.checkpoints.write_now() == 0
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


async def test_a_run_told_to_stop_in_the_middle_of_a_step_writes_a_checkpoint_of_it() -> None:
    """Its cancelled call goes on in the trainer: the step counts once the trainer has made it."""

    class SlowTrainer(Trainer):
        under_way = asyncio.Event()

        async def train_items(self, rows: object, *, step: int) -> StepResult:
            if step == 2:
                self.steps.append([])
                self.under_way.set()
                await asyncio.Event().wait()
            return await super().train_items(rows, step=step)

    trainer = SlowTrainer()
    run = make_run(make_config("max_steps=5", "checkpoint.every_steps=null"), trainer=trainer)
    running = asyncio.create_task(run.run(Fleet()))
    await trainer.under_way.wait()
    run.recorder.elapsed_s = 12.5
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await run.checkpoints.write_now() == 2
    ((name, run_state),) = trainer.checkpoints
    state = msgspec.json.decode(run_state, type=RunState)
    assert name == "step-00000002" and state.step == state.buffer.trainer_version == 2
    assert state.elapsed_s == 12.5


async def test_a_run_told_to_stop_right_after_a_checkpoint_writes_no_second_one(tmp_path: Path) -> None:
    """Its folder is there, and another of the same name cannot take its place."""

    class WritingTrainer(Trainer):
        begun: Path | None = None

        async def begin_checkpoint(self, folder: Path, *, run_state: bytes, keep: int) -> None:
            assert self.begun is None and not folder.exists() and keep == 5
            self.begun = folder
            await super().begin_checkpoint(folder, run_state=run_state, keep=keep)

        async def finish_checkpoint(self) -> None:
            """As the trainer does: the folder has its name once all of it is written."""
            if self.begun is not None:
                self.begun.mkdir()
                (self.begun / "run.json").write_text("{}")
                self.begun = None

    trainer = WritingTrainer()
    config = make_config(f"checkpoint.every_steps={MAX_STEPS}", "checkpoint.keep=5")
    run = make_run(config, trainer=trainer)
    run.checkpoints.folder = tmp_path
    await run.run(Fleet())
    assert (tmp_path / f"step-{MAX_STEPS:08d}").is_dir(), "a run waits for its last checkpoint"
    assert await run.checkpoints.write_now() == MAX_STEPS
    (tmp_path / f"step-{MAX_STEPS:08d}" / "run.json").unlink()
    (tmp_path / f"step-{MAX_STEPS:08d}").rmdir()
    assert await run.checkpoints.write_now() == MAX_STEPS
    assert (tmp_path / f"step-{MAX_STEPS:08d}").is_dir(), "it waits until all of it is written"
    assert [name for name, _ in trainer.checkpoints] == [f"step-{MAX_STEPS:08d}"] * 2


VERSION = 7


TENSORS = {
    name: torch.randn(6, 5, generator=torch.Generator().manual_seed(len(name)))
    for name in ("embedding", "an expert", "another expert")
}


@pytest.fixture
def staged(tmp_path: Path) -> StagedWeights:
    """A version of two ranks: rows of one tensor on each, columns of two stacked ones."""
    folder = tmp_path / "shared"
    folder.mkdir()
    ranks, sources, checksums = [], [], []
    for rank, (rows, columns) in enumerate([((0, 4), (0, 2)), ((4, 2), (2, 3))]):
        boxes = (Box(start=(rows[0], 0), size=(rows[1], 5)), Box(start=(0, columns[0]), size=(6, columns[1])))
        stacked = ("an expert", "another expert")
        pieces = (
            Piece(names=("embedding",), shape=(6, 5), box=boxes[0], offset=0),
            Piece(names=stacked, shape=(6, 5), box=boxes[1], offset=128),
        )
        layout = RankLayout(rank=rank, host_id="h", pieces=pieces, num_bytes=128 + 2 * 6 * columns[1] * 4)
        buffers = StagingBuffers(folder, layout, torch.float32)
        shards = [
            TENSORS["embedding"][rows[0] : sum(rows)],
            torch.stack([TENSORS[name][:, columns[0] : sum(columns)] for name in stacked]),
        ]
        checksums.append(buffers.begin(1, shards).finish().checksums)
        ranks.append(layout)
        sources.append(StagingSource(host_id="h", paths=buffers.paths))
    layout = WeightLayout(dtype=torch.float32, ranks=tuple(ranks))
    manifest = Manifest(
        version=VERSION,
        slot=1,
        layout_digest=layout.digest,
        checksums=tuple(checksums),
    )
    return StagedWeights(manifest=manifest, layout=layout, sources=tuple(sources))


def test_a_damaged_or_missing_version_is_not_taken_for_whole(staged: StagedWeights) -> None:
    path = staged.sources[1].paths[1]
    data = bytearray(path.read_bytes())
    data[130] ^= 1
    path.write_bytes(data)
    with pytest.raises(VersionUnreadable, match="block 0 of rank 1 is not that of version 7"):
        StagedVersion(staged)
    path.unlink()
    with pytest.raises(VersionUnreadable, match="cannot be read"):
        StagedVersion(staged)


async def _works(folder: Path) -> int:
    folder.mkdir()
    return 9


_refuses = AsyncMock(side_effect=ArithmeticError("export last is refused: lm_head has values that are nan"))


async def _hangs(*_: object) -> int:
    await asyncio.Event().wait()
    return 0


def rescued_run(
    folder: Path,
    export: Callable[[Path], Awaitable[int]],
    staged: StagedWeights | None,
    checkpoint: Callable[[], Awaitable[int]] = _hangs,
    *,
    sigterm_s: float = 60.0,
) -> SimpleNamespace:
    """What can be saved of a run that was resumed at step 4 and is at step 5.

    ``sigterm_s`` is short where something hangs, and otherwise too long for any machine to exceed.
    """
    source, checkpoints = folder / "source", folder / "checkpoints"
    for each in (source, checkpoints):
        each.mkdir(exist_ok=True)
    (source / "config.json").write_text("{}")

    async def save_hf(folder: Path, *, source: Path) -> int:
        assert source == run.prepared.model_path
        return await export(folder)

    run = SimpleNamespace(
        version=5,
        first_version=4,
        checkpoints=SimpleNamespace(folder=checkpoints, write_now=checkpoint, finish=_refuses),
        config=SimpleNamespace(lora=None, timeouts=TimeoutSection(sigterm_s=sigterm_s)),
        prepared=SimpleNamespace(model_path=source, facts=FACTS),
        serving=SimpleNamespace(ledger=SimpleNamespace(newest=None if staged is None else staged.manifest)),
        trainer=SimpleNamespace(save_hf=save_hf, staged=lambda manifest: staged, is_stuck=False),
    )
    return run


def make_rescue(folder: Path, *parts: object, **limits: float) -> Rescue:
    return Rescue(rescued_run(folder, *parts, **limits), folder / "checkpoints" / "last")


def save(rescue: Rescue, stop_signal: signal.Signals | None = None, *, trainer_failed: bool = False) -> str:
    return asyncio.run(rescue.save(stop_signal=stop_signal, trainer_failed=trainer_failed))


@pytest.mark.parametrize(
    ("export", "stop_signal", "trainer_failed"),
    [(_refuses, None, False), (_hangs, signal.SIGINT, False), (_works, signal.SIGTERM, True)],
    ids=["refused", "hung", "dead"],
)
def test_what_was_published_takes_its_place(
    tmp_path: Path,
    staged: StagedWeights,
    export: Callable[[Path], Awaitable[int]],
    stop_signal: signal.Signals | None,
    trainer_failed: bool,
) -> None:
    checkpoint = AsyncMock()
    sigterm_s = 1.0 if export is _hangs else 60.0
    rescue = make_rescue(tmp_path, export, staged, checkpoint, sigterm_s=sigterm_s)
    words = save(rescue, stop_signal, trainer_failed=trainer_failed)
    assert checkpoint.called is (export is _hangs), "a trainer that failed is not asked for one"
    last = tmp_path / "checkpoints" / "last"
    assert words.rpartition("; ")[2] == f"the weights of step 7, as published, are in {last}"
    found = load_file(last / "model-00001-of-00001.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert (last / "config.json").exists() and [path.name for path in last.parent.iterdir()] == ["last"]


def test_what_a_late_trainer_has_saved_counts(tmp_path: Path, staged: StagedWeights) -> None:
    """It goes on after its deadline, and is done before what was published is written."""

    async def is_late(folder: Path) -> int:
        folder.mkdir()
        (folder / "of the trainer").touch()
        raise DeadlineExceeded("exporting the newest weights took longer than 1 s")

    words = save(make_rescue(tmp_path, is_late, staged))
    last = tmp_path / "checkpoints" / "last"
    assert words == f"the trainer's newest weights, exported after its deadline, are in {last}"
    assert [path.name for path in last.iterdir()] == ["of the trainer"]
    assert [path.name for path in last.parent.iterdir()] == ["last"], "of what was published nothing is left"


def test_where_nothing_can_be_saved_the_newest_checkpoint_is_named(tmp_path: Path) -> None:
    rescue = make_rescue(tmp_path, _refuses, None)
    assert "values that are nan, no version was published yet); there is no checkpoint" in save(rescue)
    checkpoint = tmp_path / "checkpoints" / "step-00000040"
    checkpoint.mkdir()
    (checkpoint / "run.json").write_text("{}")
    assert save(rescue).endswith(f"the newest checkpoint is {checkpoint}")


def test_a_stopped_run_writes_a_checkpoint_if_there_is_time(tmp_path: Path, staged: StagedWeights) -> None:
    checkpoint = AsyncMock(return_value=9)
    for number in (signal.SIGTERM, signal.SIGINT):
        words = save(make_rescue(tmp_path, _works, staged, checkpoint), number)
        assert words.startswith("--resume latest continues after step 9; the weights of step 9 are in ")
        (tmp_path / "checkpoints" / "last").rmdir()
    assert save(make_rescue(tmp_path, _works, staged, checkpoint)).startswith("the w")
    assert checkpoint.call_count == 2
    (tmp_path / "checkpoints" / "last").rmdir()
    rescue = make_rescue(tmp_path, _works, staged)
    words = VirtualTime().run(rescue.save(stop_signal=signal.SIGTERM, trainer_failed=False))
    assert words.startswith("there was no time for a checkpoint; the weights of step 9 are in ")


def test_all_that_is_tried_after_a_signal_shares_one_limit(tmp_path: Path) -> None:
    """What kills the run a fixed time after SIGTERM counts from the signal."""
    limits_s: list[float] = []

    async def hangs(*_: object) -> int:
        now_s = asyncio.get_running_loop().time
        start_s = now_s()
        try:
            return await _hangs()
        finally:
            limits_s.append(now_s() - start_s)

    rescue = make_rescue(tmp_path, hangs, None, hangs, sigterm_s=60.0)
    words = VirtualTime().run(rescue.save(stop_signal=signal.SIGTERM, trainer_failed=False))
    assert "the newest weights could not be saved" in words
    assert limits_s == pytest.approx([30.0, 15.0])


NEW_NOTHING = "no step was made, so that there are no new weights"


@pytest.mark.parametrize(
    ("error", "version", "is_published", "words"),
    [
        (ValueError("any"), 4, False, NEW_NOTHING),
        (ValueError("any"), 4, True, "the weights of step 9 are in"),
        (ValueError("any"), 5, False, "the weights of step 9 are in"),
        (DeadlineExceeded("generator 0 took longer"), 5, True, "the weights of step 9 are in"),
        (DeadlineExceeded("the trainer making step 6 took longer"), 5, True, "the weights of step 7, as pub"),
        (ActorDied("trainer rank 1 of 2 was killed"), 5, True, "the weights of step 7, as pub"),
        (ExceptionGroup("", [ActorDied("trainer rank 1")]), 5, True, "the weights of step 7, as pub"),
        (ActorDied("scorer rank 0 was killed"), 5, True, "the weights of step 9 are in"),
        (HostLost("host generators-0 is lost"), 5, True, "the weights of step 7, as pub"),
    ],
)
def test_who_is_asked_first_depends_on_what_has_failed(
    tmp_path: Path, staged: StagedWeights, error: Exception, version: int, is_published: bool, words: str
) -> None:
    """A run that was resumed at step 4, or has published its weights, or made a step besides."""
    run = rescued_run(tmp_path, _works, staged if is_published else None)
    run.version = version
    found = asyncio.run(save_newest_weights(run, RunDir(path=tmp_path), error))
    assert found.startswith(words)
    if is_published:
        run.trainer.is_stuck = True
        shutil.rmtree(tmp_path / "checkpoints" / "last", ignore_errors=True)
        found = asyncio.run(save_newest_weights(run, RunDir(path=tmp_path), ValueError("of one rank")))
        assert found.startswith("the weights of step 7, as published, are in"), "its ranks answer nothing"
