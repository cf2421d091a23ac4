"""What a ledger says of a run: places of prompts, steps, resumptions, and numbers of all of them."""

import copy
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from forgeasync.buffer import DropReason, Update


class Place(StrEnum):
    """Where a prompt is, or how it has ended."""

    WAITING = "waiting"
    STARTED = "started"
    SAMPLED = "sampled"
    SCORED = "scored"
    TRAINED = "trained"
    SKIPPED = "skipped"
    """In the batch of a step that left the weights as they were."""
    FILTERED = "filtered"
    DROPPED = "dropped"
    UNFINISHED = "unfinished"


UNDER_WAY = frozenset({Place.STARTED, Place.SAMPLED, Place.SCORED})
OPEN = UNDER_WAY | {Place.WAITING}
LOSSES = frozenset({Place.FILTERED, Place.DROPPED, Place.UNFINISHED})
ENDS = (Place.TRAINED, Place.SKIPPED, Place.FILTERED, Place.DROPPED, Place.UNFINISHED)


class Contradiction(ValueError):
    """A line contradicts what the lines before it say."""

    def __init__(self, line: int, words: str) -> None:
        super().__init__(f"line {line}: {words}")
        self.line = line


@dataclass(slots=True)
class PromptState:
    """Where a prompt is since a line; never changed, only replaced."""

    place: Place
    attempt: int
    line: int
    group: int | None = None
    step: int | None = None
    reason: DropReason | None = None

    def words(self) -> str:
        """Say it in a sentence, as what was said of the prompt last."""
        match self.place:
            case Place.TRAINED | Place.SKIPPED:
                what = f"was {self.place} at step {self.step}"
            case Place.DROPPED:
                what = f"was dropped for good ({self.reason})"
            case Place.FILTERED | Place.UNFINISHED:
                what = f"ended as {self.place}"
            case Place.WAITING:
                what = f"waits for attempt {self.attempt} to start"
            case _:
                what = f"has its group {self.group} {self.place}"
        return f"{what} (line {self.line})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """A step of the history that stands."""

    step: int
    line: int
    num_groups: int
    update: Update
    life: int
    """Line that the controller's life began with in which the step was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """A run that went on from a checkpoint, and what that undid."""

    line: int
    step: int
    from_line: int
    undone_steps: tuple[int, ...]
    undone_prompts: tuple[int, ...]
    """Prompts that had ended, and have no end any more."""
    untrained_prompts: tuple[int, ...]
    """Those of them that had been trained on."""
    restarted_prompts: tuple[int, ...]
    """Prompts whose groups were under way at the checkpoint: their samples are lost, unless they are
    restored."""
    num_steps_again: int = 0
    """Steps that are made again with the groups that they had."""


@dataclass(slots=True, kw_only=True)
class Totals:
    """Numbers of the history that stands."""

    step: int = 0
    groups_per_step: int = 0
    num_submitted: int = 0
    next_group: int = 0
    num_attempts: int = 0
    num_reissued: int = 0
    num_restarted: int = 0
    num_restored: int = 0
    """Groups that came back from the disk when the run was resumed."""
    num_lost: Counter[DropReason] = field(default_factory=Counter)
    """Groups that were not trained on, also those whose prompts came again."""
    num_ended: Counter[Place] = field(default_factory=Counter)
    num_dropped: Counter[DropReason] = field(default_factory=Counter)
    """Prompts that ended as dropped."""

    def copied(self) -> "Totals":
        one = copy.copy(self)
        one.num_lost, one.num_ended = Counter(self.num_lost), Counter(self.num_ended)
        one.num_dropped = Counter(self.num_dropped)
        return one
