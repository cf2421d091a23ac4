"""Sums over the rows of one optimizer step, on this rank and then over the mesh, and their metrics.

Shape suffixes: T targets of a row, S its sequences, M MoE layers.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from forgeasync.algorithms import MAX_LOG_RATIO, RowLoss, RowTokens, capped
from forgeasync.rollouts import NO_RECORD
from forgeasync.trainer.host_copies import to_device
from forgeasync.trainer.packing import PackedRow

_OWN = "own:"
"""Prefix of the names of sums that are not over trained tokens."""


class StepSums:
    """Sums over trained tokens in float64, by the names of their means in metrics.jsonl."""

    def __init__(
        self, *, num_layers: int, device: str, is_first: bool = True, has_states: bool = False
    ) -> None:
        """Start at zero.

        Args:
            is_first: False: earlier steps of the batch changed the weights, so no token is fresh.
            has_states: Whether layers of the model have a recurrent state.
        """
        self._is_first = is_first
        self._has_states = has_states
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._sums: dict[str, torch.Tensor] = {}
        self._largest = dict.fromkeys(("difference", "correction"), self._zero)
        # Per layer: replayed decisions, and those in which the gate would have chosen otherwise.
        self._routing_M2 = torch.zeros((num_layers, 2), dtype=torch.float64, device=device)
        self.num_padding_tokens: int
        """Number of padding tokens over the mesh, after a call of ``metrics``."""
        self.num_computed_tokens: int
        """Number of other tokens in the rows, after a call of ``metrics``; shared ones count once."""

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add a row's part of the batch's loss."""
        self._add_own(loss=loss)

    def add_correction(self, weights_T: torch.Tensor) -> None:
        """Add the weights that corrections gave a row's trained tokens; those of its other tokens are 0."""
        doubles_T = weights_T.double()
        self._add_own(correction=doubles_T.sum(), correction_squared=doubles_T.square().sum())
        self._add_largest("correction", weights_T)

    def add(self, sums: Mapping[str, torch.Tensor | float]) -> None:
        """Add a row's sums by name."""
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, self._zero) + value

    def _add_own(self, **sums: torch.Tensor | float) -> None:
        self.add({f"{_OWN}{name}": value for name, value in sums.items()})

    def _add_largest(self, name: str, values_T: torch.Tensor) -> None:
        if len(values_T):
            self._largest[name] = torch.maximum(self._largest[name], values_T.max())

    def add_row(self, row: PackedRow, tokens: RowTokens, result: RowLoss, entropies_T: torch.Tensor) -> None:
        """Add a row's loss, log-probabilities and coverage."""
        mask_T = tokens.mask_T
        self.add_loss(result.loss.detach())
        self.add(result.sums)
        if result.weights_T is not None:
            self.add_correction(tokens.masked(result.weights_T))
        self.add({"policy/entropy": tokens.masked(entropies_T).sum()})
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
        # Selecting by a mask would wait for the GPU.
        difference_T = (logprobs_T - behavior_T).where(mask_T, 0.0)
        is_fresh_T = to_device(is_fresh(row) & self._is_first) & mask_T
        ratios_T = difference_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().where(mask_T, 0.0).double()
        self._add_own(ratio=ratios_T.sum(), ratio_squared=ratios_T.square().sum())
        self._add_largest("difference", difference_T.abs())
        self.add(
            {
                "mismatch/logprob_abs_mean": difference_T.abs().sum(),
                "mismatch/kl": _k3(difference_T).sum(),
                "mismatch/fresh_logprob_abs_mean": difference_T.where(is_fresh_T, 0.0).abs().sum(),
                "mismatch/num_fresh": is_fresh_T.sum(),
            }
        )
        if self._has_states:
            is_after_T = to_device(is_after_swap(row)) & mask_T
            after_abs = difference_T.where(is_after_T, 0.0).abs().sum()
            self._add_own(after_swap_abs=after_abs, after_swap=is_after_T.sum())

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
        num_computed = int((row.num_uses_L > 0).sum())
        self._add_own(needed=num_needed, recorded=num_recorded)
        self._add_own(tokens=int(row.num_uses_L.sum()), computed=num_computed, splits=row.num_prefix_splits)
        self._add_own(padding=len(row.num_uses_L) - num_computed)

    def add_probe(self, name: str, difference_T: torch.Tensor) -> None:
        """Add logprob differences of a row that was recomputed for comparison."""
        self._add_own(**{f"{name}_abs": difference_T.abs().sum(), f"{name}_k3": _k3(difference_T).sum()})
        self._add_own(**{f"{name}_tokens": len(difference_T)})

    def metrics(self, num_trained: int, *, mesh: DeviceMesh | None) -> dict[str, float]:
        """Return means over the ``num_trained`` tokens of all ranks; collective over the mesh."""
        count = max(1, num_trained)
        names = _names_of_all_ranks(self._sums, mesh)
        totals = _reduced({name: self._sums.get(name, self._zero) for name in names}, dist.ReduceOp.SUM, mesh)
        largest = _reduced(self._largest, dist.ReduceOp.MAX, mesh)
        metrics = {name: total / count for name, total in totals.items() if not name.startswith(_OWN)}
        own = defaultdict(float, {k[len(_OWN) :]: v for k, v in totals.items() if k.startswith(_OWN)})
        self.num_padding_tokens, self.num_computed_tokens = int(own["padding"]), int(own["computed"])
        metrics["packing/shared_token_share"] = 1.0 - own["computed"] / max(1.0, own["tokens"])
        metrics["packing/num_prefix_splits"] = own["splits"]
        metrics["loss"] = own["loss"]
        metrics["off_policy/effective_sample_share"] = _effective_share(own, "ratio", count)
        if "correction" in own:
            metrics["correction/weight_mean"] = own["correction"] / count
            metrics["correction/weight_max"] = largest["correction"]
            metrics["correction/effective_sample_share"] = _effective_share(own, "correction", count)
        fresh_share = metrics.pop("mismatch/num_fresh")
        if fresh_share:
            metrics["mismatch/fresh_logprob_abs_mean"] /= fresh_share
        else:
            # No token was sampled under the current weights, so there is no such mean.
            del metrics["mismatch/fresh_logprob_abs_mean"]
        metrics["mismatch/logprob_abs_max"] = largest["difference"]
        if num_after_swap := own["after_swap"]:
            metrics["mismatch/recurrent_state"] = own["after_swap_abs"] / num_after_swap
        for name in ("with_replay", "without_replay"):
            if num_tokens := own[f"{name}_tokens"]:
                metrics[f"mismatch/{name}_logprob_abs_mean"] = own[f"{name}_abs"] / num_tokens
                metrics[f"mismatch/{name}_kl"] = own[f"{name}_k3"] / num_tokens
        if not len(self._routing_M2):
            return metrics | {"routing/num_moe_layers": 0.0}
        metrics["routing/recorded_share"] = own["recorded"] / max(1.0, own["needed"])
        metrics["routing/num_without_record"] = own["needed"] - own["recorded"]
        # Tensor-parallel ranks count parts of a row's tokens, or all of them. The sum over all ranks gives
        # the right share in both cases.
        dist.all_reduce(self._routing_M2)
        routing_M2 = self._routing_M2.tolist()
        if num_decisions := sum(decisions for decisions, _ in routing_M2):
            metrics["routing/disagreement_share"] = sum(other for _, other in routing_M2) / num_decisions
            for layer, (decisions, other) in enumerate(routing_M2):
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


def _reduced(
    scalars: Mapping[str, torch.Tensor], op: dist.ReduceOp.RedOpType, mesh: DeviceMesh | None
) -> dict[str, float]:
    """Return scalars reduced over the mesh, in one collective and one copy to the host."""
    values = torch.stack(list(scalars.values()))
    if mesh is not None:
        dist.all_reduce(values, op, mesh.get_group())
    return dict(zip(scalars, values.tolist(), strict=True))


def _effective_share(sums: Mapping[str, float], name: str, count: int) -> float:
    """Return the effective share of n samples with weights w: (sum w)^2 / (n * sum w^2).

    Source: Kong, "A Note on Importance Sampling Using Standardized Weights", 1992.
    """
    squares = count * sums[f"{name}_squared"]
    # If every weight is 0, nothing of the batch counts.
    return sums[name] ** 2 / squares if squares else 0.0


def is_fresh(row: PackedRow) -> np.ndarray:
    """Return whether each target's whole response is of age 0: bool [T]."""
    oldest_S = np.zeros(row.num_sequences, np.int64)
    np.maximum.at(oldest_S, row.sequence_ids_T, row.ages_T)
    return oldest_S[row.sequence_ids_T] == 0


def is_after_swap(row: PackedRow) -> np.ndarray:
    """Return whether older weights sampled a token before each target, in the same turn: bool [T].

    The next turn of an episode computes its whole prompt again. Text between two turns is not a target, so
    the places of one turn's targets are consecutive.
    """
    is_first_T = np.diff(row.places_T, prepend=-2) != 1
    firsts_T = np.maximum.accumulate(np.where(is_first_T, np.arange(row.num_targets), 0))
    return np.asarray(row.ages_T < row.ages_T[firsts_T])


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
