"""Whatever ends a run, its newest weights are saved: by the trainer, or from what it published last."""

import asyncio
import shutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from forgeasync.actors import ActorDied
from forgeasync.config import TimeoutSection
from forgeasync.controller import Rescue, save_newest_weights
from forgeasync.launch import HostLost
from forgeasync.observability import RunDir
from forgeasync.testing import VirtualTime
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

VERSION = 7


def whole(names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    return {name: torch.randn(6, 5, generator=torch.Generator().manual_seed(len(name))) for name in names}


TENSORS = whole(("embedding", "an expert", "another expert"))


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
        checksums.append(buffers.begin(1, shards).finish())
        ranks.append(layout)
        sources.append(StagingSource(host_id="h", paths=buffers.paths))
    layout = WeightLayout(dtype=torch.float32, ranks=tuple(ranks))
    manifest = Manifest(
        version=VERSION,
        slot=1,
        layout_digest=layout.digest,
        checksums=tuple(checksums),
        waited_s=0.0,
        staging_s=0.0,
    )
    return StagedWeights(manifest=manifest, layout=layout, sources=tuple(sources))


def test_a_published_version_comes_back_whole(staged: StagedWeights) -> None:
    found = dict(StagedVersion(staged).tensors())
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


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


async def _refuses(folder: Path) -> int:
    raise ArithmeticError("export last is refused: lm_head has values that are nan")


async def _fails() -> None:
    raise OSError("no space left for the checkpoint")


async def _hangs(*_: object) -> int:
    await asyncio.Event().wait()
    return 0


class Checkpoints:
    """Counts what it is asked for."""

    def __init__(self) -> None:
        self.num = 0

    async def write(self) -> int:
        self.num += 1
        return 9


def make_rescue(
    folder: Path,
    export: Callable[[Path], Awaitable[int]],
    staged: StagedWeights | None,
    checkpoint: Callable[[], Awaitable[int]] = _hangs,
    *,
    sigterm_s: float = 60.0,
) -> Rescue:
    """``sigterm_s`` is short where something hangs, and otherwise too long for any machine to exceed."""
    source, checkpoints = folder / "source", folder / "checkpoints"
    for each in (source, checkpoints):
        each.mkdir(exist_ok=True)
    (source / "config.json").write_text("{}")
    return Rescue(
        folder=checkpoints / "last",
        checkpoints=checkpoints,
        source=source,
        facts=FACTS,
        lora=None,
        timeouts=TimeoutSection(sigterm_s=sigterm_s),
        export=export,
        checkpoint=checkpoint,
        staged=staged,
    )


def save(rescue: Rescue, stop_signal: signal.Signals | None = None, *, trainer_failed: bool = False) -> str:
    return asyncio.run(rescue.save(stop_signal=stop_signal, trainer_failed=trainer_failed))


def test_the_trainer_is_asked_first(tmp_path: Path, staged: StagedWeights) -> None:
    words = save(make_rescue(tmp_path, _works, staged))
    assert words == f"the weights of step 9 are in {tmp_path / 'checkpoints' / 'last'}"


@pytest.mark.parametrize(
    ("export", "stop_signal", "trainer_failed"),
    [(_refuses, None, False), (_hangs, signal.SIGINT, False), (_works, None, True)],
    ids=["refused", "hung", "dead"],
)
def test_what_was_published_takes_its_place(
    tmp_path: Path,
    staged: StagedWeights,
    export: Callable[[Path], Awaitable[int]],
    stop_signal: signal.Signals | None,
    trainer_failed: bool,
) -> None:
    rescue = make_rescue(tmp_path, export, staged, sigterm_s=1.0 if export is _hangs else 60.0)
    words = save(rescue, stop_signal, trainer_failed=trainer_failed)
    last = tmp_path / "checkpoints" / "last"
    assert words == f"the weights of step 7, as published, are in {last}"
    found = load_file(last / "model-00001-of-00001.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert (last / "config.json").exists() and [path.name for path in last.parent.iterdir()] == ["last"]


def test_a_trainer_that_is_late_has_saved_its_weights_all_the_same(
    tmp_path: Path, staged: StagedWeights
) -> None:
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
    checkpoint = rescue.checkpoints / "step-00000040"
    checkpoint.mkdir()
    (checkpoint / "run.json").write_text("{}")
    assert save(rescue).endswith(f"the newest checkpoint is {checkpoint}")


def test_sigterm_writes_a_checkpoint_if_there_is_time(tmp_path: Path, staged: StagedWeights) -> None:
    checkpoints = Checkpoints()
    words = save(make_rescue(tmp_path, _works, staged, checkpoints.write), signal.SIGTERM)
    assert words.startswith("--resume latest goes on after step 9; the weights of step 9 are in ")
    (tmp_path / "checkpoints" / "last").rmdir()
    assert save(make_rescue(tmp_path, _works, staged, checkpoints.write), signal.SIGINT).startswith("the w")
    assert checkpoints.num == 1
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


def test_a_trainer_that_failed_is_not_asked_for_a_checkpoint(tmp_path: Path, staged: StagedWeights) -> None:
    checkpoints = Checkpoints()
    rescue = make_rescue(tmp_path, _works, staged, checkpoints.write)
    assert save(rescue, signal.SIGTERM, trainer_failed=True).startswith("the weights of step 7, as published")
    assert checkpoints.num == 0


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
    tmp_path: Path,
    staged: StagedWeights,
    error: Exception,
    version: int,
    is_published: bool,
    words: str,
) -> None:
    """A run that was resumed at step 4, or has published its weights, or made a step besides."""
    rescue = make_rescue(tmp_path, _works, None)

    async def save_hf(folder: Path, *, source: Path) -> int:
        assert source == rescue.source
        return await _works(folder)

    run = SimpleNamespace(
        version=version,
        first_version=4,
        checkpoints=SimpleNamespace(folder=rescue.checkpoints, write_now=_hangs, finish=_fails),
        config=SimpleNamespace(lora=None, timeouts=rescue.timeouts),
        prepared=SimpleNamespace(model_path=rescue.source, facts=FACTS),
        serving=SimpleNamespace(ledger=SimpleNamespace(newest=staged.manifest if is_published else None)),
        trainer=SimpleNamespace(save_hf=save_hf, staged=lambda manifest: staged, is_stuck=False),
    )
    found = asyncio.run(save_newest_weights(run, RunDir(path=tmp_path), error))
    assert found.startswith(words)
    if is_published:
        run.trainer.is_stuck = True
        shutil.rmtree(rescue.folder)
        found = asyncio.run(save_newest_weights(run, RunDir(path=tmp_path), ValueError("of one rank")))
        assert found.startswith("the weights of step 7, as published, are in"), "its ranks answer nothing"
