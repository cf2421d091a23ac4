"""History of each group, from the ledger, with the approximate time of each event.

``apps.verify`` checks a ledger strictly. Here an event that does not follow from earlier ones is counted, and
shown as far as possible.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

import numpy as np

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
from forgeasync.plugins.viewer.appended_lines import LineUnreadable, Piece, read_record
from forgeasync.plugins.viewer.metrics import ELAPSED_S, MetricTable


class Fate(Enum):
    """State or ending of a group."""

    SAMPLING = auto()
    SCORING = auto()
    WAITING = auto()
    """Scored, and not yet in a batch."""
    TRAINED = auto()
    SKIPPED = auto()
    """In the batch of a step that left the weights unchanged."""
    UNKNOWN = auto()
    """In the batch of a step during which the run was told to stop."""
    FILTERED = auto()
    DROPPED = auto()
    UNDONE = auto()
    """The run was resumed from a checkpoint before the group's end."""
    UNFINISHED = auto()
    """The run made all its steps before the group's end."""

    @property
    def word(self) -> str:
        """The name in answers and URLs."""
        return self.name.lower()


_OPEN = (Fate.SAMPLING, Fate.SCORING, Fate.WAITING)
_OF_UPDATE = {Update.MADE: Fate.TRAINED, Update.SKIPPED: Fate.SKIPPED, Update.UNKNOWN: Fate.UNKNOWN}


@dataclass(slots=True, kw_only=True)
class GroupLife:
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
    previous: "GroupLife | None" = None
    """The group that had its number before the run was resumed."""


class GroupLives:
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
        self.num_odd = 0
        """Number of events that do not follow from earlier ones, for example next to damaged lines."""
        self.line_of_step: dict[int, int] = {}
        """Line of each step's training; the last one, if the step was repeated after a resumption."""
        self._first_damage: str | None = None
        self._refusal: str | None = None
        """Reason for reading no lines: the ledger has another format."""
        self._file = file
        self._lines = LedgerLines(file.name)
        self._marks: list[tuple[int, int]] = []
        """Lines that change the number of steps made, each with the number after it."""
        self._lives: list[GroupLife] = []
        self._newest: dict[int, GroupLife] = {}
        """Newest history by group."""
        self._submitted: dict[int, tuple[int, int]] = {}
        """Line that submitted each prompt, and its offset in the file; by prompt."""

    def __len__(self) -> int:
        return len(self._lives)

    def __iter__(self) -> Iterator[GroupLife]:
        return iter(self._lives)

    # ---- events

    def add(self, piece: Piece) -> None:
        """Add the next lines of the ledger; damaged lines are counted and skipped."""
        offset = piece.start
        for line in piece.lines():
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
            offset += len(line) + 1

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
        if self.num_odd:
            found.append(
                f"{self._file.name}: {self.num_odd} events do not follow from those before; "
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
                life = self._begin(event.group, event.prompt)
                life.attempt, life.started_line = event.attempt, line
                if isinstance(event, Restored):
                    life.is_restored, life.fate = True, Fate.WAITING
            case Sampled():
                life = self._known(event.group, event.prompt)
                life.sampled_line, life.fate = line, Fate.SCORING
            case Scored():
                life = self._known(event.group, event.prompt)
                life.scored_line, life.fate = line, Fate.WAITING
            case Dropped():
                life = self._known(event.group, event.prompt)
                is_filtered = event.reason is DropReason.FILTERED
                life.ended_line, life.fate = line, Fate.FILTERED if is_filtered else Fate.DROPPED
                life.reason, life.is_resubmitted = event.reason, event.again
            case Trained():
                for prompt, group in zip(event.prompts, event.groups, strict=False):
                    life = self._known(group, prompt)
                    life.ended_line, life.fate, life.step = line, _OF_UPDATE[event.update], event.step
                self.line_of_step[event.step] = line
                self._marks.append((line, event.step))
            case Resumed():
                for life in self._lives:
                    is_after = life.fate in (*_OPEN, Fate.UNFINISHED) or (life.ended_line or 0) > event.line
                    if is_after and life.undone_line is None:
                        life.undone_line, life.fate = line, Fate.UNDONE
                self.num_resumptions += 1
                self._marks.append((line, event.step))
            case Ended():
                for life in self._lives:
                    if life.fate in _OPEN:
                        life.fate = Fate.UNFINISHED
            case Opened():
                self.first_step = event.step
                self._marks.append((line, event.step))
            case Checkpointed():
                pass

    def _begin(self, group: int, prompt: int) -> GroupLife:
        life = GroupLife(group=group, prompt=prompt, previous=self._newest.get(group))
        if prompt in self._submitted:
            life.submitted_line = self._submitted[prompt][0]
        self._newest[group] = life
        self._lives.append(life)
        return life

    def _known(self, group: int, prompt: int) -> GroupLife:
        """Return the group in flight, or a new one if the line of its start is missing."""
        life = self._newest.get(group)
        if life is None or life.prompt != prompt or life.fate not in _OPEN:
            self.num_odd += 1
            life = self._begin(group, prompt)
        return life

    # ---- queries

    def of_group(self, group: int) -> list[GroupLife]:
        """Return the histories of a group, newest first; a resumed run can have several."""
        found, life = [], self._newest.get(group)
        while life is not None:
            found.append(life)
            life = life.previous
        return found

    def of_prompt(self, prompt: int) -> list[GroupLife]:
        """Return all groups of a prompt in the order of their starts."""
        return [life for life in self._lives if life.prompt == prompt]

    def find(
        self, *, fate: Fate | None = None, reason: DropReason | None = None, step: int | None = None
    ) -> list[GroupLife]:
        """Return the groups that match all given values, newest first."""
        return [
            life
            for life in reversed(self._lives)
            if (fate is None or life.fate is fate)
            and (reason is None or life.reason is reason)
            and (step is None or life.step == step)
        ]

    def num_of_fate(self) -> dict[Fate, int]:
        """Return the number of groups by fate, including undone ones."""
        counts = Counter(life.fate for life in self._lives)
        return {fate: counts[fate] for fate in Fate}

    def step_before(self, line: int) -> int:
        """Return the number of steps that the run had made when a line was written."""
        place = bisect_right(self._marks, line, key=lambda mark: mark[0])
        return self._marks[place - 1][1] if place else 0

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


class RunClock:
    """Maps lines of the ledger, which has no times, to seconds on the run's clock (``time/elapsed_s``).

    The line of a trained step has the step's time. Lines between two steps are assumed to be evenly spaced,
    so their times are accurate to one step.
    """

    def __init__(self, lives: GroupLives, metrics: MetricTable) -> None:
        elapsed = metrics.by_step(ELAPSED_S)
        known = sorted((line, elapsed[step]) for step, line in lives.line_of_step.items() if step in elapsed)
        self._lines = np.array([1.0, *(line for line, _ in known)])
        self._times = np.maximum.accumulate([0.0, *(at_s for _, at_s in known)])
        self._begins_late = lives.first_step > 0

    def about_s(self, line: int | None) -> float | None:
        """Return the approximate time of a line; None if there are no steps on both sides of it."""
        if line is None or not self._lines[0] <= line <= self._lines[-1] or len(self._lines) < 2:
            return None
        if self._begins_late and line < self._lines[1]:
            return None
        return float(np.interp(line, self._lines, self._times))


def life_answer(lives: GroupLives, clock: RunClock, life: GroupLife) -> dict[str, object]:
    """Return one group as JSON types: its events in order, each with its time and the steps before it."""
    started = "restored" if life.is_restored else "started"
    lines = [
        ("submitted", life.submitted_line),
        (started, life.started_line),
        ("sampled", life.sampled_line),
        ("scored", life.scored_line),
        (life.fate.word if life.undone_line is None else "ended", life.ended_line),
        ("undone", life.undone_line),
    ]
    return {
        "group": life.group,
        "prompt": life.prompt,
        "attempt": life.attempt,
        "fate": life.fate.word,
        "reason": None if life.reason is None else life.reason.value,
        "is_resubmitted": life.is_resubmitted,
        "step": life.step,
        "events": [
            {
                "what": what,
                "line": line,
                "num_steps_made": lives.step_before(line),
                "about_s": clock.about_s(line),
            }
            for what, line in lines
            if line is not None
        ],
    }
