"""Decides which finished groups of a run that was killed are trained on when it is resumed. Pure.

The run goes on from a checkpoint of step s. Steps that it had made after s are lost with the process, but
their groups are on the disk: the steps are made again, each with the groups that it had. So the weights of
every version come about as before, and a group that was sampled under version v is trained on under v or
later, as before. That ends at the first step of which a group is missing, after step m. Of the other groups
those come back that were sampled under m or earlier and are not too old at m.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from forgeasync.buffer.decisions import BufferSnapshot


class LeftOut(StrEnum):
    """Why a group on the disk is not trained on."""

    ENDED = "ended"
    """Nothing is lost: its prompt had ended by the checkpoint, or the group was dropped after it was kept."""
    TORN = "torn"
    """Its file is not what was written."""
    OLD = "old"
    """It would be older than max_off_policy_steps when the trainer could take it."""
    LOST_WEIGHTS = "lost_weights"
    """It was sampled under weights that were lost: a step before them cannot be made again."""
    OTHER_CONFIG = "other_config"
    """The run goes on with settings under which the group would be another one."""
    NO_LEDGER = "no_ledger"
    """Nothing says what became of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostSteps:
    """What happened after the checkpoint that a run is resumed from, by its ledger."""

    batches: tuple[tuple[int, ...], ...]
    """The prompts of each step, the first one first."""
    first_attempts: Mapping[int, int]
    """Prompts of which earlier attempts than this were lost, after the checkpoint or before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A whole group on the disk."""

    prompt: int
    attempt: int
    reference: int
    """The version that its age counts from."""
    last_version: int
    """The newest version that has sampled a token of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """Decision: which groups come back, and in which steps."""

    batches: tuple[tuple[int, ...], ...] = ()
    """The prompts of the next steps, in order; a later step takes what there is then."""
    restored: tuple[Candidate, ...] = ()
    """In the data's order; those of the batches among them."""
    left_out: Mapping[LeftOut, int]


def plan_restore(
    candidates: Sequence[Candidate],
    lost: LostSteps,
    snapshot: BufferSnapshot,
    *,
    groups_per_step: int,
    max_off_policy_steps: int,
) -> RestorePlan:
    """Choose among the groups on the disk for a run that goes on from ``snapshot``."""
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
            # Of two attempts the later one stands.
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
    """Whether the prompt had ended by the checkpoint, or this attempt was lost later."""
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
