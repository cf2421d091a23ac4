"""Times an engine with sequences of constant numbers and lengths, for a profile of the machine.

Nothing else may be under way in the engine. What is sampled is thrown away; it is sampled as the run does, so
that cut vocabularies, records and their copies cost what they cost there.
"""

import asyncio
import time
from collections.abc import Sequence

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from forgeasync.config.generator import SamplingSection
from forgeasync.generator.engine import GeneratorEngine
from forgeasync.generator.interruption import EPISODE_ARGUMENT, GROUP_ARGUMENT, NO_GROUP, SAMPLE_ARGUMENT
from forgeasync.generator.reports import DecodeSteps, DecodeTiming, PrefillTiming


class NothingTimed(RuntimeError):
    """No step of the wanted kind was seen, for instance since the KV cache is too small."""


async def time_engine(
    engine: GeneratorEngine, timing: DecodeTiming | PrefillTiming, sampling: SamplingSection, *, seed: int
) -> float:
    """Return the seconds of one decode step, or of one prompt token.

    Raises:
        NothingTimed: no step had so many sequences that all decoded.
    """
    rng = np.random.default_rng(seed)
    num_prompts = timing.num_running if isinstance(timing, DecodeTiming) else timing.num_prompts
    # No two prompts have a prefix in common, or the engine would compute it once.
    prompts = rng.integers(0, engine.vocab_size, (num_prompts, timing.num_prompt_tokens)).tolist()
    if isinstance(timing, PrefillTiming):
        start_s = time.perf_counter()
        await _sample(engine, prompts, sampling, num_tokens=1)
        return (time.perf_counter() - start_s) / (num_prompts * timing.num_prompt_tokens)
    load = num_prompts.bit_length()
    before = engine.stats().decode_steps.get(load, DecodeSteps())
    await _sample(engine, prompts, sampling, num_tokens=timing.num_steps)
    after = engine.stats().decode_steps.get(load, DecodeSteps())
    num_steps = after.num_steps - before.num_steps
    if not num_steps:
        raise NothingTimed(
            f"of {num_prompts} sequences with {timing.num_prompt_tokens} prompt tokens no step decoded one "
            "token each: generator.kv_cache_gib or generator.max_num_seqs is too small for them"
        )
    return (after.took_s - before.took_s) / num_steps


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
