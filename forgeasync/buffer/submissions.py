"""Prompts that wait to be started, which of them starts next, and what is known of one that has started."""

import dataclasses
import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from forgeasync.rollouts import Group, Score, Task, steps_of

HISTORY_DECAY = 0.5
"""Weight of the newest length in the expected length: policies change their lengths as they learn."""


MAX_PROMPTS_IN_HISTORY = 200_000
"""Most prompts whose lengths are remembered, the last measured ones; each takes about 200 bytes."""


FIRST = -1
"""Cohort of prompts that are submitted again: they start before all others."""


ATTEMPT_STRIDE = 10**9
"""Draw ids of one attempt lie between two multiples of this: no run submits as many prompts."""


class LengthHistory:
    """Expected lengths: of a prompt that was measured, else of its source, else 0. See ``Entry.lengths``."""

    def __init__(self) -> None:
        self._of_prompt: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._of_source: dict[str, float] = {}

    def measure(self, task: Task, length: float) -> None:
        """Take in the length of the longest rollout of a prompt."""
        key = (task.source, task.task_id)
        known = self._of_prompt.pop(key, length)
        # Measured last goes to the end; what was measured first is forgotten.
        self._of_prompt[key] = known + HISTORY_DECAY * (length - known)
        if len(self._of_prompt) > MAX_PROMPTS_IN_HISTORY:
            self._of_prompt.popitem(last=False)
        known = self._of_source.get(task.source, length)
        self._of_source[task.source] = known + HISTORY_DECAY * (length - known)

    def expected(self, task: Task) -> float:
        """Return the expected length."""
        of_source = self._of_source.get(task.source, 0.0)
        return self._of_prompt.get((task.source, task.task_id), of_source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A prompt submitted for training; ``attempt`` counts how often it was started before."""

    submission_id: int
    task: Task
    attempt: int = 0
    first_lengths: tuple[int, ...] | None = None
    """Lengths of the responses of the first lost attempt that was sampled to its end: they stand for what was
    submitted."""

    @property
    def draw_id(self) -> int:
        """The number that determines the group's random draws; the same in a run that is resumed."""
        return self.attempt * ATTEMPT_STRIDE + self.submission_id


def attempt_and_prompt(draw_id: int) -> tuple[int, int]:
    """Return which attempt at which prompt (``submission_id``) a draw id is of."""
    return divmod(draw_id, ATTEMPT_STRIDE)


class Submissions:
    """Pending prompts, cohort after cohort of ``cohort_size``; within one, longest expected first.

    So no prompt is overtaken by another that was submitted more than a cohort later.
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
        """Number of prompts submitted so far, not counting repeated submissions."""
        return self._num_submitted

    def submit(self, task: Task) -> Submission:
        """Add a new prompt."""
        submission = Submission(submission_id=self._num_submitted, task=task)
        self._push(submission, cohort=self._num_submitted // self._cohort_size)
        self._num_submitted += 1
        return submission

    def reissue(self, submission: Submission, lengths: tuple[int, ...] | None) -> None:
        """Submit again a prompt whose group was lost; ``lengths`` of its responses, if they are known."""
        again = dataclasses.replace(
            submission,
            attempt=submission.attempt + 1,
            first_lengths=submission.first_lengths or lengths,
        )
        self._push(again, cohort=FIRST)

    def restore(
        self, *, started: Iterable[Submission], pending: Iterable[Submission], num_submitted: int
    ) -> None:
        """Continue as another object left off; what it had ``started`` starts first, in the data's order."""
        assert not self._heap and not self._num_submitted, "before anything is submitted"
        for submission in started:
            self._push(submission, cohort=FIRST)
        for submission in pending:
            is_new = submission.attempt == 0
            self._push(submission, cohort=submission.submission_id // self._cohort_size if is_new else FIRST)
        self._num_submitted = num_submitted

    def pending(self) -> tuple[Submission, ...]:
        """List the prompts that wait to be started, in the data's order."""
        waiting = (entry[-1] for entry in self._heap)
        return tuple(sorted(waiting, key=lambda submission: submission.draw_id))

    def pop(self) -> Submission:
        """The prompt to start next."""
        return heapq.heappop(self._heap)[-1]

    def claim(self, draw_id: int, task: Task) -> Submission:
        """Take a prompt that waits out of its turn, for an attempt that was made before the run was resumed.

        It is the attempt that the prompt waits for, or a later one.

        Raises:
            ValueError: the data have another task at its place than the attempt was made at.
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


@dataclass(slots=True, kw_only=True)
class Entry:
    """A group's state in the buffer."""

    submission: Submission
    deadline: int
    """Last optimizer step that may train on it, as far as is known; rises with progress."""
    sampled: Group | None = None
    """The group with all its rollouts; None until they are sampled."""
    group: Group | None = None
    """The group with the rollouts that are trained on and their rewards; None until it is complete."""
    is_expired: bool = False
    """Whether the group is in flight past its deadline: the trainer no longer waits for it."""

    def complete(self, rewards: Sequence[float], kept: Sequence[int], scores: Sequence[Score] | None) -> None:
        """The rollouts at ``kept`` train, with these rewards."""
        assert self.sampled is not None and self.group is None, "finished, and scored once"
        assert kept and len(kept) == len(rewards) and (scores is None or len(scores) == len(kept))
        self.group = dataclasses.replace(
            self.sampled,
            rollouts=tuple(self.sampled.rollouts[index] for index in kept),
            rewards=tuple(rewards),
            scores=None if scores is None else tuple(scores),
            steps=None if scores is None else steps_of(scores),
        )

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """How long all its rollouts are; None until they are sampled.

        Responses are as long as their tokens, episodes as their milliseconds: that decides how old they get.
        """
        if self.sampled is None:
            return None
        if self.sampled.durations_ms is not None:
            return self.sampled.durations_ms
        return tuple(rollout.num_sampled_tokens for rollout in self.sampled.rollouts)
