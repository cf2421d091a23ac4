"""What a generator made and what a trainer learns from: rollouts, and the groups they come in.

Shape suffixes: T tokens of one response, P tokens of its prompt.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from forgeasync.data.task import Task


class FinishReason(StrEnum):
    STOP = "stop"
    """The model ended its response."""
    LENGTH = "length"
    """The response was cut at ``sampling.max_response_tokens``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens [start, end) of a response were sampled under policy ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sampled response.

    ``prompt_ids_P`` and ``response_ids_T`` are int32; ``logprobs_T`` (float32) are under the
    distribution that was really sampled from; ``version_spans`` cover [0, T) without gaps.
    """

    prompt_ids_P: np.ndarray
    response_ids_T: np.ndarray
    logprobs_T: np.ndarray
    version_spans: tuple[VersionSpan, ...]
    text: str
    finish_reason: FinishReason

    @property
    def num_response_tokens(self) -> int:
        return len(self.response_ids_T)

    @property
    def first_version(self) -> int:
        """Policy version of the oldest token."""
        return self.version_spans[0].version


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All rollouts of one prompt; ``rewards`` is None until they are scored.

    ``group_id`` counts admissions: group i was the i-th that the buffer let start.
    """

    group_id: int
    task: Task
    rollouts: tuple[Rollout, ...]
    rewards: tuple[float, ...] | None = None

    @property
    def first_version(self) -> int:
        """Policy version of the oldest token in the group."""
        return min(rollout.first_version for rollout in self.rollouts)
