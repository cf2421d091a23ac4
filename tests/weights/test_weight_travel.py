"""Twenty random updates under load: every engine ends with the trainer's weights, bit for bit.

Real procs: trainer meshes of several layouts, one or two generators that sample all the while, each
transport.
"""

import asyncio
import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from forgeasync.config import ParallelSection, RunConfig, SamplingSection, TransportChoice, WeightsSection
from forgeasync.models import read_model_facts
from forgeasync.runtime import (
    GeneratorRouter,
    LocalHosts,
    ProcessManager,
    RefusedGroup,
    TrainerMesh,
    connect_weights,
)
from forgeasync.testing import tiny_config, write_tiny_model
from forgeasync.weights import FetchReport, WeightExchange, WeightLedger
from tests.support.engines import assert_engine_holds
from tests.support.trainer_and_generators import start_both
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
    delta: bool = False


CASES = {
    "fsdp2-own-2_generators": Case(parallel=ParallelSection(num_procs=2), transport=None, num_generators=2),
    "ep2-rdma-1_generator": Case(
        parallel=ParallelSection(num_procs=2, expert=2),
        transport="auto",
        num_generators=1,
        trainer_host="host-1",
    ),
    "tp2-torchstore-1_generator": Case(
        parallel=ParallelSection(num_procs=2, tensor=2, sequence=False),
        transport="torchstore",
        num_generators=1,
    ),
    "tp2_ep2-delta-2_generators": Case(
        parallel=ParallelSection(num_procs=2, tensor=2, expert=2),
        transport="shared_memory",
        num_generators=2,
        delta=True,
    ),
    "fsdp2_tp2_ep2-rdma-2_generators": Case(
        parallel=ParallelSection(num_procs=4, tensor=2, expert=2),
        transport="rdma",
        num_generators=2,
    ),
}


@dataclass(slots=True, kw_only=True)
class Seen:
    """What one case ended with."""

    parameters: list[list[dict[str, torch.Tensor]]]
    exported: dict[str, torch.Tensor]
    fetches: list[FetchReport]
    span_versions: list[tuple[int, ...]]
    num_skipped: int


_group_ids = itertools.count()


async def _load(generators: GeneratorRouter, is_done: asyncio.Event, spans: list[tuple[int, ...]]) -> None:
    """Keeps a generator busy, and notes the versions that every response went through."""
    while not is_done.is_set():
        answer = await generators.sample_group(
            next(_group_ids),
            np.arange(3, 9, dtype=np.int32),
            num_samples=8,
            sampling=SamplingSection(max_response_tokens=100),
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


async def _catch_up(trainer: TrainerMesh, exchange: WeightExchange) -> None:
    while True:
        await exchange.until_owed()
        await exchange.publish(trainer.stage_weights)


async def _scenario(config: RunConfig, case: Case, folder: Path, out: Path) -> Seen:
    facts = read_model_facts(str(folder))
    manager = ProcessManager(out / "logs", LocalHosts(trainer_id=case.trainer_host))
    try:
        trainer, generators = await start_both(manager, config, folder)
        await connect_weights(manager, config, trainer, generators)
        exchange = WeightExchange(WeightLedger(lease_timeout_s=config.weights.lease_timeout_s))
        fetches: list[FetchReport] = []
        spans: list[tuple[int, ...]] = []
        is_done = asyncio.Event()
        catching_up = asyncio.create_task(_catch_up(trainer, exchange))
        async with asyncio.TaskGroup() as load:
            for _ in range(2):
                load.create_task(_load(generators, is_done, spans))
            async with asyncio.TaskGroup() as work:
                work.create_task(_publish(trainer, exchange, facts.vocab_size))
                for host in range(generators.num_hosts):
                    work.create_task(_serve(host, exchange, generators, fetches))
            is_done.set()
        catching_up.cancel()
        await trainer.save_hf(out / "exported", source=folder)
        return Seen(
            parameters=[await replica.actor.parameters.call_one() for replica in generators.pool.replicas],
            exported=load_file(out / "exported" / "model-00001-of-00001.safetensors"),
            fetches=fetches,
            span_versions=spans,
            num_skipped=exchange.state.num_skipped,
        )
    finally:
        await manager.close()


REPRESENTATIVE = ("ep2-rdma-1_generator",)
"""Whole runs take shared memory."""


@pytest.mark.procs
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in REPRESENTATIVE else pytest.mark.exhaustive) for name in CASES],
)
def test_engines_end_with_the_trainers_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    transport = case.transport
    if transport is None:
        transport = write_own_transport(tmp_path, "own_transport_of_procs")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    folder = write_tiny_model(tmp_path / "hf", scale=3.0)
    base = tiny_config(folder)
    config = base.model_copy(
        update={
            "generator": base.generator.model_copy(update={"num_replicas": case.num_generators}),
            "trainer": base.trainer.model_copy(update={"parallel": case.parallel}),
            "weights": WeightsSection(transport=transport, delta=case.delta),
        }
    )
    seen = asyncio.run(_scenario(config, case, folder, tmp_path))
    before = load_file(folder / "model.safetensors")
    assert not [name for name in before if torch.equal(before[name], seen.exported[name])], "not updated"
    for workers in seen.parameters:
        assert_engine_holds(workers, seen.exported)
    assert all(fetch.is_complete for fetch in seen.fetches)
    assert len(list(tmp_path.glob("rank-*-slot-*"))) == (4 if case.transport is None else 0)
    assert len(seen.fetches) > 1, "no version before the last was ever served"
    assert all(list(spans) == sorted(set(spans)) for spans in seen.span_versions)
    assert any(len(spans) > 1 for spans in seen.span_versions), "no sequence was running during an update"
