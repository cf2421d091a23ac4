"""Inputs of the loss from a packed row: trained targets, denominators and the teacher's record.

Shape suffixes: T targets of a row, K ids of each token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import utils as dist_utils

from forgeasync.algorithms import Loss, RowTokens, TeacherTokens
from forgeasync.models import DEVICE_TYPE
from forgeasync.rollouts import NO_ID, TeacherRecord, no_teacher_record
from forgeasync.trainer.logprobs import Predictions
from forgeasync.trainer.packing import PackedRow


def of_targets(row: PackedRow, values_L: np.ndarray) -> torch.Tensor:
    """Return one of the row's arrays at its targets [T], on the device."""
    return torch.from_numpy(values_L[row.mask_L]).to(DEVICE_TYPE)


def trained_mask(row: PackedRow, max_token_age: int | None) -> torch.Tensor:
    """Return which targets of a row are trained on: bool [T]; all of them if ``max_token_age`` is None."""
    ages_T = of_targets(row, row.ages_L)
    if max_token_age is None:
        return torch.ones_like(ages_T, dtype=torch.bool)
    return ages_T <= max_token_age


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetCounts:
    """Counts of one optimizer step, over all data-parallel ranks."""

    total: float
    """Denominator of the objective's loss."""
    term_totals: tuple[float, ...]
    """Denominator of each term of the loss."""
    num_trained: int
    num_targets: int


def count_targets(
    loss: Loss, rows: Sequence[PackedRow], masks: Sequence[torch.Tensor], *, mesh: DeviceMesh | None
) -> TargetCounts:
    """Count the targets of a step; collective."""
    counts = torch.zeros(3 + len(loss.terms), dtype=torch.float64, device=DEVICE_TYPE)
    for row, mask_T in zip(rows, masks, strict=True):
        sequence_ids_T = of_targets(row, row.sequence_ids_L)
        sample_weights_T = of_targets(row, row.sample_weights_L)
        counts[0] += loss.count(mask_T, sequence_ids_T, sample_weights_T)
        counts[1] += mask_T.sum()
        counts[2] += row.num_targets
        has_target_T = mask_T
        if loss.needs_teacher:
            has_target_T = torch.from_numpy(_teacher_record(row, loss).has_target_T).to(DEVICE_TYPE)
        of_terms = loss.term_counts(mask_T, has_target_T, sequence_ids_T, sample_weights_T)
        for index, count in enumerate(of_terms):
            counts[3 + index] += count
    if mesh is not None:
        counts = dist_utils.dist_sum_tensor(counts, mesh)
    total, num_trained, num_targets, *term_totals = counts.tolist()
    return TargetCounts(
        total=total,
        term_totals=tuple(term_totals),
        num_trained=int(num_trained),
        num_targets=int(num_targets),
    )


def student_ids_of(row: PackedRow, loss: Loss) -> np.ndarray | None:
    """Return the ids whose log-probabilities a loss with terms needs from the model: int64 [T, 1 + K].

    The first id of a target is the target itself; the others are those that its teacher scored. None if the
    loss has no terms.
    """
    if not loss.terms:
        return None
    targets_T1 = row.target_ids_L[row.mask_L][:, None]
    if not loss.needs_teacher:
        return targets_T1
    # Where the record has no id, id 0 is requested, and its log-probability is masked out.
    ids_TK = _teacher_record(row, loss).ids_TK.clip(min=0).astype(np.int64)
    return np.concatenate([targets_T1, ids_TK], axis=1)


def row_tokens(
    row: PackedRow,
    predictions: Predictions,
    loss: Loss,
    *,
    mask_T: torch.Tensor,
    ref_logprobs_T: torch.Tensor | None,
    proximal_logprobs_T: torch.Tensor | None,
) -> RowTokens:
    """Return the loss's inputs for a row's targets; ``predictions`` has the ids of ``student_ids_of``."""
    # The student's log-probabilities of the targets, over the full vocabulary at temperature 1.
    full_logprobs_T = None if predictions.asked_TK is None else predictions.asked_TK[:, 0]
    return RowTokens(
        logprobs_T=predictions.logprobs_T,
        behavior_logprobs_T=of_targets(row, row.behavior_logprobs_L),
        advantages_T=of_targets(row, row.advantages_L),
        mask_T=mask_T,
        sequence_ids_T=of_targets(row, row.sequence_ids_L),
        ages_T=of_targets(row, row.ages_L),
        sample_weights_T=of_targets(row, row.sample_weights_L),
        ref_logprobs_T=ref_logprobs_T,
        proximal_logprobs_T=proximal_logprobs_T,
        full_logprobs_T=full_logprobs_T,
        teacher=_teacher_tokens(row, predictions, loss),
    )


def _teacher_tokens(row: PackedRow, predictions: Predictions, loss: Loss) -> TeacherTokens | None:
    """Return the teacher's log-probabilities of the row's targets, and the student's of the same ids."""
    if not loss.needs_teacher:
        return None
    record = _teacher_record(row, loss)
    assert predictions.asked_TK is not None
    has_target_T = torch.from_numpy(record.has_target_T).to(DEVICE_TYPE)
    # The record is nan where the teacher did not score, and 0 times nan in a gradient is nan. The student's
    # own values replace it: they are finite, and they are masked out.
    own_TK = predictions.asked_TK.detach()
    is_id_TK = torch.from_numpy(record.ids_TK != NO_ID).to(DEVICE_TYPE)
    topk_TK = torch.from_numpy(record.topk_TK).to(DEVICE_TYPE).where(has_target_T[:, None], own_TK[:, 1:])
    return TeacherTokens(
        logprobs_T=torch.from_numpy(record.logprobs_T).to(DEVICE_TYPE).where(has_target_T, own_TK[:, 0]),
        topk_TK=topk_TK.where(is_id_TK, -math.inf),
        student_topk_TK=predictions.asked_TK[:, 1:].where(is_id_TK, -math.inf),
        versions_T=torch.from_numpy(record.versions_T).to(DEVICE_TYPE, torch.float32),
        has_target_T=has_target_T,
    )


def _teacher_record(row: PackedRow, loss: Loss) -> TeacherRecord:
    """Return the teacher's record of the row's targets, for a loss that needs a teacher."""
    if row.teacher is None:
        assert row.num_targets == 0, "groups of a run with a teacher are seen by it before they train"
        return no_teacher_record(0, loss.num_teacher_ids)
    assert row.teacher.ids_TK.shape[1] == loss.num_teacher_ids, "the teacher is asked for what terms need"
    return row.teacher
