"""Groups that are cancelled, prefixes across versions, and seeds, with real engines."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from forgeasync.config import GeneratorSection, SamplingSection, WeightsSection
from forgeasync.generator import GroupCancelled
from forgeasync.rollouts import Rollout
from forgeasync.testing import write_tiny_model
from tests.generator.conftest import Models, Seen
from tests.support.engines import (
    ROUTING,
    assert_logprobs,
    expected,
    let_decode,
    revealing_weights,
    sample_all,
    start_engine,
    update,
)
from tests.support.processes import run_alone

GENERATOR = GeneratorSection(max_num_seqs=8, max_num_batched_tokens=512, kv_cache_gib=0.02)
ONE_AT_A_TIME = GeneratorSection(max_num_seqs=1, max_num_batched_tokens=512, kv_cache_gib=0.02)
LONG = SamplingSection(max_response_tokens=100)
SHORT = SamplingSection(temperature=0.8, top_k=20, top_p=0.9, max_response_tokens=20)
PROMPT = np.arange(3, 9, dtype=np.int32)
BLOCK = 128
"""Tokens of a cache block; a prompt that is longer has a prefix to share."""


async def _cancel(folder: Path) -> Seen:
    """Four groups of two with eight places, one of them unnamed, and a fifth that waits for a place."""
    seen = Seen()
    engine = await start_engine(folder, GENERATOR)

    def group(group_id: int | None) -> asyncio.Task[tuple[Rollout, ...]]:
        return asyncio.create_task(
            engine.generate(prompt_ids_P=PROMPT, num_samples=2, sampling=LONG, group_id=group_id)
        )

    unnamed, *groups = [group(None), *(group(group_id) for group_id in range(3))]
    await let_decode(engine, 3)
    with pytest.raises(ValueError, match="group_id = 1: is being sampled already"):
        await group(1)
    # All eight places are taken.
    groups.append(group(3))
    await let_decode(engine, 3)
    seen.reports = [await update(engine, 1, revealing_weights(folder, 4))]
    await engine.cancel([0, 2, 3, 17])
    await let_decode(engine, 3)
    seen.reports.append(await update(engine, 2, revealing_weights(folder, 5)))
    seen.answers = await asyncio.gather(*groups, return_exceptions=True)
    seen.unnamed = await unnamed
    seen.afterwards = await group(0)
    seen.num_left_behind = await engine._client.between_steps(lambda core: len(core.scheduler.requests))
    engine.shutdown()
    return seen


async def _prefix(folders: list[Path], *, across_versions: bool) -> list[Rollout]:
    """Requests of one prompt, one after the other, with an update soon."""
    weights = WeightsSection(prefix_cache_across_versions=across_versions)
    engine = await start_engine(folders[0], ONE_AT_A_TIME, weights)
    running = asyncio.create_task(sample_all(engine, [long_prompt()], SHORT, num_samples=8))
    await let_decode(engine, 2)
    await update(engine, 1, load_file(folders[1] / "model.safetensors"))
    rollouts = await running
    engine.shutdown()
    return rollouts


async def _seeded(folder: Path, max_num_batched_tokens: int) -> list[list[list[int]]]:
    """Groups with seed 7, alone and beside one with seed 8; prompts are computed in chunks of the budget."""
    section = GENERATOR.model_copy(update={"max_num_batched_tokens": max_num_batched_tokens})
    engine = await start_engine(folder, section)

    async def sample(seed: int) -> list[list[int]]:
        rollouts = await engine.generate(prompt_ids_P=long_prompt(), num_samples=3, sampling=SHORT, seed=seed)
        return [rollout.response_ids_T.tolist() for rollout in rollouts]

    alone = await sample(7)
    again, other = await asyncio.gather(sample(7), sample(8))
    engine.shutdown()
    return [alone, again, other]


def _observe(folders: list[Path], revealing: Path) -> Seen:
    return Seen(
        cancelled=asyncio.run(_cancel(revealing)),
        salted=asyncio.run(_prefix(folders, across_versions=False)),
        shared=asyncio.run(_prefix(folders, across_versions=True)),
        whole_prompts=asyncio.run(_seeded(folders[0], 1024)),
        chunked_prompts=asyncio.run(_seeded(folders[0], 50)),
    )


def long_prompt() -> np.ndarray:
    return np.random.default_rng(1).integers(3, 20, BLOCK + 2).astype(np.int32)


@pytest.fixture(scope="module")
def observed(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Seen:
    # Token 3 throughout: no response ends before its last token.
    revealing = write_tiny_model(tmp_path_factory.mktemp("revealing") / "hf", num_experts=8, top_k=3)
    save_file(revealing_weights(revealing, 3), revealing / "model.safetensors", {"format": "pt"})
    return run_alone(_observe, folders, revealing)


def test_cancelled_groups_end_and_others_go_on(observed: Seen) -> None:
    seen = observed.cancelled
    assert [isinstance(answer, GroupCancelled) for answer in seen.answers] == [True, False, True, True]
    for rollout in (*seen.unnamed, *seen.answers[1]):
        assert [span.version for span in rollout.version_spans] == [0, 1, 2]
    assert [rollout.num_response_tokens for rollout in seen.afterwards] == [100, 100]
    assert seen.num_left_behind == 0


def test_an_update_reports_how_far_the_groups_are(observed: Seen) -> None:
    first, second = ({one.group_id: one for one in report.progress} for report in observed.cancelled.reports)
    assert sorted(first) == [0, 1, 2, 3], "the unnamed one is nobody's"
    assert {one.version for one in first.values()} == {1}
    assert {one.num_running for one in first.values()} == {2}
    assert first[3].num_tokens == 0
    rollouts = observed.cancelled.answers[1]
    assert first[1].num_tokens == sum(rollout.version_spans[0].end for rollout in rollouts)
    assert list(second) == [1]
    assert second[1].num_tokens == sum(rollout.version_spans[1].end for rollout in rollouts)


def test_a_waiting_request_never_meets_a_prefix_of_older_weights(observed: Seen, models: Models) -> None:
    last = observed.salted[-1]
    assert [span.version for span in last.version_spans] == [1]
    assert_logprobs(last, expected(models, last, recomputed=True), SHORT)


def test_prefixes_are_served_across_versions_if_asked_for(observed: Seen, models: Models) -> None:
    first, last = observed.shared[0], observed.shared[-1]
    assert [span.version for span in last.version_spans] == [1]
    old, new = (expected(models, one, recomputed=True).router_logits_SME[:BLOCK] for one in (first, last))

    def choices(logits_SME: np.ndarray) -> np.ndarray:
        return np.sort(np.argsort(logits_SME, -1)[..., -3:], -1)

    found = last.routed_experts.expert_ids_RMK[:BLOCK]
    assert (found == choices(old)).mean() > 0.99, "the block was not served"
    assert (found == choices(new)).mean() < 0.9, "the two versions choose alike"


def test_samples_of_a_seed_are_reproducible_in_company_and_in_chunks_and_differ(
    observed: Seen,
) -> None:
    alone, again, other = observed.whole_prompts
    assert alone == again
    assert len({tuple(sample) for sample in alone + other}) == 6
    assert observed.chunked_prompts == observed.whole_prompts


COMPANY = SamplingSection(max_response_tokens=60)
LENGTHS = (5, 17, 30, 9, 40, 12)


async def _alone_and_in_a_crowd(folder: Path, is_invariant: bool) -> list[tuple[Rollout, Rollout]]:
    """The same seeded responses, sampled alone and among others."""
    generator = GeneratorSection(
        max_num_seqs=32, max_num_batched_tokens=64, kv_cache_gib=0.05, batch_invariant=is_invariant
    )
    engine = await start_engine(folder, generator, records=ROUTING)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 20, length).astype(np.int32) for length in LENGTHS]

    async def group(index: int, seed: int | None) -> tuple[Rollout, ...]:
        return await engine.generate(prompt_ids_P=prompts[index], num_samples=4, sampling=COMPANY, seed=seed)

    everything = range(len(prompts))
    alone = [await group(index, index) for index in everything]
    crowd = await asyncio.gather(
        *(group(index, index) for index in reversed(everything)),
        *(group(index, None) for index in everything),
    )
    engine.shutdown()
    same = crowd[: len(prompts)][::-1]
    return [pair for groups in zip(alone, same, strict=True) for pair in zip(*groups, strict=True)]


@pytest.mark.parametrize("is_invariant", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_with_batch_invariant_company_changes_no_bit(tmp_path: Path, is_invariant: bool) -> None:
    model = write_tiny_model(tmp_path / "model", scale=4.0)
    pairs = run_alone(_alone_and_in_a_crowd, model, is_invariant)
    equal = [np.array_equal(one.logprobs_T, other.logprobs_T) for one, other in pairs]
    if not is_invariant:
        assert not all(equal), "the option has become needless"
        return
    assert all(equal)
    for one, other in pairs:
        assert np.array_equal(one.response_ids_T, other.response_ids_T)
    assert len({one.response_ids_T.tobytes() for one, _ in pairs}) > len(LENGTHS), "draws of their own"
