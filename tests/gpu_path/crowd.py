"""Groups under everything that happens in a busy engine, sampled by either of vLLM's model runners."""

import asyncio
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from forgeasync.config import GeneratorSection, SamplingSection
from forgeasync.rollouts import LoggedTurn, Rollout, group_turns, read_in_flight
from tests.support.engines import start_engine

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.core import EngineCore

    from forgeasync.generator import GeneratorEngine

GENERATOR = GeneratorSection(
    max_num_seqs=8,
    # Prompts are computed in chunks of at most 48 tokens, and there is room for 5 cache blocks of 128 tokens.
    max_num_batched_tokens=48,
    kv_cache_gib=0.00062,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Groups that are sampled at once."""

    prompts: Sequence[np.ndarray]
    num_samples: int
    sampling: SamplingSection
    drawn: Sequence[Rollout] = ()
    """Rollouts of another engine, whose tokens take the place of this engine's own draws. It computes its
    distributions and draws from them all the same: vLLM's trace replay, which only the GPU's runner has."""


@dataclass(slots=True, kw_only=True)
class Happened:
    """What the engine went through."""

    num_preemptions: int = 0
    num_prefix_hits: int = 0
    num_chunks: int = 0
    """Parts of prompts that were not their last."""
    most_at_once: int = 0
    """Requests in one forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    rollouts: dict[str, list[Rollout]]
    """The samples of all prompts, one after another, by the name of their round."""
    logs: dict[str, list[LoggedTurn]] = field(default_factory=dict)
    """The same as they were logged in flight."""
    happened: Happened = field(default_factory=Happened)


async def sample_rounds(folder: Path, rounds: Mapping[str, Round]) -> Sampled:
    """Sample one round after another on one engine of this process."""
    from forgeasync.generator import engine as engine_module

    if any(one.drawn for one in rounds.values()):
        engine_module.AsyncEngineArgs = functools.partial(
            engine_module.AsyncEngineArgs, enable_trace_replay=True
        )
    log = folder.parent / f"in-flight-{os.getpid()}"
    engine = await start_engine(folder, GENERATOR, in_flight=log)
    sampled = Sampled(rollouts={})
    await engine.between_steps(lambda core: _watch(core, sampled.happened))
    for name, one in rounds.items():
        _replay(engine, one)
        groups = await asyncio.gather(
            *(
                engine.generate(
                    prompt_ids_P=prompt,
                    num_samples=one.num_samples,
                    sampling=one.sampling,
                    seed=seed,
                    group_id=seed,
                )
                for seed, prompt in enumerate(one.prompts)
            )
        )
        sampled.rollouts[name] = [rollout for group in groups for rollout in group]
        read = read_in_flight(log, range(len(groups)))
        sampled.logs[name] = [turn for seed in sorted(read.groups) for turn in group_turns(read.groups[seed])]
    engine.shutdown()
    return sampled


def _replay(engine: "GeneratorEngine", one: Round) -> None:
    """Give every request of the round the tokens that were drawn for it, found by its seed."""
    from forgeasync.generator import part_seed

    traces = {}
    for number, rollout in enumerate(one.drawn):
        seed, sample = divmod(number, one.num_samples)
        traces[part_seed(seed, sample=sample, part=0)] = rollout.response_ids_T.tolist()
    run_request = type(engine).run_request

    async def run(prompt_ids: list[int], params: "SamplingParams") -> "RequestOutput":
        params.trace_decode_token_ids = traces.get(params.seed)
        return await run_request(engine, prompt_ids, params)

    engine.run_request = run


def _watch(core: "EngineCore", happened: Happened) -> None:
    scheduler = core.scheduler
    preempt, schedule = scheduler._preempt_request, scheduler.schedule
    find_prefix = scheduler.kv_cache_manager.get_computed_blocks

    def count_preemptions(*arguments: object, **named: object) -> None:
        happened.num_preemptions += 1
        preempt(*arguments, **named)

    def count_hits(request: object) -> object:
        found = find_prefix(request)
        happened.num_prefix_hits += found[1] > 0
        return found

    def count_chunks(*arguments: object) -> object:
        output = schedule(*arguments)
        happened.most_at_once = max(happened.most_at_once, len(output.num_scheduled_tokens))
        for one in output.num_scheduled_tokens:
            # The scheduler has counted the tokens of this step already.
            request = scheduler.requests[one]
            happened.num_chunks += request.num_computed_tokens < request.num_prompt_tokens
        return output

    scheduler._preempt_request = count_preemptions
    scheduler.kv_cache_manager.get_computed_blocks = count_hits
    scheduler.schedule = count_chunks
