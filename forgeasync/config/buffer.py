"""The sections on the replay buffer: age and order of groups, rollout accounting, and memory for payloads."""

from collections.abc import Iterator
from enum import StrEnum

from pydantic import Field

from forgeasync.schema import Count, Gibibytes, Refusal, Section


class StaleGroups(StrEnum):
    WAIT = "wait"
    """The trainer waits for a slow group before that group becomes too old: nothing is dropped."""
    DROP = "drop"
    """The trainer does not wait; a group that completes too late is dropped and counted."""


class AgeOf(StrEnum):
    """Which token's age ``max_off_policy_steps`` bounds, in every rollout of a group."""

    OLDEST_TOKEN = "oldest_token"
    NEWEST_TOKEN = "newest_token"
    MEAN = "mean"
    """The mean over a rollout's tokens."""
    TOKEN = "token"
    """Each token by itself: a group is trained on as long as one of its tokens is young enough, and the
    trainer leaves out the tokens that are too old."""


class BatchOrder(StrEnum):
    """Which of the complete groups a batch takes first."""

    DEADLINE = "deadline"
    """The groups that will be too old soonest."""
    COMPLETION = "completion"
    """The groups that were complete first."""


class BufferSection(Section):
    """The replay buffer between collecting and training."""

    stale_groups: StaleGroups = StaleGroups.WAIT
    age_of: AgeOf = AgeOf.OLDEST_TOKEN
    """Where nothing is said, ``token`` in runs with an environment, whose episodes can be long."""
    order: BatchOrder = BatchOrder.DEADLINE
    max_groups: Count | None = None
    """Depth bound: most groups started and not yet trained on. null: only max_off_policy_steps bounds them,
    to (max_off_policy_steps + 1) * groups_per_step. If generation is faster than training, a lower bound
    gives fresher data at the same speed."""
    max_in_flight: Count | None = None
    """In-flight bound: most groups being sampled or scored. null: as many as the depth bound allows."""
    adapt_load: bool = True
    """Adapt the number of groups in flight, from one batch up to these bounds: enough that neither generators
    nor trainer run idle, and no more, so that groups do not wait longer for training than necessary."""
    longest_first: bool = True
    """Among the prompts for one batch, start those first whose responses took longest before."""
    max_attempts: Count = 3
    """Attempts at a prompt; a prompt whose groups fail this many times is dropped."""
    keep_groups: bool = True
    """Keep finished groups on the disk, in the run's folder, until a checkpoint has the step that trained on
    them: a run that was killed resumes with them. Their arrays are as large there as in shared memory, and
    all hosts must see the folder."""
    heartbeat_s: float = Field(default=8.0, ge=1.0, le=3600.0)
    """A buffer whose process does not answer for so long is killed. The run ends then, as when it dies: the
    next start goes on from the newest checkpoint and the kept groups."""
    max_given_up_in_a_row: Count = 64
    """The run ends with an error once this many groups in a row were refused or could not be scored."""

    def find_problems(self) -> Iterator[Refusal]:
        """Find an order in which a trainer that waits could not go on."""
        if self.stale_groups is StaleGroups.WAIT and self.order is not BatchOrder.DEADLINE:
            yield (
                "order",
                "needs buffer.stale_groups = 'drop': a trainer that waits for every group must take the one "
                "with the earliest deadline first ('deadline')",
            )


class AccountingPolicy(StrEnum):
    """How trained rollouts keep the composition (sources, lengths) of the submitted ones."""

    NONE = "none"
    """Dropped groups are not made up for."""
    WINDOWED_FIFO = "windowed_fifo"
    """Batches take groups from the ``window_groups`` groups that were started first only."""
    EXACT = "exact"
    """Every dropped group leaves a deficit, which ``replacement`` makes up for."""


class Replacement(StrEnum):
    """What makes up for a dropped group under exact accounting."""

    REISSUE = "reissue"
    """The group's prompt is submitted again, before all others."""
    WEIGHT = "weight"
    """The next groups of the same source and length weigh more: inverse inclusion probability."""


class AccountingSection(Section):
    """Rollout accounting: short responses finish first, and age limits drop long ones more often."""

    policy: AccountingPolicy = AccountingPolicy.EXACT
    window_groups: Count | None = None
    """Window size in groups; used with policy ``windowed_fifo``."""
    replacement: Replacement = Replacement.REISSUE
    max_weight: float = Field(default=4.0, gt=1.0, le=1e6)
    """Largest weight of one group with replacement ``weight``; the rest of a deficit goes to later groups."""
    metric_groups: Count = 1000
    """Length of the trailing window of the composition metrics, in groups."""

    def find_problems(self) -> Iterator[Refusal]:
        """Find a window that has no effect."""
        if self.policy is not AccountingPolicy.WINDOWED_FIFO and self.window_groups is not None:
            yield "window_groups", "needs accounting.policy = 'windowed_fifo'"


class PayloadSection(Section):
    """Where rollouts' arrays wait between sampling and training: shared memory of their host."""

    capacity_gib: Gibibytes = 1.0
    """Bound on the payloads of all generators together; every generator host has room for that much. A group
    starts only when its largest possible payload fits."""
