"""Sums over the rows of one optimizer step, on this rank and then over the mesh, and their metrics.

Shape suffixes: T targets of a row, S its sequences, M MoE layers.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import utils as dist_utils

from forgeasync.algorithms import MAX_LOG_RATIO, RowLoss, RowTokens, capped
from forgeasync.rollouts import NO_RECORD
from forgeasync.trainer.packing import PackedRow


class StepSums:
    """Sums over trained tokens, by the names of their means in metrics.jsonl."""

    def __init__(self, *, num_layers: int, device: str, is_first: bool = True) -> None:
        """``is_first`` False: earlier steps of the batch changed the weights, so no token is fresh."""
        self._device = device
        self._is_first = is_first
        self._sums: dict[str, torch.Tensor] = {}
        self._largest = torch.zeros((), device=device)
        # Per layer: replayed decisions, and those in which the gate would have chosen otherwise.
        self._routing_M2 = torch.zeros((num_layers, 2), dtype=torch.float64, device=device)
        # Tokens whose output in the model matters; those of them with a record; padding.
        self._coverage = torch.zeros(3, dtype=torch.float64)
        # Per probe: sum of abs(logprob difference), sum of k3, tokens.
        self._probes: dict[str, torch.Tensor] = {}
        self._ratios = _WeightSums(device)
        self._corrections: _WeightSums | None = None
        self._loss = torch.zeros((), device=device)

    @property
    def num_padding_tokens(self) -> int:
        """Number of padding tokens over the mesh; call ``metrics`` first."""
        return int(self._coverage[2])

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add a row's part of the batch's loss."""
        self._loss = self._loss + loss

    def add_correction(self, weights_T: torch.Tensor) -> None:
        """Add the weights that corrections gave a row's trained tokens."""
        if self._corrections is None:
            self._corrections = _WeightSums(self._device)
        self._corrections.add(weights_T)

    def add(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Add a row's sums by name."""
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, torch.zeros((), device=self._device)) + value

    def add_row(self, row: PackedRow, tokens: RowTokens, result: RowLoss, entropies_T: torch.Tensor) -> None:
        """Add a row's loss, log-probabilities and coverage."""
        mask_T = tokens.mask_T
        self.add_loss(result.loss.detach())
        self.add(result.sums)
        if result.weights_T is not None:
            self.add_correction(result.weights_T[mask_T])
        self.add({"policy/entropy": entropies_T[mask_T].sum()})
        self.add_mismatch(tokens.logprobs_T.detach(), tokens.behavior_logprobs_T, mask_T, row)
        self.add_coverage(row)

    def add_mismatch(
        self, logprobs_T: torch.Tensor, behavior_T: torch.Tensor, mask_T: torch.Tensor, row: PackedRow
    ) -> None:
        """Add the differences of trainer's and generator's log-probabilities on the tokens of the mask.

        Fresh tokens are those of responses that were sampled entirely under the weights being trained: their
        difference is purely numerical. A response that was sampled across an update has no fresh tokens,
        because later tokens attend to states that older weights computed.
        """
        difference_T = (logprobs_T - behavior_T)[mask_T]
        is_fresh_T = torch.from_numpy(_is_fresh(row) & self._is_first).to(self._device)[mask_T]
        self._ratios.add(difference_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp())
        if len(difference_T):
            self._largest = torch.maximum(self._largest, difference_T.abs().max())
        self.add(
            {
                "mismatch/logprob_abs_mean": difference_T.abs().sum(),
                "mismatch/kl": _k3(difference_T).sum(),
                "mismatch/fresh_logprob_abs_mean": difference_T[is_fresh_T].abs().sum(),
                "mismatch/num_fresh": is_fresh_T.sum(),
            }
        )

    def add_routing(self, counts_of_layers: Sequence[torch.Tensor]) -> None:
        """Add the replay counts of every layer after a row's forward pass."""
        self._routing_M2 += torch.stack(list(counts_of_layers))

    def add_coverage(self, row: PackedRow) -> None:
        """Count a row's tokens with a record.

        The last token of a sequence is not an input of the generator, so it needs no record.
        """
        num_needed = int(row.num_uses_L.sum()) - row.num_sequences
        num_recorded = 0
        if row.expert_ids_LMK is not None:
            num_recorded = int(row.num_uses_L[row.expert_ids_LMK[:, 0, 0] != NO_RECORD].sum())
        self._coverage += torch.tensor([num_needed, num_recorded, int((row.num_uses_L == 0).sum())])

    def add_probe(self, name: str, difference_T: torch.Tensor) -> None:
        """Add logprob differences of a row that was recomputed for comparison."""
        added = torch.stack(
            [
                difference_T.abs().sum(),
                _k3(difference_T).sum(),
                torch.tensor(float(len(difference_T)), device=self._device),
            ]
        )
        self._probes[name] = self._probes.get(name, torch.zeros(3, device=self._device)) + added

    def metrics(self, num_trained: int, *, mesh: DeviceMesh | None) -> dict[str, float]:
        """Return means over the ``num_trained`` tokens of all ranks; collective over the mesh."""
        count = max(1, num_trained)
        zero = torch.zeros((), device=self._device)
        metrics = {
            name: dist_utils.dist_sum(self._sums.get(name, zero).float(), mesh) / count
            for name in _names_of_all_ranks(self._sums, mesh)
        }
        metrics["loss"] = dist_utils.dist_sum(self._loss, mesh)
        metrics["off_policy/effective_sample_share"] = self._ratios.effective_share(count, mesh=mesh)
        if self._corrections is not None:
            metrics |= {
                "correction/weight_mean": self._corrections.mean(count, mesh=mesh),
                "correction/weight_max": self._corrections.largest(mesh=mesh),
                "correction/effective_sample_share": self._corrections.effective_share(count, mesh=mesh),
            }
        fresh_share = metrics.pop("mismatch/num_fresh")
        if fresh_share:
            metrics["mismatch/fresh_logprob_abs_mean"] /= fresh_share
        else:
            # No token was sampled under the current weights, so there is no such mean.
            del metrics["mismatch/fresh_logprob_abs_mean"]
        metrics["mismatch/logprob_abs_max"] = dist_utils.dist_max(self._largest.float(), mesh)
        for name, probe in self._probes.items():
            absolute, k3, num_tokens = (dist_utils.dist_sum(part, mesh) for part in probe)
            if num_tokens:
                metrics[f"mismatch/{name}_logprob_abs_mean"] = absolute / num_tokens
                metrics[f"mismatch/{name}_kl"] = k3 / num_tokens
        return metrics | self._routing_metrics(mesh)

    def _routing_metrics(self, mesh: DeviceMesh | None) -> dict[str, float]:
        # Tensor-parallel ranks count parts of a row's tokens, or all of them. The sum over all ranks gives
        # the right share in both cases.
        dist.all_reduce(self._routing_M2)
        coverage = [dist_utils.dist_sum(count.to(self._device), mesh) for count in self._coverage]
        self._coverage = torch.tensor(coverage, dtype=torch.float64)
        num_needed, num_recorded, _ = coverage
        if not len(self._routing_M2):
            return {"routing/num_moe_layers": 0.0}
        metrics = {
            "routing/recorded_share": num_recorded / max(1.0, num_needed),
            "routing/num_without_record": num_needed - num_recorded,
        }
        num_decisions, num_other = self._routing_M2.sum(0).tolist()
        if num_decisions:
            metrics["routing/disagreement_share"] = num_other / num_decisions
            for layer, (decisions, other) in enumerate(self._routing_M2.tolist()):
                metrics[f"routing/disagreement_share_layer_{layer:02d}"] = other / max(1.0, decisions)
        return metrics


def _names_of_all_ranks(sums: Mapping[str, torch.Tensor], mesh: DeviceMesh | None) -> list[str]:
    """Return the names of any rank's sums; collective.

    A user's objective may return a sum for some rows only.
    """
    if mesh is None:
        return list(sums)
    names_by_rank: list[list[str]] = [[] for _ in range(mesh.size())]
    dist.all_gather_object(names_by_rank, list(sums), group=mesh.get_group())
    return list(dict.fromkeys(name for names in names_by_rank for name in names))


class _WeightSums:
    """Mean and maximum of n samples' weights w, and their effective share of the samples.

    The effective share is (sum w)^2 / (n * sum w^2): Kong, "A Note on Importance Sampling Using Standardized
    Weights", 1992.
    """

    def __init__(self, device: str) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)
        self._largest = torch.zeros((), device=device)

    def add(self, weights_T: torch.Tensor) -> None:
        doubles_T = weights_T.double()
        self._sums = self._sums + torch.stack([doubles_T.sum(), doubles_T.square().sum()])
        if len(weights_T):
            self._largest = torch.maximum(self._largest, weights_T.max())

    def mean(self, count: int, *, mesh: DeviceMesh | None) -> float:
        return dist_utils.dist_sum(self._sums[0], mesh) / count

    def largest(self, *, mesh: DeviceMesh | None) -> float:
        return dist_utils.dist_max(self._largest, mesh)

    def effective_share(self, count: int, *, mesh: DeviceMesh | None) -> float:
        total, squares = (dist_utils.dist_sum(part, mesh) for part in self._sums)
        # If every weight is 0, nothing of the batch counts.
        return total**2 / (count * squares) if squares else 0.0


def _is_fresh(row: PackedRow) -> np.ndarray:
    """Return whether each target's whole response is of age 0: bool [T]."""
    oldest_S = np.zeros(row.num_sequences, np.int64)
    np.maximum.at(oldest_S, row.sequence_ids_T, row.ages_T)
    return oldest_S[row.sequence_ids_T] == 0


def _k3(difference_T: torch.Tensor) -> torch.Tensor:
    """Return KL(behavior || current) per token by the k3 estimator.

    Source: Schulman, "Approximating KL Divergence", 2020. Differences are capped at ``MAX_LOG_RATIO``, so
    that one token cannot make the mean infinite.
    """
    capped_T = capped(difference_T)
    return capped_T.expm1() - capped_T


class Probe:
    """Picks a share of rows, evenly spread, the same ones on every rank."""

    def __init__(self, share: float) -> None:
        self._share = share
        self.owed = 0.0
        """State that determines the next choices."""

    def is_due(self) -> bool:
        """Return whether the next row is picked."""
        self.owed += self._share
        if self.owed < 1.0:
            return False
        self.owed -= 1.0
        return True
