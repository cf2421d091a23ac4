"""Sections ``reward``: what a response is worth. One reward, or a list whose weighted sum counts."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from forgeasync.config.python_code import PythonCode
from forgeasync.config.section import Seconds, Section

_Weight = Annotated[float, Field(ge=-1e6, le=1e6)]


class ReasoningGymReward(Section):
    """The verifier of the reasoning-gym data set that the problem is of."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    weight: _Weight = 1.0
    """The score counts so many times."""
    name: str | None = None
    """The score's name among several (``reward/<name>``); null: the kind."""


class MathReward(Section):
    """math-verify: 1 where the last answer of the response equals the reference, else 0."""

    kind: Literal["math"] = "math"
    weight: _Weight = 1.0
    """The score counts so many times."""
    name: str | None = None
    """The score's name among several (``reward/<name>``); null: the kind."""


class ScoredUnit(StrEnum):
    """What one call of a reward scores."""

    RESPONSE = "response"
    GROUP = "group"
    """All responses to one prompt."""


class PythonReward(PythonCode):
    """A reward of your own: ``(task, response) -> float | Score``, a function or a class, sync or async."""

    scores: ScoredUnit = ScoredUnit.RESPONSE
    """With ``group`` it is called as ``(task, responses)`` and returns one float or Score for each."""
    limit_s: Seconds = 20.0
    """Wall time for one call; past it the call has failed, and a process that it blocks is killed."""
    weight: _Weight = 1.0
    """The score counts so many times."""
    name: str | None = None
    """Its name in errors, and among several in ``reward/<name>``; null: the last part of ``factory``."""


RewardSection = Annotated[ReasoningGymReward | MathReward | PythonReward, Field(discriminator="kind")]


def _form(value: object) -> str:
    return "list" if isinstance(value, list | tuple) else "one"


Rewards = Annotated[
    Annotated[RewardSection, Tag("one")] | Annotated[tuple[RewardSection, ...], Tag("list")],
    Discriminator(_form),
]
"""One reward or a list of them."""


def name_of(reward: RewardSection) -> str:
    """What a reward is called in metrics and errors."""
    if reward.name is not None:
        return reward.name
    return reward.factory.rpartition(".")[2] if isinstance(reward, PythonReward) else reward.kind
