"""Prompts on their way to training: the queue of those that wait, the decisions about them, and their events.

A prompt is identified by its position in the data's order (``submission_id``), which stays the same over all
of its attempts and in a run that is resumed. An attempt becomes one group. The buffer appends events in the
order in which they happen, and its owner writes them down (``forgeasync.buffer``).
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
"""Weight of the newest length in the expected length. Lengths change as a policy learns."""


MAX_PROMPTS_IN_HISTORY = 200_000
"""Most prompts whose lengths are remembered, the latest ones. Each takes about 200 bytes."""


FIRST = -1
"""Cohort of prompts that are submitted again, which start before all others."""


ATTEMPT_STRIDE = 10**9
"""Draw ids of one attempt are between two multiples of this. No run submits as many prompts."""


class DropReason(StrEnum):
    """Why a group did not train."""

    STALE = "stale"
    """The group was older than max_off_policy_steps when the trainer could take it."""
    BAD_RECORD = "bad_record"
    """Log-probabilities are not finite, or routed experts or kept tokens contradict tokens or model."""
    OVERSIZED = "oversized"
    """The group's arrays need more memory than its reservation and the shared reserve."""
    CANCELLED = "cancelled"
    """The group was given up during sampling, because it would have been too old when complete."""
    FILTERED = "filtered"
    """A group filter removed all of it."""
    UNSCORED = "unscored"
    """Scoring of the group failed ``scorer.max_attempts`` times."""
    EPISODE_FAILED = "episode_failed"
    """An episode of the environment raised, took longer than ``timeouts.episode_s`` or gave no score."""
    LOST = "lost"
    """The group was lost with ``generator.max_lost_per_group`` generators."""
    LATE = "late"
    """The group took longer than ``timeouts.generate_s``, at every repetition."""
    NO_SCORE = "no_score"
    """The group's episodes got no score."""


AGE_REASONS = frozenset({DropReason.STALE, DropReason.CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A prompt that was submitted for training. ``attempt`` is the number of attempts before."""

    submission_id: int
    task: Task
    attempt: int = 0
    first_lengths: tuple[int, ...] | None = None
    """Lengths of the rollouts of the first lost attempt that was sampled completely: accounting uses them as
    those of what was submitted."""

    @property
    def draw_id(self) -> int:
        """Number that seeds the group's sampling. It is the same in a run that is resumed."""
        return self.attempt * ATTEMPT_STRIDE + self.submission_id


def attempt_and_prompt(draw_id: int) -> tuple[int, int]:
    """Split a draw id into the attempt and the prompt (``submission_id``)."""
    return divmod(draw_id, ATTEMPT_STRIDE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Decision: sample a group for this prompt."""

    group_id: int
    draw_id: int
    """``draw_id`` of the ``Group`` that this prompt becomes."""
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
    """Groups in flight that can be given up."""
    lost: tuple[Group, ...]
    """Complete groups that are too old: their arrays can be freed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deficit:
    """Weight of the lost groups of one stratum that no trained group has compensated for."""

    source: str
    length_bucket: int
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSnapshot:
    """State of a buffer between two batches."""

    trainer_version: int
    num_submitted: int
    """Number of prompts submitted so far, which are the first ones in the data's order."""
    next_group_id: int
    started: tuple[Submission, ...]
    """Groups that were being sampled or scored, in the order of their starts."""
    complete: tuple[Submission, ...]
    """Groups that waited for training. Their samples are lost."""
    pending: tuple[Submission, ...]
    num_reissued: int
    num_restarted: int
    deficits: tuple[Deficit, ...]
    num_censored: int


Count = Annotated[int, msgspec.Meta(ge=0)]


class Update(StrEnum):
    """Outcome of the optimizer step that a batch was taken for."""

    MADE = "made"
    """The step changed the weights."""
    SKIPPED = "skipped"
    """The step was skipped or rolled back: its loss, a gradient or the weights after it were not finite, or
    the gradient was far too large. If a batch has several steps, this holds for at least one of them."""
    UNKNOWN = "unknown"
    """The trainer finished the step, and the run was stopped before it knew the outcome."""


class PromptEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="event"):
    """A transition of one prompt or of all prompts of a batch."""


class Submitted(PromptEvent, frozen=True, kw_only=True, tag="submitted"):
    """A prompt was submitted for training."""

    prompt: Count
    source: str
    task_id: str


class Started(PromptEvent, frozen=True, kw_only=True, tag="started"):
    """An attempt at a prompt began, whose group is to be sampled."""

    prompt: Count
    attempt: Count
    """Number of earlier attempts that were given up. A resumed run repeats an attempt."""
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
    """A resumed run read an attempt's group from disk, scored and not trained on."""

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
    """The trainer consumed a batch; the last event of all of its prompts."""

    step: Count
    prompts: tuple[Count, ...]
    groups: tuple[Count, ...]
    """The group of each prompt, in the same order."""
    update: Update


AnyPromptEvent = Submitted | Started | Sampled | Scored | Restored | Dropped | Trained


class PromptEvents:
    """Events in order, until they are taken."""

    def __init__(self) -> None:
        self._events: list[AnyPromptEvent] = []

    def add(self, event: AnyPromptEvent) -> None:
        """Append an event."""
        self._events.append(event)

    def take(self) -> list[AnyPromptEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events


class LengthHistory:
    """Expected length of a prompt's longest rollout: the prompt's own, else that of its source, else 0.

    Lengths are tokens of responses or milliseconds of episodes.
    """

    def __init__(self) -> None:
        self._of_prompt: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._of_source: dict[str, float] = {}

    def measure(self, task: Task, length: float) -> None:
        """Record the length of the longest rollout of a prompt."""
        key = (task.source, task.task_id)
        known = self._of_prompt.pop(key, length)
        # The latest prompt moves to the end, so that the oldest one is forgotten.
        self._of_prompt[key] = known + HISTORY_DECAY * (length - known)
        if len(self._of_prompt) > MAX_PROMPTS_IN_HISTORY:
            self._of_prompt.popitem(last=False)
        known = self._of_source.get(task.source, length)
        self._of_source[task.source] = known + HISTORY_DECAY * (length - known)

    def expected(self, task: Task) -> float:
        """Return the expected length."""
        of_source = self._of_source.get(task.source, 0.0)
        return self._of_prompt.get((task.source, task.task_id), of_source)


class Submissions:
    """Pending prompts, in cohorts of ``cohort_size``. In a cohort, the longest expected prompt comes first.

    So no prompt is overtaken by one that was submitted more than a cohort later.
    """

    def __init__(self, *, cohort_size: int, longest_first: bool) -> None:
        self.history = LengthHistory()
        self._cohort_size = cohort_size
        self._longest_first = longest_first
        self._num_submitted = 0
        self._heap: list[tuple[int, float, int, Submission]] = []

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def num_submitted(self) -> int:
        """Number of prompts submitted so far, without repeated submissions."""
        return self._num_submitted

    def submit(self, task: Task) -> Submission:
        """Add a new prompt."""
        submission = Submission(submission_id=self._num_submitted, task=task)
        self._push(submission, cohort=self._num_submitted // self._cohort_size)
        self._num_submitted += 1
        return submission

    def reissue(self, submission: Submission, lengths: tuple[int, ...] | None) -> None:
        """Submit a prompt again whose group was lost, with the ``lengths`` of its rollouts if known."""
        again = dataclasses.replace(
            submission,
            attempt=submission.attempt + 1,
            first_lengths=submission.first_lengths or lengths,
        )
        self._push(again, cohort=FIRST)

    def restore(
        self, *, started: Iterable[Submission], pending: Iterable[Submission], num_submitted: int
    ) -> None:
        """Continue from a snapshot. What had ``started`` starts first, in the data's order."""
        assert not self._heap and not self._num_submitted, "before anything is submitted"
        for submission in started:
            self._push(submission, cohort=FIRST)
        for submission in pending:
            is_new = submission.attempt == 0
            self._push(submission, cohort=submission.submission_id // self._cohort_size if is_new else FIRST)
        self._num_submitted = num_submitted

    def pending(self) -> tuple[Submission, ...]:
        """Return the prompts that wait, in the data's order."""
        waiting = (entry[-1] for entry in self._heap)
        return tuple(sorted(waiting, key=lambda submission: submission.draw_id))

    def pop(self) -> Submission:
        """Take the prompt to start next."""
        return heapq.heappop(self._heap)[-1]

    def claim(self, draw_id: int, task: Task) -> Submission:
        """Take a waiting prompt out of order, for an attempt that was made before the run was resumed.

        The attempt is the one that the prompt waits for, or a later one.

        Raises:
            ValueError: the data have another task at this position than before.
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
