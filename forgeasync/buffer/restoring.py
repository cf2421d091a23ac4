"""Which finished groups of a killed run are trained on when it is resumed. Pure.

The run goes on from a checkpoint of step s. Steps after s are lost with the process, but their groups are on
disk. These steps are made again, each with the same groups. So the weights of every version are the same as
before, and a group that was sampled under version v is trained on under v or later, as before. This ends at
the first step that lacks a group; let m be the step before it. Of the other groups, those are restored that
were sampled under m or earlier and are not too old at m.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from forgeasync.buffer.prompts import BufferSnapshot, Submission


class LeftOut(StrEnum):
    """Why a group on disk is not trained on."""

    ENDED = "ended"
    """Nothing is lost: its prompt ended before the checkpoint, or the group was dropped later."""
    TORN = "torn"
    """Its file is incomplete or damaged."""
    OLD = "old"
    """It would be older than max_off_policy_steps when the trainer could take it."""
    LOST_WEIGHTS = "lost_weights"
    """It was sampled under weights that are lost, because an earlier step cannot be made again."""
    OTHER_CONFIG = "other_config"
    """The run goes on with settings that would change the group."""
    NO_LEDGER = "no_ledger"
    """There is no ledger to say what happened to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostSteps:
    """What happened after the checkpoint, by the run's ledger."""

    batches: tuple[tuple[int, ...], ...]
    """The prompts of each step, in order."""
    first_attempts: Mapping[int, int]
    """First attempt of a prompt that was not lost, for prompts with lost attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A complete group on disk."""

    prompt: int
    attempt: int
    reference: int
    """Version from which its age counts."""
    last_version: int
    """Newest version that sampled a token of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """Decision: which groups are restored, and in which steps."""

    batches: tuple[tuple[int, ...], ...] = ()
    """The prompts of the next steps, in order. Later steps take what is ready."""
    restored: tuple[Candidate, ...] = ()
    """All groups that are restored, in the data's order."""
    left_out: Mapping[LeftOut, int]


def plan_restore(
    candidates: Sequence[Candidate],
    lost: LostSteps,
    snapshot: BufferSnapshot,
    *,
    groups_per_step: int,
    max_off_policy_steps: int,
) -> RestorePlan:
    """Choose among the groups on disk for a run that goes on from ``snapshot``."""
    left_out: Counter[LeftOut] = Counter()
    waiting = {
        one.submission_id: one.attempt for one in (*snapshot.started, *snapshot.complete, *snapshot.pending)
    }
    usable: dict[int, Candidate] = {}
    for one in sorted(candidates, key=lambda one: (one.prompt, one.attempt)):
        if _has_ended(one, waiting, snapshot, lost):
            left_out[LeftOut.ENDED] += 1
            continue
        if one.prompt in usable:
            # The later of two attempts counts.
            left_out[LeftOut.ENDED] += 1
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
            left_out[LeftOut.LOST_WEIGHTS] += 1
        elif prompt not in again and one.reference + max_off_policy_steps < version:
            left_out[LeftOut.OLD] += 1
        else:
            restored.append(one)
    return RestorePlan(batches=tuple(batches), restored=tuple(restored), left_out=left_out)


def _has_ended(one: Candidate, waiting: Mapping[int, int], snapshot: BufferSnapshot, lost: LostSteps) -> bool:
    """Whether the prompt ended before the checkpoint, or this attempt was lost later."""
    if one.prompt < snapshot.num_submitted and one.attempt < waiting.get(one.prompt, one.attempt + 1):
        return True
    return one.attempt < lost.first_attempts.get(one.prompt, 0)


def _can_train(
    prompts: Collection[int], usable: Mapping[int, Candidate], version: int, max_off_policy_steps: int
) -> bool:
    """Whether the weights of ``version`` can train on the groups of all these prompts."""
    groups = [usable.get(prompt) for prompt in prompts]
    return all(
        one is not None and one.last_version <= version <= one.reference + max_off_policy_steps
        for one in groups
    )


class BatchReplayPlan:
    """The batches of the steps that a resumed run makes again."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, ...]] = deque()
        self._num_to_come = 0
        self.num_came = 0
        """Number of groups that were restored."""

    def __bool__(self) -> bool:
        return bool(self._batches or self._num_to_come)

    def plan(self, batches: Sequence[tuple[int, ...]], *, num_groups: int) -> None:
        """Set the prompts of the next batches, whose groups are among the ``num_groups`` to be restored."""
        self._batches.extend(batches)
        self._num_to_come = num_groups

    def came(self) -> None:
        """Record that a group was restored."""
        self._num_to_come -= 1
        self.num_came += 1

    def pop(self, present: Iterable[tuple[int, Submission]]) -> list[int] | None:
        """Return the groups of the next batch; None until all are restored, as each may be due first."""
        if self._num_to_come:
            return None
        prompts = set(self._batches.popleft())
        return [group_id for group_id, submission in present if submission.submission_id in prompts]
