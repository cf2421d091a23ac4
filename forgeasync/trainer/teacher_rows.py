"""What a loss with terms asks of a row: the student's own log-probabilities, beside those of a teacher.

Shape suffixes: T targets of a row, K ids of each token.
"""

import math

import numpy as np
import torch

from forgeasync.algorithms import Loss, TeacherTokens
from forgeasync.models import DEVICE_TYPE
from forgeasync.rollouts import NO_ID, TeacherRecord, not_asked
from forgeasync.trainer.logprobs import Predictions
from forgeasync.trainer.packing import PackedRow


def asked_ids(row: PackedRow, loss: Loss) -> np.ndarray | None:
    """The ids to ask the model for, int64 [T, 1 + K]: each target itself, then those that its
    teacher was asked about.

    None if the loss has no terms.
    """
    if not loss.terms:
        return None
    targets_T1 = row.target_ids_L[row.mask_L][:, None]
    if not loss.needs_teacher:
        return targets_T1
    # In place of no id any other one is asked for, and what is said of it is left out.
    ids_TK = record_of(row, loss).ids_TK.clip(min=0).astype(np.int64)
    return np.concatenate([targets_T1, ids_TK], axis=1)


def full_logprobs(predictions: Predictions) -> torch.Tensor | None:
    """The student's log-probabilities of the targets, over the full vocabulary at temperature 1 [T]."""
    return None if predictions.asked_TK is None else predictions.asked_TK[:, 0]


def teacher_tokens(row: PackedRow, predictions: Predictions, loss: Loss) -> TeacherTokens | None:
    """What the teacher says of the row's targets, and the student of the same ids."""
    if not loss.needs_teacher:
        return None
    record = record_of(row, loss)
    assert predictions.asked_TK is not None
    is_asked_T = torch.from_numpy(record.is_asked_T).to(DEVICE_TYPE)
    # Where the teacher was not asked its record is nan, and 0 times nan in a gradient is nan. The student's
    # own values are finite there; they are masked out.
    own_TK = predictions.asked_TK.detach()
    is_id_TK = torch.from_numpy(record.ids_TK != NO_ID).to(DEVICE_TYPE)
    topk_TK = torch.from_numpy(record.topk_TK).to(DEVICE_TYPE).where(is_asked_T[:, None], own_TK[:, 1:])
    return TeacherTokens(
        logprobs_T=torch.from_numpy(record.logprobs_T).to(DEVICE_TYPE).where(is_asked_T, own_TK[:, 0]),
        topk_TK=topk_TK.where(is_id_TK, -math.inf),
        student_topk_TK=predictions.asked_TK[:, 1:].where(is_id_TK, -math.inf),
        versions_T=torch.from_numpy(record.versions_T).to(DEVICE_TYPE, torch.float32),
        is_asked_T=is_asked_T,
    )


def record_of(row: PackedRow, loss: Loss) -> TeacherRecord:
    """What the teacher has said of the row's targets, for a loss that needs it."""
    if row.teacher is None:
        assert row.num_targets == 0, "groups of a run with a teacher are seen by it before they train"
        return not_asked(0, loss.num_teacher_ids)
    assert row.teacher.ids_TK.shape[1] == loss.num_teacher_ids, "the teacher is asked for what terms need"
    return row.teacher
