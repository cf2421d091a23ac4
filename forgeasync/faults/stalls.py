"""Whether a run that has no fault stands still, by its own history: a pure policy; times are passed in.

A run is said to stand still

    as a whole      if nothing has moved for ``ALL_FACTOR`` times as long as it has ever been quiet
    in its steps    if no optimizer step has come for ``STEP_FACTOR`` times the longest that one has taken,
                    whatever else moves

and for the floors below at least. Until ``NUM_STEPS`` steps were made, in which models are compiled and
caches are filled, only the first rule holds, with a floor of its own; these quiet times say nothing of those
to come.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import StrEnum

ALL_FACTOR = 5.0
STEP_FACTOR = 10.0

ALL_FLOOR_S = 60.0
STEP_FLOOR_S = 180.0
FIRST_FLOOR_S = 300.0

NUM_STEPS = 3


class Progress(StrEnum):
    """What moves in a run that goes on."""

    STEP = "optimizer step"
    TOKENS = "sampled token"
    SCORES = "score"
    WEIGHTS = "change of weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A run stands still."""

    is_whole: bool
    """Whether nothing moves at all; else optimizer steps do not come."""
    quiet_s: float
    longest_s: float
    """The longest before."""
    since_s: Mapping[Progress, float]
    """How long ago each was seen; since the watch began, if it never was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What stood still goes on."""

    quiet_s: float


class StallPolicy:
    """What was seen of a run's progress."""

    def __init__(self) -> None:
        self._marks: dict[Progress, Hashable] = {}
        self._since_s = dict.fromkeys(Progress, 0.0)
        self._num_steps = 0
        self._longest_s = 0.0
        self._longest_step_s = 0.0
        self._stall: Stall | None = None
        self.num_found = 0

    def look(self, passed_s: float, marks: Mapping[Progress, Hashable]) -> Stall | Resumed | None:
        """Take in a look at the run; a mark that differs from the one before says that there was progress.

        ``passed_s`` is the time since the look before. A stall is returned once.
        """
        quiet_s, step_s = min(self._since_s.values()) + passed_s, self._since_s[Progress.STEP] + passed_s
        moved = {kind for kind in marks if kind in self._marks and marks[kind] != self._marks[kind]}
        self._marks |= marks
        for kind in Progress:
            self._since_s[kind] = 0.0 if kind in moved else self._since_s[kind] + passed_s
        resumed = None
        if self._stall is not None and (moved if self._stall.is_whole else Progress.STEP in moved):
            resumed = Resumed(quiet_s=quiet_s if self._stall.is_whole else step_s)
            self._stall = None
        if moved:
            self._longest_s = max(self._longest_s, quiet_s)
        if Progress.STEP in moved:
            self._num_steps += 1
            self._longest_step_s = max(self._longest_step_s, step_s)
            if self._num_steps == NUM_STEPS:
                self._longest_s = 0.0
        return resumed or self._find()

    def rest(self) -> None:
        """The time since the look before counts for nothing: what holds the run up is known and seen to."""
        self._since_s = dict.fromkeys(Progress, 0.0)
        self._stall = None

    def _find(self) -> Stall | None:
        if self._stall is not None:
            return None
        quiet_s, step_s = min(self._since_s.values()), self._since_s[Progress.STEP]
        is_first = self._num_steps < NUM_STEPS
        floor_s = FIRST_FLOOR_S if is_first else ALL_FLOOR_S
        if quiet_s > max(floor_s, ALL_FACTOR * self._longest_s):
            self._stall = self._found(True, quiet_s, self._longest_s)
        elif not is_first and step_s > max(STEP_FLOOR_S, STEP_FACTOR * self._longest_step_s):
            self._stall = self._found(False, step_s, self._longest_step_s)
        return self._stall

    def _found(self, is_whole: bool, quiet_s: float, longest_s: float) -> Stall:
        self.num_found += 1
        since_s = dict(self._since_s)
        return Stall(is_whole=is_whole, quiet_s=quiet_s, longest_s=longest_s, since_s=since_s)
