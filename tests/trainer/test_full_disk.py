"""Checkpoints and exports on a disk without room: nothing half-written is left, and a later attempt works."""

import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from forgeasync.checkpoints import CheckpointNotWritten, checkpoint_name, list_checkpoints
from forgeasync.config import LoraSection, ParallelSection
from forgeasync.models import FolderNotWritten, read_model_facts
from forgeasync.testing import write_tiny_model
from forgeasync.trainer import PolicyTrainer, pack_rows
from tests.support.disks import fill, small_disk
from tests.support.processes import run_ranks
from tests.support.trainers import TOKENS_PER_ROW, make_sequences, make_trainer

PARALLEL = ParallelSection(num_procs=2)


def step(trainer: PolicyTrainer, model: Path) -> None:
    sequences = make_sequences(8, read_model_facts(str(model)))
    rows = pack_rows(sequences, tokens_per_row=TOKENS_PER_ROW, num_ranks=trainer.num_data_ranks)
    trainer.train_step(rows[trainer.data_rank])


def _on_rank_0(act: object) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        act()  # type: ignore[operator]
    dist.barrier()


def _checkpoints(model: Path, disk: Path, num_bytes: list[int]) -> list[str]:
    """One that fits, then one for each room that does not do, then one that fits again."""
    trainer = make_trainer(model, PARALLEL)
    trainer.begin_checkpoint(disk / checkpoint_name(1), run_state=b"{}", keep=2)
    trainer.finish_checkpoint()
    reasons = []
    for left_bytes in num_bytes:
        _on_rank_0(lambda left=left_bytes: fill(disk, left_bytes=left))
        trainer.begin_checkpoint(disk / checkpoint_name(2), run_state=b"{}" * 3000, keep=2)
        # Training goes on while it fails.
        step(trainer, model)
        try:
            trainer.finish_checkpoint()
        except CheckpointNotWritten as error:
            reasons.append(str(error))
        dist.barrier()
        assert [one.name for one in disk.iterdir() if one.name != "filler"] == [checkpoint_name(1)]
        _on_rank_0((disk / "filler").unlink)
    trainer.begin_checkpoint(disk / checkpoint_name(2), run_state=b"{}", keep=2)
    trainer.finish_checkpoint()
    # Rank 0 gives the checkpoint its name after the other rank has ended its part.
    dist.barrier()
    again = make_trainer(model, PARALLEL)
    for folder in sorted(disk.iterdir()):
        again.resume(folder)
    return reasons


def test_a_checkpoint_without_room_leaves_the_one_before_and_is_written_later(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    with small_disk(tmp_path / "disk", num_mib=20) as disk:
        # Room for nothing, for a part of a file, and for all but the last file.
        rooms = [0, 100_000, 1_000_000]
        of_rank_0, of_rank_1 = run_ranks(PARALLEL.num_procs, _checkpoints, model, disk, rooms)
        assert len(of_rank_0) == len(of_rank_1) == len(rooms)
        assert all("step-00000002 could not be written" in reason for reason in of_rank_0)
        assert len(list_checkpoints(disk)) == 2


def _exports(model: Path, disk: Path, rooms: list[int], lora: LoraSection | None) -> list[str]:
    trainer = make_trainer(model, PARALLEL, lora=lora)
    reasons = []
    for left_bytes in rooms:
        _on_rank_0(lambda left=left_bytes: fill(disk, left_bytes=left))
        try:
            trainer.save_hf(disk / "final", source=model)
        except FolderNotWritten as error:
            reasons.append(str(error))
        dist.barrier()
        assert [one.name for one in disk.iterdir()] == ["filler"]
        _on_rank_0((disk / "filler").unlink)
    trainer.save_hf(disk / "final", source=model)
    return reasons


@pytest.mark.parametrize(
    "lora", [None, LoraSection(rank=32, alpha=32.0, targets=("q_proj", "k_proj", "down_proj"))]
)
def test_an_export_without_room_holds_up_no_rank_and_is_written_later(
    tmp_path: Path, lora: LoraSection | None
) -> None:
    model = write_tiny_model(tmp_path / "model")
    whole = tmp_path / "whole"
    with small_disk(tmp_path / "disk", num_mib=20) as disk:
        rooms = [0, 20_000, 200_000]
        of_rank_0, of_rank_1 = run_ranks(PARALLEL.num_procs, _exports, model, disk, rooms, lora)
        assert len(of_rank_0) == len(rooms) and of_rank_1 == [], "rank 0 writes"
        assert all("final could not be written" in reason for reason in of_rank_0)
        shutil.copytree(disk / "final", whole)
    assert any(file.suffix == ".safetensors" for file in whole.iterdir())
