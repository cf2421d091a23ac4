"""Sections for the replay buffer: age and order of groups, rollout accounting, and memory for payloads."""

from enum import StrEnum

from pydantic import Field

from forgeasync.schema import Count, Gibibytes, Section


class StaleGroups(StrEnum):
    """Policy for groups that are in danger of becoming too old to train on."""

    WAIT = "wait"
    """The trainer waits for a slow group before that group becomes too old, so no group is dropped."""
    DROP = "drop"
    """The trainer does not wait; a group that completes too late is dropped and counted."""


class AgeOf(StrEnum):
    """Definition of the age of a rollout that ``max_off_policy_steps`` bounds."""

    OLDEST_TOKEN = "oldest_token"
    NEWEST_TOKEN = "newest_token"
    MEAN = "mean"
    """Mean age of a rollout's tokens."""
    TOKEN = "token"
    """Age of each token separately: a group is trained on as long as one of its tokens is young enough, and
    the trainer leaves out the tokens that are too old."""


class BufferSection(Section):
    """Settings of the replay buffer, which holds groups between sampling and training."""

    stale_groups: StaleGroups = StaleGroups.WAIT
    age_of: AgeOf = AgeOf.OLDEST_TOKEN
    """Definition of a rollout's age. If the key is missing, it is ``token`` in runs with an environment,
    whose episodes can be long (except with ``weights.interruption: cancel_stale``)."""
    max_groups: Count | None = None
    """Maximum number of groups that are started and not yet trained on. null: only
    max_off_policy_steps bounds them, to (max_off_policy_steps + 1) * groups_per_step. If generation is faster
    than training, a lower bound gives fresher data at the same speed."""
    max_in_flight: Count | None = None
    """Maximum number of groups being sampled or scored. null: only ``max_groups`` bounds it."""
    adapt_load: bool = True
    """Adapt the number of groups in flight, between one batch and these bounds. It is large enough that
    neither generators nor trainer are idle, and no larger, so that groups do not age while they wait."""
    longest_first: bool = True
    """Among the prompts for one batch, start those first whose earlier responses took longest."""
    max_attempts: Count = 3
    """Maximum number of attempts at a prompt; a prompt whose groups fail this many times is dropped."""
    keep_groups: bool = True
    """Keep finished groups on disk, in the run's folder, until a checkpoint contains the step that trained on
    them, so that a killed run resumes with them. Their arrays take the same space as in shared memory, and
    all hosts must see the folder."""
    heartbeat_s: float = Field(default=8.0, ge=1.0, le=3600.0)
    """Time without an answer after which the buffer's process is killed. The run then ends, and the next
    start resumes from the newest checkpoint and the kept groups."""
    max_given_up_in_a_row: Count = 64
    """Number of groups in a row that may be refused or fail to be scored; then the run ends with an error."""


class AccountingPolicy(StrEnum):
    """Policy that keeps the composition (sources, lengths) of trained rollouts equal to that of submitted
    ones."""

    NONE = "none"
    """Dropped groups are not compensated."""
    EXACT = "exact"
    """Every dropped group leaves a deficit, which ``replacement`` compensates."""


class Replacement(StrEnum):
    """Compensation for a dropped group under exact accounting."""

    REISSUE = "reissue"
    """The group's prompt is submitted again, before all others."""
    WEIGHT = "weight"
    """The next groups of the same source and length get a larger weight: the inverse inclusion
    probability."""


class AccountingSection(Section):
    """Rollout accounting, which corrects a bias: age limits drop long responses more often than short
    ones."""

    policy: AccountingPolicy = AccountingPolicy.EXACT
    replacement: Replacement = Replacement.REISSUE
    max_weight: float = Field(default=4.0, gt=1.0, le=1e6)
    """Maximum weight of one group with replacement ``weight``; the rest of a deficit goes to later groups."""


class PayloadSection(Section):
    """Payload store: shared memory of a generator's host that holds rollouts' arrays until they are trained
    on."""

    capacity_gib: Gibibytes = 1.0
    """Maximum size of the payloads of all generators together; every generator host has room for that much. A
    group starts only when its largest possible payload fits."""
