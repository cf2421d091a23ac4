"""Runs packed rows through a model: log-probabilities of targets, with recorded experts and kept sets.

The reference is the policy that a run starts from, for the penalty on moving away from it. With adapters it
is the trained model with its adapters switched off. Otherwise it is a second, frozen model in the compute
dtype, sharded like the trained one; its gathered weights are freed after every row. It uses the same kept
sets and temperature as the trained policy, but its own gate chooses the experts.

The inputs of the loss also come from a packed row: trained targets, denominators and the teacher's record.

Shape suffixes: L packed row length, T its targets (the response tokens trained on), D model dim, M MoE
layers, K top-k, or ids of each token.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.attention import AttentionMasksType, VarlenMetadata
from torchtitan.models.common.decoder import Decoder

from forgeasync.algorithms import Loss, RowTokens, TeacherTokens
from forgeasync.config import ModelFacts, RouterBias, TrainerSection
from forgeasync.models import DEVICE_TYPE
from forgeasync.rollouts import NO_ID, NO_RECORD, TeacherRecord, no_teacher_record
from forgeasync.trainer import hf_checkpoint
from forgeasync.trainer.host_copies import page_locked, to_device
from forgeasync.trainer.logprobs import Predictions, SumRanks, Targets
from forgeasync.trainer.lora import without_adapters
from forgeasync.trainer.model import build_parallel_model
from forgeasync.trainer.packing import PackedRow
from forgeasync.trainer.replay_router import replay, replay_routers
from forgeasync.trainer.workarounds.attention import (
    GatheredKeysAttention,
    PackedAttention,
    PackedSequences,
    PartMetadata,
    packed_sequences,
    part_metadata,
    tree_metadata,
)

if TYPE_CHECKING:
    from forgeasync.trainer.generator_forward import GeneratorForward


class RowForward:
    """Runs rows through one model of this rank's mesh; all ranks of a row call it together."""

    def __init__(
        self,
        model: Decoder,
        *,
        parallel_dims: ParallelDims,
        section: TrainerSection,
        temperature: float,
        generator_forward: "GeneratorForward | None" = None,
    ) -> None:
        """``generator_forward`` gives the model's layers the generator's bits."""
        self._model = model
        self._generator_forward = generator_forward
        self._temperature = temperature
        self.routers = replay_routers(model)
        self._counts_experts = section.router_bias is RouterBias.UPDATED
        # Compiled layers need a single graph, and tensor-parallel ranks a single order of summing gradients:
        # rows without records replay empty ones.
        self._always_replays = bool(self.routers) and (
            section.compile or section.parallel.tensor > 1 or self._counts_experts
        )
        context_mesh = parallel_dims.get_optional_mesh("cp")
        self._context_group = None if context_mesh is None else context_mesh.get_group()
        self._context_rank = 0 if context_mesh is None else context_mesh.get_local_rank()
        self._num_context_ranks = 1 if context_mesh is None else context_mesh.size()

    def replay(self, row: PackedRow, noted_ML: torch.Tensor | None = None) -> AbstractContextManager[None]:
        """Return a context in which the row's recorded experts are used; run the backward pass in it too.

        The outcome of each routing decision that this rank computes is written to ``noted_ML``
        (``ReplayedDecisions.note``).
        """
        mine = self.own_part(row)
        num_uses_BL = None
        if self._counts_experts:
            # Padding does not count towards the load of an expert.
            # A token that several sequences share counts once for each of them.
            num_uses_BL = to_device(row.num_uses_L[mine])[None]
        if row.expert_ids_LMK is not None:
            ids_BLMK = to_device(row.expert_ids_LMK[mine])[None]
            positions_BL = torch.arange(mine.start, mine.stop, device=DEVICE_TYPE)[None]
            return replay(self.routers, ids_BLMK, num_uses_BL, noted_ML=noted_ML, positions_BL=positions_BL)
        if not self._always_replays:
            return nullcontext()
        shape = (1, mine.stop - mine.start, len(self.routers), self.routers[0].top_k)
        unrecorded_BLMK = torch.full(shape, NO_RECORD, device=DEVICE_TYPE)
        return replay(self.routers, unrecorded_BLMK, num_uses_BL)

    def own_part(self, row: PackedRow) -> slice:
        """Return the positions of a row that this rank computes: an equal part with context parallelism."""
        width = len(row.token_ids_L) // self._num_context_ranks
        return slice(self._context_rank * width, (self._context_rank + 1) * width)

    def _own_targets(self, row: PackedRow) -> slice:
        """Return the targets in this rank's part. They are consecutive: such rows have no branches."""
        if self._context_group is None:
            return slice(0, row.num_targets)
        mine = self.own_part(row)
        first, end = np.searchsorted(row.places_T, (mine.start, mine.stop))
        return slice(int(first), int(end))

    def logprobs(self, row: PackedRow) -> torch.Tensor:
        """Return log-probabilities of a row's targets over their kept sets, float32 [T], with gradients.

        Call it inside ``replay``.
        """
        return self.predictions(row, with_entropies=False).logprobs_T

    @torch.no_grad()
    def trace(self, row: PackedRow, target: int) -> dict[str, np.ndarray]:
        """Return the vectors of ``GeneratorForward`` for one target (``OperatorTrace``); collective."""
        forward, only = self._generator_forward, slice(target, target + 1)
        assert forward is not None
        row = dataclasses.replace(
            row,
            places_T=row.places_T[only],
            target_ids_T=row.target_ids_T[only],
            kept_tokens=row.kept_tokens.slice(target, target + 1),
        )
        vectors: dict[str, np.ndarray] = {}
        forward.vectors = vectors
        try:
            with self.replay(row):
                self.logprobs(row)
        finally:
            forward.vectors = None
        return vectors

    def predictions(
        self, row: PackedRow, *, with_entropies: bool = True, extra_ids_TK: np.ndarray | None = None
    ) -> Predictions:
        """Return log-probabilities and entropies of a row's targets. Call it inside ``replay``.

        ``extra_ids_TK`` (int64) has, for each target, further ids whose log-probabilities over the full
        vocabulary at temperature 1 are returned.
        """
        mine = self.own_part(row)
        own = self._own_targets(row)
        if self._generator_forward is not None:
            self._generator_forward.begin(row)
        kept = row.kept_tokens.slice(own.start, own.stop)
        targets = Targets(
            token_ids_T=to_device(row.target_ids_T[own]),
            kept_offsets=page_locked(kept.offsets),
            kept_ids=to_device(kept.ids_N),
            extra_ids_TK=None if extra_ids_TK is None else to_device(extra_ids_TK[own]),
        )
        hidden_BLD = self._model(
            to_device(row.token_ids_L[mine])[None],
            positions=to_device(row.positions_L[mine])[None],
            attention_masks=attention_masks(self._model, row, part=mine),
        )
        if isinstance(hidden_BLD, DTensor):
            hidden_BLD = hidden_BLD.to_local()
        hidden_TD = hidden_BLD[0, to_device(row.places_T[own] - mine.start)]
        found = self._model.lm_head(hidden_TD, targets, self._temperature, with_entropies)
        if not torch.is_grad_enabled():
            self._reshard()
        group = self._context_group
        if group is None:
            return found
        # Objectives need whole sequences: every rank of the row continues with all of its targets.
        around = (own.start, row.num_targets - own.stop)

        def of_row(part: torch.Tensor) -> torch.Tensor:
            return SumRanks.apply(F.pad(part, (0, 0) * (part.ndim - 1) + around), group)

        return Predictions(
            of_row(found.logprobs_T),
            None if found.entropies_T is None else of_row(found.entropies_T),
            None if found.extra_logprobs_TK is None else of_row(found.extra_logprobs_TK),
        )

    def _reshard(self) -> None:
        """Free the parameters that FSDP2 keeps gathered (root, last norm and head) for the backward pass.

        Without a backward pass the whole parameters would replace the shards that are stepped and published,
        and become stale. The public ``reshard`` of torch 2.13 does nothing here: because the head is called
        separately, its group, which includes the last norm, stays in the middle of a forward pass.
        """
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    group._to_sharded()


Masks: TypeAlias = AttentionMasksType | PackedSequences | PartMetadata


def attention_masks(model: Decoder, row: PackedRow, *, part: slice) -> Masks | dict[str, Masks]:
    """Return what attention needs to separate the sequences of a row.

    ``part`` has the positions of the row that this rank computes. Models with layers of linear attention get
    one entry for each kind of layer, by TorchTitan's names.
    """
    if all(layer.attention is not None for layer in model.config.layers):
        return _attention_masks(model, row, part=part)
    assert part == slice(0, len(row.token_ids_L)), "linear attention is over whole rows"
    found = part_metadata(row.positions_L[None], start=0, stop=part.stop)
    host = (*np.flatnonzero(row.positions_L == 0).tolist(), part.stop)
    linear = VarlenMetadata(found.cu_seq_q, found.cu_seq_k, found.max_q, found.max_k, host)
    return {"quadratic_attention": _attention_masks(model, row, part=part), "deltanet": linear}


def _attention_masks(model: Decoder, row: PackedRow, *, part: slice) -> Masks:
    attention = model.config.first_attention.inner_attention
    if isinstance(attention, PackedAttention.Config):
        return packed_sequences(torch.from_numpy(row.visible_until_L), query_start=part.start)
    is_whole = part == slice(0, len(row.token_ids_L))
    if isinstance(attention, GatheredKeysAttention.Config) and is_whole:
        return tree_metadata(row.visible_until_L)
    found = part_metadata(row.positions_L[None], start=part.start, stop=part.stop)
    if isinstance(attention, GatheredKeysAttention.Config):
        return found
    # TorchTitan's own function finds the sequences on the GPU, and waits for it.
    return VarlenMetadata(found.cu_seq_q, found.cu_seq_k, found.max_q, found.max_k)


ReferenceLogprobs = Callable[[PackedRow], torch.Tensor]
"""Log-probabilities of a row under the reference, float32 [T], without gradients; collective."""


def frozen_copy(
    facts: ModelFacts,
    section: TrainerSection,
    *,
    parallel_dims: ParallelDims,
    temperature: float,
    checkpoint: Path,
) -> ReferenceLogprobs:
    """Build the reference as a second model, read from a Hugging Face folder."""
    model = build_parallel_model(facts, section, parallel_dims=parallel_dims, is_frozen=True)
    hf_checkpoint.load(model, facts, checkpoint)
    forward = RowForward(model, parallel_dims=parallel_dims, section=section, temperature=temperature)

    return lambda row: _unrecorded(forward, row)


def base_model(model: torch.nn.Module, forward: RowForward) -> ReferenceLogprobs:
    """Return the reference as the trained model without its adapters."""

    def logprobs(row: PackedRow) -> torch.Tensor:
        with without_adapters(model):
            return _unrecorded(forward, row)

    return logprobs


@torch.no_grad()
def _unrecorded(forward: RowForward, row: PackedRow) -> torch.Tensor:
    unrecorded = dataclasses.replace(row, expert_ids_LMK=None)
    with forward.replay(unrecorded):
        return forward.logprobs(unrecorded)


def recorded_tokens(row: PackedRow, max_token_age: int | None) -> RowTokens:
    """Return what is known of a row's targets before it runs, with the generator's log-probabilities.

    Targets older than ``max_token_age`` are not trained on; None: all of them are.
    """
    behavior_T, ages_T = to_device(row.behavior_logprobs_T), to_device(row.ages_T)
    return RowTokens(
        logprobs_T=behavior_T,
        behavior_logprobs_T=behavior_T,
        advantages_T=to_device(row.advantages_T),
        mask_T=torch.ones_like(ages_T, dtype=torch.bool)
        if max_token_age is None
        else ages_T <= max_token_age,
        sequence_ids_T=to_device(row.sequence_ids_T),
        ages_T=ages_T,
        sample_weights_T=to_device(row.sample_weights_T),
    )


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
    loss: Loss, rows: Sequence[PackedRow], recorded: Sequence[RowTokens], *, mesh: DeviceMesh | None
) -> TargetCounts:
    """Count the targets of a step; collective."""
    counts = torch.zeros(3 + len(loss.terms), dtype=torch.float64, device=DEVICE_TYPE)
    for row, tokens in zip(rows, recorded, strict=True):
        mask_T, sequences = tokens.mask_T, (tokens.sequence_ids_T, tokens.sample_weights_T)
        counts[0] += loss.count(mask_T, *sequences)
        counts[1] += mask_T.sum()
        counts[2] += row.num_targets
        has_target_T = mask_T
        if loss.needs_teacher:
            has_target_T = to_device(_teacher_record(row, loss).has_target_T)
        of_terms = loss.term_counts(mask_T, has_target_T, *sequences)
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
    targets_T1 = row.target_ids_T[:, None]
    if not loss.needs_teacher:
        return targets_T1
    # Where the record has no id, id 0 is requested, and its log-probability is masked out.
    ids_TK = _teacher_record(row, loss).ids_TK.clip(min=0).astype(np.int64)
    return np.concatenate([targets_T1, ids_TK], axis=1)


def row_tokens(
    row: PackedRow,
    recorded: RowTokens,
    predictions: Predictions,
    loss: Loss,
    *,
    ref_logprobs_T: torch.Tensor | None,
    proximal_logprobs_T: torch.Tensor | None,
) -> RowTokens:
    """Return the loss's inputs for a row's targets; ``predictions`` has the ids of ``student_ids_of``."""
    # The student's log-probabilities of the targets, over the full vocabulary at temperature 1.
    full_logprobs_T = None if predictions.extra_logprobs_TK is None else predictions.extra_logprobs_TK[:, 0]
    return dataclasses.replace(
        recorded,
        logprobs_T=predictions.logprobs_T,
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
    assert predictions.extra_logprobs_TK is not None
    has_target_T = to_device(record.has_target_T)
    # The record is nan where the teacher did not score, and 0 times nan in a gradient is nan. The student's
    # own values replace it: they are finite, and they are masked out.
    own_TK = predictions.extra_logprobs_TK.detach()
    is_id_TK = to_device(record.ids_TK != NO_ID)
    topk_TK = to_device(record.topk_TK).where(has_target_T[:, None], own_TK[:, 1:])
    return TeacherTokens(
        logprobs_T=to_device(record.logprobs_T).where(has_target_T, own_TK[:, 0]),
        topk_TK=topk_TK.where(is_id_TK, -math.inf),
        student_topk_TK=predictions.extra_logprobs_TK[:, 1:].where(is_id_TK, -math.inf),
        versions_T=to_device(record.versions_T).float(),
        has_target_T=has_target_T,
    )


def _teacher_record(row: PackedRow, loss: Loss) -> TeacherRecord:
    """Return the teacher's record of the row's targets, for a loss that needs a teacher."""
    if row.teacher is None:
        assert row.num_targets == 0, "groups of a run with a teacher are seen by it before they train"
        return no_teacher_record(0, loss.num_teacher_ids)
    assert row.teacher.ids_TK.shape[1] == loss.num_teacher_ids, "the teacher is asked for what terms need"
    return row.teacher
