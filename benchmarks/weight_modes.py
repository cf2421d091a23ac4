"""Tokens that an engine does not generate around an update, by what happens to running sequences.

One sequence of ten times the mean length has just begun when the update comes; the others follow each other.
"""

import asyncio
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from weight_clock import StepClock

from forgeasync.config import Interruption, KvAfterSwap
from forgeasync.weights import Manifest

if TYPE_CHECKING:
    from forgeasync.generator import GeneratorEngine, WeightReceiver

MEAN_LENGTH, LONG_LENGTH = 32, 320
PROMPT = [3, 4, 5, 6, 7, 8, 9, 10]
RATE_S = 1.5
"""Seconds after an update in which tokens are counted for the rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeRun:
    """One update."""

    update_s: float
    num_tokens: int
    """Generated from the start of the update to its end."""
    tokens_per_s: float
    """Tokens per second from the start of the update to ``RATE_S`` after its end."""


class Streams:
    """Sequences that follow each other in an engine, until they are stopped."""

    def __init__(self, engine: "GeneratorEngine", name: str) -> None:
        self._engine = engine
        self._name = name
        self._number = itertools.count()
        self._running: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False

    def start(self, lengths: Iterable[int]) -> None:
        """Begin a stream of sequences of these lengths."""
        self._tasks.append(asyncio.create_task(self._stream(lengths)))

    async def _stream(self, lengths: Iterable[int]) -> None:
        for length in lengths:
            if self._is_stopping:
                return
            await self._decode(length)

    async def _decode(self, num_tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from forgeasync.generator import GROUP_ARGUMENT

        params = SamplingParams(
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            # No group of the replay buffer.
            extra_args={GROUP_ARGUMENT: -1},
        )
        request_id = f"{self._name}-{next(self._number)}"
        # Where updates that drain hold back what is new.
        async with self._engine._gate.inside():
            self._running.add(request_id)
            async for _ in self._engine._llm.generate({"prompt_token_ids": PROMPT}, params, request_id):
                pass
            self._running.discard(request_id)

    async def stop(self) -> None:
        """End all of them."""
        self._is_stopping = True
        while not all(task.done() for task in self._tasks):
            await self._engine._llm.abort(list(self._running))
            await asyncio.wait(self._tasks, timeout=0.05)
        for task in self._tasks:
            task.result()


async def run_mode(
    engine: "GeneratorEngine",
    clock: StepClock,
    receiver: "WeightReceiver",
    manifest: Manifest,
    mode: Interruption,
    num_sequences: int,
) -> ModeRun:
    """One update under a mode, which stays the engine's."""
    from forgeasync.generator import WeightUpdates

    engine._updates = WeightUpdates(
        engine._client, engine._groups, engine._gate, interruption=mode, kv_cache=KvAfterSwap.KEEP
    )

    streams = Streams(engine, f"{mode}-{manifest.version}")
    for index in range(1, num_sequences):
        lengths = np.random.default_rng(index).integers(1, 2 * MEAN_LENGTH, 10_000)
        streams.start(lengths.tolist())
    await clock.steps(2 * MEAN_LENGTH)
    streams.start([LONG_LENGTH])
    await clock.steps(3)
    start_s, first_token = time.perf_counter(), clock.num_tokens
    fetch = await receiver.begin(manifest)
    assert fetch.is_complete, fetch
    await receiver.stage()
    await receiver.finish()
    update_s, num_tokens = time.perf_counter() - start_s, clock.num_tokens - first_token
    await asyncio.sleep(RATE_S)
    tokens_per_s = (clock.num_tokens - first_token) / (time.perf_counter() - start_s)
    await streams.stop()
    return ModeRun(update_s=update_s, num_tokens=num_tokens, tokens_per_s=tokens_per_s)
