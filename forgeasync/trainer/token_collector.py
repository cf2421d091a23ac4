"""Reports values of single tokens of an optimizer step: all tokens of chosen rollouts, and the worst ones.

The step computes these values anyway. They are copied to the host at its end, and only those that are
reported are kept. For each reported token the report also has the layers in which the trainer's own gate
would have chosen the replayed experts; the ranks of a row record this together (``ReplayedDecisions``).

Shape suffixes: T targets of a row, N the reported ones, M MoE layers, L packed row length, S sequences.
"""

import dataclasses

import numpy as np
import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims

from forgeasync.algorithms import Objective, RowLoss, RowTokens
from forgeasync.models import DEVICE_TYPE
from forgeasync.rollouts import NUM_WORST, BranchValues, TokenReport, TokenValues, WorstToken, merged_reports
from forgeasync.trainer.packing import PackedRow, PlacedSource


class ReplayedDecisions:
    """Makes notes of rows' replayed decisions, and merges the notes of a row's ranks."""

    def __init__(self, parallel_dims: ParallelDims, *, num_layers: int) -> None:
        meshes = [parallel_dims.get_optional_mesh(name) for name in ("cp", "tp")]
        self._groups = [mesh.get_group() for mesh in meshes if mesh is not None]
        self.is_first = all(mesh is None or mesh.get_local_rank() == 0 for mesh in meshes)
        """Whether this is the first of the ranks that share its rows."""
        self._num_layers = num_layers

    def note(self, row: PackedRow) -> torch.Tensor | None:
        """Return an empty note for a row, uint8 [M, L]; None if nothing is replayed or reported."""
        if not row.sources or row.expert_ids_LMK is None:
            return None
        return torch.zeros((self._num_layers, len(row.token_ids_L)), dtype=torch.uint8, device=DEVICE_TYPE)

    def whole(self, noted_ML: torch.Tensor | None) -> torch.Tensor | None:
        """Merge the notes of a row's ranks; collective over them."""
        if noted_ML is not None:
            # Decisions that a rank has not computed are ``Decision.OWN``, the smallest value.
            for group in self._groups:
                dist.all_reduce(noted_ML, op=dist.ReduceOp.MAX, group=group)
        return noted_ML


class TokenCollector:
    """Collects the tokens of one optimizer step on this rank."""

    def __init__(self, objective: Objective, decisions: ReplayedDecisions, *, trained_version: int) -> None:
        """``trained_version`` is the version of the weights being trained, from which ages count."""
        self._objective = objective
        self._decisions = decisions
        self._trained_version = trained_version
        self._rows: list[tuple[PackedRow, torch.Tensor, torch.Tensor | None]] = []

    @torch.no_grad()
    def add(
        self,
        row: PackedRow,
        tokens: RowTokens,
        result: RowLoss,
        entropies_T: torch.Tensor,
        noted_ML: torch.Tensor | None,
    ) -> None:
        """Add a row's tokens, with this rank's note of its decisions; collective over the ranks of the row.

        Rows without sources add nothing. Only the first of the ranks of a row adds tokens, so that none is
        reported twice.
        """
        decisions_ML = self._decisions.whole(noted_ML)
        if not row.sources or not self._decisions.is_first:
            return
        on_device = [
            tokens.logprobs_T,
            self._objective.importance_ratios(tokens),
            result.advantages_T,
            entropies_T,
            tokens.mask_T,
        ]
        self._rows.append((row, torch.stack([values_T.float() for values_T in on_device]), decisions_ML))

    def report(self) -> TokenReport:
        """Return the reported tokens of all rows; waits for the device."""
        return merged_reports([self._of_row(*one) for one in self._rows])

    def _of_row(
        self, row: PackedRow, values_5T: torch.Tensor, decisions_ML: torch.Tensor | None
    ) -> TokenReport:
        logprobs_T, ratios_T, advantages_T, entropies_T, mask_T = values_5T.cpu().numpy()
        sequence_T = row.sequence_ids_T
        num_prompt_S = np.array([one.num_prompt_tokens for one in row.sources])
        values = TokenValues(
            positions_N=(row.positions_L[row.places_T] + 1 - num_prompt_S[sequence_T]).astype(np.int32),
            token_ids_N=row.target_ids_T.astype(np.int32),
            logprobs_N=logprobs_T,
            behavior_logprobs_N=row.behavior_logprobs_T,
            ratios_N=ratios_T,
            advantages_N=advantages_T,
            entropies_N=entropies_T,
            versions_N=(self._trained_version - row.ages_T).astype(np.int32),
            num_kept_N=np.diff(row.kept_tokens.offsets).astype(np.int32),
            decisions_MN=None,
        )
        trained_N = mask_T.nonzero()[0]
        worst_N = _worst(values, trained_N, sequence_T, row.sources)
        is_wanted_S = np.array([one.source.is_recorded for one in row.sources])
        recorded_N = trained_N[is_wanted_S[sequence_T[trained_N]]]
        wanted_N = np.union1d(worst_N, recorded_N)
        wanted = values.take(wanted_N)
        if decisions_ML is not None:
            at = row.places_T[wanted_N]
            wanted = dataclasses.replace(wanted, decisions_MN=decisions_ML.cpu().numpy()[:, at])
        return _report(row, wanted, sequence_T, wanted_N, worst_N)


def _worst(
    values: TokenValues, trained_N: np.ndarray, sequence_T: np.ndarray, sources: tuple[PlacedSource, ...]
) -> np.ndarray:
    """Return the row's worst trained tokens, at most ``NUM_WORST``, in the order of ``WorstToken.rank``.

    Ties are broken as for the whole batch.
    """
    sizes_N = np.abs(values.mismatch_N[trained_N])
    sizes_N = np.where(np.isnan(sizes_N), np.inf, sizes_N)
    if len(sizes_N) > NUM_WORST:
        smallest = np.partition(sizes_N, -NUM_WORST)[-NUM_WORST]
        trained_N, sizes_N = trained_N[sizes_N >= smallest], sizes_N[sizes_N >= smallest]
    keys = [one.source.key for one in sources]
    place_S = np.empty(len(keys), np.int64)
    place_S[sorted(range(len(keys)), key=keys.__getitem__)] = np.arange(len(keys))
    order = np.lexsort((values.positions_N[trained_N], place_S[sequence_T[trained_N]], -sizes_N))
    return trained_N[order[:NUM_WORST]]


def _report(
    row: PackedRow, wanted: TokenValues, sequence_T: np.ndarray, wanted_N: np.ndarray, worst_N: np.ndarray
) -> TokenReport:
    """Return the report of a row; ``wanted_N``, ascending, has the targets whose values are in ``wanted``."""
    sequence_N = sequence_T[wanted_N]
    branches = []
    for index, placed in enumerate(row.sources):
        if not placed.source.is_recorded:
            continue
        ids_S = row.token_ids_L[placed.places_S].astype(np.int32)
        branches.append(
            BranchValues(
                key=placed.source.key,
                prompt_ids_P=ids_S[: placed.num_prompt_tokens],
                response_ids_T=ids_S[placed.num_prompt_tokens :],
                values=wanted.take(np.flatnonzero(sequence_N == index)),
            )
        )
    worst = [
        WorstToken(
            key=row.sources[sequence_T[target]].source.key,
            values=wanted.take(np.searchsorted(wanted_N, [target])),
        )
        for target in worst_N
    ]
    return TokenReport(branches=tuple(branches), worst=tuple(worst))
