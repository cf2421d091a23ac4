"""The sections on episodes: workers, bounds, deadlines, what each ending means, and the agents."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from forgeasync.schema import Count, Refusal, Seconds, Section


class Ending(StrEnum):
    """How an episode ended."""

    COMPLETED = "completed"
    """The environment returned a score."""
    MAX_TURNS = "max_turns"
    """The model had taken ``episodes.max_turns`` turns and was asked for another."""
    LENGTH = "length"
    """There was no room for another turn in ``model.max_context_length``."""
    PARSE_ERROR = "parse_error"
    """The environment raised ``ParseError``: it could not read what the model wrote."""
    TOOL_ERROR = "tool_error"
    """The environment raised ``ToolError``: a tool of the model failed."""
    TIMEOUT = "timeout"
    """A deadline passed: that of the set-up, a step, a tool, a judge or the episode."""
    ENVIRONMENT_CRASH = "environment_crash"
    """The environment raised anything else, or returned no score or no turn."""
    NO_SCORE = "no_score"
    """The environment raised ``NoScore``: nobody has said how good the episode was."""
    INFRASTRUCTURE = "infrastructure"
    """A worker, a sandbox or a server was lost: nothing that the model or the environment has done."""


class EndingPolicy(StrEnum):
    """What becomes of an episode that ended in a certain way."""

    SCORE = "score"
    """It trains with the environment's score; with 0 where the environment gave none."""
    ZERO = "zero"
    """It trains with score 0, whatever the environment said."""
    MASK = "mask"
    """It does not train and does not count for the others of its group, which train without it."""
    RUN_AGAIN = "run_again"
    """The same prompt is run again, up to ``episodes.max_attempts`` attempts; after that as ``mask``."""


class EndingsSection(Section):
    """What becomes of episodes, by how they ended."""

    completed: EndingPolicy = EndingPolicy.SCORE
    max_turns: EndingPolicy = EndingPolicy.SCORE
    length: EndingPolicy = EndingPolicy.SCORE
    parse_error: EndingPolicy = EndingPolicy.ZERO
    tool_error: EndingPolicy = EndingPolicy.ZERO
    timeout: EndingPolicy = EndingPolicy.MASK
    environment_crash: EndingPolicy = EndingPolicy.RUN_AGAIN
    no_score: EndingPolicy = EndingPolicy.MASK
    """``run_again`` or ``mask``: without a verdict there is nothing to train on."""
    infrastructure: EndingPolicy = EndingPolicy.RUN_AGAIN
    """``run_again`` or ``mask``: what the infrastructure has done is never a score."""

    def of(self, ending: Ending) -> EndingPolicy:
        """Return the policy of an ending."""
        policy: EndingPolicy = getattr(self, ending.value)
        return policy

    def find_problems(self) -> Iterator[Refusal]:
        """Find endings that would count as scores although they say nothing about the model."""
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
    """Episodes of an environment: the processes that run them, their bounds and deadlines."""

    num_workers: int = Field(default=2, gt=0, le=1024)
    """Number of processes that run episodes. One that dies or stops answering is replaced."""
    max_live_per_worker: int = Field(default=256, gt=0, le=4096)
    """Most episodes that a worker runs at once, each on a thread of its own; others wait."""
    max_turns: Count = 100
    """Most turns of the model in an episode, by each of its agents."""
    max_attempts: int = Field(default=3, gt=0, le=100)
    """Most attempts at an episode whose ending says ``run_again``."""
    max_kv_usage: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """No further group starts on a generator whose KV cache is fuller than this, as long as it has others."""
    setup_s: Seconds = 120.0
    """Time from the start of an episode to its first turn."""
    step_s: Seconds = 120.0
    """Time that the environment may take between two turns of the model, and after the last one."""
    tool_s: Seconds = 60.0
    """Time for one call of a tool."""
    judge_s: Seconds = 120.0
    """Time for one turn of an agent that is not trained, such as a judge."""
    heartbeat_s: Seconds = 8.0
    """A worker that does not answer for this long is stopped and replaced."""
    endings: EndingsSection = EndingsSection()


class AgentSection(Section):
    """One agent of an environment."""

    trainable: bool = True
    """Train on what this agent samples. It is compared with the same agent in the other episodes of a group.
    false: it is sampled from the same weights and not trained on, as a judge may be."""
