"""Decides, on all ranks alike and before the optimizer touches anything, whether a step is made."""

import math
from collections.abc import Sequence

from forgeasync.config import BadStepsSection
from forgeasync.trainer.bad_steps import SpikeRule
from forgeasync.trainer.finite import Ranges, agree, describe_non_finite
from forgeasync.trainer.step_result import BadStep


class StepJudge:
    """What trainer.bad_steps says of an optimizer step, before and after it."""

    def __init__(self, section: BadStepsSection) -> None:
        self._section = section
        self.spikes: SpikeRule | None = None
        """None: spikes are not looked for."""
        if section.on_spike is not None:
            self.spikes = SpikeRule(factor=section.spike_factor, window=section.spike_window)

    def judge(self, problems: Sequence[str | None], gradients: Ranges, grad_norm: float) -> BadStep | None:
        """What is wrong with a step on any rank, the same on all; None if it may be made. Collective.

        ``problems`` are those of this rank's rows.
        """
        section = self._section
        if (reason := _not_finite(problems, gradients, grad_norm)) is not None:
            return BadStep(reason=reason, remedy=section.on_nan)
        if self.spikes is None:
            return None
        assert section.on_spike is not None
        # Ranks may know the norm with different last bits: the answer of one is that of all.
        reason = agree(self.spikes.describe(grad_norm))
        if reason is not None:
            return BadStep(reason=reason, remedy=section.on_spike)
        return None

    def metrics(self) -> dict[str, float]:
        """The norm above which the next step is a spike."""
        limit = None if self.spikes is None else self.spikes.limit
        return {} if limit is None else {"grad_norm_limit": limit}

    def made(self, grad_norm: float) -> None:
        """A step was made."""
        if self.spikes is not None:
            self.spikes.made(grad_norm)

    def judge_weights(self, weights: Ranges) -> BadStep | None:
        """What is wrong with the weights that steps have made, the same on all ranks. Collective."""
        problem = agree(describe_non_finite(weights))
        if problem is None:
            return None
        return BadStep(reason=f"of the weights after it: {problem}", remedy=self._section.on_nan)


def _not_finite(problems: Sequence[str | None], gradients: Ranges, grad_norm: float) -> str | None:
    of_row = next((text for text in problems if text is not None), None)
    if math.isfinite(grad_norm):
        return agree(of_row, None, None)
    return agree(of_row, describe_non_finite(gradients), f"the norm of all gradients is {grad_norm}")
