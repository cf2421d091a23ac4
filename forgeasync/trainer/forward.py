"""Runs packed rows through a model: log-probabilities of targets, with recorded experts and kept sets.

The reference is the policy that a run starts from, for the penalty on moving away from it. With adapters it
is the trained model with its adapters switched off. Otherwise it is a second, frozen model in the compute
dtype, sharded like the trained one; its gathered weights are freed after every row. It uses the same kept
sets and temperature as the trained policy, but its own gate chooses the experts.

Shape suffixes: L packed row length, T its targets (the response tokens trained on), D model dim, M MoE
layers, K top-k.
"""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.attention import AttentionMasksType
from torchtitan.models.common.decoder import Decoder

from forgeasync.config import ModelFacts, RouterBias, TrainerSection
from forgeasync.models import DEVICE_TYPE
from forgeasync.rollouts import NO_RECORD
from forgeasync.trainer import hf_checkpoint
from forgeasync.trainer.logprobs import Predictions, SumRanks, Targets
from forgeasync.trainer.lora import without_adapters
from forgeasync.trainer.model import build_parallel_model
from forgeasync.trainer.packing import NO_SEQUENCE, PackedRow
from forgeasync.trainer.replay_router import replay, replay_routers
from forgeasync.trainer.workarounds.cpu_attention import PackedAttention, PackedSequences, packed_sequences
from forgeasync.trainer.workarounds.gpu_attention import ContextAttention, PartMetadata, part_metadata


class RowForward:
    """Runs rows through one model of this rank's mesh; all ranks of a row call it together."""

    def __init__(
        self, model: Decoder, *, parallel_dims: ParallelDims, section: TrainerSection, temperature: float
    ) -> None:
        self._model = model
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
        is_counted_BL = None
        if self._counts_experts:
            # Padding does not count towards the load of an expert.
            is_real_L = torch.from_numpy(row.sequence_ids_L[mine] != NO_SEQUENCE)
            is_counted_BL = is_real_L[None].to(DEVICE_TYPE)
        if row.expert_ids_LMK is not None:
            ids_BLMK = torch.from_numpy(row.expert_ids_LMK[mine])[None].to(DEVICE_TYPE)
            positions_BL = torch.arange(mine.start, mine.stop, device=DEVICE_TYPE)[None]
            return replay(self.routers, ids_BLMK, is_counted_BL, noted_ML=noted_ML, positions_BL=positions_BL)
        if not self._always_replays:
            return nullcontext()
        shape = (1, mine.stop - mine.start, len(self.routers), self.routers[0].top_k)
        unrecorded_BLMK = torch.full(shape, NO_RECORD, device=DEVICE_TYPE)
        return replay(self.routers, unrecorded_BLMK, is_counted_BL)

    def own_part(self, row: PackedRow) -> slice:
        """Return the positions of a row that this rank computes: an equal part with context parallelism."""
        width = len(row.token_ids_L) // self._num_context_ranks
        return slice(self._context_rank * width, (self._context_rank + 1) * width)

    def logprobs(self, row: PackedRow) -> torch.Tensor:
        """Return float32 [T], over the row's kept sets, with gradients. Call it inside ``replay``."""
        return self.predictions(row, with_entropies=False).logprobs_T

    def predictions(
        self, row: PackedRow, *, with_entropies: bool = True, asked_ids_TK: np.ndarray | None = None
    ) -> Predictions:
        """Return log-probabilities and entropies of a row's targets. Call it inside ``replay``.

        ``asked_ids_TK`` (int64) has, for each target, further ids whose log-probabilities over the full
        vocabulary at temperature 1 are returned.
        """
        mine = self.own_part(row)
        positions_L = torch.from_numpy(row.positions_L[mine])
        hidden_BLD = self._model(
            torch.from_numpy(row.token_ids_L[mine])[None].to(DEVICE_TYPE),
            positions=positions_L[None].to(DEVICE_TYPE),
            attention_masks=attention_masks(self._model, row.positions_L[None], part=mine),
        )
        if isinstance(hidden_BLD, DTensor):
            hidden_BLD = hidden_BLD.to_local()
        # This rank's targets: their positions in its part, and the index of the first among all targets.
        positions_T = row.mask_L[mine].nonzero()[0]
        first = int(row.mask_L[: mine.start].sum())
        kept = row.kept_tokens.slice(first, first + len(positions_T))
        targets = Targets(
            token_ids_T=torch.from_numpy(row.target_ids_L[mine][positions_T]).to(DEVICE_TYPE),
            kept_offsets=torch.from_numpy(kept.offsets).to(DEVICE_TYPE),
            kept_ids=torch.from_numpy(kept.ids_N).to(DEVICE_TYPE),
            asked_ids_TK=None
            if asked_ids_TK is None
            else torch.from_numpy(asked_ids_TK[first : first + len(positions_T)]).to(DEVICE_TYPE),
        )
        hidden_TD = hidden_BLD[0, torch.from_numpy(positions_T).to(DEVICE_TYPE)]
        found = self._model.lm_head(hidden_TD, targets, self._temperature, with_entropies)
        if not torch.is_grad_enabled():
            self._reshard()
        group = self._context_group
        if group is None:
            return found
        # Objectives need whole sequences: every rank of the row continues with all of its targets.
        around = (first, row.num_targets - first - len(positions_T))

        def of_row(part: torch.Tensor) -> torch.Tensor:
            return SumRanks.apply(F.pad(part, (0, 0) * (part.ndim - 1) + around), group)

        return Predictions(
            of_row(found.logprobs_T),
            None if found.entropies_T is None else of_row(found.entropies_T),
            None if found.asked_TK is None else of_row(found.asked_TK),
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


def attention_masks(
    model: Decoder, positions_BL: np.ndarray, *, part: slice
) -> AttentionMasksType | PackedSequences | PartMetadata:
    """Return what attention needs to separate the packed sequences of whole rows (int64 [B, L]).

    ``part`` has the positions of each row that this rank computes.
    """
    match model.config.first_attention.inner_attention:
        case PackedAttention.Config():
            return packed_sequences(torch.from_numpy(positions_BL), query_start=part.start)
        case ContextAttention.Config():
            return part_metadata(positions_BL, start=part.start, stop=part.stop, device=DEVICE_TYPE)
    return model.get_attention_masks(torch.from_numpy(positions_BL).to(DEVICE_TYPE))


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
