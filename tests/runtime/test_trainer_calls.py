"""Trainer ranks as processes, called back to back: versions are of their own steps, errors have traces."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from monarch.actor import ActorError

from forgeasync.algorithms import Loss
from forgeasync.config import Dtype, OptimizerSection, ParallelSection, TimeoutSection, TrainerSection
from forgeasync.models import read_model_facts
from forgeasync.runtime import LocalHosts, ProcessManager, start_trainer
from forgeasync.testing import write_tiny_model
from forgeasync.trainer import PackedRow, PolicyTrainer, TrainerSetup, full_tensors, pack_row
from forgeasync.weights import Manifest, StagedVersion
from tests.support.processes import run_ranks
from tests.support.trainers import make_sequences

NUM_RANKS = 2


def _setup(folder: Path) -> TrainerSetup:
    return TrainerSetup(
        section=TrainerSection(
            parallel=ParallelSection(num_procs=NUM_RANKS, expert=2),
            tokens_per_row=128,
            optimizer=OptimizerSection(learning_rate=1e-2, eps=1e-3),
        ),
        facts=read_model_facts(str(folder)),
        temperature=1.0,
        loss=Loss(),
        seed=0,
        checkpoint=folder,
    )


def _rows(setup: TrainerSetup, rank: int) -> list[list[PackedRow]]:
    """Of two steps."""
    sequences = make_sequences(2 * NUM_RANKS, setup.facts)
    return [[pack_row([sequences[NUM_RANKS * step + rank]])] for step in range(2)]


def _train(setup: TrainerSetup) -> list[dict[str, torch.Tensor]]:
    """The weights after each step, one call after the other."""
    trainer = PolicyTrainer(setup)
    versions = []
    for rows in _rows(setup, trainer.data_rank):
        trainer.train_step(rows)
        versions.append({name: tensor.clone() for name, tensor in full_tensors(trainer.model, setup.facts)})
    return versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    staged: list[dict[str, torch.Tensor]]
    policy_versions: list[int]
    error: ActorError


async def _scenario(setup: TrainerSetup, out: Path) -> Seen:
    processes = ProcessManager(out, LocalHosts())
    try:
        trainer = await start_trainer(processes, setup, TimeoutSection())
        layout = await trainer.lay_out_weights(Dtype.FLOAT32)
        folders = [out / f"staging-{rank}" for rank in range(NUM_RANKS)]
        for folder in folders:
            folder.mkdir()
        await trainer.open_staging(folders, "shared_memory", generator_hosts=frozenset())
        answers = []
        # All at once: no rank is given time between two calls, and the ranks not the same calls at one time.
        for rank, actor in enumerate(trainer._ranks):
            first, second = _rows(setup, rank)
            answers += [
                actor.train_rows.call_one(first),
                actor.begin_staging.call_one(0),
                actor.train_rows.call_one(second),
                actor.begin_staging.call_one(1),
                actor.policy_version.call_one(),
            ]
        found = await asyncio.gather(*(asyncio.ensure_future(answer) for answer in answers))
        staged = []
        for slot in range(2):
            shards = [await actor.finish_staging.call_one(slot) for actor in trainer._ranks]
            manifest = Manifest(
                version=shards[0].version,
                slot=slot,
                layout_digest=layout.digest,
                checksums=tuple(shard.checksums for shard in shards),
                waited_s=0.0,
                staging_s=0.0,
            )
            assert {shard.version for shard in shards} == {slot + 1}
            version = StagedVersion(trainer.staged(manifest))
            staged.append({name: tensor.clone() for name, tensor in version.tensors()})
        with pytest.raises(ActorError) as caught:
            await trainer.train_rows([["no row"]] * NUM_RANKS, step=3)  # type: ignore[list-item]
        return Seen(staged=staged, policy_versions=found[4::5], error=caught.value)
    finally:
        await processes.close()


@pytest.mark.processes
@pytest.mark.exhaustive
def test_versions_are_those_of_their_steps_however_close_the_calls(tmp_path: Path) -> None:
    setup = _setup(write_tiny_model(tmp_path / "hf"))
    expected = run_ranks(NUM_RANKS, _train, setup)[0]
    seen = asyncio.run(_scenario(setup, tmp_path / "run"))
    assert seen.policy_versions == [2] * NUM_RANKS
    for staged, weights in zip(seen.staged, expected, strict=True):
        assert staged.keys() == weights.keys()
        assert all(torch.equal(staged[name], weights[name]) for name in staged)
    differs = [name for name in expected[0] if not torch.equal(expected[0][name], expected[1][name])]
    assert len(differs) == len(expected[0])
    text = str(seen.error)
    assert "AttributeError: 'str' object" in text
    assert "policy_trainer.py" in text and "in train_step" in text, "the traceback of the trainer's thread"
