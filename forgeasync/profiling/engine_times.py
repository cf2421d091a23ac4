"""Times of one engine: a grid of decode steps, and prompts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from forgeasync.actors import GeneratorActor
from forgeasync.config import SamplingSection
from forgeasync.generator import DecodeTiming, PrefillTiming
from forgeasync.profile import DecodePoint, Estimate

NUM_STEPS = 16
"""Decode steps of each sequence in a round."""

SHORT_PROMPT = 16
"""Prompt tokens of the lower row of the grid."""

NUM_ROUNDS = 3
"""Rounds of prompts, after one that warms up."""

PREFILL_BATCHES = 4
"""A round of prompts has so many times the tokens that the engine computes at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What bounds the grid."""

    max_num_seqs: int
    max_context_length: int
    max_kv_tokens: int
    max_num_batched_tokens: int
    """Prompt tokens that the engine computes at once."""


def decode_grid(limits: EngineLimits, text: tuple[int, ...]) -> list[DecodeTiming]:
    """Return powers of two up to the most sequences, each with one or two lengths of prompts, which are cut
    from ``text``."""
    numbers = list(_powers(limits.max_num_seqs))
    # The longest that all sequences can have at once, with a tenth of the cache to spare.
    room = int(0.9 * limits.max_kv_tokens / limits.max_num_seqs)
    longest = min(limits.max_context_length, room) - NUM_STEPS - 1
    lengths = sorted({min(SHORT_PROMPT, max(1, longest)), max(1, longest)})
    return [
        DecodeTiming(num_running=num, num_prompt_tokens=length, num_steps=NUM_STEPS, text=text)
        for num in numbers
        for length in lengths
    ]


def _powers(highest: int) -> Iterator[int]:
    number = 1
    while number < highest:
        yield number
        number *= 2
    yield highest


class DecodeTimer:
    """Has one engine make the steps of a grid, in rounds.

    A point has few steps in a round, and what others do makes them longer: rounds are made at different
    moments of a profile, and medians count.
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
        """Time every point once; the first round warms up and does not count."""
        for timing, samples in zip(self._grid, self._samples, strict=True):
            step_s = await self._engine.time_engine.call_one(timing, self._sampling, self._num_rounds)
            if self._num_rounds:
                samples.append(step_s)
            on_point()
        self._num_rounds += 1

    def points(self) -> tuple[DecodePoint, ...]:
        """What the rounds have shown so far; there were two."""
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
    limits: EngineLimits,
    sampling: SamplingSection,
    *,
    text: tuple[int, ...],
    num_prompt_tokens: int,
) -> Estimate:
    """Return the prompt tokens that an engine computes a second, in prompts of such a length, cut from
    ``text``."""
    num_tokens = min(PREFILL_BATCHES * limits.max_num_batched_tokens, limits.max_kv_tokens // 2)
    num_prompts = max(1, min(num_tokens // num_prompt_tokens, limits.max_num_seqs))
    timing = PrefillTiming(num_prompts=num_prompts, num_prompt_tokens=num_prompt_tokens, text=text)
    rates = []
    for number in range(NUM_ROUNDS + 1):
        token_s = await engine.time_engine.call_one(timing, sampling, number)
        if number:
            rates.append(1.0 / token_s)
    return Estimate.of(rates)
