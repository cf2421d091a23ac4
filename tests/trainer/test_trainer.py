"""The trainer against transformers and unpacked rows; its files. Parallel layouts: test_layouts.py."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forgeasync.config import ParallelSection
from forgeasync.testing import write_tiny_model
from forgeasync.trainer import TrainingSequence, pack_rows
from tests.support.processes import run_ranks
from tests.support.trainers import TOKENS_PER_ROW, local, make_trainer


def _probed_steps(folder: Path, sequences: list[TrainingSequence]) -> None:
    """Gradient norms of three steps, the weights after them, and the shapes of what is published."""
    found = []
    for probe_share in (0.0, 1.0):
        parallel = ParallelSection(num_procs=2, expert=2)
        trainer = make_trainer(folder, parallel, replay_probe_share=probe_share)
        rows = pack_rows(sequences, tokens_per_row=TOKENS_PER_ROW, num_ranks=trainer.num_data_ranks)
        norms = [trainer.train_step(rows[trainer.data_rank]).metrics["grad_norm"] for _ in range(3)]
        shards = [local(weight.tensor).clone() for weight in trainer.named_weights()]
        found.append((norms, shards))
    (norms, shards), (norms_probed, shards_probed) = found
    assert norms_probed == norms
    assert all(map(torch.equal, shards_probed, shards)), "whole parameters are left where shards belong"


def test_probing_changes_nothing(folder: Path, sequences: list[TrainingSequence]) -> None:
    run_ranks(2, _probed_steps, folder, sequences)


def _round_trip(folder: Path, out: Path) -> None:
    make_trainer(folder, ParallelSection(num_procs=2, expert=2)).save_hf(out, source=folder)


@pytest.mark.parametrize("tie", [False, True])
def test_loading_and_saving_is_bit_exact(tmp_path: Path, tie: bool) -> None:
    source = write_tiny_model(tmp_path / "source", tie=tie)
    run_ranks(2, _round_trip, source, tmp_path / "out")
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for file in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / file).read_text() == (source / file).read_text()
    weights = tmp_path / "out" / "model-00001-of-00001.safetensors"
    index = tmp_path / "out" / "model.safetensors.index.json"
    assert weights.stat().st_mode == index.stat().st_mode, "whoever may read one file may read all"


def test_a_tensor_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        config.replace('"moe_intermediate_size": 64', '"moe_intermediate_size": 32')
    )
    with pytest.raises(Exception, match=r"experts.0.gate_proj.*shape \(64, 64\).*\(32, 64\)"):
        run_ranks(1, make_trainer, folder)
