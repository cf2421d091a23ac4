"""The life of each group by the ledger, from its start to its end, and about when each event was.

Groups are kept in arrays, about 130 bytes each. ``apps.verify`` proves a ledger; here an event that does not
follow from those before it is counted, and shown as far as possible.
"""

from array import array
from dataclasses import dataclass
from enum import IntEnum
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
from forgeasync.plugins.viewer.appended_lines import LineGone, Piece, read_record
from forgeasync.plugins.viewer.metrics import ELAPSED_S, MetricTable

NOWHERE = -1
"""Stands for a line, a step or a row that does not exist."""

REASONS = tuple(DropReason)


class Fate(IntEnum):
    """Where a group is, or how it ended."""

    SAMPLING = 0
    SCORING = 1
    WAITING = 2
    """Scored; the trainer has not taken it yet."""
    TRAINED = 3
    SKIPPED = 4
    """In the batch of a step that left the weights unchanged."""
    UNKNOWN = 5
    """In the batch of a step during which the run was told to stop."""
    FILTERED = 6
    DROPPED = 7
    UNDONE = 8
    """The run was resumed from a checkpoint before the group's end."""
    UNFINISHED = 9
    """The run made all its steps before the group's end."""

    @property
    def word(self) -> str:
        """The name in answers and addresses."""
        return self.name.lower()


_OPEN = (Fate.SAMPLING, Fate.SCORING, Fate.WAITING)
_OF_UPDATE = {Update.MADE: Fate.TRAINED, Update.SKIPPED: Fate.SKIPPED, Update.UNKNOWN: Fate.UNKNOWN}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLife:
    """One group. Numbers of lines are those of the ledger, from 1."""

    group: int
    prompt: int
    attempt: int
    fate: Fate
    is_restored: bool
    """A resumed run read it from disk; nothing was sampled."""
    submitted_line: int | None
    """Line of its prompt."""
    started_line: int | None
    sampled_line: int | None
    scored_line: int | None
    ended_line: int | None
    undone_line: int | None
    step: int | None
    """Step of the batch that it was in, even if that step was undone."""
    reason: DropReason | None
    comes_again: bool
    """Whether its prompt waits for another attempt."""


class GroupLives:
    """All groups so far. A group that was undone stays beside the later one that has its number."""

    def __init__(self, file: Path) -> None:
        self.opened: Opened | None = None
        self.num_lines = 0
        self.num_resumptions = 0
        self.num_damaged = 0
        """Lines that were left out."""
        self.num_odd = 0
        """Events that do not follow from those before them, for example next to damaged lines."""
        self._first_damage: str | None = None
        self._refusal: str | None = None
        """Why no line is read: the ledger has another format."""
        self._file = file
        self._lines = LedgerLines(file.name)
        self._marks: tuple[array[int], array[int]] = array("q"), array("q")
        """Lines that change how many steps are made, and the number after them."""
        self._trained: tuple[array[int], array[int]] = array("q"), array("q")
        """Lines of trained steps, and the steps."""
        self._columns = {name: array("q") for name in _COLUMNS}
        self._row_of_group = array("q")
        self._submitted: tuple[array[int], array[int]] = array("q"), array("q")
        """By prompt: the line that submitted it, and that line's offset in the file."""

    def __len__(self) -> int:
        return len(self._columns["group"])

    # ---- events

    def add(self, piece: Piece) -> None:
        """Take the next lines of the ledger. Damaged ones are counted and left out."""
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
        """What of the ledger was not read, in words."""
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
        """Take a line's event; ``offset`` is the line's offset in the file."""
        self.num_lines = line
        match event:
            case Submitted():
                self._submit(event.prompt, line, offset)
            case Started() | Restored():
                self._start(event, line)
            case Sampled():
                self._move(event.group, event.prompt, "sampled", Fate.SCORING, line)
            case Scored():
                self._move(event.group, event.prompt, "scored", Fate.WAITING, line)
            case Dropped():
                self._drop(event, line)
            case Trained():
                self._train(event, line)
            case Resumed():
                self._resume(event, line)
            case Ended():
                self._set_where(self._is_open(), "fate", Fate.UNFINISHED)
            case Opened():
                self.opened = event
                self._mark(line, event.step)
            case Checkpointed():
                pass

    def _submit(self, prompt: int, line: int, offset: int) -> None:
        place = prompt - (0 if self.opened is None else self.opened.num_submitted)
        if not 0 <= place <= line:
            self.num_odd += 1
            return
        for column, value in zip(self._submitted, (line, offset), strict=True):
            _fill_up(column, place)
            column[place] = value

    def _start(self, event: Started | Restored, line: int) -> None:
        row = self._new_row(event.group, event.prompt, line)
        if row is None:
            return
        columns = self._columns
        columns["attempt"][row] = event.attempt
        columns["started"][row] = line
        if isinstance(event, Restored):
            columns["restored"][row] = 1
            columns["fate"][row] = Fate.WAITING

    def _new_row(self, group: int, prompt: int, line: int) -> int | None:
        place = group - (0 if self.opened is None else self.opened.next_group)
        if not 0 <= place <= line:
            self.num_odd += 1
            return None
        _fill_up(self._row_of_group, place)
        row, columns = len(self), self._columns
        for name, column in columns.items():
            column.append(_COLUMNS[name])
        columns["group"][row], columns["prompt"][row] = group, prompt
        columns["previous"][row] = self._row_of_group[place]
        self._row_of_group[place] = row
        return row

    def _known(self, group: int, prompt: int, line: int) -> int | None:
        """Return the group's row; a new one if the line of its start is missing."""
        row = self._newest_row(group)
        if row is None or self._columns["prompt"][row] != prompt or not self._is_row_open(row):
            self.num_odd += 1
            row = self._new_row(group, prompt, line)
        return row

    def _move(self, group: int, prompt: int, column: str, fate: Fate, line: int) -> None:
        if (row := self._known(group, prompt, line)) is not None:
            self._columns[column][row] = line
            self._columns["fate"][row] = fate

    def _end(self, group: int, prompt: int, fate: Fate, line: int) -> int | None:
        if (row := self._known(group, prompt, line)) is not None:
            self._columns["ended"][row] = line
            self._columns["fate"][row] = fate
        return row

    def _drop(self, event: Dropped, line: int) -> None:
        fate = Fate.FILTERED if event.reason is DropReason.FILTERED else Fate.DROPPED
        if (row := self._end(event.group, event.prompt, fate, line)) is not None:
            self._columns["reason"][row] = REASONS.index(event.reason)
            self._columns["again"][row] = event.again

    def _train(self, event: Trained, line: int) -> None:
        for prompt, group in zip(event.prompts, event.groups, strict=False):
            if (row := self._end(group, prompt, _OF_UPDATE[event.update], line)) is not None:
                self._columns["step"][row] = event.step
        lines, steps = self._trained
        lines.append(line)
        steps.append(event.step)
        self._mark(line, event.step)

    def _resume(self, event: Resumed, line: int) -> None:
        undone = (self._array("ended") > event.line) | self._is_open()
        undone |= self._array("fate") == Fate.UNFINISHED
        undone &= self._array("undone") == NOWHERE
        self._set_where(undone, "undone", line)
        self._set_where(undone, "fate", Fate.UNDONE)
        self.num_resumptions += 1
        self._mark(line, event.step)

    def _mark(self, line: int, step: int) -> None:
        lines, steps = self._marks
        lines.append(line)
        steps.append(step)

    # ---- questions

    def of_group(self, group: int) -> list[GroupLife]:
        """Return the lives of a group, the newest first. A resumed run can have several."""
        found, row = [], self._newest_row(group)
        while row is not None and row != NOWHERE:
            found.append(self.at(row))
            row = self._columns["previous"][row]
        return found

    def of_prompt(self, prompt: int) -> list[GroupLife]:
        """Return all groups of a prompt in the order of their starts."""
        return [self.at(int(row)) for row in np.flatnonzero(self._array("prompt") == prompt)]

    def rows(
        self, *, fate: Fate | None = None, reason: DropReason | None = None, step: int | None = None
    ) -> np.ndarray:
        """Return the groups that match everything given, the newest first, as numbers for ``at``."""
        mask = np.ones(len(self), dtype=bool)
        if fate is not None:
            mask &= self._array("fate") == fate
        if reason is not None:
            mask &= self._array("reason") == REASONS.index(reason)
        if step is not None:
            mask &= self._array("step") == step
        return np.flatnonzero(mask)[::-1]

    def at(self, row: int) -> GroupLife:
        """Return one group by its number in the order of starts, from 0."""
        columns = self._columns
        prompt, reason = columns["prompt"][row], columns["reason"][row]
        submitted = self._place_of_prompt(prompt)
        return GroupLife(
            group=columns["group"][row],
            prompt=prompt,
            attempt=columns["attempt"][row],
            fate=Fate(columns["fate"][row]),
            is_restored=columns["restored"][row] == 1,
            submitted_line=None if submitted is None else submitted[0],
            started_line=_there(columns["started"][row]),
            sampled_line=_there(columns["sampled"][row]),
            scored_line=_there(columns["scored"][row]),
            ended_line=_there(columns["ended"][row]),
            undone_line=_there(columns["undone"][row]),
            step=_there(columns["step"][row]),
            reason=None if reason == NOWHERE else REASONS[reason],
            comes_again=columns["again"][row] == 1,
        )

    def num_of_fate(self) -> dict[Fate, int]:
        """Count the groups by fate, including those that were undone."""
        counts_N = np.bincount(self._array("fate"), minlength=len(Fate))
        return {fate: int(counts_N[fate]) for fate in Fate}

    def step_before(self, line: int) -> int:
        """Return how many steps the run had made when a line was written."""
        lines, steps = self._marks
        place = int(np.searchsorted(np.array(lines), line, side="right")) - 1
        return steps[place] if place >= 0 else 0

    def trained_lines(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the lines of all trained steps, ascending, and the steps, including undone ones."""
        return np.array(self._trained[0], dtype=np.int64), np.array(self._trained[1], dtype=np.int64)

    def task_of(self, prompt: int) -> tuple[str, str] | None:
        """Return the source and the id of a prompt's task; None if they cannot be read from the ledger."""
        found = self._place_of_prompt(prompt)
        if found is None:
            return None
        try:
            submitted = read_record(self._file, found[1])
        except LineGone:
            # The file was cut or replaced; the next read finds that out.
            return None
        source, task_id = submitted.get("source"), submitted.get("task_id")
        return (source, task_id) if isinstance(source, str) and isinstance(task_id, str) else None

    # ---- inside

    def _place_of_prompt(self, prompt: int) -> tuple[int, int] | None:
        place = prompt - (0 if self.opened is None else self.opened.num_submitted)
        lines, offsets = self._submitted
        if not 0 <= place < len(lines) or lines[place] == NOWHERE:
            return None
        return lines[place], offsets[place]

    def _newest_row(self, group: int) -> int | None:
        place = group - (0 if self.opened is None else self.opened.next_group)
        return _there(self._row_of_group[place]) if 0 <= place < len(self._row_of_group) else None

    def _is_row_open(self, row: int) -> bool:
        return self._columns["fate"][row] in _OPEN

    def _is_open(self) -> np.ndarray:
        return np.isin(self._array("fate"), _OPEN)

    def _array(self, name: str) -> np.ndarray:
        # A copy: an array that lends its memory cannot grow.
        return np.array(self._columns[name], dtype=np.int64)

    def _set_where(self, mask: np.ndarray, name: str, value: int) -> None:
        column = self._array(name)
        column[mask] = value
        self._columns[name] = array("q", column.tobytes())


_COLUMNS = {
    "group": NOWHERE,
    "prompt": NOWHERE,
    "attempt": 0,
    "started": NOWHERE,
    "sampled": NOWHERE,
    "scored": NOWHERE,
    "ended": NOWHERE,
    "undone": NOWHERE,
    "fate": int(Fate.SAMPLING),
    "step": NOWHERE,
    "reason": NOWHERE,
    "again": 0,
    "restored": 0,
    "previous": NOWHERE,
}
"""What is kept of a group, with the values of a new row."""


def _there(value: int) -> int | None:
    return None if value == NOWHERE else value


def _fill_up(column: "array[int]", place: int) -> None:
    """Make room for a place. What lies between is not known."""
    if place >= len(column):
        column.extend([NOWHERE] * (place + 1 - len(column)))


class RunClock:
    """Seconds on the run's own clock (``time/elapsed_s``) by lines of the ledger, which itself has no times.

    The line of a trained step has the step's time. Between two steps the lines are taken to be evenly spaced,
    so times of other lines are accurate to one step.
    """

    def __init__(self, lives: GroupLives, metrics: MetricTable) -> None:
        lines_N, steps_N = lives.trained_lines()
        # If a step was repeated after a resumption, the last one counts.
        steps, index = np.unique(steps_N[::-1], return_index=True)
        elapsed = metrics.column(ELAPSED_S)
        known = np.isin(steps, elapsed.steps_N)
        lines = lines_N[::-1][index][known]
        by_step = dict(zip(elapsed.steps_N.tolist(), elapsed.values_N.tolist(), strict=True))
        times = np.array([by_step[step] for step in steps[known].tolist()], dtype=np.float64)
        order = np.argsort(lines)
        self._lines = np.concatenate([[1], lines[order]]).astype(np.float64)
        self._times = np.concatenate([[0.0], np.maximum.accumulate(times[order])])
        opened = lives.opened
        self._begins_late = opened is not None and opened.step > 0

    def about_s(self, line: int | None) -> float | None:
        """Return the time of a line; None if there are no steps on both sides of it."""
        if line is None or not self._lines[0] <= line <= self._lines[-1] or len(self._lines) < 2:
            return None
        if self._begins_late and line < self._lines[1]:
            return None
        return float(np.interp(line, self._lines, self._times))


def life_answer(lives: GroupLives, clock: RunClock, life: GroupLife) -> dict[str, object]:
    """Return one group as JSON types: its events in order, each with the steps made by then and its time."""
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
        "comes_again": life.comes_again,
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
