"""Sections for ``forgeasync.algorithms.filters``: what is left out of a scored group before training."""

from typing import Annotated, Literal

from pydantic import Field

from forgeasync.config.section import MAX_COUNT, Count, Factor, Section


class DynamicSamplingSection(Section):
    """Groups whose rewards are all equal are dropped, and others take their places (DAPO)."""

    kind: Literal["dynamic_sampling"]
    min_std: float = Field(default=0.0, ge=0.0, le=1e30)
    """Groups whose rewards have a lower standard deviation are dropped too."""


class OverlongPenaltySection(Section):
    """Rewards fall, by up to 1, over the last tokens before a length (DAPO's soft overlong punishment)."""

    kind: Literal["overlong_penalty"]
    max_length: Count
    """Response tokens from which on the whole penalty of 1 is taken off."""
    buffer_share: float = Field(default=0.2, gt=0.0, le=1.0)
    """Of ``max_length``, its last part, over which the penalty grows from 0. DAPO's is 4,096 of 20,480."""

    @property
    def buffer(self) -> int:
        """Tokens before ``max_length`` over which the penalty grows."""
        return max(1, round(self.max_length * self.buffer_share))


class OverlongFilterSection(Section):
    """Truncated rollouts are left out; a group with fewer than two others is dropped."""

    kind: Literal["overlong_filter"]


class ResampleOnCorrectSection(Section):
    """Of an oversampled group only some rollouts are trained on, correct ones without faults preferred
    (GRPO-RoC)."""

    kind: Literal["resample_on_correct"]
    num_kept: int = Field(ge=2, le=MAX_COUNT)
    """Rollouts kept of a group; ``algorithm.group_size`` is what is sampled, usually twice as many."""
    min_positive_reward: float = Field(default=0.5, ge=-1e30, le=1e30)
    """A rollout with at least this reward is correct."""
    smoothing: Factor = 0.1
    """Correct rollouts are drawn in proportion to 1 / (penalty + smoothing)."""


FilterSection = Annotated[
    DynamicSamplingSection | OverlongPenaltySection | OverlongFilterSection | ResampleOnCorrectSection,
    Field(discriminator="kind"),
]
"""One filter. Several apply in the order of their list."""
