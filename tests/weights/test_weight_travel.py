"""Twenty random updates under load: every engine ends with the trainer's weights, bit for bit.

Real processes: trainer meshes of several layouts, one or two generators that sample all the while, each
transport. Rollouts travel back through the payload store, with routing and kept sets recorded and replayed.
"""

import asyncio
import functools
import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from forgeasync.config import (
    Delta,
    Dtype,
    LoraSection,
    OptimizerSection,
    ParallelSection,
    RunConfig,
    SamplingSection,
    TransportChoice,
    WeightsSection,
)
from forgeasync.models import read_model_facts
from forgeasync.runtime import (
    GeneratorRouter,
    RefusedGroup,
    TrainerMesh,
    connect_weights,
)
from forgeasync.testing import tiny_config, write_tiny_model
from forgeasync.trainer import assign_rows, items_of, whole_response
from forgeasync.weights import FetchReport, WeightExchange, WeightLedger, read_version, whole_tensors
from tests.support.engines import assert_engine_holds
from tests.support.peft_adapters import write_merged
from tests.support.trainer_and_generators import both_running
from tests.support.trainers import random_rows
from tests.support.weight_service import write_own_transport

NUM_UPDATES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    parallel: ParallelSection
    transport: TransportChoice | None
    """None: one of the test's own."""
    num_generators: int
    trainer_host: str = "host-0"
    delta: Delta = Delta.OFF
    lora: tuple[str, ...] = ()
    """The layers that have adapters: only these travel, merged on arrival."""

    @property
    def is_delta(self) -> bool:
        return self.delta is Delta.EXACT

    @property
    def dtype(self) -> Dtype:
        """Whose elements have the same bits after most steps."""
        return Dtype.BFLOAT16 if self.is_delta else Dtype.FLOAT32


EP2 = ParallelSection(num_procs=2, expert=2)
ALL_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SERVED = "ep2-adapters_of_attention"
"""By vLLM itself, beside base weights that never change."""
CASES = {
    "fsdp2-own-2_generators": Case(parallel=ParallelSection(num_procs=2), transport=None, num_generators=2),
    "ep2-tcp-1_generator": Case(
        parallel=EP2,
        transport="auto",
        num_generators=1,
        trainer_host="host-1",
    ),
    "tp2-torchstore-1_generator": Case(
        parallel=ParallelSection(num_procs=2, tensor=2, sequence=False),
        transport="torchstore",
        num_generators=1,
        delta=Delta.EXACT,
    ),
    "tp2_ep2-delta-2_generators": Case(
        parallel=ParallelSection(num_procs=2, tensor=2, expert=2),
        transport="shared_memory",
        num_generators=2,
        delta=Delta.EXACT,
    ),
    "fsdp2_tp2_ep2-rdma-2_generators": Case(
        parallel=ParallelSection(num_procs=4, tensor=2, expert=2),
        transport="rdma",
        num_generators=2,
        delta=Delta.EXACT,
    ),
    "ep2-adapters_of_all": Case(parallel=EP2, transport="auto", num_generators=1, lora=ALL_LAYERS),
    # Each shares a parameter of the engine with a layer that stays as it is.
    "ep2-adapters_of_parts": Case(
        parallel=EP2, transport="auto", num_generators=1, lora=("v_proj", "up_proj")
    ),
    SERVED: Case(parallel=EP2, transport="auto", num_generators=1, lora=("q_proj", "v_proj", "o_proj")),
}


PROMPT = np.arange(3, 9, dtype=np.int32)
SAMPLING = SamplingSection(temperature=0.8, top_k=20, top_p=0.9, max_response_tokens=24)
_group_ids = itertools.count()


async def _load(generators: GeneratorRouter, is_done: asyncio.Event, spans: list[tuple[int, ...]]) -> None:
    """Keeps a generator busy, and notes the versions that every response went through."""
    while not is_done.is_set():
        answer = await generators.sample_group(
            next(_group_ids), PROMPT, num_samples=8, sampling=SamplingSection(max_response_tokens=100)
        )
        assert not isinstance(answer, RefusedGroup), answer
        spans += [tuple(span.version for span in rollout.version_spans) for rollout in answer]
        await generators.free_payloads(answer)


async def _serve(
    host: int, exchange: WeightExchange, generators: GeneratorRouter, fetches: list[FetchReport]
) -> None:
    served = 0
    while served < NUM_UPDATES:
        async with exchange.lease(host, newer_than=served) as manifest:
            fetches.append(await generators.begin_update(host, manifest))
        await generators.finish_update(host, manifest.version)
        served = manifest.version


async def _publish(trainer: TrainerMesh, exchange: WeightExchange, vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    for update in range(NUM_UPDATES):
        rows = random_rows(rng, vocab_size, trainer.num_data_ranks)
        await trainer.train_rows(rows, step=update + 1)
        await exchange.publish(trainer.stage_weights)


async def _train_on_fresh(trainer: TrainerMesh, generators: GeneratorRouter) -> dict[str, float]:
    answer = await generators.sample_group(next(_group_ids), PROMPT, num_samples=6, sampling=SAMPLING)
    assert not isinstance(answer, RefusedGroup), answer
    assert len({one.branches[0].prompt for one in answer}) <= 2, "siblings share the prompt's record"
    items = [
        item
        for index, rollout in enumerate(answer)
        for item in items_of(rollout, whole_response(1.0 if index % 2 else -1.0), weight=1.0)
    ]
    rows = assign_rows(items, tokens_per_row=256, num_ranks=trainer.num_data_ranks, pair_cost=0.0)
    result = await trainer.train_items([rows], step=NUM_UPDATES + 1)
    await generators.free_payloads(answer)
    return result.metrics


async def _catch_up(trainer: TrainerMesh, exchange: WeightExchange) -> None:
    while True:
        await exchange.until_owed()
        await exchange.publish(trainer.stage_weights)


async def _update_under_load(
    trainer: TrainerMesh, generators: GeneratorRouter, config: RunConfig, vocab_size: int
) -> tuple[list[FetchReport], list[tuple[int, ...]]]:
    """All fetches, and the versions of every response that was sampled meanwhile."""
    exchange = WeightExchange(WeightLedger(lease_timeout_s=config.weights.lease_timeout_s))
    fetches: list[FetchReport] = []
    spans: list[tuple[int, ...]] = []
    is_done = asyncio.Event()
    catching_up = asyncio.create_task(_catch_up(trainer, exchange))
    async with asyncio.TaskGroup() as load:
        for _ in range(2):
            load.create_task(_load(generators, is_done, spans))
        async with asyncio.TaskGroup() as work:
            work.create_task(_publish(trainer, exchange, vocab_size))
            for host in range(generators.num_hosts):
                work.create_task(_serve(host, exchange, generators, fetches))
        is_done.set()
    catching_up.cancel()
    return fetches, spans


REPRESENTATIVE = ("ep2-tcp-1_generator",)
"""Whole runs take shared memory."""


@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in REPRESENTATIVE else pytest.mark.exhaustive) for name in CASES],
)
async def test_engines_end_with_the_trainers_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    transport = case.transport
    if transport is None:
        transport = write_own_transport(tmp_path, "own_transport_of_procs")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    folder, out = write_tiny_model(tmp_path / "hf", scale=3.0), tmp_path / "exported"
    base = tiny_config(folder)
    config = base.model_copy(
        update={
            "generator": base.generator.model_copy(
                update={"num_replicas": case.num_generators, "dtype": case.dtype}
            ),
            "trainer": base.trainer.model_copy(
                update={
                    "parallel": case.parallel,
                    "optimizer": OptimizerSection(learning_rate=1e-6 if case.is_delta else 1e-3),
                }
            ),
            "weights": WeightsSection(transport=transport, delta=case.delta, archive=case.is_delta),
            "sampling": SAMPLING,
            "lora": LoraSection(rank=4, alpha=8.0, targets=case.lora) if case.lora else None,
        }
    )
    before = load_file(folder / "model.safetensors")
    running = both_running(config, folder, tmp_path / "logs", trainer_host=case.trainer_host)
    async with running as (processes, trainer, generators):
        await trainer.connect(generators)
        await connect_weights(processes, config, trainer, generators, versions=tmp_path / "versions")
        vocab_size = read_model_facts(str(folder)).vocab_size
        fetches, spans = await _update_under_load(trainer, generators, config, vocab_size)
        assert all(fetch.is_complete for fetch in fetches)
        assert len(fetches) > 1, "no version before the last was ever served"
        assert all(list(versions) == sorted(set(versions)) for versions in spans)
        assert any(len(versions) > 1 for versions in spans), "no sequence was running during an update"
        assert len(list(tmp_path.glob("rank-*-slot-*"))) == (4 if case.transport is None else 0)

        await trainer.save_hf(out, source=folder)
        file = out / "model-00001-of-00001.safetensors"
        if config.lora is not None:
            adapters = load_file(out / "adapter_model.safetensors")
            file = write_merged(folder, adapters, config.lora, tmp_path / "merged") / "model.safetensors"
        exported = load_file(file)
        changed = [name for name in before if not torch.equal(before[name], exported[name])]
        # Of adapted layers: two of attention, two with four experts.
        if case.is_delta:
            layout, images = read_version(tmp_path / "versions", NUM_UPDATES)
            archived = dict(whole_tensors(layout, images))
            exported = {name: tensor.bfloat16() for name, tensor in exported.items()}
            assert all(torch.equal(archived[name], exported[name]) for name in exported)
        num_adapted = sum(2 if target[0] in "qkvo" else 8 for target in case.lora)
        assert len(changed) == (num_adapted or len(before))
        for replica in generators.pool.replicas if name != SERVED else ():
            workers = await replica.actor.parameters.call_one()
            assert_engine_holds(workers, exported, atol=1e-6 if case.lora else 0.0)
        full_bytes = sum(tensor.nbytes for tensor in exported.values())
        assert not case.lora or max(fetch.num_bytes_moved for fetch in fetches) < full_bytes / 2

        respond = functools.partial(generators.respond, PROMPT, num_samples=4, sampling=SAMPLING, seed=7)
        for first, second in zip(await respond(), await respond(), strict=True):
            assert (first.text, first.versions) == (second.text, second.versions)
            assert first.ids_T.tolist() == second.ids_T.tolist()

        # Through the same experts and over the same kept sets, the ratio of fresh data is 1 up to rounding.
        metrics = await _train_on_fresh(trainer, generators)
        assert metrics["mismatch/logprob_abs_max"] < (0.1 if case.is_delta else 1e-4)
        assert metrics["routing/recorded_share"] == 1.0 and metrics["routing/num_without_record"] == 0.0
        left = [file for one in processes.payload_folders for file in one.glob("*.group")]
        assert left == [], "payloads are freed with their step"
