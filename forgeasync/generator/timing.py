"""Times an engine with sequences of constant numbers and lengths, for a profile of the machine.

Nothing else may be under way in the engine. What is sampled is thrown away; it is sampled as the run does, so
that cut vocabularies, records and their copies cost what they cost there.
"""

import asyncio
from collections.abc import Sequence

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from forgeasync.config import SamplingSection
from forgeasync.generator.engine import GeneratorEngine
from forgeasync.generator.interruption import EPISODE_ARGUMENT, GROUP_ARGUMENT, NO_GROUP, SAMPLE_ARGUMENT
from forgeasync.generator.reports import DecodeSteps, DecodeTiming, PrefillTiming

MOST_TRIES = 5
"""Where other processes have the cores, sequences may begin so far apart that they never all decode."""

NUM_RANDOM = 2
"""Tokens at the begin of a prompt that are drawn: no two prompts have a prefix in common, or the engine would
compute it once."""


class NothingTimed(RuntimeError):
    """No step of the wanted kind was seen, for instance since the KV cache is too small."""


async def time_engine(
    engine: GeneratorEngine, timing: DecodeTiming | PrefillTiming, sampling: SamplingSection, *, seed: int
) -> float:
    """Return the seconds of one decode step, or of one prompt token; not those between two steps.

    Raises:
        NothingTimed: no step had so many sequences that all decoded.
    """
    rng = np.random.default_rng(seed)

    def prompts(num_prompts: int) -> list[list[int]]:
        length, text = timing.num_prompt_tokens, np.array(timing.text)
        begins = rng.integers(0, len(text), (num_prompts, 1))
        found = text[(begins + np.arange(length)) % len(text)]
        num_random = min(NUM_RANDOM, length)
        found[:, :num_random] = rng.integers(0, engine.vocab_size, (num_prompts, num_random))
        return found.tolist()

    if isinstance(timing, PrefillTiming):
        before_s = engine.stats().steps_s
        await _sample(engine, prompts(timing.num_prompts), sampling, num_tokens=1)
        num_tokens = timing.num_prompts * timing.num_prompt_tokens
        return (engine.stats().steps_s - before_s) / num_tokens
    load = timing.num_running.bit_length()
    for _ in range(MOST_TRIES):
        before = engine.stats().decode_steps.get(load, DecodeSteps())
        await _sample(engine, prompts(timing.num_running), sampling, num_tokens=timing.num_steps)
        after = engine.stats().decode_steps.get(load, DecodeSteps())
        num_steps = after.num_steps - before.num_steps
        if num_steps:
            return (after.took_s - before.took_s) / num_steps
    raise NothingTimed(
        f"of {timing.num_running} sequences with {timing.num_prompt_tokens} prompt tokens no step decoded "
        f"one token each, {MOST_TRIES} times: generator.kv_cache_gib or generator.max_num_seqs is too small "
        "for them, or other processes have the cores"
    )


async def _sample(
    engine: GeneratorEngine, prompts: Sequence[list[int]], sampling: SamplingSection, *, num_tokens: int
) -> None:
    """Sample so many tokens of every prompt; none ends earlier."""

    async def one(index: int, prompt: list[int]) -> None:
        arguments = {GROUP_ARGUMENT: NO_GROUP, SAMPLE_ARGUMENT: index}
        params = SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k or engine.all_kept,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            max_tokens=num_tokens,
            ignore_eos=True,
            logprobs=0,
            seed=index,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={**arguments, EPISODE_ARGUMENT: engine.new_episode(index).number},
        )
        await engine.run_request(prompt, params)

    await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))
