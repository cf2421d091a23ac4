"""Groups sampled and scored by the run's own procs: lengths, times of scoring, episodes."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from forgeasync.actors import GroupSampler, GroupScoring, SampledGroup, Unscored
from forgeasync.buffer import Submission
from forgeasync.environments import response_of, sampling_seed
from forgeasync.profile import Distribution, EnvironmentTimes, Lengths, fit_lengths, mean_of_groups
from forgeasync.rollouts import Group, Score, StoredRollout, Task, steps_of

FIRST_GROUP = 1_000_000
"""Number of the first group that is sampled here: none of the loops had such a number."""

NUM_SCORED_TOGETHER = 256
"""Most responses that are scored all at once."""

NUM_SCORED_ALONE = 64
"""Responses that are scored one after the other, to be timed: those of whole groups, as verifiers keep what
they know of a problem."""

LENGTH_ERROR = 0.05
"""Groups are sampled until the 95 % interval of every source's mean length is within this share of it ..."""

SAMPLING_LIMIT_S = 60.0
"""... or until they have taken so long: what a prediction says of throughput is off by as much as lengths."""


class NotProfiled(RuntimeError):
    """What has to be timed did not work; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One group with its scores, and what its environment took."""

    group: Group
    scores: tuple[Score, ...]
    turn_latencies_s: tuple[float, ...]
    """Of each episode: its time without sampling, by its turns."""
    num_turns: tuple[int, ...]


async def sample_until_known(
    sample: Callable[[], Awaitable[list[Sampled]]], free: Callable[[list[Sampled]], Awaitable[None]]
) -> list[list[Sampled]]:
    """Sample batches until the lengths are known; returns them. Only the first one still has its arrays.

    ``sample`` returns the groups of the next batch, ``free`` frees their arrays. There are at least two
    batches, since an interval of a few groups says little, unless the first one takes all of the time.
    """
    start_s = time.perf_counter()
    batches = [await sample()]
    while time.perf_counter() - start_s < SAMPLING_LIMIT_S:
        batches.append(await sample())
        await free(batches[-1])
        if lengths_are_known([one for batch in batches for one in batch]):
            break
    return batches


def lengths_are_known(sampled: Sequence[Sampled]) -> bool:
    """Return whether the mean length of every source that was sampled is known to ``LENGTH_ERROR``."""
    return all(
        len(groups) > 1 and mean.high - mean.mean <= LENGTH_ERROR * mean.mean
        for groups in _by_source(sampled).values()
        for mean in (mean_of_groups(_response_lengths(groups)),)
    )


async def sample_groups(
    groups: GroupSampler, scorer: GroupScoring, batch: Sequence[Submission], *, seed: int
) -> list[Sampled]:
    """Sample and score a group for each prompt, all at once, with the seeds that they have in a run.

    Raises:
        NotProfiled: no group could be sampled and scored.
    """
    problems: list[str] = []

    async def one(submission: Submission) -> Sampled | None:
        number, task = FIRST_GROUP + submission.draw_id, submission.task
        answer = await groups.sample(number, task, seed=sampling_seed(seed, submission.draw_id))
        if not isinstance(answer, SampledGroup):
            problems.append(f"task {task.task_id}: {answer}")
            return None
        scores = answer.scores
        if scores is None:
            responses = [response_of(rollout) for rollout in answer.rollouts]
            found = await scorer.score_group(number, task, responses)
            if isinstance(found, Unscored):
                problems.append(f"task {task.task_id}: {found.reason}")
                return None
            scores = found
        return _sampled(number, task, answer, scores)

    found = await asyncio.gather(*(one(submission) for submission in batch))
    sampled = [one for one in found if one is not None]
    if not sampled:
        raise NotProfiled(f"none of {len(batch)} groups was sampled and scored; the first: {problems[0]}")
    return sampled


def _sampled(number: int, task: Task, answer: SampledGroup, scores: tuple[Score, ...]) -> Sampled:
    group = Group(
        group_id=number,
        draw_id=number,
        task=task,
        rollouts=answer.rollouts,
        rewards=tuple(score.value for score in scores),
        scores=scores,
        steps=steps_of(scores),
        durations_ms=answer.durations_ms,
    )
    episodes = [one for one in answer.outcomes if one.num_turns]
    return Sampled(
        group=group,
        scores=scores,
        turn_latencies_s=tuple(max(0.0, one.episode_s - one.sampling_s) / one.num_turns for one in episodes),
        num_turns=tuple(one.num_turns for one in episodes),
    )


async def time_scoring(scorer: GroupScoring, sampled: Sequence[Sampled]) -> Distribution:
    """Return how long scoring one response takes, with nothing else to do."""
    times_s = []
    num_groups = max(1, NUM_SCORED_ALONE // max(1, len(sampled[0].group.rollouts)))
    every = max(1, len(sampled) // num_groups)
    picked = sampled[::every][:num_groups]
    for task, rollout in ((one.group.task, rollout) for one in picked for rollout in one.group.rollouts):
        start_s = time.perf_counter()
        await scorer.score(f"a response to task {task.task_id}", task, [response_of(rollout)])
        times_s.append(time.perf_counter() - start_s)
    return Distribution.of(times_s)


async def count_places(scorer: GroupScoring, sampled: Sequence[Sampled], *, alone_s: float) -> int:
    """Return how many responses are scored at once when many come together, of which each takes so long
    alone.

    Scores that are computed get no more of it than there are cores; those that wait for a server do.
    """
    pairs = [(one.group.task, rollout) for one in sampled for rollout in one.group.rollouts]
    pairs = pairs[:NUM_SCORED_TOGETHER]
    start_s = time.perf_counter()
    await asyncio.gather(
        *(
            scorer.score(f"a response to task {task.task_id}", task, [response_of(rollout)])
            for task, rollout in pairs
        )
    )
    return max(1, round(len(pairs) * alone_s / (time.perf_counter() - start_s)))


def environment_times(sampled: Sequence[Sampled]) -> EnvironmentTimes | None:
    """Return what episodes took besides sampling; None without an environment."""
    turns = [float(num) for one in sampled for num in one.num_turns]
    if not turns:
        return None
    latencies_s = [latency for one in sampled for latency in one.turn_latencies_s]
    return EnvironmentTimes(num_turns=Distribution.of(turns), latency_s=Distribution.of(latencies_s))


def lengths_by_source(sampled: Sequence[Sampled]) -> dict[str, Lengths]:
    """Return the lengths of prompts and responses of every source that was sampled."""
    return {
        source: fit_lengths([_prompt(group.rollouts[0]) for group in groups], _response_lengths(groups))
        for source, groups in _by_source(sampled).items()
    }


def _by_source(sampled: Sequence[Sampled]) -> dict[str, list[Group]]:
    by_source: dict[str, list[Group]] = {}
    for one in sampled:
        by_source.setdefault(one.group.task.source, []).append(one.group)
    return by_source


def _response_lengths(groups: Sequence[Group]) -> list[list[float]]:
    return [[float(max(1, rollout.num_sampled_tokens)) for rollout in group.rollouts] for group in groups]


def _prompt(rollout: StoredRollout) -> float:
    return float(rollout.branches[0].num_prompt_tokens)
