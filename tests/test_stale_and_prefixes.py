"""Groups cancelled for their age, prefixes across versions, and seeds, with real engines."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from forgeasync.config.schema import GeneratorSection, Interruption, SamplingSection, WeightsSection
from forgeasync.data.rollout import Rollout
from forgeasync.sampler.swap import GroupCancelled, SwapReport
from tests.support.engines import (
    assert_logprobs,
    expected,
    let_decode,
    revealing_weights,
    sample_all,
    start_engine,
    update,
)
from tests.support.models import write_random_model
from tests.support.processes import run_alone

GENERATOR = GeneratorSection(max_num_seqs=8, max_num_batched_tokens=512, kv_cache_gib=0.02)
ONE_AT_A_TIME = GeneratorSection(max_num_seqs=1, max_num_batched_tokens=512, kv_cache_gib=0.02)
LONG = SamplingSection(max_response_tokens=100)
SHORT = SamplingSection(temperature=0.8, top_k=20, top_p=0.9, max_response_tokens=20)
PROMPT = np.arange(3, 9, dtype=np.int32)
BLOCK = 128
"""Tokens of a cache block; a prompt that is longer has a prefix to share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """Three cancellable groups of two, one that is not, and one of which nothing had started."""

    reports: list[SwapReport]
    num_cancelled_groups: int
    evaluated: tuple[Rollout, ...]
    waiting: tuple[Rollout, ...]
    afterwards: tuple[Rollout, ...]
    num_left_behind: int


async def _cancel(folder: Path) -> Cancelled:
    weights = WeightsSection(interruption=Interruption.CANCEL_STALE)
    engine = await start_engine(folder, GENERATOR, weights, max_off_policy_steps=1)

    def group(*, may_cancel: bool = True) -> asyncio.Task[tuple[Rollout, ...]]:
        return asyncio.create_task(
            engine.generate(prompt_ids_P=PROMPT, num_samples=2, sampling=LONG, may_cancel=may_cancel)
        )

    evaluated, *groups = [group(may_cancel=False), *(group() for _ in range(3))]
    await let_decode(engine, 3)
    # All eight places are taken.
    waiting = group()
    reports = []
    for version in (1, 2, 3):
        await let_decode(engine, 3)
        reports.append(await update(engine, version, revealing_weights(folder, 3 + version)))
    answers = await asyncio.gather(*groups, return_exceptions=True)
    seen = Cancelled(
        reports=reports,
        num_cancelled_groups=sum(isinstance(answer, GroupCancelled) for answer in answers),
        evaluated=await evaluated,
        waiting=await waiting,
        afterwards=await group(),
        num_left_behind=await engine._client.between_steps(lambda core: len(core.scheduler.requests)),
    )
    engine.shutdown()
    return seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixed:
    """Requests of one prompt, one after the other, with an update soon."""

    first: Rollout
    last: Rollout


async def _prefix(folders: list[Path], *, across_versions: bool) -> Prefixed:
    weights = WeightsSection(prefix_cache_across_versions=across_versions)
    engine = await start_engine(folders[0], ONE_AT_A_TIME, weights)
    running = asyncio.create_task(sample_all(engine, [long_prompt()], SHORT, num_samples=8))
    await let_decode(engine, 2)
    await update(engine, 1, load_file(folders[1] / "model.safetensors"))
    rollouts = await running
    engine.shutdown()
    return Prefixed(first=rollouts[0], last=rollouts[-1])


async def _seeded(folder: Path) -> list[list[list[int]]]:
    """The samples of two groups with seed 7, alone and among others, and of one with seed 8."""
    engine = await start_engine(folder, GENERATOR, WeightsSection())

    async def sample(seed: int) -> list[list[int]]:
        rollouts = await engine.generate(prompt_ids_P=PROMPT, num_samples=3, sampling=SHORT, seed=seed)
        return [rollout.response_ids_T.tolist() for rollout in rollouts]

    alone = await sample(7)
    again, other = await asyncio.gather(sample(7), sample(8))
    engine.shutdown()
    return [alone, again, other]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What came out of all scenarios."""

    cancelled: Cancelled
    salted: Prefixed
    shared: Prefixed
    seeded: list[list[list[int]]]


def _observe(folders: list[Path], revealing: Path) -> Observed:
    return Observed(
        cancelled=asyncio.run(_cancel(revealing)),
        salted=asyncio.run(_prefix(folders, across_versions=False)),
        shared=asyncio.run(_prefix(folders, across_versions=True)),
        seeded=asyncio.run(_seeded(folders[0])),
    )


def long_prompt() -> np.ndarray:
    return np.random.default_rng(1).integers(3, 20, BLOCK + 2).astype(np.int32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [
        write_random_model(root / str(seed), seed=seed, scale=12.0, num_experts=8, top_k=3)
        for seed in range(2)
    ]


@pytest.fixture(scope="module")
def models(folders: list[Path]) -> dict[int, torch.nn.Module]:
    return {
        version: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for version, folder in enumerate(folders)
    }


@pytest.fixture(scope="module")
def observed(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Observed:
    # Token 3 throughout: no response ends before its last token.
    revealing = write_random_model(tmp_path_factory.mktemp("revealing") / "hf", num_experts=8, top_k=3)
    save_file(revealing_weights(revealing, 3), revealing / "model.safetensors", {"format": "pt"})
    return run_alone(_observe, folders, revealing)


def test_stale_groups_are_cancelled_and_others_go_on(observed: Observed) -> None:
    seen = observed.cancelled
    assert [report.num_cancelled for report in seen.reports] == [0, 6, 0], "stale once two versions behind"
    assert seen.num_cancelled_groups == 3
    assert [span.version for span in seen.evaluated[0].version_spans] == [0, 1, 2, 3]
    for rollout in seen.waiting:
        # Older than version 3 by one: no reason to cancel.
        assert [span.version for span in rollout.version_spans] == [2, 3]
    assert [rollout.num_response_tokens for rollout in seen.afterwards] == [100, 100]
    assert seen.num_left_behind == 0


def test_a_waiting_request_never_meets_a_prefix_of_older_weights(
    observed: Observed, models: Mapping[int, torch.nn.Module]
) -> None:
    seen = observed.salted
    assert [span.version for span in seen.last.version_spans] == [1]
    assert_logprobs(seen.last, expected(models, seen.last, recomputed=True), SHORT)


def test_prefixes_are_served_across_versions_if_asked_for(
    observed: Observed, models: Mapping[int, torch.nn.Module]
) -> None:
    seen = observed.shared
    assert [span.version for span in seen.last.version_spans] == [1]
    old = expected(models, seen.first, recomputed=True).router_logits_SME[:BLOCK]
    new = expected(models, seen.last, recomputed=True).router_logits_SME[:BLOCK]

    def choices(logits_SME: np.ndarray) -> np.ndarray:
        return np.sort(np.argsort(logits_SME, -1)[..., -3:], -1)

    found = seen.last.routed_experts.expert_ids_RMK[:BLOCK]
    assert (found == choices(old)).mean() > 0.99, "the block was not served"
    assert (found == choices(new)).mean() < 0.9, "the two versions choose alike"


def test_samples_of_a_seed_are_reproducible_and_differ(observed: Observed) -> None:
    alone, again, other = observed.seeded
    assert alone == again
    assert len({tuple(sample) for sample in alone + other}) == 6
