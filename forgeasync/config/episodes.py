"""Sections for episodes: workers, bounds, deadlines, a policy for each ending, and agents."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from forgeasync.schema import Count, Refusal, Seconds, Section


class Ending(StrEnum):
    """Cause of the end of an episode."""

    COMPLETED = "completed"
    """The environment returned a score."""
    MAX_TURNS = "max_turns"
    """The environment requested another turn after ``episodes.max_turns`` turns."""
    LENGTH = "length"
    """Another turn did not fit in ``model.max_context_length``."""
    PARSE_ERROR = "parse_error"
    """The environment raised ``ParseError``: it could not parse the model's output."""
    TOOL_ERROR = "tool_error"
    """The environment raised ``ToolError``: a tool of the model failed."""
    TIMEOUT = "timeout"
    """The deadline of the set-up, a step, a tool, a judge or the episode passed."""
    ENVIRONMENT_CRASH = "environment_crash"
    """The environment raised any other exception, or did not return a score or a turn."""
    NO_SCORE = "no_score"
    """The environment raised ``NoScore``: the episode was not judged."""
    INFRASTRUCTURE = "infrastructure"
    """A worker, a sandbox or a server was lost; neither the model nor the environment caused it."""


class EndingPolicy(StrEnum):
    """Policy for episodes with a certain ending."""

    SCORE = "score"
    """Train on the episode with the environment's score, or with 0 if there is none."""
    ZERO = "zero"
    """Train on the episode with score 0, whatever the environment's score."""
    MASK = "mask"
    """Do not train on the episode, and leave it out of its group's advantages."""
    RUN_AGAIN = "run_again"
    """Run the same prompt again, up to ``episodes.max_attempts`` attempts; after that, as ``mask``."""


class EndingsSection(Section):
    """Policy for each ending of an episode."""

    completed: EndingPolicy = EndingPolicy.SCORE
    max_turns: EndingPolicy = EndingPolicy.SCORE
    length: EndingPolicy = EndingPolicy.SCORE
    parse_error: EndingPolicy = EndingPolicy.ZERO
    tool_error: EndingPolicy = EndingPolicy.ZERO
    timeout: EndingPolicy = EndingPolicy.MASK
    environment_crash: EndingPolicy = EndingPolicy.RUN_AGAIN
    no_score: EndingPolicy = EndingPolicy.MASK
    """``run_again`` or ``mask``, since an episode without a verdict has no score to train on."""
    infrastructure: EndingPolicy = EndingPolicy.RUN_AGAIN
    """``run_again`` or ``mask``, since a failure of the infrastructure says nothing about the model."""

    def of(self, ending: Ending) -> EndingPolicy:
        """Return the policy of an ending."""
        policy: EndingPolicy = getattr(self, ending.value)
        return policy

    def find_problems(self) -> Iterator[Refusal]:
        """Yield endings that would count as scores although they say nothing about the model."""
        never_a_score = (EndingPolicy.RUN_AGAIN, EndingPolicy.MASK)
        for ending, what in (
            (Ending.INFRASTRUCTURE, "what a lost worker or server has done"),
            (Ending.NO_SCORE, "that nobody has judged an episode"),
        ):
            if self.of(ending) not in never_a_score:
                yield (
                    ending.value,
                    f"must be one of {', '.join(never_a_score)}: {what} says nothing about the model, so it "
                    "is never a score",
                )


class EpisodesSection(Section):
    """Settings of the episodes of an environment: worker processes, bounds and deadlines."""

    num_workers: int = Field(default=2, gt=0, le=1024)
    """Number of processes that run episodes. A process that dies or stops answering is replaced."""
    max_live_per_worker: int = Field(default=256, gt=0, le=4096)
    """Maximum number of episodes that a worker runs at once, each on its own thread; others wait."""
    max_turns: Count = 100
    """Maximum number of turns in an episode, for each agent."""
    max_attempts: int = Field(default=3, gt=0, le=100)
    """Maximum number of attempts at an episode whose ending has the policy ``run_again``."""
    max_kv_usage: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """KV cache usage above which a generator that has groups gets no further group."""
    setup_s: Seconds = 120.0
    """Time limit from the start of an episode to its first turn."""
    step_s: Seconds = 120.0
    """Time limit for the environment between two turns of the model, and after the last turn."""
    tool_s: Seconds = 60.0
    """Time limit for one tool call."""
    judge_s: Seconds = 120.0
    """Time limit for one turn of an agent that is not trained, such as a judge."""
    heartbeat_s: Seconds = 8.0
    """Time without an answer after which a worker is stopped and replaced."""
    endings: EndingsSection = EndingsSection()


class AgentSection(Section):
    """Settings of one agent of an environment."""

    trainable: bool = True
    """Train on the tokens of this agent, with advantages relative to the same agent in the other episodes of
    the group. false: the agent samples from the same weights but is not trained on, such as a judge."""
