"""Steps that a resumed run makes again, each with the groups that it had before the run was killed."""

from collections import deque
from collections.abc import Mapping, Sequence

from forgeasync.buffer.submissions import Entry


class StepsAgain:
    """The prompts of the next batches, as long as they are decided by what was lost; pure."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, ...]] = deque()

    def __bool__(self) -> bool:
        return bool(self._batches)

    def plan(self, batches: Sequence[tuple[int, ...]]) -> None:
        """Decide the next batches by their prompts, all of which will be restored."""
        self._batches.extend(batches)

    def pop(self, entries: Mapping[int, Entry]) -> list[int] | None:
        """The groups of the next batch; None while they are not all there."""
        prompts = set(self._batches[0])
        ids = [group_id for group_id, entry in entries.items() if entry.submission.submission_id in prompts]
        if len(ids) < len(prompts):
            return None
        self._batches.popleft()
        return ids
