"""What the training loop spends a step on: for the step's metrics, and for the controller's trace."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import StrEnum

from forgeasync.controller.recorder import StepTimes, TimesBetween
from forgeasync.tracing import State, doing, span


class Part(StrEnum):
    """The parts of a step, in order; each is a span of the trace."""

    WAIT = "wait for a batch"
    ASSIGN = "assign rows"
    TRAIN = "train"
    COMMIT = "commit"
    PUBLISH = "publish"
    EVALUATE = "evaluate"
    RECORD = "record"
    """After the step, as what follows: no part of its time."""
    DISK = "wait for the disk"
    CHECKPOINT = "begin a checkpoint"


_STATES = {
    Part.WAIT: State.WAITING_FOR_BATCH,
    Part.PUBLISH: State.PUBLISHING,
    Part.EVALUATE: State.EVALUATING,
}
"""In all other parts the controller counts as computing."""


class StepClock:
    """Measures one step, whose time runs from here."""

    def __init__(self, step: int) -> None:
        self._facts = {"step": step}
        self._start_s = time.perf_counter()
        self._took_s: defaultdict[Part, float] = defaultdict(float)

    @contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """The block is one part of the step."""
        state = _STATES.get(part)
        start_s = time.perf_counter()
        with nullcontext() if state is None else doing(state), span(part, self._facts):
            yield
        self._took_s[part] += time.perf_counter() - start_s

    def move(self, seconds: float, source: Part, target: Part) -> None:
        """Count some of a part's time as another one's."""
        self._took_s[source] -= seconds
        self._took_s[target] += seconds

    @property
    def wait_share(self) -> float:
        """Share that waiting has of waiting and training."""
        waited_s, train_s = self._took_s[Part.WAIT], self._took_s[Part.TRAIN]
        return waited_s / (waited_s + train_s)

    def times(self, *, has_evaluated: bool) -> StepTimes:
        """Return the step's times up to here; ``has_evaluated``: training waited for an evaluation."""
        took_s = self._took_s
        return StepTimes(
            step_s=time.perf_counter() - self._start_s,
            wait_for_batch_s=took_s[Part.WAIT],
            train_s=took_s[Part.TRAIN],
            publish_weights_s=took_s[Part.PUBLISH],
            eval_s=took_s[Part.EVALUATE] if has_evaluated else 0.0,
            controller_s=took_s[Part.ASSIGN] + took_s[Part.COMMIT],
        )

    def times_between(self) -> TimesBetween:
        """Return the times from the end of the step up to here."""
        return TimesBetween(
            controller_s=self._took_s[Part.RECORD],
            wait_for_disk_s=self._took_s[Part.DISK],
            checkpoint_s=self._took_s.get(Part.CHECKPOINT),
        )
