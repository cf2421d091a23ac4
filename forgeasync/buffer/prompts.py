"""The queue of pending prompts, the buffer's decisions, and the events of prompts.

A prompt is identified by its position in the data's order (``submission_id``), which stays the same over all
of its attempts and in a resumed run. Each attempt becomes one group. The buffer appends events in the order
in which they happen, and ``JournaledBuffer`` writes them to the run's ledger.
"""

import dataclasses
import heapq
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import msgspec

from forgeasync.rollouts import Group, Task

HISTORY_DECAY = 0.5
"""Weight of the newest length in the moving average of lengths. Lengths change as a policy learns."""


MAX_PROMPTS_IN_HISTORY = 200_000
"""Maximum number of prompts whose lengths are remembered, the latest ones. Each needs about 200 bytes."""


FIRST = -1
"""Cohort of prompts that are submitted again. It starts before all others."""


ATTEMPT_STRIDE = 10**9
"""Stride of draw ids: attempt a uses those from a * stride up to the next multiple.

No run submits this many prompts.
"""


class DropReason(StrEnum):
    """Why a group did not train."""

    STALE = "stale"
    """The group was older than max_off_policy_steps when the trainer could take it."""
    BAD_RECORD = "bad_record"
    """Log-probabilities are not finite, or routed experts or kept sets contradict the tokens or the model."""
    OVERSIZED = "oversized"
    """The group's arrays need more memory than its reservation and the shared reserve."""
    CANCELLED = "cancelled"
    """The group was given up during sampling, because it would have been too old when complete."""
    FILTERED = "filtered"
    """Group filters removed all rollouts of the group."""
    UNSCORED = "unscored"
    """Scoring of the group failed ``scorer.max_attempts`` times."""
    EPISODE_FAILED = "episode_failed"
    """An episode of the environment raised, took longer than ``timeouts.episode_s``, or gave no score."""
    LOST = "lost"
    """The group lost ``generator.max_lost_per_group`` generators that were sampling it."""
    LATE = "late"
    """The group took longer than ``timeouts.generate_s`` at every repetition."""
    NO_SCORE = "no_score"
    """The group's episodes got no score."""


AGE_REASONS = frozenset({DropReason.STALE, DropReason.CANCELLED})
"""Reasons that drop a group because of its age."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A prompt that was submitted for training. ``attempt`` is the number of earlier attempts."""

    submission_id: int
    task: Task
    attempt: int = 0
    first_lengths: tuple[int, ...] | None = None
    """Lengths of the rollouts of the first lost attempt that was sampled completely, if any.

    Accounting counts them as the lengths of the submitted group.
    """

    @property
    def draw_id(self) -> int:
        """Number that seeds the group's sampling, the same in a resumed run."""
        return self.attempt * ATTEMPT_STRIDE + self.submission_id


def attempt_and_prompt(draw_id: int) -> tuple[int, int]:
    """Split a draw id into the attempt and the prompt (``submission_id``)."""
    return divmod(draw_id, ATTEMPT_STRIDE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Decision: sample a group for this prompt."""

    group_id: int
    draw_id: int
    """Number that seeds the sampling, and becomes the ``draw_id`` of the ``Group``."""
    task: Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Decision: train on these groups, each with a weight from rollout accounting."""

    trainer_version: int
    groups: tuple[Group, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Decisions that follow from a committed step."""

    cancelled: tuple[int, ...]
    """Ids of groups in flight that are too old, so that their sampling can be cancelled."""
    lost: tuple[Group, ...]
    """Complete groups that are too old, whose arrays can be freed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deficit:
    """Weight of the lost groups of one stratum for which no trained group has compensated."""

    source: str
    length_bucket: int
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSnapshot:
    """State of a buffer between two batches, without the samples of its groups."""

    trainer_version: int
    num_submitted: int
    """Number of prompts submitted so far, which are the first ones in the data's order."""
    next_group_id: int
    started: tuple[Submission, ...]
    """Prompts whose groups were being sampled or scored, in the order of their starts."""
    complete: tuple[Submission, ...]
    """Prompts whose complete groups waited for training."""
    pending: tuple[Submission, ...]
    num_reissued: int
    num_restarted: int
    deficits: tuple[Deficit, ...]
    num_censored: int


Count = Annotated[int, msgspec.Meta(ge=0)]


class Update(StrEnum):
    """Outcome of the optimizer step on a batch."""

    MADE = "made"
    """The step changed the weights."""
    SKIPPED = "skipped"
    """The step was skipped or rolled back, because its loss, a gradient or the weights after it were not
    finite, or the gradient was far too large. If a batch has several steps, at least one of them was."""
    UNKNOWN = "unknown"
    """The trainer finished the step, but the run was stopped before the controller knew the outcome."""


class PromptEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="event"):
    """A transition of one prompt, or of all prompts of a batch. Written to the ledger."""


class Submitted(PromptEvent, frozen=True, kw_only=True, tag="submitted"):
    """A prompt was submitted for training."""

    prompt: Count
    source: str
    task_id: str


class Started(PromptEvent, frozen=True, kw_only=True, tag="started"):
    """An attempt at a prompt began. Its group will be sampled."""

    prompt: Count
    attempt: Count
    """Number of earlier attempts that were given up. A resumed run may start the same attempt again."""
    group: Count


class Sampled(PromptEvent, frozen=True, kw_only=True, tag="sampled"):
    """All rollouts of the group are sampled."""

    prompt: Count
    group: Count


class Scored(PromptEvent, frozen=True, kw_only=True, tag="scored"):
    """The group has its rewards and may be trained on."""

    prompt: Count
    group: Count


class Restored(PromptEvent, frozen=True, kw_only=True, tag="restored"):
    """A resumed run read the scored, untrained group of an attempt from disk."""

    prompt: Count
    attempt: Count
    group: Count


class Dropped(PromptEvent, frozen=True, kw_only=True, tag="dropped"):
    """The group will not be trained on."""

    prompt: Count
    group: Count
    reason: DropReason
    again: bool
    """Whether the prompt waits for another attempt; otherwise this is its last event."""


class Trained(PromptEvent, frozen=True, kw_only=True, tag="trained"):
    """The trainer consumed a batch. This is the last event of all of its prompts."""

    step: Count
    prompts: tuple[Count, ...]
    groups: tuple[Count, ...]
    """Group of each prompt, in the order of ``prompts``."""
    update: Update


AnyPromptEvent = Submitted | Started | Sampled | Scored | Restored | Dropped | Trained


class LengthHistory:
    """Estimates the length of a prompt's longest rollout from the lengths of earlier ones.

    The estimate is a moving average for the prompt itself, otherwise for its source, otherwise 0. Lengths
    are tokens of responses or milliseconds of episodes.
    """

    def __init__(self) -> None:
        self._of_prompt: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._of_source: dict[str, float] = {}

    def measure(self, task: Task, length: float) -> None:
        """Record the length of the longest rollout of a prompt."""
        key = (task.source, task.task_id)
        known = self._of_prompt.pop(key, length)
        # Moves the prompt to the end, so that popitem(last=False) forgets the one measured longest ago.
        self._of_prompt[key] = known + HISTORY_DECAY * (length - known)
        if len(self._of_prompt) > MAX_PROMPTS_IN_HISTORY:
            self._of_prompt.popitem(last=False)
        known = self._of_source.get(task.source, length)
        self._of_source[task.source] = known + HISTORY_DECAY * (length - known)

    def expected(self, task: Task) -> float:
        """Return the expected length of the longest rollout of the task's prompt."""
        of_source = self._of_source.get(task.source, 0.0)
        return self._of_prompt.get((task.source, task.task_id), of_source)


class Submissions:
    """Priority queue of pending prompts, in cohorts of ``cohort_size`` in the order of submission.

    With ``longest_first``, the prompt with the longest expected rollout of a cohort comes first. No new
    prompt is overtaken by one of a later cohort.
    """

    def __init__(self, *, cohort_size: int, longest_first: bool) -> None:
        self.history = LengthHistory()
        self._cohort_size = cohort_size
        self._longest_first = longest_first
        self.num_submitted = 0
        """Number of prompts submitted so far, without repeated submissions."""
        self._heap: list[tuple[int, float, int, Submission]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def submit(self, task: Task) -> Submission:
        """Add a new prompt."""
        submission = Submission(submission_id=self.num_submitted, task=task)
        self._push(submission, cohort=self.num_submitted // self._cohort_size)
        self.num_submitted += 1
        return submission

    def reissue(self, submission: Submission, lengths: tuple[int, ...] | None) -> None:
        """Submit the prompt of a lost group again. ``lengths`` are those of its rollouts, if known."""
        again = dataclasses.replace(
            submission,
            attempt=submission.attempt + 1,
            first_lengths=submission.first_lengths or lengths,
        )
        self._push(again, cohort=FIRST)

    def restore(
        self, *, started: Iterable[Submission], pending: Iterable[Submission], num_submitted: int
    ) -> None:
        """Continue from a snapshot. Prompts that had ``started`` start first, in the data's order."""
        assert not self._heap and not self.num_submitted, "before anything is submitted"
        for submission in started:
            self._push(submission, cohort=FIRST)
        for submission in pending:
            is_new = submission.attempt == 0
            self._push(submission, cohort=submission.submission_id // self._cohort_size if is_new else FIRST)
        self.num_submitted = num_submitted

    def pending(self) -> tuple[Submission, ...]:
        """Return the pending prompts, ordered by attempt and then in the data's order."""
        waiting = (entry[-1] for entry in self._heap)
        return tuple(sorted(waiting, key=lambda submission: submission.draw_id))

    def pop(self) -> Submission:
        """Remove and return the prompt to start next."""
        return heapq.heappop(self._heap)[-1]

    def claim(self, draw_id: int, task: Task) -> Submission:
        """Remove and return a pending prompt, for an attempt made before the run was resumed.

        The attempt of ``draw_id`` is the one that the prompt waits for, or a later one.

        Raises:
            ValueError: The task at this position of the data is not ``task``, so the data changed.
        """
        attempt, prompt = attempt_and_prompt(draw_id)
        (place,) = (index for index, entry in enumerate(self._heap) if entry[2] == prompt)
        submission = self._heap.pop(place)[-1]
        heapq.heapify(self._heap)
        assert submission.attempt <= attempt, "an attempt that was given up"
        now, before = submission.task, task
        if (now.source, now.task_id) != (before.source, before.task_id):
            raise ValueError(
                f"prompt {prompt} is task {now.task_id!r} of {now.source!r}, and was task "
                f"{before.task_id!r} of {before.source!r} before the run was resumed; must be the same data"
            )
        return dataclasses.replace(submission, attempt=attempt)

    def _push(self, submission: Submission, *, cohort: int) -> None:
        expected = self.history.expected(submission.task) if self._longest_first else 0.0
        heapq.heappush(self._heap, (cohort, -expected, submission.submission_id, submission))
