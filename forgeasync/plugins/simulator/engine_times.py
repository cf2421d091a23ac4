"""Times of engines, a grid of decode steps and prompts, and the processor time of processes."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence

import psutil

from forgeasync.config import RunConfig, SamplingSection
from forgeasync.generator import DecodeTiming, PrefillTiming
from forgeasync.plugins.simulator.profile import DecodePoint, Estimate, powers_of_two
from forgeasync.runtime import GeneratorActor

NUM_STEPS = 16
"""Decode steps of each sequence in a round."""

SHORT_PROMPT = 16
"""Prompt tokens of the lower row of the grid."""

NUM_ROUNDS = 3
"""Rounds of prompts, after one that warms up."""

PREFILL_BATCHES = 4
"""A round of prompts has as many tokens as this number of batches that the engine computes at once."""


def decode_grid(
    text: tuple[int, ...], *, max_num_seqs: int, max_context_length: int, max_kv_tokens: int
) -> list[DecodeTiming]:
    """Return powers of two up to the most sequences, each with one or two lengths of prompts.

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
    """Has one engine make the steps of a grid, in rounds.

    A point has few steps in a round, and other work on the machine makes them longer. So rounds are made at
    different moments of a profile, and medians count.
    """

    def __init__(
        self, engine: GeneratorActor, grid: Sequence[DecodeTiming], sampling: SamplingSection
    ) -> None:
        self._engine = engine
        self._grid = grid
        self._sampling = sampling
        self._num_rounds = 0
        self._samples: list[list[float]] = [[] for _ in grid]
        """Seconds of each point of the grid."""

    @property
    def num_points(self) -> int:
        return len(self._grid)

    async def round(self, on_point: Callable[[], None]) -> None:
        """Time every point once. The first round warms up and does not count."""
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
                # Halfway through the steps.
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
    """Return how many tokens of prompts an engine computes per second, in prompts of one length cut from
    ``text``."""
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


class ProcessGone(RuntimeError):
    """A process whose time is measured has ended, and its seconds are lost."""


class ProcessorTime:
    """Processor seconds of some processes of this machine, with all that they have started.

    Raises:
        ProcessGone: one of the processes has ended.
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
                raise ProcessGone(f"process {pid} has ended while its processor time was measured") from error
            for one in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = one.cpu_times()
                    # With those of children that have ended: verifiers fork.
                    total_s += times.user + times.system + times.children_user + times.children_system
        return total_s


class OtherLoad:
    """The share of this machine's cores that other processes take."""

    def __init__(self) -> None:
        self._own = ProcessorTime([os.getpid()])
        self._start_s, self._busy_s = time.perf_counter(), _busy_s()

    def share(self) -> float:
        """Return their share of all cores since this object was made, from 0 to 1."""
        passed_s = time.perf_counter() - self._start_s
        others_s = _busy_s() - self._busy_s - self._own.passed_s()
        return min(1.0, max(0.0, others_s / (passed_s * psutil.cpu_count())))


def _busy_s() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait
