"""Terms of the loss in the trainer: against transformers in float64, a loss written out, and over ranks."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from forgeasync.algorithms import Loss
from forgeasync.config import ParallelSection
from forgeasync.models import read_model_facts
from forgeasync.rollouts import NO_ID, TeacherRecord, no_teacher_record
from forgeasync.trainer import TrainingSequence, pack_row, pack_rows
from tests.support.processes import run_ranks
from tests.support.references import reference_logits
from tests.support.tokens import section
from tests.support.trainers import make_sequences, named_tensors
from tests.trainer.test_loss_in_trainer import Step, assert_alike, step_gradients, unclipped_trainer

K = 4


def full_logprobs(folder: Path, sequence: TrainingSequence, *, noise: float = 0.0) -> torch.Tensor:
    """Log-probabilities over the whole vocabulary at every response token, float64 [T, V]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            generator = torch.Generator().manual_seed(parameter.numel())
            parameter += noise * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        return reference_logits(model, sequence).log_softmax(-1)


def seen_by_teacher(folder: Path, *, noise: float) -> list[TrainingSequence]:
    """Sequences with kept sets, sampled at a temperature, and what a teacher near the student says of them.

    It was not asked about the second and the fifth: their records are nan throughout.
    """
    seen = []
    for number, sequence in enumerate(make_sequences(9, read_model_facts(str(folder)))):
        logprobs_TV = full_logprobs(folder, sequence, noise=noise)
        top = logprobs_TV.topk(K)
        ids_T = torch.from_numpy(sequence.response_ids_T.astype(np.int64))
        record = TeacherRecord(
            logprobs_T=logprobs_TV.gather(1, ids_T[:, None])[:, 0].float().numpy(),
            ids_TK=top.indices.numpy().astype(np.int32),
            topk_TK=top.values.float().numpy(),
            versions_T=np.full(len(ids_T), number, np.int32),
        )
        if number in (1, 4):
            record = no_teacher_record(len(ids_T), K)
        # The model's own gate: transformers takes no records.
        seen.append(
            dataclasses.replace(sequence, expert_ids_SMK=None, teacher=record, weight=[1.0, 2.5][number % 2])
        )
    return seen


SAMPLED = {"kind": "sampled_reverse_kl", "weight": 0.7}
TERMS = {
    "sampled": section(objective={"kind": "none"}, terms=[SAMPLED | {"weight": 1.0}]),
    **{
        kind: section(objective={"kind": "none"}, terms=[{"kind": "topk_kl", "divergence": kind, "top_k": K}])
        for kind in ("forward", "reverse", "jsd")
    },
    "together": section(
        objective={"kind": "reinforce"},
        corrections=[{"kind": "truncated_is", "cap": 1.1, "level": "token"}],
        terms=[
            SAMPLED,
            {"kind": "topk_kl", "divergence": "jsd", "top_k": 2, "weight": 0.3, "tail": False},
            {"kind": "cross_entropy", "weight": 0.2, "aggregation": {"kind": "sequence_mean_of_token_mean"}},
        ],
    ),
}


def narrowed(record: TeacherRecord, num_ids: int, *, num_none: int = 0) -> TeacherRecord:
    """The record with its first ids, and behind them places without one."""
    behind = ((0, 0), (0, num_none))
    return dataclasses.replace(
        record,
        ids_TK=np.pad(record.ids_TK[:, :num_ids], behind, constant_values=NO_ID),
        topk_TK=np.pad(record.topk_TK[:, :num_ids], behind, constant_values=np.nan),
    )


def steps_of(
    folder: Path, sequences: list[TrainingSequence], parallel: ParallelSection, tokens_per_row: int
) -> dict[str, Step]:
    trainer = unclipped_trainer(folder, TERMS["together"], parallel=parallel)
    rows = pack_rows(sequences, tokens_per_row=tokens_per_row, num_ranks=trainer.num_data_ranks)
    found = {}
    for name, loss in TERMS.items():
        trainer._loss = loss
        # The record has as many ids as the config asks for.
        cut = [
            dataclasses.replace(row, teacher=row.teacher and narrowed(row.teacher, loss.num_teacher_ids))
            for row in rows[trainer.data_rank]
        ]
        found[name] = step_gradients(trainer, cut)
    return found


def written_out(folder: Path, sequences: list[TrainingSequence]) -> dict[str, Step]:
    """The losses of "sampled" and "together" from sums over tokens, in float64.

    Terms that need the teacher are means over the tokens that it was asked about, the others over all.
    """
    trainer = unclipped_trainer(folder, Loss())
    row = pack_row(sequences)
    assert row.teacher is not None
    targets_T1 = row.target_ids_T[:, None]
    extra_ids_TK = np.concatenate([targets_T1, row.teacher.ids_TK.astype(np.int64)], axis=1)
    lengths = torch.tensor([len(one.response_ids_T) for one in sequences])
    weights_T = torch.tensor([one.weight for one in sequences]).repeat_interleave(lengths).double()
    advantages_T = torch.from_numpy(row.advantages_T).double()
    behavior_T = torch.from_numpy(row.behavior_logprobs_T).double()
    found = {}
    for name in ("sampled", "together"):
        predictions = trainer._forward.predictions(row, extra_ids_TK=extra_ids_TK)
        assert predictions.extra_logprobs_TK is not None
        logprobs_T, asked = predictions.logprobs_T.double(), predictions.extra_logprobs_TK.double()
        is_taught_T = torch.from_numpy(~np.isnan(row.teacher.logprobs_T))
        taught_weights_T = weights_T * is_taught_T / (weights_T * is_taught_T).sum()
        gap_T = (asked[:, 0] - torch.from_numpy(row.teacher.logprobs_T)).detach().where(is_taught_T, 0.0)
        ratio_T = (logprobs_T.detach() - behavior_T).exp().clamp(max=1.1)
        if name == "sampled":
            loss = (taught_weights_T * gap_T * logprobs_T).sum()
        else:
            q_TK = torch.from_numpy(row.teacher.topk_TK[:, :2]).double().exp().nan_to_num(0.5)
            p_TK = asked[:, 1:3].exp()
            m_TK = (p_TK + q_TK) / 2
            jsd_T = (p_TK * (p_TK / m_TK).log() + q_TK * (q_TK / m_TK).log()).sum(-1) / 2
            loss = -(weights_T * ratio_T * advantages_T * logprobs_T).sum() / weights_T.sum()
            loss = loss + (taught_weights_T * (0.7 * ratio_T * gap_T * logprobs_T + 0.3 * jsd_T)).sum()
            better_T = -asked[:, 0] * (advantages_T > 0)
            means = torch.stack([part.mean() for part in better_T.split(lengths.tolist())])
            of_sequences = torch.tensor([one.weight for one in sequences], dtype=torch.float64)
            loss = loss + 0.2 * (of_sequences * means).sum() / of_sequences.sum()
        loss.backward()
        gradients = named_tensors(trainer, gradients=True)
        trainer._optimizer.zero_grad()
        metrics = {
            "loss": float(loss),
            "teacher/gap_abs_mean": float(gap_T[is_taught_T].abs().mean()),
            "teacher/taught_share": float(is_taught_T.double().mean()),
        }
        found[name] = (metrics, gradients)
    return found


def of_one_proc(folder: Path, sequences: list[TrainingSequence]) -> dict[str, Step]:
    """Steps, which are also compared with the losses written out."""
    trainer = unclipped_trainer(folder, Loss())
    row = pack_row(sequences)
    every_id_TV = np.arange(read_model_facts(str(folder)).vocab_size)[None].repeat(row.num_targets, 0)
    with torch.no_grad():
        asked_TV = trainer._forward.predictions(row, extra_ids_TK=every_id_TV).extra_logprobs_TK
    # The whole distribution at temperature 1, although rows have kept sets and the trainer one of 0.8.
    expected_TV = torch.cat([full_logprobs(folder, one) for one in sequences])
    torch.testing.assert_close(asked_TV.double(), expected_TV, atol=2e-5, rtol=0)
    steps, by_hand = steps_of(folder, sequences, ParallelSection(), 1024), written_out(folder, sequences)
    assert by_hand["sampled"][0]["teacher/gap_abs_mean"] > 0.01
    assert 0.5 < by_hand["sampled"][0]["teacher/taught_share"] < 0.9
    for name, expected in by_hand.items():
        assert_alike(steps[name], expected, name)
    return steps


@pytest.fixture(scope="module")
def sequences(folder: Path) -> list[TrainingSequence]:
    return seen_by_teacher(folder, noise=0.02)


@pytest.fixture(scope="module")
def one_proc(folder: Path, sequences: list[TrainingSequence]) -> dict[str, Step]:
    return run_ranks(1, of_one_proc, folder, sequences)[0]


def test_steps_of_one_proc_are_the_losses_written_out(one_proc: dict[str, Step]) -> None:
    assert one_proc.keys() == TERMS.keys()


@pytest.mark.parametrize(
    ("parallel", "tokens_per_row"),
    [
        pytest.param(ParallelSection(num_procs=2, context=2), 256, id="cp2"),
        pytest.param(ParallelSection(num_procs=2, expert=2), 128, id="ep2", marks=pytest.mark.exhaustive),
        pytest.param(
            ParallelSection(num_procs=2, tensor=2, sequence=False),
            256,
            id="tp2",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_ranks_and_rows_add_up_to_one_big_batch(
    folder: Path,
    sequences: list[TrainingSequence],
    one_proc: dict[str, Step],
    parallel: ParallelSection,
    tokens_per_row: int,
) -> None:
    for found in run_ranks(parallel.num_procs, steps_of, folder, sequences, parallel, tokens_per_row):
        for name, step in found.items():
            assert_alike(step, one_proc[name], name)


def _fewer_ids(folder: Path, sequences: list[TrainingSequence]) -> None:
    """Every divergence over two ids, and over four of which two are none."""
    trainer = unclipped_trainer(folder, TERMS["forward"])
    for kind in ("forward", "reverse", "jsd"):
        steps = []
        for num_none in (0, 2):
            term = {"kind": "topk_kl", "divergence": kind, "top_k": 2 + num_none}
            trainer._loss = section(objective={"kind": "none"}, terms=[term])
            records = [narrowed(one.teacher, 2, num_none=num_none) for one in sequences]
            pairs = zip(sequences, records, strict=True)
            row = pack_row([dataclasses.replace(one, teacher=record) for one, record in pairs])
            steps.append(step_gradients(trainer, [row]))
        assert_alike(steps[1], steps[0], kind)
        assert 0.0 < steps[0][0]["teacher/student_mass"] < 1.0


def test_where_there_is_no_id_nothing_is_added(folder: Path, sequences: list[TrainingSequence]) -> None:
    """Their log-probabilities are nan in the record."""
    run_ranks(1, _fewer_ids, folder, sequences)
