"""What happens to prompts on their way through the replay buffer, one record for each transition.

A prompt is named by its place in the data's order (``submission_id``), which stays the same over all of its
attempts and in a run that is resumed. An attempt becomes one group. The buffer appends events in the order in
which they happen; who keeps the buffer takes them and writes them down (``forgeasync.ledger``).
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

import msgspec

from forgeasync.buffer.decisions import DropReason
from forgeasync.buffer.submissions import Entry, Submission

Count = Annotated[int, msgspec.Meta(ge=0)]


class Update(StrEnum):
    """What became of the optimizer step that a batch was taken for."""

    MADE = "made"
    """The step changed the weights."""
    SKIPPED = "skipped"
    """It was not made, or was taken back: its loss, a gradient or the weights after it were not finite, or
    the gradient was far too large. Where a batch has several steps, at least one of them."""
    UNKNOWN = "unknown"
    """The trainer ended the step, and the run was told to stop before it heard how."""


class PromptEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="event"):
    """Something that happened to prompts."""


class Submitted(PromptEvent, frozen=True, kw_only=True, tag="submitted"):
    """A prompt was taken in for training."""

    prompt: Count
    source: str
    task_id: str


class Started(PromptEvent, frozen=True, kw_only=True, tag="started"):
    """An attempt at a prompt began: its group is to be sampled."""

    prompt: Count
    attempt: Count
    """Number of attempts that were given up before. A restart after a resumption repeats an attempt."""
    group: Count


class Sampled(PromptEvent, frozen=True, kw_only=True, tag="sampled"):
    """All rollouts of the group are there."""

    prompt: Count
    group: Count


class Scored(PromptEvent, frozen=True, kw_only=True, tag="scored"):
    """The group has its rewards and may be trained on."""

    prompt: Count
    group: Count


class Restored(PromptEvent, frozen=True, kw_only=True, tag="restored"):
    """A resumed run has an attempt's group from the disk, scored and not trained on; nothing was sampled."""

    prompt: Count
    attempt: Count
    group: Count


class Dropped(PromptEvent, frozen=True, kw_only=True, tag="dropped"):
    """The group will not be trained on."""

    prompt: Count
    group: Count
    reason: DropReason
    again: bool
    """Whether the prompt waits for another attempt; else this is its end."""


class Trained(PromptEvent, frozen=True, kw_only=True, tag="trained"):
    """The trainer has consumed a batch; the end of all of its prompts."""

    step: Count
    prompts: tuple[Count, ...]
    groups: tuple[Count, ...]
    """The group of each prompt, in the same order."""
    update: Update


AnyPromptEvent = Submitted | Started | Sampled | Scored | Restored | Dropped | Trained


class PromptEvents:
    """Events that nobody has taken yet, the first one first."""

    def __init__(self) -> None:
        self._events: list[AnyPromptEvent] = []

    def take(self) -> list[AnyPromptEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def submitted(self, submission: Submission) -> None:
        task = submission.task
        self._events.append(
            Submitted(prompt=submission.submission_id, source=task.source, task_id=task.task_id)
        )

    def started(self, submission: Submission, group_id: int) -> None:
        self._events.append(
            Started(prompt=submission.submission_id, attempt=submission.attempt, group=group_id)
        )

    def sampled(self, submission: Submission, group_id: int) -> None:
        self._events.append(Sampled(prompt=submission.submission_id, group=group_id))

    def scored(self, submission: Submission, group_id: int) -> None:
        self._events.append(Scored(prompt=submission.submission_id, group=group_id))

    def restored(self, submission: Submission, group_id: int) -> None:
        self._events.append(
            Restored(prompt=submission.submission_id, attempt=submission.attempt, group=group_id)
        )

    def dropped(self, submission: Submission, group_id: int, reason: DropReason, *, again: bool) -> None:
        self._events.append(
            Dropped(prompt=submission.submission_id, group=group_id, reason=reason, again=again)
        )

    def trained(self, batch: Mapping[int, Entry], *, step: int, update: Update) -> None:
        """``batch`` has the entries by group id."""
        prompts = tuple(entry.submission.submission_id for entry in batch.values())
        self._events.append(Trained(step=step, prompts=prompts, groups=tuple(batch), update=update))
