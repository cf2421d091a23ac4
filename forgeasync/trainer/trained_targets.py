"""Which targets of a step are trained on, and what its loss is divided by.

Shape suffix: T targets of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import utils as dist_utils

from forgeasync.algorithms import Loss
from forgeasync.models import DEVICE_TYPE
from forgeasync.trainer.packing import PackedRow
from forgeasync.trainer.teacher_rows import record_of


def trained_mask(row: PackedRow, max_token_age: int | None) -> torch.Tensor:
    """Which targets of a row are trained on: bool [T]; None for ``max_token_age`` trains on all."""
    ages_T = torch.from_numpy(row.ages_L[row.mask_L]).to(DEVICE_TYPE)
    if max_token_age is None:
        return torch.ones_like(ages_T, dtype=torch.bool)
    return ages_T <= max_token_age


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetCounts:
    """Counts of one optimizer step, over all data-parallel ranks."""

    total: float
    """What the objective's loss is divided by."""
    term_totals: tuple[float, ...]
    """What each term of the loss is divided by."""
    num_trained: int
    num_targets: int


def count_targets(
    loss: Loss, rows: Sequence[PackedRow], masks: Sequence[torch.Tensor], *, mesh: DeviceMesh | None
) -> TargetCounts:
    """Count the targets of a step; collective."""
    counts = torch.zeros(3 + len(loss.terms), dtype=torch.float64, device=DEVICE_TYPE)
    for row, mask_T in zip(rows, masks, strict=True):
        sequence_ids_T = torch.from_numpy(row.sequence_ids_L[row.mask_L]).to(DEVICE_TYPE)
        sample_weights_T = torch.from_numpy(row.sample_weights_L[row.mask_L]).to(DEVICE_TYPE)
        counts[0] += loss.count(mask_T, sequence_ids_T, sample_weights_T)
        counts[1] += mask_T.sum()
        counts[2] += row.num_targets
        is_asked_T = mask_T
        if loss.needs_teacher:
            is_asked_T = torch.from_numpy(record_of(row, loss).is_asked_T).to(DEVICE_TYPE)
        of_terms = loss.term_counts(mask_T, is_asked_T, sequence_ids_T, sample_weights_T)
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
