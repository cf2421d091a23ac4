"""Requests of a recorded run sampled again: on another engine, in other batches, under the same versions."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from forgeasync.config import GeneratorSection, Interruption, KvAfterSwap, SamplingSection, WeightsSection
from forgeasync.generator import RecordedRequest, ReexecutedVersion, first_difference
from forgeasync.rollouts import (
    EVERY_HOST,
    CaptureSpec,
    Group,
    KeptTokens,
    PayloadWriter,
    Rollout,
    SampledTokens,
    Task,
)
from forgeasync.runtime import SampledRollout, store_group
from tests.generator.conftest import Seen, make_prompts
from tests.support.engines import let_decode, start_engine, update
from tests.support.processes import run_alone

SAMPLING = SamplingSection(temperature=0.8, top_k=20, top_p=0.9, max_response_tokens=26)
RECORDS = CaptureSpec(routing=True, kept_tokens=True, execution=True)
# Prompts are computed in chunks, so a swap finds some of them half computed.
RECORDED = GeneratorSection(
    max_num_seqs=32, max_num_batched_tokens=48, kv_cache_gib=0.05, batch_invariant=True
)
AGAIN = RECORDED.model_copy(update={"max_num_seqs": 64, "max_num_batched_tokens": 512, "kv_cache_gib": 0.1})
LENGTHS = (3, 9, 33, 60, 112, 116, 120, 122)
SEED = 5
TASK = Task(task_id="a", prompt="", answer="", source_index=0, source="sums")
MODES = {
    "in_flight": WeightsSection(),
    "recompute": WeightsSection(kv_cache=KvAfterSwap.RECOMPUTE),
    "abort_and_resume": WeightsSection(interruption=Interruption.ABORT_AND_RESUME),
}


async def _execute_twice(folders: list[Path], vocab_size: int, root: Path, mode: str) -> Seen:
    seen = Seen()
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    engine = await start_engine(folders[0], RECORDED, MODES[mode], records=RECORDS)
    prompts = make_prompts(vocab_size, LENGTHS, num_shared=2)

    async def sample(number: int) -> tuple[Rollout, ...]:
        return await engine.generate(
            prompt_ids_P=prompts[number], num_samples=2, sampling=SAMPLING, seed=SEED + number
        )

    running = [asyncio.create_task(sample(number)) for number in range(len(prompts))]
    for version in (1, 2):
        await let_decode(engine, 6)
        await update(engine, version, weights[version])
    seen.groups = await asyncio.gather(*running)
    engine.shutdown()

    engine = await start_engine(folders[0], AGAIN, MODES[mode], records=RECORDS)
    # Imports vLLM.
    from forgeasync.generator import EngineReexecution, recorded_requests

    writer = PayloadWriter(root, EVERY_HOST, 2**24)
    requests: list[RecordedRequest] = []
    for number, rollouts in enumerate(seen.groups):
        sampled = [
            SampledRollout(branches=(one,), finish_reason=one.finish_reason, episode=index)
            for index, one in enumerate(rollouts)
        ]
        stored = store_group(writer, sampled, group_id=number, generator_rank=0)
        assert isinstance(stored, tuple)
        group = Group(group_id=number, draw_id=number, task=TASK, rollouts=stored)
        requests += recorded_requests(group, seed=SEED + number)
    again = await EngineReexecution.begin(engine, SAMPLING)
    seen.versions = []
    for version in range(3):
        if version:
            await update(engine, version, weights[version])
        seen.versions.append(await again.run(version, requests if version == 0 else []))
    engine.shutdown()
    return seen


@pytest.fixture(scope="module", params=list(MODES))
def seen(request: pytest.FixtureRequest, folders: list[Path], facts: Any, tmp_path_factory: Any) -> Seen:
    return run_alone(
        _execute_twice, folders, facts.vocab_size, tmp_path_factory.mktemp("payloads"), request.param
    )


def test_every_request_has_the_same_bits_again(seen: Seen) -> None:
    versions: list[ReexecutedVersion] = seen.versions
    assert [one.differences for one in versions] == [(), (), ()]
    assert versions[-1].num_waiting == 0
    rollouts = [rollout for group in seen.groups for rollout in group]
    assert sum(one.num_tokens for one in versions) == sum(one.num_response_tokens for one in rollouts)
    # The comparison is about sequences that crossed swaps, and about prompts that were half computed at one.
    assert sum(len(one.version_spans) > 1 for one in rollouts) >= 4
    assert any(span.request for one in rollouts for span in one.request_spans)


REQUEST_IDS = np.asarray([4, 5, 6], np.int32)


def recorded() -> RecordedRequest:
    return RecordedRequest(
        draw_id=7,
        episode=1,
        agent=0,
        branch=0,
        start=10,
        seed=0,
        prompt_ids=[1, 2],
        versions=((1, 3), (3, 4)),
        ids_N=REQUEST_IDS,
        logprobs_N=np.asarray([-0.5, -0.25, -1.0], np.float32),
        # Inputs: two of the prompt, and two of the three sampled tokens.
        expert_ids_RMK=np.asarray([[[0, 1]], [[0, 2]], [[1, 2]], [[0, 3]]], np.int16),
        kept_tokens=KeptTokens.from_rows([[4, 9], [5], [6, 7]], vocab_size=20),
    )


def sampled(**changes: Any) -> SampledTokens:
    one = recorded()
    rows = np.asarray([[[1, 0]], [[2, 0]], [[2, 1]], [[3, 0]]], np.uint8)
    same = SampledTokens(
        ids_T=one.ids_N,
        logprobs_T=one.logprobs_N,
        version_spans=(),
        expert_ids_RMK=rows,
        kept_tokens=one.kept_tokens,
    )
    return dataclasses.replace(same, **changes)


def test_experts_are_sets_and_equal_tokens_are_no_difference() -> None:
    assert first_difference(recorded(), sampled()) is None


@pytest.mark.parametrize(
    ("changes", "position", "version", "what"),
    [
        ({"ids_T": np.asarray([4, 5, 8], np.int32)}, 12, 4, "id"),
        ({"logprobs_T": np.asarray([-0.5, -0.25000003, -1.0], np.float32)}, 11, 4, "log-probability"),
        (
            {"expert_ids_RMK": np.asarray([[[1, 0]], [[2, 0]], [[2, 3]], [[3, 0]]], np.uint8)},
            11,
            4,
            "experts of input 2 in MoE layer 0",
        ),
        ({"kept_tokens": KeptTokens.from_rows([[4], [5], [6, 7]], vocab_size=20)}, 10, 3, "kept set"),
    ],
)
def test_the_first_bit_that_differs_is_named(
    changes: dict[str, Any], position: int, version: int, what: str
) -> None:
    found = first_difference(recorded(), sampled(**changes))
    assert found is not None
    assert (found.position, found.version, found.what) == (position, version, what)
    assert (found.draw_id, found.episode) == (7, 1)


def test_a_response_that_ends_too_early_is_a_difference() -> None:
    short = sampled().first(2)
    found = first_difference(recorded(), short)
    assert found is not None and (found.position, found.found) == (12, "none: the response has ended")
    assert first_difference(recorded(), None) is not None
