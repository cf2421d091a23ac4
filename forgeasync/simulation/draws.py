"""Everything that a simulated run draws at random. A draw depends on the seed and on what it is for alone.

So two runs that differ in one number of their config have the same prompts, the same lengths and the same
latencies, as far as they draw them: a difference between their predictions is the number's, and not chance.
"""

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

from forgeasync.environments import sampling_seed, weighted_order
from forgeasync.profile import Distribution, Profile
from forgeasync.rollouts import Task
from forgeasync.simulation.shape import SimulatedRun

_PROMPTS_KEY = 1_000_003


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRollout:
    """One rollout as it will be."""

    num_prompt_tokens: int
    turns: tuple[int, ...]
    """Tokens of each turn of the model."""
    latencies_s: tuple[float, ...]
    """Of the environment, after each turn; empty without one."""
    score_s: float


class Draws:
    """Tasks in the order of the data, and what becomes of their groups."""

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
        """The rollouts of a group.

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
            rollouts.append(self._rollout(num_prompt, num_tokens, draws))
        return tuple(rollouts)

    def is_filtered(self, draw_id: int) -> bool:
        """Whether the filters leave nothing of a group."""
        share = self._profile.filtered_share
        return share > 0.0 and random.Random(sampling_seed(self._run.seed, draw_id) + 1).random() < share

    def time_s(self, distribution: Distribution) -> float:
        """One service time, in the order in which they are asked for."""
        return distribution.at(self._times.random())

    def until_fault_s(self, rate_per_s: float) -> float:
        """Seconds until the next of faults that come independently; infinite at rate 0."""
        return self._times.expovariate(rate_per_s) if rate_per_s > 0.0 else math.inf

    def _rollout(self, num_prompt: int, num_tokens: int, draws: random.Random) -> DrawnRollout:
        score_s = self._profile.score_s.at(draws.random())
        environment = self._profile.environment
        if environment is None or not self._run.has_environment:
            return DrawnRollout(
                num_prompt_tokens=num_prompt, turns=(num_tokens,), latencies_s=(), score_s=score_s
            )
        num_turns = min(max(1, round(environment.num_turns.at(draws.random()))), num_tokens)
        each, more = divmod(num_tokens, num_turns)
        return DrawnRollout(
            num_prompt_tokens=num_prompt,
            turns=tuple(each + (turn < more) for turn in range(num_turns)),
            latencies_s=tuple(environment.latency_s.at(draws.random()) for _ in range(num_turns)),
            score_s=score_s,
        )


_normal_share = NormalDist().cdf
