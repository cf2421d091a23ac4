"""Weights on their way from the trainer mesh into a running vLLM engine, and rollouts on their way back.

One fleet of real processes serves all tests of the file: trainer (FSDP2, expert parallelism 2), generator,
weight store. Rollouts travel through the payload store, as between hosts, with routing and kept sets recorded
and replayed.
"""

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forgeasync.config import RunConfig, SamplingSection
from forgeasync.rollouts import PayloadReader, StoredRollout, TokenTrace, decode_rollout
from forgeasync.runtime import (
    LOCAL_HOST_ID,
    CancelledGroup,
    GeneratorRouter,
    LocalHosts,
    ProcessManager,
    RefusedGroup,
    SampledResponse,
    TrainerMesh,
    connect_weights,
)
from forgeasync.testing import tiny_config, write_tiny_model
from forgeasync.trainer import assign_rows, items_of, whole_response
from tests.support.engines import assert_engine_holds
from tests.support.trainer_and_generators import start_both

pytestmark = pytest.mark.processes

SAMPLING = SamplingSection(temperature=0.8, top_k=20, top_p=0.9, max_response_tokens=24)
NUM_UPDATES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A rollout's facts and its arrays."""

    rollout: StoredRollout
    trace: TokenTrace


@dataclass(slots=True, kw_only=True)
class Measured:
    """What the one scenario below saw."""

    fresh: list[Sampled]
    fresh_metrics: dict[str, float]
    parameters: list[dict[str, torch.Tensor]]
    exported: dict[str, torch.Tensor]
    after: list[Sampled]
    after_metrics: dict[str, float]
    crossing: list[Sampled]
    seeded: tuple[tuple[SampledResponse, ...], tuple[SampledResponse, ...]]
    payload_files_left: list[Path]


async def _train_on(
    trainer: TrainerMesh, generators: GeneratorRouter, samples: list[Sampled]
) -> dict[str, float]:
    items = [
        item
        for index, sampled in enumerate(samples)
        for item in items_of(sampled.rollout, whole_response(1.0 if index % 2 else -1.0), weight=1.0)
    ]
    rows = assign_rows(items, tokens_per_row=256, num_ranks=trainer.num_data_ranks)
    result = await trainer.train_items([rows], step=1)
    await _free(generators, samples)
    return result.metrics


async def _free(generators: GeneratorRouter, samples: list[Sampled]) -> None:
    await generators.free_payloads(sampled.rollout for sampled in samples)


_group_ids = itertools.count()


async def _sample_group(
    generators: GeneratorRouter, num_prompt_tokens: int, num_samples: int, sampling: SamplingSection
) -> list[Sampled]:
    prompt = np.arange(3, 3 + num_prompt_tokens, dtype=np.int32)
    answer = await generators.sample_group(
        next(_group_ids), prompt, num_samples=num_samples, sampling=sampling
    )
    assert not isinstance(answer, RefusedGroup | CancelledGroup), answer
    reader = PayloadReader(LOCAL_HOST_ID)
    return [
        Sampled(
            rollout=r,
            trace=decode_rollout(reader.read(r.branches[0].prompt), reader.read(r.branches[0].response)),
        )
        for r in answer
    ]


async def _sample(generators: GeneratorRouter) -> list[Sampled]:
    groups = await asyncio.gather(*(_sample_group(generators, n, 4, SAMPLING) for n in (1, 5, 9)))
    return [sampled for group in groups for sampled in group]


async def _respond(generators: GeneratorRouter) -> tuple[SampledResponse, ...]:
    prompt = np.arange(3, 9, dtype=np.int32)
    return await generators.respond(prompt, num_samples=4, sampling=SAMPLING, seed=7)


async def _sync(trainer: TrainerMesh, generators: GeneratorRouter, slot: int = 0) -> None:
    manifest = await trainer.stage_weights(slot)
    for host in range(generators.num_hosts):
        fetched = await generators.begin_update(host, manifest)
        assert fetched.is_complete, fetched
        await generators.finish_update(host, manifest.version)


async def _scenario(config: RunConfig, folder: Path, out: Path) -> Measured:
    # Payloads are read as from another host; tests/end_to_end/test_grpo_app.py reads them from shared memory.
    manager = ProcessManager(out / "logs", LocalHosts(trainer_id="host-1"))
    try:
        trainer, generators = await start_both(manager, config, folder)
        await trainer.connect(generators)
        await connect_weights(manager, config, trainer, generators)
        fresh = await _sample(generators)
        fresh_metrics = await _train_on(trainer, generators, fresh)
        for _ in range(1, NUM_UPDATES):
            await _sync(trainer, generators)
            await _train_on(trainer, generators, await _sample(generators))
        await trainer.save_hf(out / "exported", source=folder)
        is_synced = asyncio.Event()
        # Two at a time, so that one is in flight whenever the update comes.
        sampling = [asyncio.create_task(_sample_until(is_synced, generators)) for _ in range(2)]
        num_sampled = await _num_sampled(generators)
        while await _num_sampled(generators) == num_sampled:
            await asyncio.sleep(0)
        await _sync(trainer, generators)
        is_synced.set()
        crossing = [sampled for task in sampling for sampled in await task]
        await _free(generators, crossing)
        replica = generators.pool.replicas[0].actor
        parameters = await replica.parameters.call_one()
        after = await _sample(generators)
        after_metrics = await _train_on(trainer, generators, after)
        return Measured(
            fresh=fresh,
            fresh_metrics=fresh_metrics,
            parameters=parameters,
            exported=load_file(out / "exported" / "model-00001-of-00001.safetensors"),
            after=after,
            after_metrics=after_metrics,
            crossing=crossing,
            seeded=(await _respond(generators), await _respond(generators)),
            payload_files_left=[
                file for folder in manager.payload_folders for file in folder.glob("*.group")
            ],
        )
    finally:
        await manager.close()


async def _num_sampled(generators: GeneratorRouter) -> int:
    return sum(one.num_generated_tokens for one in await generators.stats())


async def _sample_until(is_synced: asyncio.Event, generators: GeneratorRouter) -> list[Sampled]:
    samples: list[Sampled] = []
    while not is_synced.is_set():
        samples += await _sample_group(generators, 10, 192, SamplingSection(max_response_tokens=140))
    return samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "hf", scale=3.0)


@pytest.fixture(scope="module")
def measured(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    config = tiny_config(folder).model_copy(update={"sampling": SAMPLING})
    yield asyncio.run(_scenario(config, folder, tmp_path_factory.mktemp("out")))


def test_fresh_logprobs_of_generator_and_trainer_agree(measured: Measured) -> None:
    """Through the same experts and over the same kept sets, the ratio of fresh data is 1 up to rounding."""
    assert measured.fresh_metrics["mismatch/logprob_abs_max"] < 1e-4
    assert measured.after_metrics["mismatch/logprob_abs_max"] < 1e-4, (
        "after updates the engine must compute with the new weights"
    )
    spread = np.concatenate([sampled.trace.logprobs_T for sampled in measured.fresh]).std()
    assert spread > 0.3, "a nearly uniform model would hide mistakes"


def test_every_token_that_matters_is_replayed(measured: Measured) -> None:
    assert measured.fresh_metrics["routing/recorded_share"] == 1.0
    assert measured.fresh_metrics["routing/num_without_record"] == 0.0
    widths = np.concatenate([np.diff(sampled.trace.kept_tokens.offsets) for sampled in measured.fresh])
    assert 1 <= widths.min() < widths.max() <= SAMPLING.top_k


def test_prompt_records_are_stored_once_a_group(measured: Measured) -> None:
    prompts = {sampled.rollout.branches[0].prompt for sampled in measured.fresh}
    assert len({sampled.rollout.branches[0].response for sampled in measured.fresh}) == 12
    assert 3 <= len(prompts) < 6


def test_payloads_are_freed_with_their_step(measured: Measured) -> None:
    assert measured.payload_files_left == []


def test_engine_parameters_equal_the_trainers_bit_for_bit(measured: Measured) -> None:
    assert_engine_holds(measured.parameters, measured.exported)


def test_the_updates_changed_every_weight(measured: Measured, folder: Path) -> None:
    before = load_file(folder / "model.safetensors")
    assert not [name for name in before if torch.equal(before[name], measured.exported[name])]


def test_tokens_carry_the_version_that_produced_them(measured: Measured) -> None:
    assert {span.version for sampled in measured.fresh for span in sampled.rollout.version_spans} == {0}
    after = {span.version for sampled in measured.after for span in sampled.rollout.version_spans}
    assert after == {NUM_UPDATES}
    for sampled in measured.crossing:
        spans = sampled.rollout.version_spans
        assert spans[0].start == 0 and spans[-1].end == len(sampled.trace.response_ids_T)
        assert all(a.end == b.start and a.version < b.version for a, b in itertools.pairwise(spans))


def test_running_sequences_go_on_under_the_new_weights(measured: Measured) -> None:
    spans = [sampled.rollout.version_spans for sampled in measured.crossing]
    crossed = [[span.version for span in of_one] for of_one in spans if len(of_one) > 1]
    assert crossed, "no sequence was running during the update"
    assert all(versions == [NUM_UPDATES - 1, NUM_UPDATES] for versions in crossed)


def test_sampling_with_a_seed_is_reproducible(measured: Measured) -> None:
    for first, second in zip(*measured.seeded, strict=True):
        assert (first.response, first.versions) == (second.response, second.versions)
        assert first.ids_T.tolist() == second.ids_T.tolist()


def test_logprobs_are_those_of_the_sampled_distribution(measured: Measured, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for sampled in measured.fresh:
        trace = sampled.trace
        ids = torch.from_numpy(np.concatenate([trace.prompt_ids_P, trace.response_ids_T])).long()
        with torch.no_grad():
            logits = model(ids[None]).logits[0].double() / SAMPLING.temperature
        for index, token in enumerate(trace.response_ids_T.tolist()):
            kept = trace.kept_tokens.row(index).tolist()
            row = logits[len(trace.prompt_ids_P) - 1 + index]
            expected = float(torch.log_softmax(row[kept], 0)[kept.index(token)])
            assert trace.logprobs_T[index] == pytest.approx(expected, abs=1e-4)
