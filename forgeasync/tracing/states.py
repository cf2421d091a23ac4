"""What a proc does at a moment: exactly one of eight states, by rank among all that is under way."""

from collections import Counter
from enum import StrEnum


class State(StrEnum):
    """The states, those that hide others first: of all that is under way a proc is in the first one."""

    STARTING = "starting"
    """Loads libraries, a model or an environment."""
    SWAPPING = "swapping"
    """Decoding stands still for new weights."""
    COMPUTING = "computing"
    """Samples, scores, runs episodes or makes an optimizer step, waiting for other ranks included."""
    EVALUATING = "evaluating"
    """Samples only what is not trained on. The controller: training waits for an evaluation."""
    PUBLISHING = "publishing"
    """Checks, copies and sums up weights for the generators."""
    FETCHING = "fetching"
    """Reads weights, or arrays of rollouts, and does nothing else."""
    WAITING_FOR_BATCH = "waiting for a batch"
    """Has nothing to train on, to score or to run."""
    WAITING_FOR_ROOM = "waiting for room"
    """Has nothing to sample: the buffer lets no further group start."""


ORDER = tuple(State)


class StateClock:
    """Counts what is under way, and says the state that follows from it. Pure."""

    def __init__(self, idle: State) -> None:
        """``idle`` is the state while nothing is under way."""
        self._idle = idle
        self._num_under_way: Counter[State] = Counter()

    @property
    def state(self) -> State:
        return next((state for state in ORDER if self._num_under_way[state]), self._idle)

    def begin(self, state: State) -> None:
        """Something of this state is under way from now on."""
        self._num_under_way[state] += 1

    def end(self, state: State) -> None:
        """One of them has ended."""
        assert self._num_under_way[state] > 0, f"{state} was not begun"
        self._num_under_way[state] -= 1
