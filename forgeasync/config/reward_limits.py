"""What rewards of every kind have: a weight, a name, and limits of their calls."""

from typing import Annotated

from pydantic import Field

from forgeasync.schema import Section

_Weight = Annotated[float, Field(ge=-1e6, le=1e6)]


class LimitedReward(Section):
    """Fields of every reward."""

    weight: _Weight = 1.0
    """Factor for this score in the sum over a list of rewards."""
    name: str | None = None
    """The score's name in errors and, in a list, in the metric ``reward/<name>``; null: the kind, or the last
    part of ``factory``."""
    max_concurrent: int | None = Field(default=None, gt=0, le=65536)
    """Most calls of this reward at once, over all scorers, which share it evenly; null: as many as there are
    places for (requests of a judge: 64 a scorer)."""
    max_per_s: float | None = Field(default=None, ge=1e-3, le=1e6)
    """Most calls of this reward that begin in a second, over all scorers, evenly spaced; null: no limit."""
    max_attempts: int = Field(default=1, gt=0, le=100)
    """Calls of this reward for a response within one attempt of ``scorer.max_attempts``: the other rewards of
    a list are not called again for it."""
