"""Sections for rewards: scorers of responses, their call limits, and the names of their scores."""

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
"""Names that a part of a score cannot have, because other metrics are named ``reward/<name>`` or
``score/<name>``."""


_PART_NAME = re.compile(r"[A-Za-z0-9][\w.\-/]{0,99}", re.ASCII)


PART_NAME_RULE = (
    "up to 100 letters, digits, '_', '-', '.' or '/', beginning with a letter or digit, and none of "
    + ", ".join(sorted(RESERVED_PARTS))
)
"""Rule for the names of a score's parts, for messages."""


def is_part_name(name: object) -> bool:
    """Return whether a part of a score can have this name."""
    return isinstance(name, str) and name not in RESERVED_PARTS and _PART_NAME.fullmatch(name) is not None


class BaseReward(Section):
    """Base class of reward sections, with the fields of every reward."""

    weight: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    """Factor of this score in the sum over a list of rewards."""
    name: str | None = None
    """Name of the score in errors and, in a list, in the metric ``reward/<name>``; null: the kind, or the
    last part of ``factory``."""
    max_concurrent: int | None = Field(default=None, gt=0, le=65536)
    """Maximum number of concurrent calls of this reward, over all scorers, which share it evenly; null:
    limited only by the scorers' processes (requests of a judge: 64 per scorer)."""


class ReasoningGymReward(BaseReward):
    """Verifier of the reasoning-gym data set that contains the problem."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"


class MathReward(BaseReward):
    """math-verify: 1 if the last answer of the response equals the reference, else 0."""

    kind: Literal["math"] = "math"


class ScoredUnit(StrEnum):
    """Unit that one call of a reward scores."""

    RESPONSE = "response"
    GROUP = "group"
    """All responses to one prompt."""


class PythonReward(BaseReward, PythonCode):
    """Your own reward: ``(task, response) -> float | Score``, a function or a class, sync or async."""

    scores: ScoredUnit = ScoredUnit.RESPONSE
    """Unit that one call scores. With ``group``, the signature is ``(task, responses)``, and the reward
    returns a list with one float or Score for each response."""
    limit_s: Seconds = 20.0
    """Wall time limit of one call, in seconds. A call that takes longer fails, and a process that it blocks
    is killed."""


DEFAULT_RUBRIC = (
    "Grade how well the response solves the task. Give the highest score only to a response that is correct "
    "and complete, the lowest to one that is wrong, empty or off the subject."
)


class JudgeReward(BaseReward):
    """Judge model behind an OpenAI-compatible endpoint, whose points become a reward from 0 to 1."""

    kind: Literal["judge"]
    base_url: str = Field(pattern=r"^https?://[^\s/]+")
    """URL up to ``/v1``, such as ``http://localhost:8000/v1``."""
    model: str = Field(min_length=1)
    """Name of the model at the endpoint."""
    api_key_env: str | None = None
    """Name of the environment variable with the API key, which is never written to a file; null: no key is
    sent."""
    rubric: str = Field(default=DEFAULT_RUBRIC, min_length=1)
    """Grading instructions."""
    lowest: float = Field(default=0.0, ge=-1e6, le=1e6)
    """Points of the worst response, which give reward 0."""
    highest: float = Field(default=10.0, ge=-1e6, le=1e6)
    """Points of the best response, which give reward 1."""
    correct_from: float = Field(default=0.5, ge=0.0, le=1.0)
    """Minimum reward of a response that counts as correct."""
    temperature: float = Field(default=0.0, ge=0.0, le=2.0)
    """Temperature of the judge."""
    max_reply_tokens: int = Field(default=1024, gt=0, le=1048576)
    """Maximum number of tokens of a verdict, including its reasoning."""
    max_response_chars: int = Field(default=65536, gt=0, le=1048576)
    """Maximum number of characters of a response. A longer one is not sent, scores 0 and is counted
    (``scoring/num_oversized``)."""
    limit_s: Seconds = 50.0
    """Time limit of one request, in seconds."""
    cache_size: int = Field(default=16384, ge=0, le=2**24)
    """Number of responses whose verdict each scorer caches, by content; 0: no cache."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problem = None
        if self.lowest >= self.highest:
            problem = f"lowest = {self.lowest:g} must be less than highest = {self.highest:g}"
        if problem is not None:
            raise PydanticCustomError("judge", "{problem}", {"problem": problem})
        return self


class StepsValue(StrEnum):
    """Aggregation of the scores of a response's steps to one value."""

    LAST = "last"
    MINIMUM = "minimum"
    MEAN = "mean"
    PRODUCT = "product"


class ProcessRewardModel(BaseReward):
    """Process reward model in a vLLM pooling engine, which scores each step of a response from 0 to 1."""

    kind: Literal["process_reward_model"]
    model_path: str = Field(min_length=1)
    """Hugging Face folder of a ``Qwen2ForProcessRewardModel`` or ``Qwen2ForRewardModel``, with its
    tokenizer."""
    step_separator: str = Field(default="\n\n", min_length=1, max_length=100)
    """Text between two steps of a response; it is removed from the model's input."""
    step_tag: str = Field(default="<extra_0>", min_length=1, max_length=100)
    """Token of the model's tokenizer that is inserted after every step; the step's score is read at this
    token."""
    chat_template: bool = False
    """Render task and response with the chat template of the model's tokenizer; false: the response directly
    follows the task's text."""
    system_prompt: str | None = None
    """Text of a system message before the task; needs ``chat_template: true``."""
    max_context_length: int = Field(default=4096, gt=0, le=MAX_ROW_TOKENS)
    """Maximum number of tokens of task and response together, by the model's own tokenizer. A longer response
    is neither sent nor cut; it scores 0 and is counted (``scoring/num_oversized``)."""
    dtype: Dtype = Dtype.FLOAT32
    """Data type of the model's weights and activations."""
    max_num_seqs: int = Field(default=16, gt=0, le=1024)
    """Maximum number of responses that one engine computes at once."""
    max_num_batched_tokens: int = Field(default=8192, gt=0, le=MAX_ROW_TOKENS)
    """Maximum number of tokens in one forward pass; at least ``max_context_length``, since responses are not
    split."""
    kv_cache_gib: Gibibytes = 0.25
    """KV cache of one engine, in GiB."""
    gpu: int | None = Field(default=None, ge=0, le=1023)
    """GPU that the engines use, by the machine's own number. No other role of the run gets it; null: no
    GPU."""
    value: StepsValue = StepsValue.MINIMUM
    """Aggregation of the scores of the steps to the response's reward."""
    correct_from: float = Field(default=0.5, ge=0.0, le=1.0)
    """Minimum reward of a response that counts as correct, if it was not cut off."""
    limit_s: Seconds = 50.0
    """Time limit for one response, in seconds; an engine that takes longer is killed and replaced."""
    start_limit_s: Seconds = 600.0
    """Time limit for loading the model, in seconds."""

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
"""Section ``data.reward`` of a config, or one of its entries."""


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
