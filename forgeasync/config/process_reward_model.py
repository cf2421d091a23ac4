"""The section on process reward models: models that score the steps of a response."""

from enum import StrEnum
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from forgeasync.config.model import MAX_ROW_TOKENS, Dtype
from forgeasync.config.reward_limits import LimitedReward
from forgeasync.schema import Gibibytes, Seconds


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
