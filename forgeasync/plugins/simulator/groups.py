"""Groups of a simulated run: their random draws, and the state of their sequences during decoding.

The draws of a group depend only on the seed and on the task or draw. Two runs that differ in one number of
their config therefore have the same prompts and lengths, so that a difference between their
predictions comes from that number and not from chance (common random numbers).
"""

import math
import random
from collections.abc import Sequence as SequenceOf
from dataclasses import InitVar, dataclass, field
from statistics import NormalDist

from forgeasync.buffer import Start
from forgeasync.environments import sampling_seed, weighted_order
from forgeasync.plugins.simulator.profile import Distribution, Profile
from forgeasync.plugins.simulator.shape import SimulatedRun
from forgeasync.rollouts import (
    FinishReason,
    Group,
    PayloadRef,
    StoredBranch,
    StoredRollout,
    Task,
    VersionSpan,
)

_PROMPTS_KEY = 1_000_003


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRollout:
    """The random draws of one rollout."""

    num_prompt_tokens: int
    num_tokens: int
    """Number of tokens of the response."""
    score_s: float


class SimulatedDraws:
    """Draws the tasks in the order of the data, the rollouts of their groups, and service times."""

    def __init__(self, run: SimulatedRun, profile: Profile) -> None:
        self._run = run
        self._profile = profile
        per_source = max(1, run.num_prompts // len(run.source_weights))
        tasks = [
            Task(task_id=str(index), prompt="", answer="", source_index=index, source=name)
            for name in run.source_weights
            for index in range(per_source)
        ]
        self._places = {name: place for place, name in enumerate(run.source_weights)}
        self.order = weighted_order(tasks, run.source_weights, seed=run.seed)
        self._times = random.Random(run.seed)

    def group(self, task: Task, draw_id: int) -> tuple[DrawnRollout, ...]:
        """Return the rollouts of a group.

        Lengths have the distribution of their source; within a group they are correlated by a Gaussian copula
        (Nelsen, "An Introduction to Copulas", 2006, section 2.3) with ``prompt_share``.
        """
        lengths = self._profile.lengths[task.source]
        prompt_draws = random.Random(
            (self._run.seed * _PROMPTS_KEY + self._places[task.source]) * _PROMPTS_KEY + task.source_index
        )
        of_prompt = math.sqrt(lengths.prompt_share) * prompt_draws.gauss(0.0, 1.0)
        num_prompt = max(1, round(lengths.prompt.at(prompt_draws.random())))
        spread = math.sqrt(1.0 - lengths.prompt_share)
        draws = random.Random(sampling_seed(self._run.seed, draw_id))
        rollouts = []
        for _ in range(self._run.group_size):
            share = _normal_share(of_prompt + spread * draws.gauss(0.0, 1.0))
            num_tokens = min(max(1, round(lengths.response.at(share))), self._run.max_response_tokens)
            score_s = self._profile.score_s.at(draws.random())
            rollouts.append(
                DrawnRollout(num_prompt_tokens=num_prompt, num_tokens=num_tokens, score_s=score_s)
            )
        return tuple(rollouts)

    def is_filtered(self, draw_id: int) -> bool:
        """Return whether the filters remove a whole group."""
        share = self._profile.filtered_share
        return share > 0.0 and random.Random(sampling_seed(self._run.seed, draw_id) + 1).random() < share

    def time_s(self, distribution: Distribution) -> float:
        """Draw a service time. The draws depend on the order of the calls."""
        return distribution.at(self._times.random())


_normal_share = NormalDist().cdf


NOWHERE = PayloadRef(host_id="", file="", payload_id="", offset=0, num_bytes=0, checksum=0)
"""Placeholder for the arrays of a rollout; simulated rollouts have none."""


Counts = tuple[float, float, float]
"""Work of an engine: prompt tokens, sum over decode steps of their running sequences, and decode steps."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One rollout while it is sampled."""

    group: "SimulatedGroup"
    index: int
    rollout: DrawnRollout
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of version and number of tokens, oldest first."""
    num_sampled: int = 0
    """Number of tokens when the sequence last began or stopped running."""
    num_settled: int = 0
    """Number of tokens after ``num_sampled`` that are already in ``spans``."""
    start: float = 0.0
    """Step counter of the engine when the sequence began to run."""
    at: tuple[int, int] | None = None
    """Engine and version that hold the sequence's keys and values."""
    counts: Counts = (0, 0.0, 0.0)
    """Work of the engine up to the end of the sequence."""

    @property
    def num_left(self) -> int:
        """Number of tokens left, counted from ``num_sampled``."""
        return self.rollout.num_tokens - self.num_sampled

    def add(self, version: int, num_tokens: int) -> None:
        """Add tokens to ``spans``."""
        if num_tokens <= 0:
            return
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1] + num_tokens)
        else:
            self.spans.append((version, num_tokens))

    def stored(self) -> StoredRollout:
        """Return the finished rollout."""
        spans, start = [], 0
        for version, num_tokens in self.spans:
            spans.append(VersionSpan(version=version, start=start, end=start + num_tokens))
            start += num_tokens
        branch = StoredBranch(
            prompt=NOWHERE,
            response=NOWHERE,
            num_prompt_tokens=self.rollout.num_prompt_tokens,
            num_response_tokens=start,
            version_spans=tuple(spans),
            text="",
        )
        return StoredRollout(
            generator_rank=0,
            branches=(branch,),
            finish_reason=FinishReason.STOP,
            episode=self.index,
        )


@dataclass(slots=True, eq=False)
class SimulatedGroup:
    """A group from its start to the end of its scoring."""

    start: Start
    rollouts: InitVar[SequenceOf[DrawnRollout]]
    sequences: list[Sequence] = field(init=False)
    engine: int | None = None
    """Number of the generator that samples the group."""
    prompt_at: tuple[int, int] | None = None
    """Engine and version that hold the keys and values of the prompt."""
    num_finished: int = 0
    num_scored: int = 0
    items: list[int] = field(default_factory=list)
    """Items of the group's responses in the dispatcher of scorers."""
    unsubmitted: list[int] = field(default_factory=list)
    """Responses for which the scorers' queue had no room."""
    is_ended: bool = False

    def __post_init__(self, rollouts: SequenceOf[DrawnRollout]) -> None:
        self.sequences = [Sequence(self, index, rollout) for index, rollout in enumerate(rollouts)]

    @property
    def group_id(self) -> int:
        return self.start.group_id

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens of all rollouts."""
        return sum(one.rollout.num_prompt_tokens + one.rollout.num_tokens for one in self.sequences)

    def stored(self) -> Group:
        """Return the group in the form that the buffer stores."""
        return Group(
            group_id=self.start.group_id,
            draw_id=self.start.draw_id,
            task=self.start.task,
            rollouts=tuple(one.stored() for one in self.sequences),
        )
