"""Which groups have to train by when: what the proof in docs/off_policy.md counts."""

from collections.abc import Iterable


class Deadlines:
    """Ids of groups by the last optimizer step that may train on them."""

    def __init__(self) -> None:
        self._ids: dict[int, set[int]] = {}

    def add(self, group_id: int, deadline: int) -> None:
        self._ids.setdefault(deadline, set()).add(group_id)

    def remove(self, group_id: int, deadline: int) -> None:
        self._ids[deadline].remove(group_id)
        if not self._ids[deadline]:
            del self._ids[deadline]

    def before(self, step: int) -> list[tuple[int, list[int]]]:
        """Deadlines earlier than ``step`` with their groups, as they are now."""
        return [(deadline, sorted(self._ids[deadline])) for deadline in self._ids if deadline < step]

    def are_feasible(self, step: int, taken: Iterable[tuple[int, int]], *, groups_per_step: int) -> bool:
        """Whether all groups but those taken now, in ``step``, can train in later steps by their deadlines.

        ``taken`` holds deadlines, each with the number of its groups that are taken.
        """
        num_taken = dict(taken)
        num_due = 0
        for deadline in sorted(self._ids):
            num_due += len(self._ids[deadline]) - num_taken.get(deadline, 0)
            if num_due > (deadline - step) * groups_per_step:
                return False
        return True
