"""Samples and scores groups with the run's own processes, to measure lengths, scoring and episodes."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from forgeasync.buffer import Submission
from forgeasync.environments import response_of, sampling_seed, weighted_order
from forgeasync.plugins.simulator.profile import (
    Distribution,
    EnvironmentTimes,
    Lengths,
    fit_lengths,
    mean_of_groups,
)
from forgeasync.rollouts import Group, Score, StoredRollout, Task, steps_of
from forgeasync.runtime import GroupSampler, GroupScoring, SampledGroup, Unscored

FIRST_GROUP = 1_000_000
"""Number of the first group that is sampled here; larger than the numbers of the loops' groups."""

NUM_SCORED_TOGETHER = 256
"""Maximum number of responses that are scored at once."""

NUM_SCORED_ALONE = 64
"""Number of responses that are scored one after another and timed. They belong to whole groups, since
verifiers cache results of a problem."""

LENGTH_ERROR = 0.05
"""Relative half width of the 95 % interval of every source's mean length that ends the sampling."""

SAMPLING_LIMIT_S = 60.0
"""Time limit for sampling groups, in seconds. Predictions of throughput have the error of the lengths."""


class NotProfiled(RuntimeError):
    """A part could not be timed; the text has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One group with its scores and the times of its environment."""

    group: Group
    scores: tuple[Score, ...]
    turn_latencies_s: tuple[float, ...]
    """For each episode, its time without sampling divided by its number of turns."""
    num_turns: tuple[int, ...]


async def sample_until_known(
    sample: Callable[[], Awaitable[list[Sampled]]], free: Callable[[list[Sampled]], Awaitable[None]]
) -> list[list[Sampled]]:
    """Sample and return batches until the lengths are known; only the first keeps its arrays.

    ``sample`` returns the groups of the next batch, and ``free`` frees their arrays. There are at least two
    batches, since an interval of a few groups is unreliable, unless the first one uses up the time.
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
    """Return whether the mean length of every sampled source is known to ``LENGTH_ERROR``."""
    return all(
        len(groups) > 1 and mean.high - mean.mean <= LENGTH_ERROR * mean.mean
        for groups in _by_source(sampled).values()
        for mean in (mean_of_groups(_response_lengths(groups)),)
    )


async def sample_groups(
    groups: GroupSampler, scorer: GroupScoring, batch: Sequence[Submission], *, seed: int
) -> list[Sampled]:
    """Sample and score a group for each prompt, all at once, with the seeds of a run.

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
    """Return the time of scoring one response on an otherwise idle machine."""
    times_s = []
    num_groups = max(1, NUM_SCORED_ALONE // max(1, len(sampled[0].group.rollouts)))
    every = max(1, len(sampled) // num_groups)
    picked = sampled[::every][:num_groups]
    for task, rollout in _responses(picked):
        start_s = time.perf_counter()
        await _score(scorer, task, rollout)
        times_s.append(time.perf_counter() - start_s)
    return Distribution.of(times_s)


async def count_places(scorer: GroupScoring, sampled: Sequence[Sampled], *, alone_s: float) -> int:
    """Return the number of responses that are scored at once under load; each takes ``alone_s`` alone.

    Scores that are computed run at most one per core; those that wait for a server can be more.
    """
    pairs = _responses(sampled)[:NUM_SCORED_TOGETHER]
    start_s = time.perf_counter()
    await asyncio.gather(*(_score(scorer, task, rollout) for task, rollout in pairs))
    return max(1, round(len(pairs) * alone_s / (time.perf_counter() - start_s)))


def _responses(sampled: Sequence[Sampled]) -> list[tuple[Task, StoredRollout]]:
    return [(one.group.task, rollout) for one in sampled for rollout in one.group.rollouts]


async def _score(scorer: GroupScoring, task: Task, rollout: StoredRollout) -> None:
    await scorer.score(f"a response to task {task.task_id}", task, [response_of(rollout)])


def environment_times(sampled: Sequence[Sampled]) -> EnvironmentTimes | None:
    """Return the times of episodes outside of sampling; None without an environment."""
    turns = [float(num) for one in sampled for num in one.num_turns]
    if not turns:
        return None
    latencies_s = [latency for one in sampled for latency in one.turn_latencies_s]
    return EnvironmentTimes(num_turns=Distribution.of(turns), latency_s=Distribution.of(latencies_s))


def lengths_by_source(sampled: Sequence[Sampled]) -> dict[str, Lengths]:
    """Return the lengths of prompts and responses of every sampled source."""
    return {
        source: fit_lengths(
            [float(group.rollouts[0].branches[0].num_prompt_tokens) for group in groups],
            _response_lengths(groups),
        )
        for source, groups in _by_source(sampled).items()
    }


def _by_source(sampled: Sequence[Sampled]) -> dict[str, list[Group]]:
    by_source: dict[str, list[Group]] = {}
    for one in sampled:
        by_source.setdefault(one.group.task.source, []).append(one.group)
    return by_source


def _response_lengths(groups: Sequence[Group]) -> list[list[float]]:
    return [[float(max(1, rollout.num_sampled_tokens)) for rollout in group.rollouts] for group in groups]


FIRST_EXTRA = 500_000
"""Number of the first problem that is sampled out of the run's order."""


def batches_of(tasks: Sequence[Task], *, groups_per_step: int, seed: int) -> Iterator[list[Submission]]:
    """Yield batches without end: problems in the run's order, and two of each source that a batch lacks.

    In a run with one source, these are the run's own first groups, with the run's seeds.
    """
    by_source: dict[str, list[Task]] = {}
    for task in tasks:
        by_source.setdefault(task.source, []).append(task)
    order = weighted_order(tasks, dict.fromkeys(by_source, 1.0), seed=seed)
    others = {source: itertools.cycle(of_source) for source, of_source in by_source.items()}
    numbers, extras = itertools.count(), itertools.count(FIRST_EXTRA)
    while True:
        batch = [Submission(submission_id=next(numbers), task=order.next()) for _ in range(groups_per_step)]
        for source in sorted(others.keys() - {one.task.source for one in batch}):
            batch += [
                Submission(submission_id=next(extras), task=task)
                for task in itertools.islice(others[source], 2)
            ]
        yield batch
