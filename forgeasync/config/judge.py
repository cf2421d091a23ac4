"""The section on judges: models behind an endpoint that score responses."""

from enum import StrEnum
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from forgeasync.config.reward_limits import LimitedReward
from forgeasync.schema import Seconds

DEFAULT_RUBRIC = (
    "Grade how well the response solves the task. Give the highest score only to a response that is correct "
    "and complete, the lowest to one that is wrong, empty or off the subject."
)


class Votes(StrEnum):
    """How several votes become one score."""

    MEAN = "mean"
    MEDIAN = "median"


class JudgeReward(LimitedReward):
    """A model behind an OpenAI-compatible endpoint. Its points become a reward from 0 to 1."""

    kind: Literal["judge"]
    base_url: str = Field(pattern=r"^https?://[^\s/]+")
    """URL up to ``/v1``, such as ``http://localhost:8000/v1``."""
    model: str = Field(min_length=1)
    """The model's name there."""
    api_key_env: str | None = None
    """Name of the environment variable with the key, which is written nowhere; null: no key is sent."""
    rubric: str | None = None
    """What to grade by; null: a short general rubric, or ``rubric_file``."""
    rubric_file: str | None = None
    """A text file with the rubric, in place of ``rubric``; read when the run starts."""
    lowest: float = Field(default=0.0, ge=-1e6, le=1e6)
    """Points of the worst response. The reward is 0 there."""
    highest: float = Field(default=10.0, ge=-1e6, le=1e6)
    """Points of the best response. The reward is 1 there."""
    correct_from: float = Field(default=0.5, ge=0.0, le=1.0)
    """A response with at least this reward counts as correct."""
    num_votes: int = Field(default=1, gt=0, le=64)
    """Verdicts that are asked for on each response."""
    votes: Votes = Votes.MEAN
    """How the points of several verdicts become one reward."""
    temperature: float = Field(default=0.0, ge=0.0, le=2.0)
    """Temperature of the judge; above 0 with several votes, which would all be the same otherwise."""
    max_reply_tokens: int = Field(default=1024, gt=0, le=1048576)
    """Longest verdict, in tokens, reasons included."""
    max_response_chars: int = Field(default=65536, gt=0, le=1048576)
    """Longest response that is sent to the judge. A longer one scores 0 and is counted
    (``scoring/num_oversized``)."""
    limit_s: Seconds = 50.0
    """Time for one request, in seconds."""
    max_attempts: int = Field(default=3, gt=0, le=100)
    """Requests for one verdict before its response waits (the endpoint has failed) or its attempt has failed
    (the verdicts were malformed)."""
    cache_size: int = Field(default=16384, ge=0, le=2**24)
    """Responses whose verdicts each scorer remembers, by content; 0: none."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problem = None
        if self.lowest >= self.highest:
            problem = f"lowest = {self.lowest:g} must be less than highest = {self.highest:g}"
        elif self.rubric is not None and self.rubric_file is not None:
            problem = "rubric and rubric_file must not both be given"
        elif self.num_votes > 1 and self.temperature == 0.0:
            problem = f"num_votes = {self.num_votes} needs temperature above 0: all votes would be the same"
        if problem is not None:
            raise PydanticCustomError("judge", "{problem}", {"problem": problem})
        return self
