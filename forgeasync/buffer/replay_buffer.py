"""The replay buffer: a pure state machine.

``ReplayBuffer`` has no clock, no I/O and no actors. Its inputs are events: a prompt was submitted, a group
made progress, finished, was scored or failed, the generators serve another version, a batch was trained on.
Its outputs are decisions: start this prompt, train on these groups, give up those groups, submit that prompt
again. The states of a group are

    pending -> in flight -> complete -> in a batch -> trained
                  |            |
                  +------------+--> lost: dropped with a reason, or its prompt submitted again

The policies bound the age at which a group trains. docs/off_policy.md states and proves the bound, and
tests/buffer/test_replay_buffer_histories.py looks for counterexamples. An event costs at most O(log n) for n
groups; most events cost O(1).
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from forgeasync.buffer.accounting import AccountingLedger, is_resubmitted
from forgeasync.buffer.prompts import (
    AGE_REASONS,
    AnyPromptEvent,
    Batch,
    BufferSnapshot,
    Committed,
    Deficit,
    Dropped,
    DropReason,
    Restored,
    Sampled,
    Scored,
    Start,
    Started,
    Submission,
    Submissions,
    Submitted,
    Trained,
    Update,
)
from forgeasync.buffer.ready_groups import (
    Deadlines,
    EarliestDeadlineFirst,
    known_reference,
    reference_version,
)
from forgeasync.buffer.restoring import BatchReplayPlan
from forgeasync.config import AccountingSection, AgeOf, BufferSection, StaleGroups
from forgeasync.rollouts import Group, GroupProgress, Score, SpilledGroup, Task

TRAINER_WAITS_SHARE = 0.05
"""Share of a step spent waiting for its batch, above which the trainer counts as waiting.

Smaller shares can come from a single slow group.
"""

CALM_STEPS = 3
"""Consecutive steps with a whole batch to spare before the bound falls; a single one may be chance."""


class WaitingSide(StrEnum):
    """Which side of the buffer waited for the other in the last step."""

    TRAINER = "trainer"
    GENERATORS = "generators"
    NONE = "none"


class LoadController:
    """Adapts the bound on the number of groups in the buffer, between one batch and ``max_groups``.

    With too few groups, the trainer waits for batches. With too many, complete groups wait and grow old. The
    rule resembles congestion control: the bound rises as soon as the trainer waits because of it, and falls
    slowly while whole batches are ready and the trainer does not wait.
    """

    def __init__(self, *, groups_per_step: int, max_groups: int) -> None:
        assert max_groups >= groups_per_step
        self._groups_per_step = groups_per_step
        self._max_groups = max_groups
        self._num_calm_steps = 0
        self.bound = max_groups
        self.waiting_side = WaitingSide.NONE

    def step(self, *, trainer_wait_share: float, num_ready: int, is_bound: bool) -> None:
        """Adapt the bound after a step of the training loop.

        Args:
            trainer_wait_share: Share of the step spent waiting for its batch.
            num_ready: Number of complete groups left after the batch was taken.
            is_bound: Whether the bound kept groups from starting when the batch was taken.
        """
        if trainer_wait_share > TRAINER_WAITS_SHARE:
            self.waiting_side = WaitingSide.TRAINER
            self._num_calm_steps = 0
            if is_bound:
                self.bound = min(self._max_groups, self.bound + max(1, self._groups_per_step // 4))
            return
        has_batch_to_spare = num_ready >= self._groups_per_step
        self.waiting_side = WaitingSide.GENERATORS if is_bound else WaitingSide.NONE
        self._num_calm_steps = self._num_calm_steps + 1 if has_batch_to_spare else 0
        if self._num_calm_steps >= CALM_STEPS:
            self._num_calm_steps = 0
            self.bound = max(self._groups_per_step, self.bound - max(1, self._groups_per_step // 8))

    def metrics(self) -> dict[str, float]:
        """Return metrics by their names in metrics.jsonl."""
        return {
            "load/bound": self.bound,
            "load/trainer_waits": float(self.waiting_side is WaitingSide.TRAINER),
            "load/generators_wait": float(self.waiting_side is WaitingSide.GENERATORS),
        }


class NothingTrains(RuntimeError):
    """Too many consecutive groups were given up, so the run might generate forever without making a step."""


class StarvationDetector:
    """Counts consecutive groups that were given up, and ends the run at a limit.

    Losses to age do not count, because groups grow old only while the trainer makes steps. Groups that
    filters drop have their own limit (in ``forgeasync.scoring``), because a batch may discard many of them.
    """

    def __init__(self, limit: int) -> None:
        """``limit`` is the consecutive number that ends the run (``buffer.max_given_up_in_a_row``)."""
        assert limit > 0
        self._limit = limit
        self._by_reason: Counter[DropReason] = Counter()
        self._first_problem = ""

    def came_through(self) -> None:
        """Record that a group was sampled, scored and kept, which resets the count."""
        self._by_reason.clear()

    def given_up(self, reason: DropReason, problem: str) -> None:
        """Record that a group was given up. ``problem`` describes the cause for the error message.

        Raises:
            NothingTrains: The limit is reached.
        """
        if reason in AGE_REASONS or reason is DropReason.FILTERED:
            return
        if not self._by_reason:
            self._first_problem = problem
        self._by_reason[reason] += 1
        if (num := self._by_reason.total()) >= self._limit:
            reasons = ", ".join(f"{count} {name}" for name, count in self._by_reason.most_common())
            raise NothingTrains(
                f"{num} groups in a row were given up ({reasons}; limit buffer.max_given_up_in_a_row = "
                f"{self._limit}); the first: {self._first_problem}"
            )


@dataclass(slots=True, kw_only=True)
class Entry:
    """State of a group in the buffer."""

    submission: Submission
    deadline: int
    """Last optimizer step that may train on the group; a lower bound during sampling, raised by progress."""
    sampled: Group | None = None
    """The group with all rollouts; None until all are sampled."""
    group: Group | None = None
    """The group with the rollouts that train and their rewards; None until the group is complete."""
    is_expired: bool = False
    """Whether the group is in flight after its deadline, so that the trainer does not wait for it."""

    def complete(self, rewards: Sequence[float], kept: Sequence[int], scores: Sequence[Score] | None) -> None:
        """Complete the group. The rollouts at the indices ``kept`` train, with these rewards and scores."""
        assert self.sampled is not None and self.group is None, "finished, and scored once"
        assert kept and len(kept) == len(rewards) and (scores is None or len(scores) == len(kept))
        self.group = self.sampled.trained(rewards, kept, scores)

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Lengths of all rollouts, in tokens of responses or milliseconds of episodes; None until sampled.

        The longest one decides how old the group gets before it trains.
        """
        if self.sampled is None:
            return None
        if self.sampled.durations_ms is not None:
            return self.sampled.durations_ms
        return tuple(rollout.num_sampled_tokens for rollout in self.sampled.rollouts)


class ReplayBuffer:
    """Decides when groups start, train and are lost: a pure state machine without clocks or files.

    It holds references to groups, not their arrays. A group moves from pending over in flight and complete
    to trained or lost. No group trains with an age above ``max_off_policy_steps`` (docs/staleness.md).
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        group_size: int,
        max_off_policy_steps: int,
        num_groups_in_run: int,
        section: BufferSection,
        accounting: AccountingSection,
    ) -> None:
        """Create an empty buffer.

        Args:
            groups_per_step: Groups of each optimizer step.
            group_size: Rollouts of each group.
            max_off_policy_steps: Largest allowed age of a group when it trains.
            num_groups_in_run: Number of groups that the whole run starts, not counting lost ones.
            section: The config's ``buffer`` section.
            accounting: The config section of rollout accounting.
        """
        self._groups_per_step = groups_per_step
        self._group_size = group_size
        self._max_off_policy_steps = max_off_policy_steps
        self._num_groups_in_run = num_groups_in_run
        self._section = section
        self._accounting = accounting
        age_bound = (max_off_policy_steps + 1) * groups_per_step
        self._load = LoadController(
            groups_per_step=groups_per_step, max_groups=min(age_bound, section.max_groups or age_bound)
        )
        self._submissions = Submissions(cohort_size=groups_per_step, longest_first=section.longest_first)
        self._ledger = AccountingLedger(accounting)
        self._ready = EarliestDeadlineFirst()
        self._served_version = 0
        self._trainer_version = 0
        self._next_group_id = 0
        self._num_admitted = 0
        self._entries: dict[int, Entry] = {}
        self.num_in_flight = 0
        """Number of groups that were started and are not complete."""
        # Deadlines of all groups except the expired ones.
        self._due = Deadlines()
        self._batch: dict[int, Entry] = {}
        self._deficits_before_batch: tuple[Deficit, ...] = ()
        self._num_ready_after_batch = 0
        self._was_bound = False
        self._again = BatchReplayPlan()
        self._events: list[AnyPromptEvent] = []
        """Events since the last call of ``take_events``, in the order in which they happened."""
        self.num_dropped: Counter[DropReason] = Counter({reason: 0 for reason in DropReason})
        self.num_reissued = 0
        self.num_restarted = 0
        self.num_trained = 0

    # ---- events

    def submit(self, tasks: Iterable[Task]) -> None:
        """Add prompts to the queue."""
        for task in tasks:
            prompt = self._submissions.submit(task).submission_id
            self._events.append(Submitted(prompt=prompt, source=task.source, task_id=task.task_id))

    def progressed(self, groups: Iterable[GroupProgress]) -> None:
        """Handle a generator's reports on groups in flight. Reports on other groups are ignored."""
        for progress in groups:
            entry = self._entries.get(progress.group_id)
            if entry is not None and entry.sampled is None:
                reference = known_reference(progress, self._group_size, self._section.age_of)
                self._move_deadline(progress.group_id, entry, reference + self._max_off_policy_steps)

    def finished(self, group: Group) -> None:
        """Handle a group whose rollouts are all sampled. It must be scored next."""
        entry = self._entries[group.group_id]
        assert entry.sampled is None, "finished once"
        self._events.append(Sampled(prompt=entry.submission.submission_id, group=group.group_id))
        self._take_in(entry, group)

    def _take_in(self, entry: Entry, group: Group) -> None:
        entry.sampled = group
        assert entry.lengths is not None
        self._submissions.history.measure(entry.submission.task, max(entry.lengths))
        reference = reference_version(group.rollouts, self._section.age_of)
        deadline = reference + self._max_off_policy_steps
        if self._section.age_of is AgeOf.TOKEN:
            # Lost episodes may have had the newest tokens, and thus have raised the deadline.
            deadline = max(deadline, entry.deadline)
        assert deadline >= entry.deadline, "progress gave a lower bound"
        self._move_deadline(group.group_id, entry, deadline)

    def scored(
        self,
        group_id: int,
        rewards: Sequence[float],
        kept: Sequence[int],
        scores: Sequence[Score] | None = None,
    ) -> tuple[Group, ...]:
        """Complete a group. The rollouts at the indices ``kept`` train, with these rewards and scores.

        Returns the group if it is too old to train, so that its arrays can be freed, and nothing otherwise.
        """
        entry = self._entries[group_id]
        entry.complete(rewards, kept, scores)
        self.num_in_flight -= 1
        self._events.append(Scored(prompt=entry.submission.submission_id, group=group_id))
        if entry.is_expired:
            return self._lose(group_id, DropReason.STALE)
        self._ready.add(group_id, entry.deadline)
        return ()

    def failed(self, group_id: int, reason: DropReason) -> None:
        """Drop a group in flight."""
        self.num_in_flight -= 1
        self._lose(group_id, reason)

    def set_served_version(self, version: int) -> None:
        """Record that all generators sample under ``version`` or a later one."""
        assert version >= self._served_version
        self._served_version = version

    def committed(self, *, trainer_wait_share: float, update: Update = Update.MADE) -> Committed:
        """Record that the batch was trained on, and return the decisions that follow.

        ``trainer_wait_share`` is the share of the step that the trainer spent waiting for its batch.
        """
        assert self._batch, "a batch was taken"
        self.num_trained += len(self._batch)
        self._trainer_version += 1
        prompts = tuple(entry.submission.submission_id for entry in self._batch.values())
        self._events.append(
            Trained(step=self._trainer_version, prompts=prompts, groups=tuple(self._batch), update=update)
        )
        self._batch.clear()
        if self._section.adapt_load:
            self._load.step(
                trainer_wait_share=trainer_wait_share,
                num_ready=self._num_ready_after_batch,
                is_bound=self._was_bound,
            )
        return self._expire()

    # ---- decisions

    def start(self) -> Start | None:
        """Return the prompt to sample next; None if none is pending or a bound forbids it."""
        if not len(self._submissions) or self._is_bound():
            return None
        submission = self._submissions.pop()
        group_id = self._admit(submission, self._served_version + self._max_off_policy_steps)
        self.num_in_flight += 1
        self._events.append(
            Started(prompt=submission.submission_id, attempt=submission.attempt, group=group_id)
        )
        return Start(group_id=group_id, draw_id=submission.draw_id, task=submission.task)

    def start_groups(self, most: int) -> tuple[tuple[Start, ...], int] | None:
        """Return 1 to ``most`` starts, and the number of prompts to submit; None if no group may start."""
        starts = tuple(itertools.islice(iter(self.start, None), most))
        return (starts, self.num_wanted) if starts else None

    def _admit(self, submission: Submission, deadline: int) -> int:
        group_id = self._next_group_id
        self._next_group_id += 1
        self._num_admitted += 1
        self._entries[group_id] = Entry(submission=submission, deadline=deadline)
        self._due.add(group_id, deadline)
        return group_id

    @property
    def num_wanted(self) -> int:
        """Number of prompts to submit so that a whole cohort is pending and can be ordered."""
        return max(0, self._groups_per_step - len(self._submissions))

    def take(self) -> Batch | None:
        """Return the batch of the next optimizer step, its groups by draw id; None if it is not ready.

        The batch before it must be committed first.
        """
        assert not self._batch, "the batch before it was committed"
        ids = self._next_ids()
        if ids is None:
            return None
        self._was_bound = self._is_bound()
        # The order of groups changes the last bits of a step's sums, so it must not depend on timing.
        ids.sort(key=lambda group_id: self._entries[group_id].submission.draw_id)
        self._batch = {group_id: self._entries[group_id] for group_id in ids}
        self._deficits_before_batch = self._ledger.deficits
        groups, weights = [], []
        for group_id, entry in self._batch.items():
            assert entry.group is not None
            assert entry.deadline >= self._trainer_version
            self._forget(group_id)
            groups.append(entry.group)
            submission, lengths = entry.submission, entry.lengths
            assert lengths is not None
            weights.append(
                self._ledger.train(submission.task, lengths, submitted=submission.first_lengths or lengths)
            )
        self._num_ready_after_batch = len(self._ready)
        return Batch(trainer_version=self._trainer_version, groups=tuple(groups), weights=tuple(weights))

    # ---- a run that is resumed

    def snapshot(self) -> BufferSnapshot:
        """Return the state from which another buffer can continue.

        The groups of a batch that is not committed count as complete, because they may not have trained.
        """
        entries = [self._entries[group_id] for group_id in sorted(self._entries)]
        return BufferSnapshot(
            trainer_version=self._trainer_version,
            num_submitted=self._submissions.num_submitted,
            next_group_id=self._next_group_id,
            started=tuple(entry.submission for entry in entries if entry.group is None),
            complete=tuple(
                entry.submission for entry in (*self._batch.values(), *entries) if entry.group is not None
            ),
            pending=self._submissions.pending(),
            num_reissued=self.num_reissued,
            num_restarted=self.num_restarted,
            deficits=self._deficits_before_batch if self._batch else self._ledger.deficits,
            num_censored=self._ledger.num_censored,
        )

    def restore(
        self, snapshot: BufferSnapshot, *, batches: Sequence[tuple[int, ...]] = (), num_groups: int = 0
    ) -> None:
        """Continue from a snapshot. Generators must serve its version before a group starts.

        Args:
            snapshot: State of the buffer in the checkpoint.
            batches: Prompts of the steps to repeat, in order. Their groups are among the restored ones.
            num_groups: Number of calls of ``restored`` that will follow.
        """
        assert not self._trainer_version and not self._entries, "before the first step"
        started, pending = (*snapshot.started, *snapshot.complete), snapshot.pending
        self._submissions.restore(started=started, pending=pending, num_submitted=snapshot.num_submitted)
        self._ledger.restore(snapshot.deficits, snapshot.num_censored)
        self._trainer_version = self._served_version = snapshot.trainer_version
        self._next_group_id = snapshot.next_group_id
        self._num_admitted = self.num_trained = snapshot.trainer_version * self._groups_per_step
        self.num_reissued = snapshot.num_reissued
        self.num_restarted = snapshot.num_restarted + len(started)
        self._again.plan(batches, num_groups=num_groups)

    def restored(self, kept: SpilledGroup) -> Group:
        """Add a scored group from before the run was resumed, and return it with its new id.

        Its prompt must be pending.
        """
        submission = self._submissions.claim(kept.group.draw_id, kept.group.task)
        reference = reference_version(kept.group.rollouts, self._section.age_of)
        group_id = self._admit(submission, reference + self._max_off_policy_steps)
        entry = self._entries[group_id]
        group = dataclasses.replace(kept.group, group_id=group_id, task=submission.task)
        self._take_in(entry, group)
        entry.complete(kept.rewards, kept.kept, kept.scores)
        self._again.came()
        self._events.append(
            Restored(prompt=submission.submission_id, attempt=submission.attempt, group=group_id)
        )
        self._ready.add(group_id, entry.deadline)
        return group

    # ---- state

    def take_events(self) -> list[AnyPromptEvent]:
        """Return the events since the last call, in the order in which they happened."""
        events, self._events = self._events, []
        return events

    @property
    def num_complete(self) -> int:
        """Number of complete groups that wait for a batch."""
        return len(self._entries) - self.num_in_flight

    def metrics(self) -> dict[str, float]:
        """Return metrics by their names in metrics.jsonl."""
        counts = {
            "buffer/num_in_flight": self.num_in_flight,
            "buffer/num_complete": self.num_complete,
            "buffer/num_reissued": self.num_reissued,
            "buffer/num_restarted": self.num_restarted,
            "buffer/num_restored": self._again.num_came,
        }
        return self._ledger.metrics() | counts | self._load.metrics()

    # ---- inside

    def _is_bound(self) -> bool:
        ahead = self._served_version + self._max_off_policy_steps + 1
        if self._num_admitted >= min(ahead * self._groups_per_step, self._num_groups_in_run):
            return True
        if self._section.max_in_flight is not None and self.num_in_flight >= self._section.max_in_flight:
            return True
        return len(self._entries) >= self._load.bound

    def _next_ids(self) -> list[int] | None:
        """Remove the groups of the next batch from the line and return them; None if not all are ready."""
        if self._again:
            # No check of deadlines: the same step was feasible before the run was resumed, and no group with
            # an earlier deadline has been added.
            present = ((group_id, entry.submission) for group_id, entry in self._entries.items())
            ids = self._again.pop(present)
            for group_id in ids or ():
                self._ready.discard(group_id)
            return ids
        if len(self._ready) < self._groups_per_step or not self._leaves_rest_feasible():
            return None
        return self._ready.pop(self._groups_per_step)

    def _leaves_rest_feasible(self) -> bool:
        """Whether every group outside the next batch can train by its deadline in later steps."""
        if self._section.stale_groups is StaleGroups.DROP:
            return True
        return self._due.are_feasible(
            self._trainer_version,
            self._ready.num_taken_by_deadline(self._groups_per_step),
            groups_per_step=self._groups_per_step,
        )

    def _move_deadline(self, group_id: int, entry: Entry, deadline: int) -> None:
        if deadline <= entry.deadline:
            return
        if not entry.is_expired:
            self._due.remove(group_id, entry.deadline)
        entry.deadline = deadline
        if deadline >= self._trainer_version:
            self._due.add(group_id, deadline)
            entry.is_expired = False

    def _expire(self) -> Committed:
        """Drop complete groups whose deadline passed, and stop waiting for such groups in flight."""
        cancelled: list[int] = []
        lost: list[Group] = []
        for deadline, group_ids in self._due.before(self._trainer_version):
            assert self._section.stale_groups is StaleGroups.DROP, "waiting lets no deadline pass"
            for group_id in group_ids:
                entry = self._entries[group_id]
                if entry.group is None:
                    self._due.remove(group_id, deadline)
                    entry.is_expired = True
                    cancelled.append(group_id)
                else:
                    lost += self._lose(group_id, DropReason.STALE)
        return Committed(cancelled=tuple(cancelled), lost=tuple(lost))

    def _lose(self, group_id: int, reason: DropReason) -> tuple[Group, ...]:
        """Drop a group and submit its prompt again if the accounting policy wants it.

        Returns the group if it was complete, so that its arrays can be freed.
        """
        entry = self._entries[group_id]
        self._ready.discard(group_id)
        self._forget(group_id)
        self._num_admitted -= 1
        self.num_dropped[reason] += 1
        submission = entry.submission
        again = (
            is_resubmitted(reason, self._accounting) and submission.attempt + 1 < self._section.max_attempts
        )
        self._events.append(
            Dropped(prompt=submission.submission_id, group=group_id, reason=reason, again=again)
        )
        if again:
            self._submissions.reissue(submission, entry.lengths)
            self.num_reissued += 1
        elif reason is not DropReason.FILTERED:
            self._ledger.lose(submission.task, submission.first_lengths or entry.lengths)
        return () if entry.group is None else (entry.group,)

    def _forget(self, group_id: int) -> None:
        entry = self._entries.pop(group_id)
        if not entry.is_expired:
            self._due.remove(group_id, entry.deadline)
