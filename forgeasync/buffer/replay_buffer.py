"""The replay buffer as a pure state machine: no clock, no I/O, no actors.

Events come in: a prompt was submitted, a group made progress, finished, was scored or failed, the generators
serve another version, a batch was trained on. Decisions go out: start this prompt, these groups are the next
batch, those are given up, that prompt is submitted again. A group is

    pending -> in flight -> complete -> in a batch -> trained
                  |            |
                  +------------+--> lost: dropped with a reason, or its prompt submitted again

The largest age that anything trains at follows from the policies; docs/off_policy.md states and proves it,
tests/buffer/test_replay_buffer.py looks for counterexamples. Every event costs O(log n) at most in the number
n of groups, most of them O(1).
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from forgeasync.buffer.accounting import AccountingLedger, comes_again
from forgeasync.buffer.ages import Deadlines, known_reference, reference_version
from forgeasync.buffer.batch_replay import BatchReplayPlan
from forgeasync.buffer.decisions import (
    Batch,
    BufferSnapshot,
    Committed,
    Deficit,
    DropReason,
    Start,
)
from forgeasync.buffer.events import PromptEvents, Update
from forgeasync.buffer.load import LoadController, StepLoad
from forgeasync.buffer.ready_groups import BatchLine
from forgeasync.buffer.submissions import Entry, Submission, Submissions
from forgeasync.config import AccountingPolicy, AccountingSection, AgeOf, BufferSection, StaleGroups
from forgeasync.rollouts import Group, GroupProgress, Score, SpilledGroup, Task


class ReplayBuffer:
    """Groups on their way from submission to training."""

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
        """The run starts ``num_groups_in_run`` groups in all, not counting lost ones."""
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
        is_windowed = accounting.policy is AccountingPolicy.WINDOWED_FIFO
        self._line = BatchLine(section.order, accounting.window_groups if is_windowed else None)
        self._served_version = 0
        self._trainer_version = 0
        self._next_group_id = 0
        self._num_admitted = 0
        self._entries: dict[int, Entry] = {}
        self._num_in_flight = 0
        # Deadlines of the groups that can still be trained on.
        self._due = Deadlines()
        self._batch: dict[int, Entry] = {}
        self._deficits_before_batch: tuple[Deficit, ...] = ()
        self._num_ready_after_batch = 0
        self._was_bound = False
        self._again = BatchReplayPlan()
        self.events = PromptEvents()
        self.num_dropped: Counter[DropReason] = Counter({reason: 0 for reason in DropReason})
        self.num_reissued = 0
        self.num_restarted = 0
        self.num_trained = 0

    # ---- events

    def submit(self, task: Task) -> None:
        """Take in a prompt."""
        self.events.submitted(self._submissions.submit(task))

    def progressed(self, progress: GroupProgress) -> None:
        """Take in a generator's report on a group; reports on groups that have ended are ignored."""
        entry = self._entries.get(progress.group_id)
        if entry is None or entry.sampled is not None:
            return
        reference = known_reference(progress, self._group_size, self._section.age_of)
        self._move_deadline(progress.group_id, entry, reference + self._max_off_policy_steps)

    def finished(self, group: Group) -> None:
        """Take in a group whose rollouts are all sampled; it still has to be scored."""
        entry = self._entries[group.group_id]
        assert entry.sampled is None, "finished once"
        self.events.sampled(entry.submission, group.group_id)
        self._take_in(entry, group)

    def _take_in(self, entry: Entry, group: Group) -> None:
        entry.sampled = group
        assert entry.lengths is not None
        self._submissions.history.measure(entry.submission.task, max(entry.lengths))
        reference = reference_version(group.rollouts, self._section.age_of)
        deadline = reference + self._max_off_policy_steps
        if self._section.age_of is AgeOf.TOKEN:
            # Episodes that were lost, with the newest tokens perhaps, may have raised it.
            deadline = max(deadline, entry.deadline)
        assert deadline >= entry.deadline, "what was known of it on the way was a lower bound"
        self._move_deadline(group.group_id, entry, deadline)

    def scored(
        self,
        group_id: int,
        rewards: Sequence[float],
        kept: Sequence[int],
        scores: Sequence[Score] | None = None,
    ) -> tuple[Group, ...]:
        """Complete a group: the rollouts at ``kept`` train, with these rewards.

        ``scores`` are what the reward said of them. Returns the group if it is too old by now: its arrays
        can be freed.
        """
        entry = self._entries[group_id]
        entry.complete(rewards, kept, scores)
        self._num_in_flight -= 1
        self.events.scored(entry.submission, group_id)
        if entry.is_expired:
            return self._lose(group_id, DropReason.STALE)
        self._line.complete(group_id, entry.deadline)
        return ()

    def failed(self, group_id: int, reason: DropReason) -> None:
        """Give up a group in flight."""
        self._num_in_flight -= 1
        self._lose(group_id, reason)

    def set_served_version(self, version: int) -> None:
        """Note that all generators sample under ``version`` (or a later one) from now on."""
        assert version >= self._served_version
        self._served_version = version

    def committed(self, *, trainer_wait_share: float, update: Update = Update.MADE) -> Committed:
        """Note that the batch was trained on; return what follows from it."""
        assert self._batch, "a batch was taken"
        self.num_trained += len(self._batch)
        self._trainer_version += 1
        self.events.trained(self._batch, step=self._trainer_version, update=update)
        self._batch.clear()
        if self._section.adapt_load:
            self._load.step(
                StepLoad(
                    trainer_wait_share=trainer_wait_share,
                    num_ready=self._num_ready_after_batch,
                    is_bound=self._was_bound,
                )
            )
        return self._expire()

    # ---- decisions

    def start(self) -> Start | None:
        """Choose the prompt to sample now; None while a bound, the run's end or a lack of prompts forbids."""
        if not len(self._submissions) or self._is_bound():
            return None
        submission = self._submissions.pop()
        group_id = self._admit(submission, self._served_version + self._max_off_policy_steps)
        self._num_in_flight += 1
        self.events.started(submission, group_id)
        return Start(group_id=group_id, draw_id=submission.draw_id, task=submission.task)

    def _admit(self, submission: Submission, deadline: int) -> int:
        group_id = self._next_group_id
        self._next_group_id += 1
        self._num_admitted += 1
        self._entries[group_id] = Entry(submission=submission, deadline=deadline)
        self._due.add(group_id, deadline)
        self._line.start(group_id)
        return group_id

    @property
    def num_wanted(self) -> int:
        """Number of prompts to submit so that a whole cohort can be ordered."""
        return max(0, self._groups_per_step - len(self._submissions))

    def take(self) -> Batch | None:
        """Take the groups of the next optimizer step, ordered by their prompts' places in the data's order;
        None while not ready.
        """
        assert not self._batch, "the batch before it was committed"
        ids = self._next_ids()
        if ids is None:
            return None
        self._was_bound = self._is_bound()
        # The order changes the last bits of a step's sums, so it must not depend on timing.
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
        self._num_ready_after_batch = self._line.num_ready
        return Batch(trainer_version=self._trainer_version, groups=tuple(groups), weights=tuple(weights))

    # ---- a run that is resumed

    def snapshot(self) -> BufferSnapshot:
        """Return the state that a buffer needs to continue from here.

        A batch that was taken and not committed counts as complete: as far as is known it did not train.
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
        """Continue from a snapshot; generators serve its version before anything starts.

        So many groups will be ``restored``, among them those of the next steps, with the prompts ``batches``.
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
        """Take in a finished group from before the run was resumed, whose prompt was submitted."""
        submission = self._submissions.claim(kept.group.draw_id, kept.group.task)
        reference = reference_version(kept.group.rollouts, self._section.age_of)
        group_id = self._admit(submission, reference + self._max_off_policy_steps)
        entry = self._entries[group_id]
        group = dataclasses.replace(kept.group, group_id=group_id, task=submission.task)
        self._take_in(entry, group)
        entry.complete(kept.rewards, kept.kept, kept.scores)
        self._again.came()
        self.events.restored(submission, group_id)
        self._line.complete(group_id, entry.deadline)
        return group

    # ---- state

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    @property
    def num_present(self) -> int:
        """Groups started and neither trained on nor lost."""
        return len(self._entries)

    @property
    def num_complete(self) -> int:
        return len(self._entries) - self._num_in_flight

    @property
    def num_pending(self) -> int:
        return len(self._submissions)

    @property
    def num_submitted(self) -> int:
        return self._submissions.num_submitted

    def metrics(self) -> dict[str, float]:
        """Return metrics under their names in metrics.jsonl."""
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
        if self._section.max_in_flight is not None and self._num_in_flight >= self._section.max_in_flight:
            return True
        return len(self._entries) >= self._load.bound

    def _next_ids(self) -> list[int] | None:
        """The groups of the next batch, which leave the line; None while they are not all there."""
        if self._again:
            # The step was feasible when it was made before, and nothing has come that is due earlier.
            ids = self._again.pop(self._entries)
            self._line.end(ids or ())
            return ids
        if self._line.num_ready < self._groups_per_step or not self._leaves_rest_feasible():
            return None
        return self._line.pop(self._groups_per_step)

    def _leaves_rest_feasible(self) -> bool:
        """Whether every group left can still be taken by its deadline, groups_per_step groups per step."""
        if self._section.stale_groups is StaleGroups.DROP:
            return True
        return self._due.are_feasible(
            self._trainer_version,
            self._line.num_taken_by_deadline(self._groups_per_step),
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
            if entry.is_expired:
                entry.is_expired = False
                self._line.come_back(group_id)

    def _expire(self) -> Committed:
        """Drop complete groups past their deadline; groups in flight past theirs no longer count."""
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
        # Batches do not wait for these at the head of the line.
        self._line.end(cancelled)
        return Committed(cancelled=tuple(cancelled), lost=tuple(lost))

    def _lose(self, group_id: int, reason: DropReason) -> tuple[Group, ...]:
        """Drop a group: its place is free, and its prompt may be submitted again."""
        entry = self._entries[group_id]
        self._line.end([group_id])
        self._forget(group_id)
        self._num_admitted -= 1
        self.num_dropped[reason] += 1
        submission = entry.submission
        again = comes_again(reason, self._accounting) and submission.attempt + 1 < self._section.max_attempts
        self.events.dropped(submission, group_id, reason, again=again)
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
