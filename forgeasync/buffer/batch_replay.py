"""Steps that a resumed run makes again, each with the groups that it had before the run was killed."""

from collections import deque
from collections.abc import Mapping, Sequence

from forgeasync.buffer.submissions import Entry


class BatchReplayPlan:
    """The prompts of the next batches, as long as they are decided by what was lost; pure."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, ...]] = deque()
        self._num_to_come = 0
        self.num_came = 0
        """Groups that were restored."""

    def __bool__(self) -> bool:
        return bool(self._batches or self._num_to_come)

    def plan(self, batches: Sequence[tuple[int, ...]], *, num_groups: int) -> None:
        """Decide the next batches by their prompts; their groups are among those that will be restored."""
        self._batches.extend(batches)
        self._num_to_come = num_groups

    def came(self) -> None:
        """A group was restored."""
        self._num_to_come -= 1
        self.num_came += 1

    def pop(self, entries: Mapping[int, Entry]) -> list[int] | None:
        """The groups of the next batch; None while a group is to be restored: it may be due first."""
        if self._num_to_come:
            return None
        prompts = set(self._batches.popleft())
        return [group_id for group_id, entry in entries.items() if entry.submission.submission_id in prompts]
