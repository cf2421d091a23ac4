"""The replay buffer as a pure state machine: no clock, no I/O, no actors.

It decides when a group may start (admission), which groups make the next batch, and what is too old.

The bound on age. Let G be groups_per_step and k max_off_policy_steps. A group that starts while the
generators serve version w has its deadline at optimizer step w + k: taken later, its oldest token could be
more than k versions old. A group may start only while fewer than (w + k + 1) * G groups have been admitted in
all (dropped ones not counted). With ``StaleGroups.WAIT`` the batch of step s is the G complete groups with
the earliest deadlines, and it is taken only if it leaves the rest feasible: for every d, at most (d - s) * G
of the groups left, complete or in flight, have a deadline of d or before. Otherwise the trainer waits.

Claim: no group misses its deadline, and the trainer never waits once all groups are complete. Proof. Before
step s, at most (d - s + 1) * G groups with a deadline of d or before are present, for every d. Admission
keeps this: it gives the latest deadline d = w + k so far, so all s * G groups taken before had deadlines of
at most d, and at most (d + 1) * G - s * G are left. Taking keeps it, by its condition. If all groups are
complete the condition holds: either all G taken have deadlines up to d, which leaves (d - s + 1) * G - G, or
one has a later one, and then none up to d is left. With d = s the condition says that no deadline passes.
Reusing the place of a dropped group changes none of the counts. tests/test_replay_buffer.py checks the claim
on random histories.
"""

from collections import Counter
from enum import StrEnum

from forgeasync.config.schema import StaleGroups
from forgeasync.data.rollout import Group


class DropReason(StrEnum):
    STALE = "stale"
    """Older than max_off_policy_steps when the trainer could have taken it."""
    BAD_RECORD = "bad_record"
    """Its routed experts or kept tokens contradict its tokens or the model."""
    CANCELLED = "cancelled"
    """Given up in the generator at an update that would have left it too old."""


class ReplayBuffer:
    """Groups on their way from admission to training."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_off_policy_steps: int,
        stale_groups: StaleGroups,
        max_groups: int | None,
        num_groups_in_run: int,
    ) -> None:
        """At most ``max_groups`` are present at once; ``num_groups_in_run`` are started in all."""
        assert max_groups is None or max_groups >= groups_per_step
        self._groups_per_step = groups_per_step
        self._max_off_policy_steps = max_off_policy_steps
        self._stale_groups = stale_groups
        self._max_groups = max_groups
        self._num_groups_in_run = num_groups_in_run
        self._served_version = 0
        self._next_group_id = 0
        self._num_admitted = 0
        self._started_at: dict[int, int] = {}
        self._in_flight: set[int] = set()
        self._complete: dict[int, Group] = {}
        self.num_dropped: Counter[DropReason] = Counter({reason: 0 for reason in DropReason})

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_complete(self) -> int:
        return len(self._complete)

    def set_served_version(self, version: int) -> None:
        """All generators sample under ``version`` (or a later one) from now on."""
        assert version >= self._served_version
        self._served_version = version

    def admit(self) -> int | None:
        """The id of a group that may start now; None while a bound or the run's end forbids it."""
        ahead = self._served_version + self._max_off_policy_steps + 1
        if self._num_admitted >= min(ahead * self._groups_per_step, self._num_groups_in_run):
            return None
        if self._max_groups is not None and len(self._started_at) >= self._max_groups:
            return None
        group_id = self._next_group_id
        self._next_group_id += 1
        self._num_admitted += 1
        self._started_at[group_id] = self._served_version
        self._in_flight.add(group_id)
        return group_id

    def add(self, group: Group) -> None:
        """A scored group is complete."""
        assert group.rewards is not None and len(group.rewards) == len(group.rollouts)
        assert group.first_version >= self._started_at[group.group_id]
        self._in_flight.remove(group.group_id)
        self._complete[group.group_id] = group

    def drop(self, group_id: int, reason: DropReason) -> None:
        """A group will not come; its place is free for another."""
        self._in_flight.discard(group_id)
        self._complete.pop(group_id, None)
        del self._started_at[group_id]
        self._num_admitted -= 1
        self.num_dropped[reason] += 1

    def drop_stale(self, trainer_version: int) -> list[Group]:
        """Drop complete groups that are too old to train on now, and return them."""
        stale = [
            group
            for group in self._complete.values()
            if trainer_version - group.first_version > self._max_off_policy_steps
        ]
        for group in stale:
            self.drop(group.group_id, DropReason.STALE)
        return stale

    def take(self, trainer_version: int) -> list[Group] | None:
        """The groups of the optimizer step at ``trainer_version``, oldest first; None while not ready."""
        oldest_allowed = trainer_version - self._max_off_policy_steps
        fresh = [group for group in self._complete.values() if group.first_version >= oldest_allowed]
        if len(fresh) < self._groups_per_step:
            return None
        fresh.sort(key=lambda group: (self._started_at[group.group_id], group.group_id))
        batch = fresh[: self._groups_per_step]
        if self._stale_groups is StaleGroups.WAIT and not self._leaves_rest_feasible(batch, trainer_version):
            return None
        for group in batch:
            del self._complete[group.group_id], self._started_at[group.group_id]
        return batch

    def _leaves_rest_feasible(self, batch: list[Group], step: int) -> bool:
        """Whether every group left can still be taken by its deadline, G a step."""
        taken = {group.group_id for group in batch}
        deadlines = sorted(
            started_at + self._max_off_policy_steps
            for group_id, started_at in self._started_at.items()
            if group_id not in taken
        )
        return all(
            num_due <= (deadline - step) * self._groups_per_step
            for num_due, deadline in enumerate(deadlines, start=1)
        )
