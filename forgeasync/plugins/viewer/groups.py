"""History of each group, from the ledger.

``apps.verify`` checks a ledger strictly. Here an event that does not follow from earlier ones is counted, and
shown as far as possible.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum, auto
from pathlib import Path

from forgeasync.buffer import (
    AnyEvent,
    BadLine,
    Checkpointed,
    Dropped,
    DropReason,
    Ended,
    LedgerLines,
    LedgerUnreadable,
    Opened,
    Restored,
    Resumed,
    Sampled,
    Scored,
    Started,
    Submitted,
    Trained,
    Update,
)
from forgeasync.plugins.viewer.followed_file import LineUnreadable, read_record


class Fate(StrEnum):
    """State or ending of a group."""

    SAMPLING = auto()
    SCORING = auto()
    WAITING = auto()
    """Scored, and not yet in a batch."""
    TRAINED = auto()
    SKIPPED = auto()
    """In the batch of a step that left the weights unchanged."""
    UNKNOWN = auto()
    """In the batch of a step during which the run was stopped."""
    FILTERED = auto()
    DROPPED = auto()
    UNDONE = auto()
    """The run was resumed from a checkpoint before the group's end."""
    UNFINISHED = auto()
    """The run made all its steps before the group's end."""


_OPEN = (Fate.SAMPLING, Fate.SCORING, Fate.WAITING)
_OF_UPDATE = {Update.MADE: Fate.TRAINED, Update.SKIPPED: Fate.SKIPPED, Update.UNKNOWN: Fate.UNKNOWN}


@dataclass(slots=True, kw_only=True)
class GroupHistory:
    """History of one group. Line numbers are those of the ledger, starting with 1."""

    group: int
    prompt: int
    attempt: int = 0
    fate: Fate = Fate.SAMPLING
    is_restored: bool = False
    """Whether a resumed run read it from disk, so that it was not sampled."""
    submitted_line: int | None = None
    """Line of its prompt."""
    started_line: int | None = None
    sampled_line: int | None = None
    scored_line: int | None = None
    ended_line: int | None = None
    undone_line: int | None = None
    step: int | None = None
    """Step of its batch, even if that step was undone."""
    reason: DropReason | None = None
    is_resubmitted: bool = False
    """Whether its prompt waits for another attempt."""
    previous: "GroupHistory | None" = None
    """The group that had its number before the run was resumed."""


class GroupHistories:
    """All groups so far, in the order of their starts.

    An undone group stays, beside the later one with its number.
    """

    def __init__(self, file: Path) -> None:
        self.first_step = 0
        """Number of steps made before the ledger begins."""
        self.num_lines = 0
        self.num_resumptions = 0
        self.num_damaged = 0
        """Number of skipped lines."""
        self.num_inconsistent = 0
        """Number of events that do not follow from earlier ones, for example next to damaged lines."""
        self.line_of_step: dict[int, int] = {}
        """Line of each step's training; the last one, if the step was repeated after a resumption."""
        self._first_damage: str | None = None
        self._refusal: str | None = None
        """Reason for reading no lines: the ledger has another format."""
        self._file = file
        self._lines = LedgerLines(file.name)
        self._num_steps_after: list[tuple[int, int]] = []
        """Lines that change the number of steps made, each with the number after it."""
        self._histories: list[GroupHistory] = []
        self._newest: dict[int, GroupHistory] = {}
        """Newest history by group."""
        self._submitted: dict[int, tuple[int, int]] = {}
        """Line that submitted each prompt, and its offset in the file; by prompt."""

    def __len__(self) -> int:
        return len(self._histories)

    def __iter__(self) -> Iterator[GroupHistory]:
        return iter(self._histories)

    # ---- events

    def add(self, line: bytes, offset: int) -> None:
        """Add the next line of the ledger; damaged lines are counted and skipped."""
        if self._refusal is not None:
            return
        try:
            event = self._lines.read(line)
        except BadLine as error:
            self.num_damaged += 1
            if self._first_damage is None:
                self._first_damage = f"line {self._lines.position.num_lines + 1} {error}"
            self._lines.skip(line)
        except LedgerUnreadable as error:
            self._refusal = str(error)
        else:
            self._apply(event, line=self._lines.position.num_lines, offset=offset)

    @property
    def problems(self) -> list[str]:
        """Messages about parts of the ledger that were not read."""
        found = []
        if self._refusal is not None:
            found.append(f"{self._refusal}; groups are not shown")
        if self.num_damaged:
            found.append(
                f"{self._file.name}: {self.num_damaged} damaged lines were left out; "
                f"the first: {self._first_damage}"
            )
        if self.num_inconsistent:
            found.append(
                f"{self._file.name}: {self.num_inconsistent} events do not follow from those before; "
                "python -m apps.verify says more"
            )
        return found

    def _apply(self, event: AnyEvent, *, line: int, offset: int) -> None:
        """Apply a line's event; ``offset`` is the line's offset in the file."""
        self.num_lines = line
        match event:
            case Submitted():
                self._submitted[event.prompt] = line, offset
            case Started() | Restored():
                one = self._begin(event.group, event.prompt)
                one.attempt, one.started_line = event.attempt, line
                if isinstance(event, Restored):
                    one.is_restored, one.fate = True, Fate.WAITING
            case Sampled():
                one = self._known(event.group, event.prompt)
                one.sampled_line, one.fate = line, Fate.SCORING
            case Scored():
                one = self._known(event.group, event.prompt)
                one.scored_line, one.fate = line, Fate.WAITING
            case Dropped():
                one = self._known(event.group, event.prompt)
                is_filtered = event.reason is DropReason.FILTERED
                one.ended_line, one.fate = line, Fate.FILTERED if is_filtered else Fate.DROPPED
                one.reason, one.is_resubmitted = event.reason, event.again
            case Trained():
                for prompt, group in zip(event.prompts, event.groups, strict=False):
                    one = self._known(group, prompt)
                    one.ended_line, one.fate, one.step = line, _OF_UPDATE[event.update], event.step
                self.line_of_step[event.step] = line
                self._num_steps_after.append((line, event.step))
            case Resumed():
                for one in self._histories:
                    is_open = one.fate in (*_OPEN, Fate.UNFINISHED)
                    if one.undone_line is None and (is_open or (one.ended_line or 0) > event.line):
                        one.undone_line, one.fate = line, Fate.UNDONE
                self.num_resumptions += 1
                self._num_steps_after.append((line, event.step))
            case Ended():
                for one in self._histories:
                    if one.fate in _OPEN:
                        one.fate = Fate.UNFINISHED
            case Opened():
                self.first_step = event.step
                self._num_steps_after.append((line, event.step))
            case Checkpointed():
                pass

    def _begin(self, group: int, prompt: int) -> GroupHistory:
        one = GroupHistory(group=group, prompt=prompt, previous=self._newest.get(group))
        if prompt in self._submitted:
            one.submitted_line = self._submitted[prompt][0]
        self._newest[group] = one
        self._histories.append(one)
        return one

    def _known(self, group: int, prompt: int) -> GroupHistory:
        """Return the group in flight, or a new one if the line of its start is missing."""
        one = self._newest.get(group)
        if one is None or one.prompt != prompt or one.fate not in _OPEN:
            self.num_inconsistent += 1
            one = self._begin(group, prompt)
        return one

    # ---- queries

    def of_group(self, group: int) -> list[GroupHistory]:
        """Return the histories of a group, newest first; a resumed run can have several."""
        found, one = [], self._newest.get(group)
        while one is not None:
            found.append(one)
            one = one.previous
        return found

    def of_prompt(self, prompt: int) -> list[GroupHistory]:
        """Return all groups of a prompt in the order of their starts."""
        return [one for one in self._histories if one.prompt == prompt]

    def find(
        self, *, fate: Fate | None = None, reason: DropReason | None = None, step: int | None = None
    ) -> list[GroupHistory]:
        """Return the groups that match all given values, newest first."""
        return [
            one
            for one in reversed(self._histories)
            if (fate is None or one.fate is fate)
            and (reason is None or one.reason is reason)
            and (step is None or one.step == step)
        ]

    def num_of_fate(self) -> dict[Fate, int]:
        """Return the number of groups by fate, including undone ones."""
        counts = Counter(one.fate for one in self._histories)
        return {fate: counts[fate] for fate in Fate}

    def step_before(self, line: int) -> int:
        """Return the number of steps that the run had made when a line was written."""
        place = bisect_right(self._num_steps_after, line, key=lambda pair: pair[0])
        return self._num_steps_after[place - 1][1] if place else 0

    def task_of(self, prompt: int) -> tuple[str, str] | None:
        """Return the source and the id of a prompt's task; None if they cannot be read from the ledger."""
        if prompt not in self._submitted:
            return None
        try:
            submitted = read_record(self._file, self._submitted[prompt][1])
        except LineUnreadable:
            # The file was truncated or replaced; the next read detects that.
            return None
        source, task_id = submitted.get("source"), submitted.get("task_id")
        return (source, task_id) if isinstance(source, str) and isinstance(task_id, str) else None
