"""Limits of the buffer: the adaptive bound on groups present at once, and the check against starvation."""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from forgeasync.buffer.prompts import AGE_REASONS, DropReason

TRAINER_WAITS_SHARE = 0.05
"""Share of a step spent waiting for its batch, above which the trainer counts as waiting.

Smaller shares can come from a single slow group.
"""

CALM_STEPS = 3
"""Consecutive steps with a whole batch to spare before the bound falls; a single one may be chance."""


class WaitingSide(StrEnum):
    """Which side of the buffer waited for the other in the last step."""

    TRAINER = "trainer"
    GENERATORS = "generators"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """Observations of one step of the training loop, the input of ``LoadController``."""

    trainer_wait_share: float
    """Share of the step spent waiting for its batch."""
    num_ready: int
    """Number of complete groups left after the batch was taken."""
    is_bound: bool
    """Whether the bound kept groups from starting when the batch was taken."""


class LoadController:
    """Adapts the bound on the number of groups in the buffer, between one batch and ``max_groups``.

    With too few groups, the trainer waits for batches. With too many, complete groups wait and grow old. The
    rule resembles congestion control: the bound rises as soon as the trainer waits because of it, and falls
    slowly while whole batches are ready and the trainer does not wait.
    """

    def __init__(self, *, groups_per_step: int, max_groups: int) -> None:
        assert max_groups >= groups_per_step
        self._groups_per_step = groups_per_step
        self._max_groups = max_groups
        self._num_calm_steps = 0
        self.bound = max_groups
        self.waiting_side = WaitingSide.NONE

    def step(self, load: StepLoad) -> None:
        """Adapt the bound after a step."""
        if load.trainer_wait_share > TRAINER_WAITS_SHARE:
            self.waiting_side = WaitingSide.TRAINER
            self._num_calm_steps = 0
            if load.is_bound:
                self.bound = min(self._max_groups, self.bound + max(1, self._groups_per_step // 4))
            return
        has_batch_to_spare = load.num_ready >= self._groups_per_step
        self.waiting_side = WaitingSide.GENERATORS if load.is_bound else WaitingSide.NONE
        self._num_calm_steps = self._num_calm_steps + 1 if has_batch_to_spare else 0
        if self._num_calm_steps >= CALM_STEPS:
            self._num_calm_steps = 0
            self.bound = max(self._groups_per_step, self.bound - max(1, self._groups_per_step // 8))

    def metrics(self) -> dict[str, float]:
        """Return metrics by their names in metrics.jsonl."""
        return {
            "load/bound": self.bound,
            "load/trainer_waits": float(self.waiting_side is WaitingSide.TRAINER),
            "load/generators_wait": float(self.waiting_side is WaitingSide.GENERATORS),
        }


class NothingTrains(RuntimeError):
    """Too many consecutive groups were given up, so the run might generate forever without making a step."""


class StarvationDetector:
    """Counts consecutive groups that were given up, and ends the run at a limit.

    Losses to age do not count, because groups grow old only while the trainer makes steps. Groups that
    filters drop have their own limit (in ``forgeasync.scoring``), because a batch may discard many of them.
    """

    def __init__(self, limit: int) -> None:
        """``limit`` is the consecutive number that ends the run (``buffer.max_given_up_in_a_row``)."""
        assert limit > 0
        self._limit = limit
        self._by_reason: Counter[DropReason] = Counter()
        self._first_problem = ""

    def came_through(self) -> None:
        """Record that a group was sampled, scored and kept, which resets the count."""
        self._by_reason.clear()

    def given_up(self, reason: DropReason, problem: str) -> None:
        """Record that a group was given up. ``problem`` describes the cause for the error message.

        Raises:
            NothingTrains: The limit is reached.
        """
        if reason in AGE_REASONS or reason is DropReason.FILTERED:
            return
        if not self._by_reason:
            self._first_problem = problem
        self._by_reason[reason] += 1
        if (num := self._by_reason.total()) >= self._limit:
            reasons = ", ".join(f"{count} {name}" for name, count in self._by_reason.most_common())
            raise NothingTrains(
                f"{num} groups in a row were given up ({reasons}; limit buffer.max_given_up_in_a_row = "
                f"{self._limit}); the first: {self._first_problem}"
            )
