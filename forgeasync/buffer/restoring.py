"""Chooses which finished groups on disk a resumed run trains on. Pure.

The run continues from the checkpoint of step s. The process lost all steps after s, but their groups are on
disk. The resumed run repeats these steps, each with the same groups, up to the first step that lacks a group.
Let m be the last repeated step. Repeated steps reproduce the weights of every version up to m, so a group
sampled under version v still trains under v or later. Of the other groups on disk, the run restores those
that were sampled under m or earlier and are not too old at m.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from forgeasync.buffer.prompts import BufferSnapshot, Submission


class SkipReason(StrEnum):
    """Reason why a resumed run does not train on a group that is on disk."""

    ENDED = "ended"
    """The group is not needed: its prompt ended before the checkpoint, the group was dropped later, or a
    later attempt at the prompt replaces it."""
    TORN = "torn"
    """The group's file is incomplete or damaged."""
    OLD = "old"
    """The group would be older than ``max_off_policy_steps`` when the trainer could take it."""
    LOST_WEIGHTS = "lost_weights"
    """The group was sampled under weights that are lost, because an earlier step cannot be repeated."""
    OTHER_CONFIG = "other_config"
    """The run is resumed with settings under which the group would be different."""
    NO_LEDGER = "no_ledger"
    """The run has no ledger, so the history of the group is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostSteps:
    """Events after the checkpoint, read from the run's ledger."""

    batches: tuple[tuple[int, ...], ...]
    """Prompts of each step after the checkpoint, in step order."""
    first_attempts: Mapping[int, int]
    """First attempt that was not lost, by prompt, for prompts with lost attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A complete group on disk, which may be restored."""

    prompt: int
    attempt: int
    reference: int
    """Policy version from which the group's age counts."""
    last_version: int
    """Newest policy version that sampled a token of the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """Decision of ``plan_restore``: the groups to restore, and the steps that use them."""

    batches: tuple[tuple[int, ...], ...] = ()
    """Prompts of the steps to repeat, in step order. Steps after them use whichever groups are ready."""
    restored: tuple[Candidate, ...] = ()
    """All groups to restore, in the data's order."""
    left_out: Mapping[SkipReason, int]
    """Number of groups on disk that are not restored, by reason."""


def plan_restore(
    candidates: Sequence[Candidate],
    lost: LostSteps,
    snapshot: BufferSnapshot,
    *,
    groups_per_step: int,
    max_off_policy_steps: int,
) -> RestorePlan:
    """Choose which of the groups on disk a run that continues from ``snapshot`` restores.

    Args:
        candidates: Complete groups on disk.
        lost: Events after the checkpoint, from the ledger.
        snapshot: The buffer's state in the checkpoint.
        groups_per_step: Groups of each optimizer step.
        max_off_policy_steps: Largest allowed age of a group when it trains.
    """
    left_out: Counter[SkipReason] = Counter()
    waiting = {
        one.submission_id: one.attempt for one in (*snapshot.started, *snapshot.complete, *snapshot.pending)
    }
    usable: dict[int, Candidate] = {}
    for one in sorted(candidates, key=lambda one: (one.prompt, one.attempt)):
        if _has_ended(one, waiting, snapshot, lost):
            left_out[SkipReason.ENDED] += 1
            continue
        if one.prompt in usable:
            # Of two attempts at one prompt, the later one counts.
            left_out[SkipReason.ENDED] += 1
        usable[one.prompt] = one
    version = snapshot.trainer_version
    batches = []
    for batch in lost.batches:
        if len(batch) != groups_per_step or not _can_train(batch, usable, version, max_off_policy_steps):
            break
        batches.append(batch)
        version += 1
    again = {prompt for batch in batches for prompt in batch}
    restored = []
    for prompt, one in usable.items():
        if prompt not in again and one.last_version > version:
            left_out[SkipReason.LOST_WEIGHTS] += 1
        elif prompt not in again and one.reference + max_off_policy_steps < version:
            left_out[SkipReason.OLD] += 1
        else:
            restored.append(one)
    return RestorePlan(batches=tuple(batches), restored=tuple(restored), left_out=left_out)


def _has_ended(one: Candidate, waiting: Mapping[int, int], snapshot: BufferSnapshot, lost: LostSteps) -> bool:
    """Whether the candidate's prompt ended before the checkpoint, or this attempt was lost after it."""
    if one.prompt < snapshot.num_submitted and one.attempt < waiting.get(one.prompt, one.attempt + 1):
        return True
    return one.attempt < lost.first_attempts.get(one.prompt, 0)


def _can_train(
    prompts: Collection[int], usable: Mapping[int, Candidate], version: int, max_off_policy_steps: int
) -> bool:
    """Whether all these prompts have usable groups that may train at ``version``."""
    groups = [usable.get(prompt) for prompt in prompts]
    return all(
        one is not None and one.last_version <= version <= one.reference + max_off_policy_steps
        for one in groups
    )


class BatchReplayPlan:
    """Batches of the steps that a resumed run repeats with the same groups."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, ...]] = deque()
        self._num_to_come = 0
        self.num_came = 0
        """Number of groups restored so far."""

    def __bool__(self) -> bool:
        return bool(self._batches or self._num_to_come)

    def plan(self, batches: Sequence[tuple[int, ...]], *, num_groups: int) -> None:
        """Set the prompts of the next batches. Their groups are among the ``num_groups`` to be restored."""
        self._batches.extend(batches)
        self._num_to_come = num_groups

    def came(self) -> None:
        """Record that a group was restored."""
        self._num_to_come -= 1
        self.num_came += 1

    def pop(self, present: Iterable[tuple[int, Submission]]) -> list[int] | None:
        """Return the group ids of the next batch; None until all groups to restore have arrived.

        ``present`` holds the group id and submission of each group in the buffer. Groups can arrive in any
        order, so a group of the next batch may be the last one.
        """
        if self._num_to_come:
            return None
        prompts = set(self._batches.popleft())
        return [group_id for group_id, submission in present if submission.submission_id in prompts]
