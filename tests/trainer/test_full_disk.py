"""Checkpoints and exports on a disk without room: nothing half-written is left, and a later attempt works."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from forgeasync.checkpoints import CheckpointNotWritten, checkpoint_name, list_checkpoints
from forgeasync.config import LoraSection, ParallelSection
from forgeasync.models import FolderNotWritten, read_model_facts
from forgeasync.testing import write_tiny_model
from forgeasync.trainer import pack_rows
from tests.support.disks import fill, small_disk
from tests.support.processes import run_ranks
from tests.support.trainers import TOKENS_PER_ROW, make_sequences, make_trainer

PARALLEL = ParallelSection(num_procs=2)


def _on_rank_0(act: Callable[[], object]) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        act()
    dist.barrier()


def _without_room(disk: Path, num_bytes: int, write: Callable[[], None]) -> str:
    """What writing says where that much room is left; afterwards nothing of it is there."""
    before = {one.name for one in disk.iterdir()}
    _on_rank_0(lambda: fill(disk, left_bytes=num_bytes))
    try:
        write()
        said = ""
    except (CheckpointNotWritten, FolderNotWritten) as error:
        said = str(error)
    dist.barrier()
    assert {one.name for one in disk.iterdir()} == before | {"filler"}
    _on_rank_0((disk / "filler").unlink)
    return said


def _checkpoints(model: Path, disk: Path) -> None:
    """One that fits, then one for each room that does not do, then one that fits again."""
    trainer = make_trainer(model, PARALLEL)
    sequences = make_sequences(8, read_model_facts(str(model)))
    rows = pack_rows(sequences, tokens_per_row=TOKENS_PER_ROW, num_ranks=trainer.num_data_ranks)

    def write(version: int, *, is_large: bool = False) -> None:
        run_state = b"{}" * (3000 if is_large else 1)
        trainer.begin_checkpoint(disk / checkpoint_name(version), run_state=run_state, keep=2)
        if is_large:
            # Training goes on while it fails.
            trainer.train_step(rows[trainer.data_rank])
        trainer.finish_checkpoint()
        # Rank 0 gives the checkpoint its name after the other rank has ended its part.
        dist.barrier()

    write(1)
    # Room for nothing, for a part of a file, and for all but the last file.
    for left_bytes in (0, 100_000, 1_000_000):
        said = _without_room(disk, left_bytes, lambda: write(2, is_large=True))
        assert dist.get_rank() or "step-00000002 could not be written" in said
    write(2)
    again = make_trainer(model, PARALLEL)
    assert len(list_checkpoints(disk)) == 2
    for folder in sorted(disk.iterdir()):
        again.resume(folder)


def test_a_checkpoint_without_room_leaves_the_one_before_and_is_written_later(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    with small_disk(tmp_path / "disk", num_mib=20) as disk:
        run_ranks(PARALLEL.num_procs, _checkpoints, model, disk)


def _exports(model: Path, disk: Path, lora: LoraSection | None) -> None:
    trainer = make_trainer(model, PARALLEL, lora=lora)
    for left_bytes in (0, 20_000, 200_000):
        said = _without_room(disk, left_bytes, lambda: trainer.save_hf(disk / "final", source=model))
        assert ("final could not be written" in said) == (dist.get_rank() == 0), "rank 0 writes"
    trainer.save_hf(disk / "final", source=model)


@pytest.mark.parametrize(
    "lora", [None, LoraSection(rank=32, alpha=32.0, targets=("q_proj", "k_proj", "down_proj"))]
)
def test_an_export_without_room_holds_up_no_rank_and_is_written_later(
    tmp_path: Path, lora: LoraSection | None
) -> None:
    model = write_tiny_model(tmp_path / "model")
    with small_disk(tmp_path / "disk", num_mib=20) as disk:
        run_ranks(PARALLEL.num_procs, _exports, model, disk, lora)
        assert any(file.suffix == ".safetensors" for file in (disk / "final").iterdir())
