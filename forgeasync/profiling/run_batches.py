"""A run's own groups, batch after batch, sampled and scored by its procs."""

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence

from forgeasync.buffer import Submission
from forgeasync.controller import Prepared, Roles
from forgeasync.environments import weighted_order
from forgeasync.observability import StepConsole
from forgeasync.profiling.sampled_groups import NotProfiled, Sampled, sample_groups, sample_until_known
from forgeasync.rollouts import Task

LOAD_S = 10.0
"""No further groups are sampled for a load after so long."""

FIRST_EXTRA = 500_000
"""Number of the first problem that is not in its turn."""


class RunBatches:
    """Problems in the run's order, two of every source that a batch leaves out besides.

    In a run with one source they are its own first groups, with the seeds that they have in it.
    """

    def __init__(self, prepared: Prepared, roles: Roles) -> None:
        self._roles = roles
        self._seed = prepared.config.seed
        config = prepared.config
        self._batches = batches_of(
            prepared.train, groups_per_step=config.algorithm.groups_per_step, seed=config.seed
        )

    async def until_known(self) -> list[list[Sampled]]:
        """Sample batches until their lengths are known; only the first one still has its arrays.

        Raises:
            NotProfiled: a batch had no group that could be sampled and scored.
        """
        return await sample_until_known(lambda: self._sample(next(self._batches)), self._free)

    async def load(self, console: StepConsole, *, one_by_one: bool = False) -> list[list[Sampled]]:
        """Sample batches, or groups, one after the other for ``LOAD_S``; their arrays are freed.

        Raises:
            NotProfiled: not one could be sampled and scored.
        """
        found, problems = list[list[Sampled]](), list[NotProfiled]()
        end_s = time.perf_counter() + LOAD_S
        batches: Iterable[list[Submission]] = self._batches
        if one_by_one:
            batches = ([one] for one in itertools.chain.from_iterable(self._batches))
        for batch in batches:
            try:
                found.append(await self._sample(batch))
            except NotProfiled as problem:
                problems.append(problem)
            else:
                await self._free(found[-1])
            if time.perf_counter() > end_s:
                break
        if not found:
            raise problems[0]
        if problems:
            console.message(f"{len(problems)} times no group could be sampled; first {problems[0]}")
        return found

    async def _sample(self, batch: Sequence[Submission]) -> list[Sampled]:
        return await sample_groups(self._roles.groups, self._roles.scorer, batch, seed=self._seed)

    async def _free(self, sampled: Sequence[Sampled]) -> None:
        rollouts = (rollout for one in sampled for rollout in one.group.rollouts)
        await self._roles.generators.free_payloads(rollouts)


def batches_of(tasks: Sequence[Task], *, groups_per_step: int, seed: int) -> Iterator[list[Submission]]:
    """Yield batch after batch for ever, as ``RunBatches`` has them."""
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
