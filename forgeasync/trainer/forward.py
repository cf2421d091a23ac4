"""A packed row through a model: log-probabilities of its targets, over recorded experts and kept sets.

Shape suffixes: L packed row length, T its targets (the response tokens trained on), D model dim, M MoE
layers, K top-k.
"""

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder

from forgeasync.config import RouterBias, TrainerSection
from forgeasync.models import DEVICE_TYPE
from forgeasync.rollouts import NO_RECORD
from forgeasync.trainer.attention import attention_masks
from forgeasync.trainer.head import Targets
from forgeasync.trainer.logprobs import Predictions
from forgeasync.trainer.packing import NO_SEQUENCE, PackedRow
from forgeasync.trainer.replay_router import replay, replay_routers
from forgeasync.trainer.vocabulary_slice import SumRanks


class RowForward:
    """Runs rows through one model of this rank's mesh; the ranks of a row call it together."""

    def __init__(
        self, model: Decoder, *, parallel_dims: ParallelDims, section: TrainerSection, temperature: float
    ) -> None:
        self._model = model
        self._temperature = temperature
        self.routers = replay_routers(model)
        self._counts_experts = section.router_bias is RouterBias.UPDATED
        # A compiled layer keeps to one graph, and tensor-parallel ranks to one order of adding up gradients:
        # without records they replay that there are none.
        self._always_replays = bool(self.routers) and (
            section.compile or section.parallel.tensor > 1 or self._counts_experts
        )
        context_mesh = parallel_dims.get_optional_mesh("cp")
        self._context_group = None if context_mesh is None else context_mesh.get_group()
        self._context_rank = 0 if context_mesh is None else context_mesh.get_local_rank()
        self._num_context_ranks = 1 if context_mesh is None else context_mesh.size()

    def replay(self, row: PackedRow, noted_ML: torch.Tensor | None = None) -> AbstractContextManager[None]:
        """While it lasts, the row's recorded experts are taken; a backward pass belongs into it too.

        ``noted_ML`` (``ReplayedDecisions.note``) gets what became of the decisions that this rank computes.
        """
        mine = self.own_part(row)
        is_counted_BL = None
        if self._counts_experts:
            # Padding is no load that an expert should be relieved of.
            is_real_L = torch.from_numpy(row.sequence_ids_L[mine] != NO_SEQUENCE)
            is_counted_BL = is_real_L[None].to(DEVICE_TYPE)
        if row.expert_ids_LMK is not None:
            ids_BLMK = torch.from_numpy(row.expert_ids_LMK[mine])[None].to(DEVICE_TYPE)
            if noted_ML is None:
                return replay(self.routers, ids_BLMK, is_counted_BL)
            positions_BL = torch.arange(mine.start, mine.stop, device=DEVICE_TYPE)[None]
            return replay(self.routers, ids_BLMK, is_counted_BL, noted_ML=noted_ML, positions_BL=positions_BL)
        if not self._always_replays:
            return nullcontext()
        shape = (1, mine.stop - mine.start, len(self.routers), self.routers[0].top_k)
        unrecorded_BLMK = torch.full(shape, NO_RECORD, device=DEVICE_TYPE)
        return replay(self.routers, unrecorded_BLMK, is_counted_BL)

    def own_part(self, row: PackedRow) -> slice:
        """The positions of a row that this rank computes: with context parallelism, an equal part of them."""
        width = len(row.token_ids_L) // self._num_context_ranks
        return slice(self._context_rank * width, (self._context_rank + 1) * width)

    def logprobs(self, row: PackedRow) -> torch.Tensor:
        """Float32 [T], over the row's kept sets, with gradients; call it inside of ``replay``."""
        return self.predictions(row, with_entropies=False).logprobs_T

    def predictions(
        self, row: PackedRow, *, with_entropies: bool = True, asked_ids_TK: np.ndarray | None = None
    ) -> Predictions:
        """Log-probabilities and entropies of a row's targets; call it inside of ``replay``.

        ``asked_ids_TK``: int64, for each target the ids whose log-probabilities over the full vocabulary at
        temperature 1 are asked for.
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
        # Targets of this rank's part: the same tokens counted within the part, and among all targets.
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
        # Objectives look at whole sequences: every rank of the row goes on with all of its targets.
        around = (first, row.num_targets - first - len(positions_T))

        def of_row(part: torch.Tensor) -> torch.Tensor:
            return SumRanks.apply(F.pad(part, (0, 0) * (part.ndim - 1) + around), group)

        return Predictions(
            of_row(found.logprobs_T),
            None if found.entropies_T is None else of_row(found.entropies_T),
            None if found.asked_TK is None else of_row(found.asked_TK),
        )

    def _reshard(self) -> None:
        """Free what FSDP2 keeps gathered (root, last norm and head) for a backward pass that does not come.

        Otherwise whole parameters would stand in for the shards that are stepped and published, and go stale.
        The public ``reshard`` of torch 2.13 does nothing here: called by itself, the head leaves its group,
        which the last norm belongs to, in the middle of a forward pass.
        """
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    group._to_sharded()
