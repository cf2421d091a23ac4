"""The replay buffer's decisions, and the reasons why a group is not trained on."""

from dataclasses import dataclass
from enum import StrEnum

from forgeasync.buffer.submissions import Submission
from forgeasync.rollouts import Group, Task


class DropReason(StrEnum):
    """Why a group did not train."""

    STALE = "stale"
    """The group was older than max_off_policy_steps when the trainer could have taken it."""
    BAD_RECORD = "bad_record"
    """Log-probabilities are not finite, or routed experts or kept tokens contradict the tokens or the model.
    """
    OVERSIZED = "oversized"
    """The group's arrays are larger than the memory reserved for them and the shared excess."""
    CANCELLED = "cancelled"
    """The group was given up while it was sampled, because it would have been too old at its end."""
    FILTERED = "filtered"
    """A group filter left nothing of it to learn from."""
    UNSCORED = "unscored"
    """Scoring of the group failed ``scorer.max_attempts`` times."""
    EPISODE_FAILED = "episode_failed"
    """An episode of the environment raised, took longer than ``timeouts.episode_s`` or gave no score."""
    LOST = "lost"
    """The group was on ``generator.max_lost_per_group`` generators that were lost."""
    LATE = "late"
    """The group took longer than ``timeouts.generate_s``, and did so again whenever it was repeated."""
    NO_SCORE = "no_score"
    """Nobody has said how good the group's episodes were."""


AGE_REASONS = frozenset({DropReason.STALE, DropReason.CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Decision: sample a group for this prompt."""

    group_id: int
    draw_id: int
    """``draw_id`` of the ``Group`` that this prompt becomes."""
    task: Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Decision: train on these groups, each with its weight from rollout accounting."""

    trainer_version: int
    groups: tuple[Group, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The consequences of a committed step."""

    cancelled: tuple[int, ...]
    """Decision: groups in flight that can be given up."""
    lost: tuple[Group, ...]
    """Complete groups that became too old: their arrays can be freed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deficit:
    """Weight of lost groups of one stratum that no other group has taken over yet."""

    source: str
    length_bucket: int
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSnapshot:
    """A buffer between two batches."""

    trainer_version: int
    num_submitted: int
    """Position in the data's order: submitted prompts are its first ones."""
    next_group_id: int
    started: tuple[Submission, ...]
    """Submissions of groups that are being sampled or scored, in the order in which they started."""
    complete: tuple[Submission, ...]
    """Submissions of groups that waited for training; their samples are lost."""
    pending: tuple[Submission, ...]
    num_reissued: int
    num_restarted: int
    deficits: tuple[Deficit, ...]
    num_censored: int
