"""Decides how many groups to have under way, so that neither the trainer nor the generators wait.

With too few, the trainer waits for batches; with too many, complete groups wait and grow old. The rule is
that of congestion control: the bound rises at once if the trainer waits because of it, and falls slowly while
whole batches are ready and the trainer does not wait.
"""

from dataclasses import dataclass
from enum import StrEnum

TRAINER_WAITS_SHARE = 0.05
"""Share of a step spent waiting for its batch; smaller shares are within the noise of one slow group."""


CALM_STEPS = 3
"""Steps in a row with a whole batch to spare before the bound falls: a single one may be chance."""


class WaitingSide(StrEnum):
    TRAINER = "trainer"
    GENERATORS = "generators"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """The load that a step of the training loop saw."""

    trainer_wait_share: float
    """Share of the step spent waiting for its batch."""
    num_ready: int
    """Complete groups left after the batch was taken."""
    is_bound: bool
    """Whether the bound kept groups from starting when the trainer came for its batch."""


class LoadController:
    """The bound on groups under way, between one batch and what the age policy allows."""

    def __init__(self, *, groups_per_step: int, max_groups: int) -> None:
        assert max_groups >= groups_per_step
        self._groups_per_step = groups_per_step
        self._max_groups = max_groups
        self._num_calm_steps = 0
        self.bound = max_groups
        self.waiting_side = WaitingSide.NONE

    def step(self, load: StepLoad) -> None:
        """Move the bound after a step."""
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
        """Return metrics under their names in metrics.jsonl."""
        return {
            "load/bound": self.bound,
            "load/trainer_waits": float(self.waiting_side is WaitingSide.TRAINER),
            "load/generators_wait": float(self.waiting_side is WaitingSide.GENERATORS),
        }
