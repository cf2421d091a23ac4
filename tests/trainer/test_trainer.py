"""The trainer against transformers and unpacked rows; its files. Parallel layouts: test_layouts.py."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forgeasync.config import ParallelSection
from forgeasync.testing import write_tiny_model
from forgeasync.trainer import TrainingSequence, full_tensors, pack_row, pack_rows
from tests.support.processes import run_ranks
from tests.support.trainers import TOKENS_PER_ROW, local, make_trainer


def _packed_logprobs(
    folder: Path, sequences: list[TrainingSequence], temperature: float
) -> list[torch.Tensor]:
    trainer = make_trainer(folder, temperature=temperature)
    with torch.no_grad():
        packed = trainer.logprobs(pack_row(sequences))
        alone = [trainer.logprobs(pack_row([sequence])) for sequence in sequences]
    return [*packed.split([len(sequence.response_ids_T) for sequence in sequences]), *alone]


def test_logprobs_match_transformers_and_unpacked_rows(
    folder: Path, sequences: list[TrainingSequence]
) -> None:
    """Own routing, sampled from kept sets."""
    temperature = 0.7
    three = [dataclasses.replace(sequence, expert_ids_SMK=None) for sequence in sequences[:3]]
    results = run_ranks(1, _packed_logprobs, folder, three, temperature)[0]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for sequence, packed, alone in zip(three, results[:3], results[3:], strict=True):
        torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)
        ids = torch.from_numpy(np.concatenate([sequence.prompt_ids_P, sequence.response_ids_T])).long()
        with torch.no_grad():
            logits = reference(ids[None]).logits[0].double() / temperature
        expected = []
        for index, token in enumerate(sequence.response_ids_T.tolist()):
            row = logits[len(sequence.prompt_ids_P) - 1 + index]
            kept = sequence.kept_tokens.row(index).tolist() or list(range(len(row)))
            expected.append(torch.log_softmax(row[kept], 0)[kept.index(token)])
        expected = torch.stack(expected)
        torch.testing.assert_close(packed.double(), expected, atol=1e-4, rtol=0)
        assert expected.std() > 0.3, "a nearly uniform model would hide mistakes"


def _probed_steps(
    folder: Path, parallel: ParallelSection, sequences: list[TrainingSequence], probe_share: float
) -> tuple[list[float], dict[str, torch.Tensor], list[tuple[int, ...]]]:
    """Gradient norms of three steps, the weights after them, and the shapes of what is published."""
    trainer = make_trainer(folder, parallel, replay_probe_share=probe_share)
    rows = pack_rows(sequences, tokens_per_row=TOKENS_PER_ROW, num_ranks=trainer.num_data_ranks)
    norms = [trainer.train_step(rows[trainer.data_rank]).metrics["grad_norm"] for _ in range(3)]
    shapes = [tuple(local(weight.tensor).shape) for weight in trainer.named_weights()]
    return (
        norms,
        {name: tensor.clone() for name, tensor in full_tensors(trainer.model, trainer._facts)},
        shapes,
    )


def test_probing_changes_nothing(folder: Path, sequences: list[TrainingSequence]) -> None:
    parallel = ParallelSection(num_procs=2, expert=2)
    for plain, probed in zip(
        run_ranks(2, _probed_steps, folder, parallel, sequences, 0.0),
        run_ranks(2, _probed_steps, folder, parallel, sequences, 1.0),
        strict=True,
    ):
        assert probed[0] == plain[0]
        assert all(torch.equal(probed[1][name], tensor) for name, tensor in plain[1].items())
        assert probed[2] == plain[2], "whole parameters are left where shards belong"


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
