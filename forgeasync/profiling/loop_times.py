"""A few steps of the run itself: what its loops need, which no part that is timed alone shows."""

import asyncio
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from forgeasync.actors import GeneratorRouter, Procs
from forgeasync.config import RunConfig
from forgeasync.controller import Prepared, Roles, RunFiles, RunRecorder, StepRecord, StepTimes
from forgeasync.observability import StepConsole
from forgeasync.profile import Distribution
from forgeasync.profiling.processor_time import ProcessorTime
from forgeasync.rollouts import Score

NUM_WARMUP_STEPS = 3
NUM_STEPS = 15
"""Steps in all."""

LEARNING_RATE = 1e-9
"""The policy stays as it is, so that its responses do."""

IDLE_S = 0.2
"""Engines that were not busy for so long have nothing left to do."""


class Loops(Protocol):
    """The loops of a run, such as ``apps.grpo.GrpoRun``."""

    async def run(self, fleet: Procs) -> None:
        """Make all steps of the config."""
        ...


class MakeLoops(Protocol):
    """Makes them for procs that have done nothing yet."""

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
    """What the steps have shown."""

    response_s: float
    """Processor seconds of controller and buffer for each response."""
    score_s: float
    """Processor seconds of all scorers for each response."""
    run_s: float
    """Seconds that all steps but the first ``NUM_WARMUP_STEPS`` took together, without evaluations."""
    between_s: Distribution
    """Seconds of a step in which training neither waited nor trained nor published."""

    def rest_s(self, *, controller_s: float) -> float:
        """Processor seconds for each response besides ``controller_s``."""
        return max(0.0, self.response_s - controller_s)


def short_run_of(config: RunConfig) -> RunConfig:
    """Return the config with so few steps, which learn nothing, write no checkpoint and evaluate next to
    nothing."""
    optimizer = config.trainer.optimizer.model_copy(update={"learning_rate": LEARNING_RATE})
    return config.model_copy(
        update={
            "max_steps": NUM_STEPS,
            "trainer": config.trainer.model_copy(update={"optimizer": optimizer}),
            "checkpoint": config.checkpoint.model_copy(update={"every_steps": None, "folder": None}),
            "evaluation": config.evaluation.model_copy(
                update={"every_steps": NUM_STEPS + 1, "num_problems": 1, "sets": ()}
            ),
        }
    )


async def time_loops(
    prepared: Prepared,
    roles: Roles,
    fleet: Procs,
    files: RunFiles,
    console: StepConsole,
    make_loops: MakeLoops,
) -> LoopTimes:
    """Make ``NUM_STEPS`` steps of the prepared short run, and wait until its engines are idle."""
    pids = {
        role: [one.pid for one in fleet.listing.entries if one.role == role] for role in ("buffer", "scorer")
    }
    with _TimedRecorder(prepared, files, console, buffers=pids["buffer"], scorers=pids["scorer"]) as recorder:
        loops = make_loops(prepared.config, prepared, roles, recorder=recorder, files=files)
        await loops.run(fleet)
    await _until_idle(roles.generators)
    return loop_times(recorder.marks[NUM_WARMUP_STEPS - 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What had passed when a step was recorded."""

    at_s: float
    processor_s: float
    """Of controller and buffer."""
    scorers_s: float
    """Of all scorers."""
    num_responses: int
    """Those that were scored."""
    times: StepTimes


def loop_times(marks: Sequence[Mark]) -> LoopTimes:
    """Return what passed between the first of the marks and the last."""
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
        run_s=last.at_s - first.at_s - sum(mark.times.eval_s for mark in marks[1:]),
        between_s=Distribution.of(between_s),
    )


class _TimedRecorder(RunRecorder):
    """The run's recorder, which looks at the clocks at every step."""

    def __init__(
        self,
        prepared: Prepared,
        files: RunFiles,
        console: StepConsole,
        *,
        buffers: Iterable[int],
        scorers: Iterable[int],
    ) -> None:
        super().__init__(prepared.config, files.run_dir, console, None, prompts=prepared.prompts)
        self.marks: list[Mark] = []
        self._buffers = ProcessorTime(buffers)
        self._buffers_s = 0.0
        self._scorers = ProcessorTime(scorers)
        self._scorers_s = 0.0
        self._num_responses = 0

    def record_scored(self, scores: Sequence[Score], lengths: Sequence[int]) -> None:
        self._num_responses += len(scores)
        super().record_scored(scores, lengths)

    def record(self, record: StepRecord) -> None:
        super().record(record)
        self._buffers_s += self._buffers.passed_s()
        self._scorers_s += self._scorers.passed_s()
        self.marks.append(
            Mark(
                at_s=time.perf_counter(),
                # Without its children, which are all the other procs.
                processor_s=time.process_time() + self._buffers_s,
                scorers_s=self._scorers_s,
                num_responses=self._num_responses,
                times=record.times,
            )
        )


async def _until_idle(generators: GeneratorRouter) -> None:
    """Wait until the engines have ended what the loops have left them with."""
    before_s = -1.0
    while before_s != (busy_s := sum(one.busy_s for one in await generators.stats())):
        before_s = busy_s
        await asyncio.sleep(IDLE_S)
