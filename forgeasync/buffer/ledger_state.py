"""Replays the events of a ledger into the state of every prompt, and finds contradictions. Pure: no files.

A prompt is in one place at a time:

    waiting -> started -> sampled -> scored -> trained (or skipped)
       ^          |          |         |
       +----------+----------+---------+--> filtered or dropped
      again

A resumed run continues from the state at a line ``checkpointed``. Everything after that line is undone, and
prompts whose groups were in flight wait again. A prompt whose scored group is read from disk moves from
waiting to scored with an event ``restored``. Steps may be repeated, each with the same prompts. Undone events
stay in the ledger.
"""

import copy
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NoReturn

from forgeasync.buffer.ledger_lines import AnyEvent, Checkpointed, Ended, Opened, Resumed
from forgeasync.buffer.prompts import (
    Dropped,
    DropReason,
    Restored,
    Sampled,
    Scored,
    Started,
    Submitted,
    Trained,
    Update,
)
from forgeasync.buffer.restoring import LostSteps


class Place(StrEnum):
    """Current stage of a prompt, or how the prompt ended."""

    WAITING = "waiting"
    STARTED = "started"
    SAMPLED = "sampled"
    SCORED = "scored"
    TRAINED = "trained"
    SKIPPED = "skipped"
    """The prompt was in the batch of a step that did not change the weights."""
    FILTERED = "filtered"
    DROPPED = "dropped"
    UNFINISHED = "unfinished"


UNDER_WAY = frozenset({Place.STARTED, Place.SAMPLED, Place.SCORED})
"""Places of a prompt that has a group in the buffer."""
OPEN = UNDER_WAY | {Place.WAITING}
"""Places of a prompt that has not ended."""
LOSSES = frozenset({Place.FILTERED, Place.DROPPED, Place.UNFINISHED})
"""Places of a prompt that ended without being in a batch."""
ENDS = (Place.TRAINED, Place.SKIPPED, Place.FILTERED, Place.DROPPED, Place.UNFINISHED)
"""Places of a prompt that has ended, in the order of reports."""


class Contradiction(ValueError):
    """A line of the ledger contradicts the lines before it."""

    def __init__(self, line: int, words: str) -> None:
        """``line`` is the line's number, starting at 1."""
        super().__init__(f"line {line}: {words}")
        self.line = line


@dataclass(slots=True)
class PromptState:
    """State of a prompt since a line of the ledger. Instances are replaced, never changed."""

    place: Place
    attempt: int
    line: int
    group: int | None = None
    step: int | None = None
    reason: DropReason | None = None

    def words(self) -> str:
        """Return the state as the predicate of a sentence about the prompt."""
        match self.place:
            case Place.TRAINED | Place.SKIPPED:
                what = f"was {self.place} at step {self.step}"
            case Place.DROPPED:
                what = f"was dropped permanently ({self.reason})"
            case Place.FILTERED | Place.UNFINISHED:
                what = f"ended as {self.place}"
            case Place.WAITING:
                what = f"waits for attempt {self.attempt} to start"
            case _:
                what = f"has its group {self.group} {self.place}"
        return f"{what} (line {self.line})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """A trained step that no resumption has undone."""

    step: int
    line: int
    num_groups: int
    update: Update
    life: int
    """Number of the ledger's first line from the controller process that made the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """A resumption from a checkpoint, with the steps and prompts that it undid."""

    line: int
    step: int
    from_line: int
    undone_steps: tuple[int, ...]
    undone_prompts: tuple[int, ...]
    """Prompts whose ends were undone."""
    untrained_prompts: tuple[int, ...]
    """Prompts among ``undone_prompts`` that had been trained on."""
    restarted_prompts: tuple[int, ...]
    """Prompts whose groups were in the buffer at the checkpoint. Their samples are lost unless restored."""
    num_steps_again: int = 0
    """Number of steps to repeat with the same groups."""


@dataclass(slots=True, kw_only=True)
class Totals:
    """Counts of the events that no resumption has undone."""

    step: int = 0
    groups_per_step: int = 0
    num_submitted: int = 0
    next_group: int = 0
    num_attempts: int = 0
    num_reissued: int = 0
    num_restarted: int = 0
    num_restored: int = 0
    """Number of groups that were read from disk when the run was resumed."""
    num_lost: Counter[DropReason] = field(default_factory=Counter)
    """Number of groups that did not train, by reason, including those whose prompts were submitted again."""
    num_ended: Counter[Place] = field(default_factory=Counter)
    """Number of prompts that ended, by their last place."""
    num_dropped: Counter[DropReason] = field(default_factory=Counter)
    """Number of prompts that ended as dropped, by reason."""


@dataclass(slots=True, kw_only=True)
class _Mark:
    """State at a line ``checkpointed``, enough to undo everything that follows it."""

    line: int
    totals: Totals
    before: dict[int, PromptState | None] = field(default_factory=dict)
    """State at this line of each prompt that changed before the next such line; None if not yet submitted."""


class LedgerState:
    """State machine that applies a ledger's events line by line, and checks each one.

    It needs a few hundred bytes of memory for each prompt.
    """

    def __init__(self) -> None:
        self.totals = Totals()
        self.opened: Opened | None = None
        self.num_lines = 0
        self.is_ended = False
        self.steps: list[TrainedStep] = []
        self.losses: list[tuple[int, DropReason]] = []
        """Line and reason of each dropped group."""
        self.resumptions: list[Resumption] = []
        self._prompts: dict[int, PromptState] = {}
        self._open: set[int] = set()
        self._tasks: dict[int, tuple[str, str]] = {}
        self._marks: list[_Mark] = []
        self._life = 0
        self._planned: list[tuple[int, ...]] = []
        """Prompts of the steps still to repeat, in step order."""

    def apply(self, event: AnyEvent) -> None:
        """Apply the event of the next line.

        Raises:
            Contradiction: The lines before do not allow the event. Do not use this instance afterwards.
        """
        self.num_lines += 1
        if self.opened is None and not isinstance(event, Opened):
            self._contradict("comes before the line that opens the ledger")
        if self.is_ended and not isinstance(event, Resumed):
            self._contradict(f"says {_tag(event)} after the run has ended; only a resumption may follow")
        match event:
            case Opened():
                self._open_ledger(event)
            case Submitted():
                self._submit(event)
            case Started():
                self._start(event)
            case Sampled():
                self._move(event, Place.STARTED, Place.SAMPLED)
            case Scored():
                self._move(event, Place.SAMPLED, Place.SCORED)
            case Restored():
                self._restore(event)
            case Dropped():
                self._drop(event)
            case Trained():
                self._train(event)
            case Checkpointed():
                self._check_step(event.step, "a checkpoint")
                self._marks.append(_Mark(line=self.num_lines, totals=copy.deepcopy(self.totals)))
            case Resumed():
                self._resume(event)
            case Ended():
                self._end(event)

    @property
    def open_prompts(self) -> dict[int, int]:
        """Attempt of each prompt that has not ended, by prompt."""
        return {prompt: self._prompts[prompt].attempt for prompt in sorted(self._open)}

    def lost_after(self, step: int) -> LostSteps:
        """Return the steps and attempts that a run resumed from the checkpoint of ``step`` loses."""
        batches: dict[int, list[int]] = {one.step: [] for one in self.steps if one.step > step}
        first_attempts: dict[int, int] = {}
        for prompt, state in self._prompts.items():
            if state.step is not None and state.step > step:
                batches[state.step].append(prompt)
            num_lost = state.attempt + (state.place in LOSSES)
            if num_lost:
                first_attempts[prompt] = num_lost
        made = tuple(tuple(sorted(batches[one])) for one in sorted(batches))
        return LostSteps(batches=(*made, *self._planned), first_attempts=first_attempts)

    def prompt(self, prompt: int) -> PromptState | None:
        """Return a prompt's state; None if it was not submitted, or ended before the ledger began."""
        return self._prompts.get(prompt)

    # ---- events

    def _open_ledger(self, event: Opened) -> None:
        if self.opened is not None:
            self._contradict("opens a ledger that line 1 has opened")
        self.opened = event
        totals = self.totals
        totals.step, totals.groups_per_step = event.step, event.groups_per_step
        totals.num_submitted, totals.next_group = event.num_submitted, event.next_group
        for prompt, attempt in event.waiting:
            if prompt >= event.num_submitted or prompt in self._prompts:
                self._contradict(f"prompt {prompt} waits, but is not one of {event.num_submitted} prompts")
            self._set(prompt, PromptState(Place.WAITING, attempt, self.num_lines))
        self._life = self.num_lines

    def _submit(self, event: Submitted) -> None:
        if event.prompt != self.totals.num_submitted:
            state = self._prompts.get(event.prompt)
            self._contradict(
                f"prompt {event.prompt} was submitted, but prompt {self.totals.num_submitted} comes next"
                + ("" if state is None else f"; prompt {event.prompt} {state.words()}")
            )
        task = (event.source, event.task_id)
        if (before := self._tasks.setdefault(event.prompt, task)) != task:
            self._contradict(
                f"prompt {event.prompt} is task {task[1]!r} of {task[0]!r}, and was task {before[1]!r} of "
                f"{before[0]!r} before the run was resumed"
            )
        self.totals.num_submitted += 1
        self._set(event.prompt, PromptState(Place.WAITING, 0, self.num_lines))

    def _start(self, event: Started) -> None:
        state = self._known(event.prompt, "was started")
        if state.place is not Place.WAITING or event.attempt != state.attempt:
            self._contradict(
                f"prompt {event.prompt} was started as attempt {event.attempt}, but it {state.words()}"
            )
        self._number_group(event, "started")
        self.totals.num_attempts += 1
        self._set(event.prompt, PromptState(Place.STARTED, state.attempt, self.num_lines, event.group))

    def _number_group(self, event: Started | Restored, what: str) -> None:
        if event.group != self.totals.next_group:
            self._contradict(
                f"prompt {event.prompt} was {what} as group {event.group}, but group "
                f"{self.totals.next_group} comes next"
            )
        self.totals.next_group += 1

    def _move(self, event: Sampled | Scored, source: Place, target: Place) -> None:
        state = self._known(event.prompt, f"was {target}")
        if state.place is not source or state.group != event.group:
            self._contradict(
                f"group {event.group} of prompt {event.prompt} was {target}, but the prompt {state.words()}"
            )
        self._set(event.prompt, PromptState(target, state.attempt, self.num_lines, event.group))

    def _restore(self, event: Restored) -> None:
        state = self._known(event.prompt, "was restored")
        if state.place is not Place.WAITING or event.attempt < state.attempt:
            self._contradict(
                f"attempt {event.attempt} at prompt {event.prompt} was restored, but it {state.words()}"
            )
        if not self.resumptions:
            self._contradict(f"prompt {event.prompt} was restored in a run that was not resumed")
        self._number_group(event, "restored")
        self.totals.num_restored += 1
        self._set(event.prompt, PromptState(Place.SCORED, event.attempt, self.num_lines, event.group))

    def _drop(self, event: Dropped) -> None:
        state = self._known(event.prompt, "was dropped")
        if state.place not in UNDER_WAY or state.group != event.group:
            self._contradict(
                f"group {event.group} of prompt {event.prompt} was dropped ({event.reason}), but the prompt "
                f"{state.words()}"
            )
        if event.again and event.reason is DropReason.FILTERED:
            self._contradict(f"prompt {event.prompt} was filtered, and cannot come again")
        self.totals.num_lost[event.reason] += 1
        self.losses.append((self.num_lines, event.reason))
        if event.again:
            self.totals.num_reissued += 1
            self._set(event.prompt, PromptState(Place.WAITING, state.attempt + 1, self.num_lines))
            return
        place = Place.FILTERED if event.reason is DropReason.FILTERED else Place.DROPPED
        if place is Place.DROPPED:
            self.totals.num_dropped[event.reason] += 1
        self._set(
            event.prompt,
            PromptState(place, state.attempt, self.num_lines, event.group, reason=event.reason),
        )

    def _train(self, event: Trained) -> None:
        if event.step != self.totals.step + 1:
            trained = next((f" (line {one.line})" for one in self.steps if one.step == event.step), "")
            self._contradict(
                f"step {event.step} was trained, but step {self.totals.step + 1} comes next"
                + (f"; step {event.step} was trained before{trained}" if trained else "")
            )
        if not len(event.prompts) == len(event.groups) == self.totals.groups_per_step:
            self._contradict(
                f"step {event.step} was trained on {len(event.prompts)} prompts and {len(event.groups)} "
                f"groups; a step has {self.totals.groups_per_step}"
            )
        if self._planned and set(planned := self._planned.pop(0)) != set(event.prompts):
            self._contradict(
                f"step {event.step} was trained on prompts {_listed(event.prompts)}, but it was to be made "
                f"again with prompts {_listed(planned)}"
            )
        place = Place.SKIPPED if event.update is Update.SKIPPED else Place.TRAINED
        for prompt, group in zip(event.prompts, event.groups, strict=True):
            state = self._known(prompt, f"was {place} at step {event.step}")
            if state.place is not Place.SCORED or state.group != group:
                self._contradict(
                    f"prompt {prompt} was {place} at step {event.step} with group {group}, but it "
                    f"{state.words()}"
                )
            self._set(prompt, PromptState(place, state.attempt, self.num_lines, group, step=event.step))
        self.totals.step = event.step
        self.steps.append(
            TrainedStep(
                step=event.step,
                line=self.num_lines,
                num_groups=len(event.groups),
                update=event.update,
                life=self._life,
            )
        )

    def _resume(self, event: Resumed) -> None:
        number = next((index for index, mark in enumerate(self._marks) if mark.line == event.line), None)
        if number is None or self._marks[number].totals.step != event.step:
            known = ", ".join(f"{mark.line} (step {mark.totals.step})" for mark in self._marks[-5:]) or "none"
            self._contradict(
                f"continues from the checkpoint of step {event.step} in line {event.line}; the history that "
                f"stands has its last checkpoints in lines {known}"
            )
        ended = {}
        for mark in reversed(self._marks[number:]):
            for prompt, before in mark.before.items():
                now = self._prompts.get(prompt)
                if now is not None and now.place in ENDS:
                    ended[prompt] = now
                self._put(prompt, before)
        del self._marks[number + 1 :]
        mark = self._marks[number]
        mark.before.clear()
        self._planned = list(event.batches)
        self.totals = copy.deepcopy(mark.totals)
        self.totals.groups_per_step = event.groups_per_step
        self.is_ended = False
        undone = [one for one in sorted(ended) if one not in self._prompts or one in self._open]
        restarted = [one for one in sorted(self._open) if self._prompts[one].place in UNDER_WAY]
        for prompt in restarted:
            self._set(prompt, PromptState(Place.WAITING, self._prompts[prompt].attempt, self.num_lines))
        self.totals.num_restarted += len(restarted)
        undone_steps = tuple(one.step for one in self.steps if one.line > event.line)
        self.steps = [one for one in self.steps if one.line <= event.line]
        self.resumptions.append(
            Resumption(
                line=self.num_lines,
                step=event.step,
                from_line=event.line,
                undone_steps=undone_steps,
                undone_prompts=tuple(undone),
                untrained_prompts=tuple(one for one in undone if ended[one].place is Place.TRAINED),
                restarted_prompts=tuple(restarted),
                num_steps_again=len(event.batches),
            )
        )
        self.losses = [(line, reason) for line, reason in self.losses if line <= event.line]
        self._life = self.num_lines

    def _end(self, event: Ended) -> None:
        missing, extra = self._open - set(event.unfinished), set(event.unfinished) - self._open
        if missing or extra or len(event.unfinished) != len(self._open):
            prompt = min(missing | extra, default=None)
            state = None if prompt is None else self._prompts.get(prompt)
            if prompt is None:
                words = "it names a prompt twice"
            elif prompt in missing:
                words = f"it leaves out prompt {prompt}, which {self._prompts[prompt].words()}"
            else:
                words = f"it names prompt {prompt}, which " + (
                    "was not submitted" if state is None else state.words()
                )
            self._contradict(f"the run ended with {len(event.unfinished)} unfinished prompts, but {words}")
        for prompt in event.unfinished:
            state = self._prompts[prompt]
            self._set(prompt, PromptState(Place.UNFINISHED, state.attempt, self.num_lines, state.group))
        self.is_ended = True

    # ---- inside

    def _check_step(self, step: int, what: str) -> None:
        if step != self.totals.step:
            self._contradict(f"{what} of step {step} was begun, but step {self.totals.step} was the last one")

    def _known(self, prompt: int, what: str) -> PromptState:
        state = self._prompts.get(prompt)
        if state is None:
            before = self.opened is not None and prompt < self.opened.num_submitted
            self._contradict(
                f"prompt {prompt} {what}, but "
                + ("it had ended before the ledger began" if before else "it was not submitted")
            )
        return state

    def _set(self, prompt: int, state: PromptState) -> None:
        before = self._prompts.get(prompt)
        if self._marks:
            self._marks[-1].before.setdefault(prompt, before)
        self._put(prompt, state)
        if state.place in ENDS:
            self.totals.num_ended[state.place] += 1

    def _put(self, prompt: int, state: PromptState | None) -> None:
        if state is None:
            self._prompts.pop(prompt, None)
        else:
            self._prompts[prompt] = state
        if state is not None and state.place in OPEN:
            self._open.add(prompt)
        else:
            self._open.discard(prompt)

    def _contradict(self, words: str) -> NoReturn:
        raise Contradiction(self.num_lines, words)


def _listed(prompts: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(prompts)))


def _tag(event: AnyEvent) -> str:
    return repr(type(event).__struct_config__.tag)
