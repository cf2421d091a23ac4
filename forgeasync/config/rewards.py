"""The sections on rewards: what scores a response, how often it is called, and what its score is called."""

import re
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from forgeasync.config.model import MAX_ROW_TOKENS, Dtype
from forgeasync.schema import Gibibytes, PythonCode, Seconds, Section

RESERVED_PARTS = frozenset(
    {
        *("mean", "std", "scored_mean"),
        *("num_retried", "num_failed", "num_deferred", "num_discarded"),
        *("num_queued", "num_in_flight", "num_early"),
    }
)
"""Names that no part of a score may have, because other metrics are called ``reward/<name>`` or
``score/<name>`` already."""


_PART_NAME = re.compile(r"[A-Za-z0-9][\w.\-/]{0,99}", re.ASCII)


PART_NAME_RULE = (
    "up to 100 letters, digits, '_', '-', '.' or '/', beginning with a letter or digit, and none of "
    + ", ".join(sorted(RESERVED_PARTS))
)


def is_part_name(name: object) -> bool:
    """Whether a part of a score can have this name."""
    return isinstance(name, str) and name not in RESERVED_PARTS and _PART_NAME.fullmatch(name) is not None


class LimitedReward(Section):
    """Fields of every reward."""

    weight: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
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


class ReasoningGymReward(LimitedReward):
    """The verifier of the reasoning-gym data set that the problem comes from."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"


class MathReward(LimitedReward):
    """math-verify: 1 where the last answer of the response equals the reference, else 0."""

    kind: Literal["math"] = "math"


class ScoredUnit(StrEnum):
    """What one call of a reward scores."""

    RESPONSE = "response"
    GROUP = "group"
    """All responses to one prompt."""


class PythonReward(LimitedReward, PythonCode):
    """Your own reward: ``(task, response) -> float | Score``, a function or a class, sync or async."""

    scores: ScoredUnit = ScoredUnit.RESPONSE
    """What one call scores. With ``group`` it is called as ``(task, responses)`` and returns a list with one
    float or Score for each response."""
    limit_s: Seconds = 20.0
    """Wall time for one call, in seconds. A call that takes longer fails, and a process that it blocks is
    killed."""


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


class StepsValue(StrEnum):
    """How the scores of a response's steps become its value."""

    LAST = "last"
    MINIMUM = "minimum"
    MEAN = "mean"
    PRODUCT = "product"


class ProcessRewardModel(LimitedReward):
    """A model in a vLLM pooling engine that gives every step of a response a score from 0 to 1."""

    kind: Literal["process_reward_model"]
    model_path: str = Field(min_length=1)
    """Hugging Face folder of a ``Qwen2ForProcessRewardModel`` or ``Qwen2ForRewardModel``, with its
    tokenizer."""
    step_separator: str = Field(default="\n\n", min_length=1, max_length=100)
    """Text between two steps of a response. The model does not see it."""
    step_tag: str = Field(default="<extra_0>", min_length=1, max_length=100)
    """Token of the model's tokenizer that is put behind every step; the score is read there."""
    chat_template: bool = False
    """Render task and response by the chat template of the model's tokenizer; false: the response follows the
    task's text at once."""
    system_prompt: str | None = None
    """Text of a system message before the task; needs ``chat_template: true``."""
    max_context_length: int = Field(default=4096, gt=0, le=MAX_ROW_TOKENS)
    """Most tokens of task and response together, in the model's own tokens. A longer one is not sent, not
    cut; it scores 0 and is counted (``scoring/num_oversized``)."""
    dtype: Dtype = Dtype.FLOAT32
    max_num_seqs: int = Field(default=16, gt=0, le=1024)
    """Most responses that one engine computes at once."""
    max_num_batched_tokens: int = Field(default=8192, gt=0, le=MAX_ROW_TOKENS)
    """Most tokens in one forward pass; at least ``max_context_length``, since no response is divided."""
    kv_cache_gib: Gibibytes = 0.25
    """KV cache of one engine, in GiB."""
    gpu: int | None = Field(default=None, ge=0, le=1023)
    """The machine's GPU that the engines use, by the machine's own number. No other role of the run gets it;
    null: none, as on machines without."""
    value: StepsValue = StepsValue.MINIMUM
    """How the scores of the steps become the response's reward."""
    correct_from: float = Field(default=0.5, ge=0.0, le=1.0)
    """A response that was not cut off counts as correct from this reward on."""
    limit_s: Seconds = 50.0
    """Time for one response, in seconds; the engine of one that takes longer is killed and replaced."""
    start_limit_s: Seconds = 600.0
    """Time for loading the model, in seconds."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problem = None
        if self.system_prompt is not None and not self.chat_template:
            problem = f"system_prompt = {self.system_prompt!r} needs chat_template = true"
        elif self.max_num_batched_tokens < self.max_context_length:
            problem = (
                f"max_num_batched_tokens = {self.max_num_batched_tokens} must be at least "
                f"max_context_length = {self.max_context_length}"
            )
        if problem is not None:
            raise PydanticCustomError("process_reward_model", "{problem}", {"problem": problem})
        return self


RewardSection = Annotated[
    ReasoningGymReward | MathReward | PythonReward | JudgeReward | ProcessRewardModel,
    Field(discriminator="kind"),
]


def _form(value: object) -> str:
    return "list" if isinstance(value, list | tuple) else "one"


Rewards = Annotated[
    Annotated[RewardSection, Tag("one")] | Annotated[tuple[RewardSection, ...], Tag("list")],
    Discriminator(_form),
]
"""One reward or a list of them."""


def name_of(reward: RewardSection) -> str:
    """Return the name of a reward in metrics and errors."""
    if reward.name is not None:
        return reward.name
    return reward.factory.rpartition(".")[2] if isinstance(reward, PythonReward) else reward.kind
