"""What a trainer says of single tokens, for people who look at a run: tokens of rollouts, and the worst.

A token's values are what its optimizer step has computed from; nothing is computed a second time.

Shape suffixes: N tokens, M MoE layers, P tokens of a prompt, T tokens of a response.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

NUM_WORST = 10
"""Tokens of a batch that are kept for their mismatch."""


class Decision(IntEnum):
    """What became of the choice of experts at one token in one MoE layer."""

    OWN = 0
    """No record was replayed: the trainer chose."""
    SAME = 1
    """The trainer's own gate would have chosen the set of experts that was replayed."""
    OTHER = 2
    """The trainer's own gate would have chosen another set: a disagreement."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RolloutKey:
    """Names one rollout of a run."""

    group_id: int
    episode: int
    agent: int


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class BranchKey:
    """Names one branch of a rollout of a run."""

    rollout: RolloutKey
    branch: int
    """Its place among the rollout's branches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """Values of trained tokens; float32 unless said otherwise."""

    positions_N: np.ndarray
    """int32: place among the branch's response tokens."""
    token_ids_N: np.ndarray
    """int32."""
    logprobs_N: np.ndarray
    """The trainer's."""
    behavior_logprobs_N: np.ndarray
    """The generator's, recorded when the token was sampled."""
    ratios_N: np.ndarray
    """Importance ratios as the objective has them."""
    advantages_N: np.ndarray
    """As the objective saw them: less the penalty to go where a KL penalty is in the reward."""
    entropies_N: np.ndarray
    """Of the distribution that the token is trained under, in nats."""
    versions_N: np.ndarray
    """int32: which policy version sampled the token."""
    num_kept_N: np.ndarray
    """int32: number of tokens that sampling kept; 0 where it kept the whole vocabulary."""
    decisions_MN: np.ndarray | None
    """uint8, ``Decision``: at the position that predicts the token. None where its row replayed nothing."""

    @property
    def mismatch_N(self) -> np.ndarray:
        """Trainer's less generator's log-probability, float32 [N]: what the metrics of mismatch are of."""
        with np.errstate(invalid="ignore"):
            return self.logprobs_N - self.behavior_logprobs_N

    def take(self, indices: np.ndarray) -> "TokenValues":
        """Return the values of some of the tokens."""
        return TokenValues(
            positions_N=self.positions_N[indices],
            token_ids_N=self.token_ids_N[indices],
            logprobs_N=self.logprobs_N[indices],
            behavior_logprobs_N=self.behavior_logprobs_N[indices],
            ratios_N=self.ratios_N[indices],
            advantages_N=self.advantages_N[indices],
            entropies_N=self.entropies_N[indices],
            versions_N=self.versions_N[indices],
            num_kept_N=self.num_kept_N[indices],
            decisions_MN=None if self.decisions_MN is None else self.decisions_MN[:, indices],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchValues:
    """All trained tokens of one branch, with the ids of the whole sequence (int32)."""

    key: BranchKey
    prompt_ids_P: np.ndarray
    response_ids_T: np.ndarray
    values: TokenValues


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstToken:
    """A token with one of the largest mismatches; ``values`` has N = 1."""

    key: BranchKey
    values: TokenValues

    @property
    def rank(self) -> tuple[float, BranchKey, int]:
        """Sorts the worst first; what is no number is worse than all numbers."""
        mismatch = abs(float(self.values.mismatch_N[0]))
        size = float("inf") if np.isnan(mismatch) else mismatch
        return -size, self.key, int(self.values.positions_N[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReport:
    """What a batch's tokens were like: on one rank, or on all ranks (``merged_reports``)."""

    branches: tuple[BranchValues, ...] = ()
    """Those that were asked for, by key."""
    worst: tuple[WorstToken, ...] = ()
    """At most ``NUM_WORST``, the worst first."""


def merged_reports(reports: Sequence[TokenReport]) -> TokenReport:
    """Put reports of different rows together: neither the order nor the number of ranks changes anything."""
    return TokenReport(
        branches=tuple(
            sorted((one for report in reports for one in report.branches), key=lambda one: one.key)
        ),
        worst=tuple(
            sorted((one for report in reports for one in report.worst), key=lambda one: one.rank)[:NUM_WORST]
        ),
    )
