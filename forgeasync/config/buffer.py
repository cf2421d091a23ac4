"""How a run's config describes the replay buffer: age and order, accounting, and where payloads wait."""

from enum import StrEnum

from pydantic import Field

from forgeasync.schema.section import Count, Gibibytes, Section


class StaleGroups(StrEnum):
    WAIT = "wait"
    """The trainer waits for a straggling group before it becomes too old: nothing is dropped."""
    DROP = "drop"
    """The trainer goes on; a group that comes too late is dropped and counted."""


class AgeOf(StrEnum):
    """Which token's age ``max_off_policy_steps`` bounds, in every rollout of a group."""

    OLDEST_TOKEN = "oldest_token"
    NEWEST_TOKEN = "newest_token"
    MEAN = "mean"
    """The mean over a rollout's tokens."""
    TOKEN = "token"
    """Each token's own: a group trains as long as one token is young enough, and the trainer leaves out
    those that are not."""


class BatchOrder(StrEnum):
    """Which of the complete groups a batch takes first."""

    DEADLINE = "deadline"
    """Those that become too old first."""
    COMPLETION = "completion"
    """Those that were complete first."""


class BufferSection(Section):
    """The replay buffer between collecting and training."""

    stale_groups: StaleGroups = StaleGroups.WAIT
    age_of: AgeOf = AgeOf.OLDEST_TOKEN
    order: BatchOrder = BatchOrder.DEADLINE
    max_groups: Count | None = None
    """Depth bound: most groups started and not yet trained on; null leaves it to max_off_policy_steps, which
    allows (max_off_policy_steps + 1) * groups_per_step. Where generation is the faster side, fewer mean
    fresher data at the same speed."""
    max_in_flight: Count | None = None
    """In-flight bound: most groups being sampled or scored; null: as many as the depth bound allows."""
    adapt_load: bool = True
    """Move the number of groups in flight between one batch and these bounds, so that neither side starves
    and nothing waits for training longer than it must."""
    longest_first: bool = True
    """Within a batch's worth of prompts, start those first whose responses took longest before."""
    max_attempts: Count = 3
    """A prompt whose groups fail this many times is dropped."""
    max_given_up_in_a_row: Count = 64
    """The run ends with an error once this many groups in a row were refused or could not be scored, with
    none kept between."""


class AccountingPolicy(StrEnum):
    """How the trained rollouts are kept at the composition of the submitted ones."""

    NONE = "none"
    """Groups too old are gone."""
    WINDOWED_FIFO = "windowed_fifo"
    """Batches take groups out of the oldest ``window_groups`` started ones only."""
    EXACT = "exact"
    """What is dropped leaves a deficit, which ``replacement`` makes up for."""


class Replacement(StrEnum):
    """What makes up for a dropped group under exact accounting."""

    REISSUE = "reissue"
    """Its prompt is submitted again, before all others."""
    WEIGHT = "weight"
    """The next groups of its source and length weigh more: inverse inclusion probability."""


class AccountingSection(Section):
    """Rollout accounting: short responses finish first, and age limits drop long ones more often."""

    policy: AccountingPolicy = AccountingPolicy.EXACT
    window_groups: Count | None = None
    """Of windowed_fifo."""
    replacement: Replacement = Replacement.REISSUE
    max_weight: float = Field(default=4.0, gt=1.0, le=1e6)
    """Most that one group weighs with replacement ``weight``; what is left over waits for later groups."""
    metric_groups: Count = 1000
    """Trailing window of the composition metrics."""


class PayloadSection(Section):
    """Where rollouts' arrays wait between sampling and training: shared memory of their host."""

    capacity_gib: Gibibytes = 1.0
    """Bound on the payloads of all generators together, wherever they lie: every generator host has room for
    as many. A group starts only when its largest possible payload fits in."""
