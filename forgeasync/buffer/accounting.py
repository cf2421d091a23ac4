"""Rollout accounting: measures how lost groups bias the training data, and corrects the bias with weights.

The stratum of a group is its data source and the length of its longest rollout, rounded down to a power of
two. The longest rollout decides how long a group takes. A response's length is its number of tokens, an
episode's its milliseconds. A group is resolved when it was trained on or lost permanently. Two histograms
count the rollouts of resolved groups over a trailing window: as submitted, where each group has
weight 1, and as trained, with the weights of the batches. If nothing is lost, the two are equal and their
distance is 0.

With ``Replacement.WEIGHT``, a lost group leaves a deficit of 1 in its stratum. The next trained groups of
that stratum compensate for it with weights up to ``max_weight``. If a share p of a stratum's groups survives,
the weights tend to 1 / p, without an estimate of p. This is the estimator of Horvitz and Thompson, "A
Generalization of Sampling Without Replacement from a Finite Universe", 1952. If no group of a stratum
survives, its deficit remains and shows in the metrics.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from forgeasync.buffer.prompts import AGE_REASONS, Deficit, DropReason
from forgeasync.config import AccountingPolicy, AccountingSection, Replacement
from forgeasync.rollouts import Task

METRIC_GROUPS = 1000
"""Length of the trailing window of the composition metrics, in groups."""

K = TypeVar("K")


Stratum = tuple[str, int]
"""Data source and length bucket. Groups of one stratum are assumed equally likely to be lost."""


def length_bucket(num_tokens: int) -> int:
    """Return the exponent of the largest power of two at or below a length; -1 for length 0."""
    return num_tokens.bit_length() - 1


def stratum_of(task: Task, lengths: Sequence[int]) -> Stratum:
    """Return the stratum of a group whose rollouts have these lengths."""
    return task.source, length_bucket(max(lengths))


def is_resubmitted(reason: DropReason, section: AccountingSection) -> bool:
    """Whether the prompt of a group lost for ``reason`` is submitted again, if it has attempts left."""
    if reason in AGE_REASONS:
        return section.policy is AccountingPolicy.EXACT and section.replacement is Replacement.REISSUE
    return reason is not DropReason.FILTERED


class AccountingLedger:
    """Counts resolved groups, and computes the weight of each group that trains."""

    def __init__(self, section: AccountingSection) -> None:
        self._carries_deficits = (
            section.policy is AccountingPolicy.EXACT and section.replacement is Replacement.WEIGHT
        )
        self._max_weight = section.max_weight
        self._deficits: defaultdict[Stratum, float] = defaultdict(float)
        self._composition = Composition(METRIC_GROUPS)
        self.num_censored = 0
        """Number of groups lost before they were sampled completely, whose lengths are unknown."""

    def train(self, task: Task, lengths: Sequence[int], *, submitted: Sequence[int]) -> float:
        """Count a group that goes into a batch, and return its weight.

        Args:
            task: The group's task.
            lengths: Lengths of the group's rollouts.
            submitted: Lengths of the rollouts of the prompt's first completely sampled attempt. They differ
                from ``lengths`` if that attempt was lost.
        """
        weight = 1.0
        if self._carries_deficits:
            stratum = stratum_of(task, lengths)
            carried = min(self._deficits[stratum], self._max_weight - 1.0)
            self._deficits[stratum] -= carried
            weight += carried
        self._composition.add(task.source, submitted=submitted, trained=lengths, weight=weight)
        return weight

    def lose(self, task: Task, lengths: Sequence[int] | None) -> None:
        """Count a group that is lost permanently. ``lengths`` is None if it was not sampled completely."""
        if lengths is None:
            self.num_censored += 1
            return
        if self._carries_deficits:
            self._deficits[stratum_of(task, lengths)] += 1
        self._composition.add(task.source, submitted=lengths, trained=(), weight=0.0)

    @property
    def deficits(self) -> tuple[Deficit, ...]:
        """Deficits that no trained group has compensated for."""
        return tuple(
            Deficit(source=source, length_bucket=bucket, weight=float(weight))
            for (source, bucket), weight in self._deficits.items()
            if weight
        )

    def restore(self, deficits: Iterable[Deficit], num_censored: int) -> None:
        """Continue with the deficits of another ledger."""
        for one in deficits:
            self._deficits[one.source, one.length_bucket] += one.weight
        self.num_censored = num_censored

    def metrics(self) -> dict[str, float]:
        """Return metrics by their names in metrics.jsonl."""
        return self._composition.metrics() | {
            "accounting/outstanding_deficit": float(sum(self._deficits.values())),
            "accounting/num_censored": self.num_censored,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rollouts:
    source: str
    num_by_bucket: Mapping[int, int]
    num_tokens: int
    weight: float


def _rollouts(source: str, lengths: Sequence[int], weight: float) -> _Rollouts:
    buckets = Counter(map(length_bucket, lengths))
    return _Rollouts(source=source, num_by_bucket=buckets, num_tokens=sum(lengths), weight=weight)


class Composition:
    """Histograms of the latest ``num_groups`` resolved groups, as submitted and as trained.

    Adding a group costs O(number of its rollouts).
    """

    def __init__(self, num_groups: int) -> None:
        self._window: deque[tuple[_Rollouts, _Rollouts]] = deque()
        self._num_groups = num_groups
        self._submitted = _Histograms()
        self._trained = _Histograms()

    def add(self, source: str, *, submitted: Sequence[int], trained: Sequence[int], weight: float) -> None:
        """Add a resolved group by the lengths of its rollouts. ``weight`` is 0 if it did not train."""
        group = (_rollouts(source, submitted, 1.0), _rollouts(source, trained, weight))
        self._window.append(group)
        self._count(group, +1)
        if len(self._window) > self._num_groups:
            self._count(self._window.popleft(), -1)

    def _count(self, group: tuple[_Rollouts, _Rollouts], sign: int) -> None:
        for histograms, rollouts in zip((self._submitted, self._trained), group, strict=True):
            histograms.add(rollouts, sign * rollouts.weight)

    def metrics(self) -> dict[str, float]:
        """Return metrics by their names in metrics.jsonl.

        Distances are total variation distances: half the sum of absolute differences of shares.
        """
        if self._trained.num_rollouts < 0.5:
            return {}
        return {
            "accounting/length_distance": _distance(self._submitted.by_bucket, self._trained.by_bucket),
            "accounting/source_distance": _distance(self._submitted.by_source, self._trained.by_source),
            "accounting/mean_length_ratio": self._trained.mean_length / max(1.0, self._submitted.mean_length),
            "accounting/effective_groups_share": self._trained.num_groups / self._submitted.num_groups,
        } | {
            f"accounting/length_share_ratio_{2**bucket if bucket >= 0 else 0}": share
            for bucket, share in self._share_ratios().items()
        }

    def _share_ratios(self) -> dict[int, float]:
        """Return the ratio of trained share to submitted share, for each bucket that is not empty."""
        submitted, trained = self._submitted, self._trained
        return {
            bucket: trained.by_bucket.get(bucket, 0.0)
            / trained.num_rollouts
            / (number / submitted.num_rollouts)
            for bucket, number in sorted(submitted.by_bucket.items())
            if number > 0.5
        }


class _Histograms:
    """Weighted counts of rollouts by length bucket and by source."""

    def __init__(self) -> None:
        self.by_bucket: defaultdict[int, float] = defaultdict(float)
        self.by_source: defaultdict[str, float] = defaultdict(float)
        self.num_rollouts = 0.0
        self.num_tokens = 0.0
        self.num_groups = 0.0

    @property
    def mean_length(self) -> float:
        return self.num_tokens / self.num_rollouts

    def add(self, group: _Rollouts, weight: float) -> None:
        for bucket, number in group.num_by_bucket.items():
            self.by_bucket[bucket] += weight * number
            self.by_source[group.source] += weight * number
            self.num_rollouts += weight * number
        self.num_tokens += weight * group.num_tokens
        self.num_groups += weight


def _distance(one: Mapping[K, float], other: Mapping[K, float]) -> float:
    total_one, total_other = sum(one.values()), sum(other.values())
    return 0.5 * sum(
        abs(one.get(key, 0.0) / total_one - other.get(key, 0.0) / total_other)
        for key in one.keys() | other.keys()
    )
