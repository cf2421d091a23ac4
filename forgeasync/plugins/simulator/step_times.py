"""Times an engine and the trainer alone, and a few steps of the run's own loops."""

import asyncio
import contextlib
import itertools
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import psutil

from forgeasync.config import RunConfig, SamplingSection
from forgeasync.controller import (
    Prepared,
    Roles,
    RunFiles,
    RunRecorder,
    StepRecord,
    StepTimes,
)
from forgeasync.generator import DecodeTiming, PrefillTiming
from forgeasync.observability import StepConsole
from forgeasync.plugins.simulator.profile import (
    DecodePoint,
    Distribution,
    Estimate,
    TrainPoint,
    WeightTimes,
    powers_of_two,
)
from forgeasync.plugins.simulator.run import packed_size
from forgeasync.plugins.simulator.sampled_groups import NotProfiled
from forgeasync.rollouts import Group, Score
from forgeasync.runtime import GeneratorActor, GeneratorRouter, ProcessManager, TrainerRecovery
from forgeasync.trainer import assign_rows, training_items
from forgeasync.weights import NUM_SLOTS

NUM_STEPS = 16
"""Number of decode steps of each sequence in a round."""

SHORT_PROMPT = 16
"""Number of prompt tokens in the lower row of the grid."""

NUM_ROUNDS = 3
"""Number of rounds of prompts, after one that warms up."""

PREFILL_BATCHES = 4
"""Number of tokens in a round of prompts, in units of the largest batch that the engine computes at once."""


def decode_grid(
    text: tuple[int, ...], *, max_num_seqs: int, max_context_length: int, max_kv_tokens: int
) -> list[DecodeTiming]:
    """Return powers of two up to ``max_num_seqs``, each with one or two lengths of prompts.

    Prompts are cut from ``text``.
    """
    # The longest prompt that all sequences can have at once, with a tenth of the cache to spare.
    room = int(0.9 * max_kv_tokens / max_num_seqs)
    longest = min(max_context_length, room) - NUM_STEPS - 1
    lengths = sorted({min(SHORT_PROMPT, max(1, longest)), max(1, longest)})
    return [
        DecodeTiming(num_running=num, num_prompt_tokens=length, num_steps=NUM_STEPS, text=text)
        for num in powers_of_two(max_num_seqs)
        for length in lengths
    ]


class DecodeTimer:
    """Times the steps of a grid on one engine, in rounds.

    A point has few steps in a round, and other work on the machine makes them longer. Therefore rounds are
    spread over the time of a profile, and the medians are used.
    """

    def __init__(
        self, engine: GeneratorActor, grid: Sequence[DecodeTiming], sampling: SamplingSection
    ) -> None:
        self._engine = engine
        self._grid = grid
        self._sampling = sampling
        self._num_rounds = 0
        self._samples: list[list[float]] = [[] for _ in grid]
        """Seconds of each point of the grid, one for each round."""

    @property
    def num_points(self) -> int:
        return len(self._grid)

    async def round(self, on_point: Callable[[], None]) -> None:
        """Time every point once. The first round is a warm-up and does not count."""
        for timing, samples in zip(self._grid, self._samples, strict=True):
            step_s = await self._engine.time_engine.call_one(timing, self._sampling, self._num_rounds)
            if self._num_rounds:
                samples.append(step_s)
            on_point()
        self._num_rounds += 1

    def points(self) -> tuple[DecodePoint, ...]:
        """Return the points, after at least two rounds."""
        return tuple(
            DecodePoint(
                num_running=timing.num_running,
                # The context halfway through the steps.
                num_context_tokens=timing.num_prompt_tokens + timing.num_steps // 2,
                step_s=Estimate.median_of(found),
            )
            for timing, found in zip(self._grid, self._samples, strict=True)
        )


async def time_prompts(
    engine: GeneratorActor,
    config: RunConfig,
    text: tuple[int, ...],
    *,
    num_prompt_tokens: int,
    max_kv_tokens: int,
) -> Estimate:
    """Return an engine's prompt tokens per second, with prompts of one length cut from ``text``."""
    section = config.generator
    num_tokens = min(PREFILL_BATCHES * section.max_num_batched_tokens, max_kv_tokens // 2)
    num_prompts = max(1, min(num_tokens // num_prompt_tokens, section.max_num_seqs))
    timing = PrefillTiming(num_prompts=num_prompts, num_prompt_tokens=num_prompt_tokens, text=text)
    rates = []
    for number in range(NUM_ROUNDS + 1):
        token_s = await engine.time_engine.call_one(timing, config.sampling, number)
        if number:
            rates.append(1.0 / token_s)
    return Estimate.of(rates)


class ProcessExited(RuntimeError):
    """A process whose time is measured has ended, so its seconds are lost."""


class ProcessorTime:
    """Processor seconds of processes of this machine, including their descendants.

    Raises:
        ProcessExited: one of the processes has ended.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self._before_s = self._total_s()

    def passed_s(self) -> float:
        """Return the seconds of all cores together since the last call."""
        before_s, self._before_s = self._before_s, self._total_s()
        return max(0.0, self._before_s - before_s)

    def _total_s(self) -> float:
        total_s = 0.0
        for pid in self._pids:
            try:
                process = psutil.Process(pid)
                processes = [process, *process.children(recursive=True)]
            except psutil.NoSuchProcess as error:
                raise ProcessExited(
                    f"process {pid} has ended while its processor time was measured"
                ) from error
            for one in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = one.cpu_times()
                    # Includes children that have ended, because verifiers fork.
                    total_s += times.user + times.system + times.children_user + times.children_system
        return total_s


class OtherLoad:
    """The share of this machine's cores that other processes use."""

    def __init__(self) -> None:
        self._own = ProcessorTime([os.getpid()])
        self._start_s, self._busy_s = time.perf_counter(), _busy_s()

    def share(self) -> float:
        """Return the others' share of all cores since the creation of this object, from 0 to 1."""
        passed_s = time.perf_counter() - self._start_s
        others_s = _busy_s() - self._busy_s - self._own.passed_s()
        return min(1.0, max(0.0, others_s / (passed_s * psutil.cpu_count())))


def _busy_s() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait


SHARES = (0.25, 0.5, 1.0)
"""Parts of a batch on which steps are timed."""

NUM_OWN = 3
"""Number of times in a round that the whole batch is timed in the run's own rows."""

MORE_ROWS = 4
"""Factor by which rows are shortened for another timing of each part, if its longest sequence fits."""


@dataclass(frozen=True, slots=True)
class _Case:
    """A step that is timed: its size and its packing."""

    num_groups: int
    tokens_per_row: int
    num_timed: int
    """Number of times in a round that it is timed."""


class StepTimer:
    """Makes steps on parts of the groups, publishes each, and lets the generators load it, in rounds.

    Other work on the machine makes steps longer for a while, and never shorter. Therefore rounds are spread
    over the time of a profile, and the medians are used.
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
        """``numbers`` are the numbers of the steps to make, after those that were already made."""
        self._config = config
        self._trainer = trainer
        self._generators = generators
        self._groups = groups
        self._processors = processors
        self._numbers = numbers
        self._cases = step_cases(config, groups)
        self._samples: dict[tuple[int, int], list[float]] = defaultdict(list)
        self._cores: list[float] = []
        self._weights_s: dict[str, list[float]] = defaultdict(list)
        """Times of new weights, by the fields of ``WeightTimes``."""

    @property
    def num_steps(self) -> int:
        """Number of steps in a round."""
        return sum(1 + case.num_timed for case in self._cases)

    async def round(self, on_step: Callable[[], None]) -> None:
        """Make each step once more than it is timed.

        The first step of a size takes longer, because memory was laid out by steps of other sizes; in a run
        all steps are alike.

        Raises:
            NotProfiled: a version did not arrive.
        """
        config, trainer = self._config, self._trainer
        for case in self._cases:
            part = self._groups[: case.num_groups]
            items = training_items(part, [1.0] * len(part), config.algorithm)
            rows = assign_rows(items, tokens_per_row=case.tokens_per_row, num_ranks=trainer.num_data_ranks)
            size = packed_size(
                [item.num_tokens for item in items],
                tokens_per_row=case.tokens_per_row,
                num_ranks=trainer.num_data_ranks,
            )
            for number in range(1 + case.num_timed):
                step = next(self._numbers)
                self._processors.passed_s()
                start_s = time.perf_counter()
                await trainer.train_items([rows], step=step)
                step_s = time.perf_counter() - start_s
                busy_s = self._processors.passed_s()
                await self._serve(step)
                on_step()
                if number:
                    self._samples[size].append(step_s)
                    self._cores.append(busy_s / step_s)

    async def _serve(self, step: int) -> None:
        """Publish the weights of a step and let all generators load them, as in a run."""
        begun_s: list[float] = []
        start_s = time.perf_counter()
        manifest = await self._trainer.stage_weights(
            step % NUM_SLOTS, when_begun=lambda: begun_s.append(time.perf_counter())
        )
        published_s = time.perf_counter()
        self._weights_s["wait_s"].append(begun_s[0] - start_s)
        self._weights_s["publish_s"].append(published_s - begun_s[0])
        generators = self._generators
        generators.published(manifest.version)
        for host in range(generators.num_hosts):
            fetch_start_s = time.perf_counter()
            fetched = await generators.begin_update(host, manifest)
            if fetched is None or not fetched.is_complete:
                what = f"version {manifest.version} did not arrive at the generators of host {host}"
                raise NotProfiled(what)
            swapped = await generators.finish_update(host, manifest.version)
            pauses_s = [one.report.pause_s for one in swapped]
            self._weights_s["fetch_s"].append(time.perf_counter() - fetch_start_s - max(pauses_s))
            self._weights_s["swap_s"] += pauses_s
            for one in swapped:
                generators.record_swap(one.number)

    # ---- results, after at least one round

    def points(self) -> tuple[TrainPoint, ...]:
        """Return the optimizer steps by size."""
        return tuple(
            TrainPoint(num_rows=num_rows, num_tokens=num_tokens, step_s=Estimate.median_of(found))
            for (num_rows, num_tokens), found in self._samples.items()
        )

    def weights(self) -> WeightTimes:
        """Return the times of new weights."""
        return WeightTimes(**{field: Distribution.of(found) for field, found in self._weights_s.items()})

    def cores(self) -> float:
        """Return the number of cores that all trainer processes together keep busy while they train."""
        return statistics.median(self._cores)


def step_cases(config: RunConfig, groups: Sequence[Group]) -> list[_Case]:
    """Return the steps of a round: parts of the groups, in the run's own rows and in shorter ones."""
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


NUM_WARMUP_STEPS = 3
NUM_LOOP_STEPS = 15
"""Total number of steps, including the warm-up."""

LEARNING_RATE = 1e-9
"""So small that the policy, and therefore the lengths of its responses, stay the same."""

IDLE_S = 0.2
"""Time after which engines that were not busy are idle, in seconds."""


class Loops(Protocol):
    """The loops of a run, such as ``apps.grpo.GrpoRun``."""

    async def run(self, manager: ProcessManager) -> None:
        """Make all steps of the config."""
        ...


class MakeLoops(Protocol):
    """Creates the loops for roles that have not been used yet."""

    def __call__(
        self,
        config: RunConfig,
        prepared: Prepared,
        roles: Roles,
        *,
        recorder: RunRecorder,
        files: RunFiles,
    ) -> Loops: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopTimes:
    """Times of the loops' steps."""

    response_s: float
    """Processor seconds of controller and buffer per response."""
    score_s: float
    """Processor seconds of all scorers per response."""
    handing_over_s: float
    """Processor seconds per response of the engines' threads that receive requests and return responses."""
    run_s: float
    """Total seconds of all steps after the first ``NUM_WARMUP_STEPS``, without evaluations."""
    between_s: Distribution
    """Seconds of a step outside of waiting, training, publishing and evaluating."""


def short_run_of(config: RunConfig) -> RunConfig:
    """Return the config with ``NUM_LOOP_STEPS`` steps that learn nothing, write no checkpoint and evaluate
    one problem."""
    optimizer = config.trainer.optimizer.model_copy(update={"learning_rate": LEARNING_RATE})
    return config.model_copy(
        update={
            "max_steps": NUM_LOOP_STEPS,
            "trainer": config.trainer.model_copy(update={"optimizer": optimizer}),
            "checkpoint": config.checkpoint.model_copy(update={"every_steps": None, "folder": None}),
            "evaluation": config.evaluation.model_copy(
                update={"every_steps": NUM_LOOP_STEPS + 1, "num_problems": 1, "sets": ()}
            ),
        }
    )


async def time_loops(
    prepared: Prepared,
    roles: Roles,
    manager: ProcessManager,
    files: RunFiles,
    console: StepConsole,
    make_loops: MakeLoops,
) -> LoopTimes:
    """Make the steps of the prepared short run, and wait until its engines are idle."""
    pids: dict[str, list[int]] = defaultdict(list)
    for entry in manager.listing.entries:
        pids[entry.role].append(entry.pid)
    with _TimedRecorder(prepared, files, console, pids) as recorder:
        loops = make_loops(prepared.config, prepared, roles, recorder=recorder, files=files)
        await loops.run(manager)
    await _until_idle(roles.generators)
    return loop_times(recorder.marks[NUM_WARMUP_STEPS - 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Clocks and counts when a step was recorded."""

    at_s: float
    processor_s: float
    """Processor seconds of controller and buffer."""
    scorers_s: float
    """Processor seconds of all scorers."""
    handing_over_s: float
    """Processor seconds of the engines' threads that return responses."""
    num_responses: int
    """Number of responses that were scored."""
    times: StepTimes


def loop_times(marks: Sequence[Mark]) -> LoopTimes:
    """Return the times between the first mark and the last."""
    first, last = marks[0], marks[-1]
    between_s = []
    for before, after in itertools.pairwise(marks):
        times = after.times
        known_s = times.wait_for_batch_s + times.train_s + times.publish_weights_s + times.eval_s
        between_s.append(max(0.0, after.at_s - before.at_s - known_s))
    num_responses = max(1, last.num_responses - first.num_responses)
    return LoopTimes(
        response_s=(last.processor_s - first.processor_s) / num_responses,
        score_s=(last.scorers_s - first.scorers_s) / num_responses,
        handing_over_s=(last.handing_over_s - first.handing_over_s) / num_responses,
        run_s=last.at_s - first.at_s - sum(mark.times.eval_s for mark in marks[1:]),
        between_s=Distribution.of(between_s),
    )


class _TimedRecorder(RunRecorder):
    """The run's recorder, which also reads the clocks at every step."""

    def __init__(
        self, prepared: Prepared, files: RunFiles, console: StepConsole, pids: Mapping[str, Iterable[int]]
    ) -> None:
        """``pids`` are the processes of each role."""
        super().__init__(prepared.config, files.run_dir, console, None, prompts=prepared.prompts)
        self.marks: list[Mark] = []
        self._processors = {role: ProcessorTime(pids[role]) for role in ("buffer", "scorer")}
        self._passed_s = dict.fromkeys(self._processors, 0.0)
        self._num_responses = 0

    def record_scored(self, scores: Sequence[Score], lengths: Sequence[int]) -> None:
        self._num_responses += len(scores)
        super().record_scored(scores, lengths)

    def record(self, record: StepRecord) -> None:
        super().record(record)
        for role, processors in self._processors.items():
            self._passed_s[role] += processors.passed_s()
        self.marks.append(
            Mark(
                at_s=time.perf_counter(),
                # Without the controller's children, which are all other processes.
                processor_s=time.process_time() + self._passed_s["buffer"],
                scorers_s=self._passed_s["scorer"],
                handing_over_s=sum(engine.handing_over_s for engine in record.engines),
                num_responses=self._num_responses,
                times=record.times,
            )
        )


async def _until_idle(generators: GeneratorRouter) -> None:
    """Wait until the engines have finished the requests that the loops left in flight."""
    before_s = -1.0
    while before_s != (busy_s := sum(one.busy_s for one in await generators.stats())):
        before_s = busy_s
        await asyncio.sleep(IDLE_S)
