"""The trainer against transformers, unpacked rows, and itself under other parallel layouts."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forgeasync.algorithms.objectives import ppo_clip
from forgeasync.config.model_facts import read_model_facts
from forgeasync.config.schema import (
    ActivationCheckpointing,
    OptimizerSection,
    ParallelSection,
    TrainerSection,
)
from forgeasync.trainer.hf_checkpoint import full_tensors
from forgeasync.trainer.packing import TrainingSequence, pack_row, pack_rows
from forgeasync.trainer.policy_trainer import PolicyTrainer
from tests.support.models import write_random_model
from tests.support.processes import run_ranks

TOKENS_PER_ROW = 128


def make_trainer(
    folder: Path,
    parallel: ParallelSection,
    *,
    temperature: float = 1.0,
    checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE,
) -> PolicyTrainer:
    section = TrainerSection(
        parallel=parallel,
        tokens_per_row=TOKENS_PER_ROW,
        activation_checkpointing=checkpointing,
        # A large step, so that a wrong gradient shows in the weights.
        optimizer=OptimizerSection(learning_rate=1e-2, max_grad_norm=0.1, eps=1e-3),
    )
    return PolicyTrainer(
        section=section,
        facts=read_model_facts(str(folder)),
        temperature=temperature,
        objective=ppo_clip(),
        seed=0,
        checkpoint=folder,
    )


def make_sequences(num_sequences: int, vocab_size: int) -> list[TrainingSequence]:
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(num_sequences):
        response = rng.integers(0, vocab_size, rng.integers(3, 60)).astype(np.int32)
        sequences.append(
            TrainingSequence(
                prompt_ids_P=rng.integers(0, vocab_size, rng.integers(1, 20)).astype(np.int32),
                response_ids_T=response,
                behavior_logprobs_T=(-3.0 + 0.3 * rng.standard_normal(len(response))).astype(np.float32),
                ages_T=np.zeros(len(response), np.int32),
                advantage=float(rng.standard_normal()),
            )
        )
    return sequences


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model") / "hf", scale=4.0)


@pytest.fixture(scope="module")
def sequences(folder: Path) -> list[TrainingSequence]:
    return make_sequences(11, read_model_facts(str(folder)).vocab_size)


def _packed_logprobs(
    folder: Path, sequences: list[TrainingSequence], temperature: float
) -> list[torch.Tensor]:
    trainer = make_trainer(folder, ParallelSection(), temperature=temperature)
    with torch.no_grad():
        packed = trainer.logprobs(pack_row(sequences))
        alone = [trainer.logprobs(pack_row([sequence])) for sequence in sequences]
    start = 0
    pieces = []
    for sequence in sequences:
        pieces.append(packed[start : start + sequence.num_tokens - 1])
        start += sequence.num_tokens
    return pieces + [row[: s.num_tokens - 1] for row, s in zip(alone, sequences, strict=True)]


def test_logprobs_match_transformers_and_unpacked_rows(
    folder: Path, sequences: list[TrainingSequence]
) -> None:
    temperature = 0.7
    three = sequences[:3]
    results = run_ranks(1, _packed_logprobs, folder, three, temperature)[0]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for sequence, packed, alone in zip(three, results[:3], results[3:], strict=True):
        torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)
        ids = torch.from_numpy(np.concatenate([sequence.prompt_ids_P, sequence.response_ids_T])).long()
        with torch.no_grad():
            logits = reference(ids[None]).logits[0].double()
        expected = torch.log_softmax(logits / temperature, -1)[:-1].gather(-1, ids[1:, None])[:, 0]
        torch.testing.assert_close(packed.double(), expected, atol=1e-4, rtol=0)
        assert expected.std() > 0.3, "a nearly uniform model would hide mistakes"


def _step(
    folder: Path,
    parallel: ParallelSection,
    sequences: list[TrainingSequence],
    checkpointing: ActivationCheckpointing,
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    trainer = make_trainer(folder, parallel, checkpointing=checkpointing)
    rows = pack_rows(sequences, tokens_per_row=TOKENS_PER_ROW, num_ranks=trainer.num_data_ranks)
    num_targets = sum(row.num_targets for of_rank in rows for row in of_rank)
    result = trainer.train_step(rows[trainer.data_rank], num_targets=num_targets)
    weights = {name: tensor.clone() for name, tensor in full_tensors(trainer.model, trainer._facts)}
    return result.metrics, weights


@pytest.fixture(scope="module")
def single(
    folder: Path, sequences: list[TrainingSequence]
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    return run_ranks(1, _step, folder, ParallelSection(), sequences, ActivationCheckpointing.NONE)[0]


@pytest.mark.parametrize(
    ("parallel", "checkpointing"),
    [
        pytest.param(ParallelSection(num_procs=2), ActivationCheckpointing.NONE, id="fsdp2"),
        pytest.param(ParallelSection(num_procs=2, expert=2), ActivationCheckpointing.NONE, id="fsdp2-ep2"),
        pytest.param(ParallelSection(num_procs=2, expert=2), ActivationCheckpointing.FULL, id="ep2-full-ac"),
        pytest.param(
            ParallelSection(num_procs=2, data_replicate=2), ActivationCheckpointing.NONE, id="replicate2"
        ),
        pytest.param(
            ParallelSection(num_procs=2, tensor=2, expert=2), ActivationCheckpointing.NONE, id="tp2-ep2"
        ),
        pytest.param(
            ParallelSection(num_procs=4, tensor=2, expert=4),
            ActivationCheckpointing.SELECTIVE,
            id="fsdp2-tp2-ep4-selective-ac",
        ),
    ],
)
def test_a_step_is_the_same_under_every_layout(
    folder: Path,
    sequences: list[TrainingSequence],
    single: tuple[dict[str, float], dict[str, torch.Tensor]],
    parallel: ParallelSection,
    checkpointing: ActivationCheckpointing,
) -> None:
    metrics, weights = single
    for rank_metrics, rank_weights in run_ranks(
        parallel.num_procs, _step, folder, parallel, sequences, checkpointing
    ):
        for name in ("loss", "grad_norm", "mismatch/kl", "objective/clipped_share"):
            assert rank_metrics[name] == pytest.approx(metrics[name], rel=1e-4), name
        assert rank_weights.keys() == weights.keys()
        for name, expected in weights.items():
            torch.testing.assert_close(rank_weights[name], expected, atol=2e-5, rtol=1e-4, msg=name)


def test_the_step_does_something(
    folder: Path, single: tuple[dict[str, float], dict[str, torch.Tensor]]
) -> None:
    before = load_file(folder / "model.safetensors")
    moved = [name for name, tensor in single[1].items() if not torch.equal(tensor, before[name])]
    # Every parameter has a gradient, gates included.
    assert len(moved) == len(before)


def _round_trip(folder: Path, out: Path) -> None:
    make_trainer(folder, ParallelSection(num_procs=2, expert=2)).save_hf(out, source=folder)


@pytest.mark.parametrize("tie", [False, True])
def test_loading_and_saving_is_bit_exact(tmp_path: Path, tie: bool) -> None:
    source = write_random_model(tmp_path / "source", tie=tie)
    run_ranks(2, _round_trip, source, tmp_path / "out")
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "out" / "model-00001.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for file in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / file).read_text() == (source / file).read_text()


def test_a_tensor_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "model")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        config.replace('"moe_intermediate_size": 64', '"moe_intermediate_size": 32')
    )
    with pytest.raises(Exception, match=r"gate_proj.*shape \(4, 64, 64\).*\(4, 32, 64\)"):
        run_ranks(1, make_trainer, folder, ParallelSection())
