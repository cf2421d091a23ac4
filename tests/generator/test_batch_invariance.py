"""With ``generator.batch_invariant`` a seeded response is the same to the last bit in any company."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from forgeasync.config import GeneratorSection, SamplingSection
from forgeasync.rollouts import Rollout
from forgeasync.testing import write_tiny_model
from tests.support.engines import ROUTING, start_engine
from tests.support.processes import run_alone

SAMPLING = SamplingSection(max_response_tokens=60)
LENGTHS = (5, 17, 30, 9, 40, 12)

Groups = list[tuple[Rollout, ...]]


async def _sample(folder: Path, is_invariant: bool) -> dict[str, Groups]:
    generator = GeneratorSection(
        max_num_seqs=32, max_num_batched_tokens=64, kv_cache_gib=0.05, batch_invariant=is_invariant
    )
    engine = await start_engine(folder, generator, records=ROUTING)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 20, length).astype(np.int32) for length in LENGTHS]

    async def group(index: int, seed: int | None) -> tuple[Rollout, ...]:
        return await engine.generate(prompt_ids_P=prompts[index], num_samples=4, sampling=SAMPLING, seed=seed)

    everything = range(len(prompts))
    alone = [await group(index, index) for index in everything]
    crowd = await asyncio.gather(
        *(group(index, index) for index in reversed(everything)),
        *(group(index, None) for index in everything),
    )
    engine.shutdown()
    return {"alone": alone, "crowd": list(crowd[: len(prompts)])[::-1]}


@pytest.mark.parametrize("is_invariant", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_company_changes_no_bit(tmp_path: Path, is_invariant: bool) -> None:
    sampled = run_alone(_sample, write_tiny_model(tmp_path / "model", scale=4.0), is_invariant)
    pairs = [
        (one, other)
        for group, same in zip(sampled["alone"], sampled["crowd"], strict=True)
        for one, other in zip(group, same, strict=True)
    ]
    equal = [np.array_equal(one.logprobs_T, other.logprobs_T) for one, other in pairs]
    if not is_invariant:
        assert not all(equal), "the option has become needless"
        return
    assert all(equal)
    for one, other in pairs:
        assert np.array_equal(one.response_ids_T, other.response_ids_T)
    assert len({one.response_ids_T.tobytes() for one, _ in pairs}) > len(LENGTHS), "draws of their own"
