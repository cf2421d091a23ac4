"""A world around a replay buffer in which anything may happen at any time, to look for broken promises in.

It plays generator, scorer and trainer with groups of two rollouts, and checks what every batch must satisfy.
A ledger's book follows it, and would contradict.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from forgeasync.buffer import (
    AnyEvent,
    Batch,
    BufferSnapshot,
    DropReason,
    LedgerState,
    Place,
    ReplayBuffer,
    Submission,
)
from forgeasync.config import AccountingSection, AgeOf, BufferSection, Replacement, StaleGroups
from forgeasync.rollouts import Group, GroupProgress, Step, StoredRollout, Task
from tests.support.ledgers import opened
from tests.support.rollouts import make_stored_rollout

GROUP_SIZE = 2


def make_task(index: int, source: str = "s") -> Task:
    return Task(task_id=str(index), prompt="", answer="", source_index=index, source=source)


def make_group(*steps: tuple[Step, ...], texts: tuple[str, ...] = ("abcdef", "abcd")) -> Group:
    """A scored group whose steps have values."""
    rollouts = tuple(make_stored_rollout((0, 0, 4), text=text) for text in texts)
    return Group(
        group_id=7,
        draw_id=0,
        task=make_task(0),
        rollouts=rollouts,
        rewards=tuple(float(index) for index in range(len(texts))),
        steps=steps or None,
    )


def make_snapshot(
    version: int, *, num_submitted: int = 0, next_group_id: int = 0, pending: Sequence[Submission] = ()
) -> BufferSnapshot:
    """A buffer after that many steps, with no group in it."""
    return BufferSnapshot(
        trainer_version=version,
        num_submitted=num_submitted,
        next_group_id=next_group_id,
        started=(),
        complete=(),
        pending=tuple(pending),
        num_reissued=0,
        num_restarted=0,
        deficits=(),
        num_censored=0,
    )


@dataclass(slots=True)
class Sampling:
    """A group in the generator: the versions of the tokens of each rollout so far."""

    task: Task
    draw_id: int
    versions: list[list[int]] = field(default_factory=lambda: [[] for _ in range(GROUP_SIZE)])
    ended: set[int] = field(default_factory=set)

    def rollouts(self) -> tuple[StoredRollout, ...]:
        spans = [[(version, at, at + 1) for at, version in enumerate(one)] for one in self.versions]
        return tuple(make_stored_rollout(*of_one) for of_one in spans)


def age_of_group(group: Group, trained_version: int, age_of: AgeOf) -> float:
    """By definition, token by token."""
    versions = [
        [span.version for span in rollout.version_spans for _ in range(span.start, span.end)]
        for rollout in group.rollouts
    ]
    ages = [[trained_version - version for version in one] for one in versions]
    match age_of:
        case AgeOf.OLDEST_TOKEN:
            return max(max(one) for one in ages)
        case AgeOf.NEWEST_TOKEN:
            return max(min(one) for one in ages)
        case AgeOf.MEAN:
            return max(sum(one) / len(one) for one in ages)
        case AgeOf.TOKEN:
            return min(min(one) for one in ages)


class BufferWorld:
    """Moves that a random history is made of; every move keeps the world consistent."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        k: int,
        section: BufferSection,
        accounting: AccountingSection,
        num_steps: int = 100_000,
    ) -> None:
        self.groups_per_step, self.k, self.section = groups_per_step, k, section
        self.new_buffer = functools.partial(
            ReplayBuffer,
            groups_per_step=groups_per_step,
            group_size=GROUP_SIZE,
            max_off_policy_steps=k,
            num_groups_in_run=num_steps * groups_per_step,
            section=section,
            accounting=accounting,
        )
        self.buffer = self.new_buffer()
        self.trainer_version = self.served_version = 0
        self.sampling: dict[int, Sampling] = {}
        self.sampled: dict[int, Group] = {}
        self.trained: list[Task] = []
        self.num_lost_groups = 0
        self.weights: list[float] = []
        self.cancellable: set[int] = set()
        self.book = LedgerState()
        self.events: list[AnyEvent] = []
        self.note(opened(groups_per_step))
        self._num_tasks = 0

    def note(self, *events: AnyEvent) -> None:
        """Enter what happened in the buffer into the book, and then ``events``."""
        for event in (*self.buffer.take_events(), *events):
            self.events.append(event)
            self.book.apply(event)

    def start_all(self) -> None:
        while True:
            for _ in range(self.buffer.num_wanted):
                self.buffer.submit([make_task(self._num_tasks)])
                self._num_tasks += 1
            start = self.buffer.start()
            if start is None:
                return
            self.sampling[start.group_id] = Sampling(start.task, start.draw_id)

    def decode(self, group_id: int, num_tokens: int = 1) -> None:
        """Every rollout of a group that has not ended gets more tokens."""
        sampling = self.sampling[group_id]
        for index, versions in enumerate(sampling.versions):
            if index not in sampling.ended:
                versions.extend([self.served_version] * num_tokens)

    def end_one(self, group_id: int) -> None:
        """The first rollout of a group ends, the others go on."""
        self.decode(group_id)
        self.sampling[group_id].ended.add(0)

    def finish(self, group_id: int) -> None:
        self.decode(group_id)
        sampling = self.sampling.pop(group_id)
        group = Group(
            group_id=group_id, draw_id=sampling.draw_id, task=sampling.task, rollouts=sampling.rollouts()
        )
        self.buffer.finished(group)
        self.sampled[group_id] = group

    def score(self, group_id: int) -> None:
        del self.sampled[group_id]
        self._free(self.buffer.scored(group_id, (1.0,) * GROUP_SIZE, range(GROUP_SIZE)))

    def fail(self, group_id: int, reason: DropReason) -> None:
        if self.sampling.pop(group_id, None) is None:
            del self.sampled[group_id]
        self.buffer.failed(group_id, reason)
        self.num_lost_groups += 1

    def serve(self, version: int) -> None:
        """The generator goes over to a version: it says who runs, then the loop says that it is served."""
        self.served_version = version
        for group_id, sampling in self.sampling.items():
            progress = GroupProgress(
                group_id=group_id,
                version=version,
                num_running=GROUP_SIZE - len(sampling.ended),
                num_tokens=sum(map(len, sampling.versions)),
            )
            self.buffer.progressed([progress])
        self.buffer.set_served_version(version)

    def take(self) -> Batch | None:
        batch = self.buffer.take()
        if batch is None:
            return None
        assert batch.trainer_version == self.trainer_version
        assert len(batch.groups) == len(batch.weights) == self.groups_per_step
        for group in batch.groups:
            age = age_of_group(group, self.trainer_version, self.section.age_of)
            assert age <= self.k, f"group {group.group_id} trains at age {age}"
        self.trained += [group.task for group in batch.groups]
        self.weights += batch.weights
        self.trainer_version += 1
        committed = self.buffer.committed(trainer_wait_share=0.0)
        self.cancellable.update(committed.cancelled)
        self._free(committed.lost)
        return batch

    def _free(self, lost: tuple[Group, ...]) -> None:
        assert not lost or self.section.stale_groups is StaleGroups.DROP
        self.num_lost_groups += len(lost)

    def finish_everything(self) -> None:
        self.serve(self.trainer_version)
        self.start_all()
        for group_id in list(self.sampling):
            self.finish(group_id)
        for group_id in list(self.sampled):
            self.score(group_id)

    def check_counts(self) -> None:
        """Every submitted prompt is in one place or has come to one end."""
        buffer = self.buffer
        now = buffer.snapshot()
        num_gone = buffer.num_dropped.total() - buffer.num_reissued
        num_held = len(now.pending) + buffer.num_in_flight + buffer.num_complete
        assert buffer.num_dropped.total() == self.num_lost_groups
        assert buffer.num_trained == len(self.trained)
        assert now.num_submitted == self._num_tasks
        assert self._num_tasks == len(self.trained) + num_gone + num_held
        assert len({task.task_id for task in self.trained}) == len(self.trained), "trained twice"
        self.note()
        totals = self.book.totals
        assert totals.num_lost == +buffer.num_dropped
        assert totals.num_reissued == buffer.num_reissued and totals.num_submitted == self._num_tasks
        assert totals.num_ended[Place.TRAINED] == buffer.num_trained
        assert totals.num_ended[Place.FILTERED] + totals.num_ended[Place.DROPPED] == num_gone
        assert len(self.book.open_prompts) == num_held


EXACT = AccountingSection()


def make_world(
    groups_per_step: int, k: int, *, accounting: AccountingSection = EXACT, **section: object
) -> BufferWorld:
    values = {"adapt_load": False} | section
    return BufferWorld(
        groups_per_step=groups_per_step, k=k, section=BufferSection(**values), accounting=accounting
    )


def started(world: BufferWorld) -> list[int]:
    before = set(world.sampling)
    world.start_all()
    return sorted(set(world.sampling) - before)


def complete(world: BufferWorld, *group_ids: int) -> None:
    for group_id in group_ids:
        world.finish(group_id)
        world.score(group_id)


def taken(world: BufferWorld) -> list[int] | None:
    batch = world.take()
    return None if batch is None else [group.group_id for group in batch.groups]


WEIGHT = AccountingSection(replacement=Replacement.WEIGHT)
