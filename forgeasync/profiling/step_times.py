"""Times of the trainer, alone: steps on parts of a batch, and their weights on the way to the generators."""

import asyncio
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from forgeasync.actors import GeneratorRouter
from forgeasync.config import RunConfig
from forgeasync.controller import TrainerRecovery
from forgeasync.profile import Distribution, Estimate, TrainPoint, WeightTimes
from forgeasync.profiling.processor_time import ProcessorTime, crowding_of
from forgeasync.profiling.sampled_groups import NotProfiled
from forgeasync.rollouts import Group, padded_length
from forgeasync.trainer import TrainingItem, assign_rows, training_items
from forgeasync.weights import NUM_SLOTS

T = TypeVar("T")

SHARES = (0.25, 0.5, 1.0)
"""Parts of a batch that steps are timed on."""

NUM_ALONE = 3
"""Steps alone, before and after those beside others."""

NUM_OWN = 3
"""Times in a round that the whole batch is timed in the rows that a run has."""

MORE_ROWS = 4
"""Each part is also packed into rows so many times shorter, if its longest sequence lets them be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """What the trainer takes."""

    points: tuple[TrainPoint, ...]
    weights: WeightTimes
    cores: float
    """Cores that all of its procs keep busy together while they train."""


@dataclass(frozen=True, slots=True)
class _Case:
    """One step that is timed, by its size and how it is packed."""

    num_groups: int
    tokens_per_row: int
    num_timed: int
    """Times in a round."""


class _Measured:
    """Samples of weights on their way, in seconds."""

    def __init__(self) -> None:
        self.wait: list[float] = []
        self.publish: list[float] = []
        self.fetch: list[float] = []
        self.swap: list[float] = []

    def times(self) -> WeightTimes:
        return WeightTimes(
            wait_s=Distribution.of(self.wait),
            publish_s=Distribution.of(self.publish),
            fetch_s=Distribution.of(self.fetch),
            swap_s=Distribution.of(self.swap),
        )


class StepTimer:
    """Makes steps on parts of the groups, publishes each, and has the generators take it, in rounds.

    Others that use the machine make steps longer for a while, and never shorter: rounds are made at different
    moments of a profile, and medians count.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: TrainerRecovery,
        generators: GeneratorRouter,
        groups: Sequence[Group],
        processors: ProcessorTime,
        *,
        numbers: Iterator[int],
    ) -> None:
        """``numbers`` are those of the steps, behind the ones that were made before."""
        self._config = config
        self._trainer = trainer
        self._generators = generators
        self._groups = groups
        self._processors = processors
        self._numbers = numbers
        self._cases = step_cases(config, groups)
        self._samples: dict[tuple[int, int], list[float]] = defaultdict(list)
        self._cores: list[float] = []
        self._weights = _Measured()

    @property
    def num_steps(self) -> int:
        """Steps of a round."""
        return num_steps_of(self._cases)

    async def round(self, on_step: Callable[[], None]) -> None:
        """Make all steps once more than they are timed: memory that steps of another size have left is shaped
        to this one's first, as in a run, whose steps are all alike.

        Raises:
            NotProfiled: a version did not arrive.
        """
        for case, is_timed in _round(self._cases):
            step = next(self._numbers)
            part = self._groups[: case.num_groups]
            rows = _rows(self._config, self._trainer, part, tokens_per_row=case.tokens_per_row)
            self._processors.passed_s()
            start_s = time.perf_counter()
            await self._trainer.train_items([rows], step=step)
            step_s = time.perf_counter() - start_s
            busy_s = self._processors.passed_s()
            await _serve(self._trainer, self._generators, step, self._weights)
            on_step()
            if is_timed:
                self._samples[size_of(rows)].append(step_s)
                self._cores.append(busy_s / step_s)

    def times(self) -> StepTimes:
        """What the rounds have shown so far; there was one."""
        points = tuple(
            TrainPoint(num_rows=num_rows, num_tokens=num_tokens, step_s=Estimate.median_of(found))
            for (num_rows, num_tokens), found in self._samples.items()
        )
        return StepTimes(points=points, weights=self._weights.times(), cores=statistics.median(self._cores))


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """One optimizer step, as it is made alone and while others want the same cores: medians."""

    alone_s: float
    alone_processor_s: float
    """Of all ranks together."""
    beside_s: float
    beside_processor_s: float

    @property
    def core_share(self) -> float:
        """Share of the time that its cores were the trainer's while it computed beside others."""
        cores = self.alone_processor_s / self.alone_s
        return min(1.0, self.beside_processor_s / (self.beside_s * cores))

    @property
    def crowding(self) -> float:
        """How much more processor time it took, by the share that others had: ``Cores.trainer_crowding``."""
        return crowding_of(self.beside_processor_s / self.alone_processor_s - 1.0, 1.0 - self.core_share)


def mean_of(parts: Sequence[Beside]) -> Beside:
    """Return the mean of each number."""
    return Beside(
        alone_s=statistics.fmean(one.alone_s for one in parts),
        alone_processor_s=statistics.fmean(one.alone_processor_s for one in parts),
        beside_s=statistics.fmean(one.beside_s for one in parts),
        beside_processor_s=statistics.fmean(one.beside_processor_s for one in parts),
    )


async def train_beside(
    config: RunConfig,
    trainer: TrainerRecovery,
    groups: Sequence[Group],
    other: Callable[[], Awaitable[T]],
    processor_time: ProcessorTime,
    *,
    numbers: Iterator[int],
) -> tuple[T, Beside]:
    """Make steps on the groups for as long as something else takes, and before and after it alone.

    Returns what that returns, and what the steps took. ``processor_time`` is that of the trainer's ranks;
    ``numbers`` are those of the steps.
    """
    rows = _rows(config, trainer, groups, tokens_per_row=config.trainer.tokens_per_row)

    async def step() -> tuple[float, float]:
        processor_time.passed_s()
        start_s = time.perf_counter()
        await trainer.train_items([rows], step=next(numbers))
        return time.perf_counter() - start_s, processor_time.passed_s()

    # The first one shapes the memory, as in a round.
    _, *alone = [await step() for _ in range(1 + NUM_ALONE)]
    waiting = asyncio.ensure_future(other())
    beside: list[tuple[float, float]] = []
    try:
        while not waiting.done():
            beside.append(await step())
        result = await waiting
    finally:
        waiting.cancel()
    # A machine that others use as well may have become faster or slower meanwhile.
    alone += [await step() for _ in range(NUM_ALONE)]
    # The end of the last one was alone.
    beside_s, beside_processor_s = map(statistics.median, zip(*(beside[:-1] or beside), strict=True))
    alone_s, alone_processor_s = map(statistics.median, zip(*alone, strict=True))
    return result, Beside(
        alone_s=alone_s,
        alone_processor_s=alone_processor_s,
        beside_s=beside_s,
        beside_processor_s=beside_processor_s,
    )


def _rows(
    config: RunConfig, trainer: TrainerRecovery, groups: Sequence[Group], *, tokens_per_row: int
) -> list[list[list[TrainingItem]]]:
    items = training_items(groups, [1.0] * len(groups), config.algorithm)
    return assign_rows(items, tokens_per_row=tokens_per_row, num_ranks=trainer.num_data_ranks)


def step_cases(config: RunConfig, groups: Sequence[Group]) -> list[_Case]:
    """Return the steps of a round: parts of the groups, in rows as the run has them and in shorter ones."""
    longest = max(branch.num_tokens for one in groups for roll in one.rollouts for branch in roll.branches)
    whole = config.trainer.tokens_per_row
    cases = []
    for share in SHARES:
        num_groups = max(1, round(share * len(groups)))
        cases.append(_Case(num_groups, whole, NUM_OWN if num_groups == len(groups) else 1))
        num_tokens = sum(roll.num_tokens for one in groups[:num_groups] for roll in one.rollouts)
        shorter = max(longest, math.ceil(num_tokens / (MORE_ROWS * config.trainer.parallel.num_procs)))
        if shorter < min(whole, num_tokens):
            cases.append(_Case(num_groups, shorter, 1))
    return list(dict.fromkeys(cases))


def num_steps_of(cases: Sequence[_Case]) -> int:
    """Return how many steps a round has."""
    return sum(1 for _ in _round(cases))


def _round(cases: Sequence[_Case]) -> Iterator[tuple[_Case, bool]]:
    """Yield the steps of a round, and whether each is timed."""
    for case in cases:
        yield case, False
        for _ in range(case.num_timed):
            yield case, True


def size_of(rows: Sequence[Sequence[Sequence[TrainingItem]]]) -> tuple[int, int]:
    """Return the microbatches of a step, and the tokens of the longest row of each, added up.

    ``rows`` has items by data rank and microbatch. Rows are filled up to ``ROW_ALIGNMENT`` tokens.
    """
    lengths = [[padded_length(sum(item.num_tokens for item in row)) for row in of_rank] for of_rank in rows]
    return len(rows[0]), sum(max(of_batch) for of_batch in zip(*lengths, strict=True))


async def _serve(
    trainer: TrainerRecovery, generators: GeneratorRouter, step: int, measured: _Measured
) -> None:
    """Publish the weights of a step and have all generators take them, as the serving loops do."""
    begun_s: list[float] = []
    start_s = time.perf_counter()
    manifest = await trainer.stage_weights(
        step % NUM_SLOTS, when_begun=lambda: begun_s.append(time.perf_counter())
    )
    published_s = time.perf_counter()
    measured.wait.append(begun_s[0] - start_s)
    measured.publish.append(published_s - begun_s[0])
    generators.published(manifest.version)
    for host in range(generators.num_hosts):
        fetch_start_s = time.perf_counter()
        fetched = await generators.begin_update(host, manifest)
        if fetched is None or not fetched.is_complete:
            raise NotProfiled(f"version {manifest.version} did not arrive at the generators of host {host}")
        swapped = await generators.finish_update(host, manifest.version)
        pauses = [one.report.pause_s for one in swapped]
        measured.fetch.append(time.perf_counter() - fetch_start_s - max(pauses))
        measured.swap += pauses
        for one in swapped:
            generators.taken(one.number)
