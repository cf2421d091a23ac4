"""Calls of trainer ranks: their order, when time begins, who is stuck, what calls back to back make."""

import asyncio
import dataclasses
import threading
import traceback
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from monarch.actor import ActorError

from forgeasync.algorithms import Loss
from forgeasync.config import Dtype, OptimizerSection, ParallelSection, TimeoutSection, TrainerSection
from forgeasync.models import read_model_facts
from forgeasync.processes import MemoryPeak
from forgeasync.runtime import (
    LocalHosts,
    ProcessManager,
    SerialExecutor,
    TrainerActor,
    TrainerMesh,
    start_trainer,
    trainer_mesh,
)
from forgeasync.testing import write_tiny_model
from forgeasync.trainer import PackedRow, PolicyTrainer, StepResult, TrainerSetup, full_tensors, pack_row
from forgeasync.waiting import DeadlineExceeded
from forgeasync.weights import Manifest, StagedVersion
from tests.support.loops import Endpoint
from tests.support.processes import run_ranks
from tests.support.trainers import make_sequences

RESULT = StepResult(
    policy_version=3, num_targets=1, num_padding_tokens=0, train_s=0.1, metrics={}, skip_reason=None
)


class Rank:
    """A trainer rank in this process; ``slice`` makes it its own mesh.

    It works on one call after the other, and finishes to stage beside them. Calls outlive their callers.
    """

    def __init__(self, **durations_s: float) -> None:
        self._durations_s = durations_s
        self._queue = asyncio.Lock()
        self.log: list[str] = []

    def slice(self, *, procs: int) -> "Rank":
        return self

    async def _answer(self, name: str) -> object:
        async with nullcontext() if name == "finish_staging" else self._queue:
            self.log.append(f"{name} begins")
            await asyncio.sleep(self._durations_s[name])
            self.log.append(f"{name} ends")
        if name == "train_rows":
            return RESULT
        return SimpleNamespace(version=1, checksums=(), patches=(), rank=0, archive_refusal=None)

    def __getattr__(self, name: str) -> Endpoint:
        async def call(*arguments: object) -> object:
            return await asyncio.shield(asyncio.ensure_future(self._answer(name)))

        return Endpoint(call)


def make_mesh(rank: Rank, **timeouts: float) -> TrainerMesh:
    mesh = TrainerMesh(rank, 1, TimeoutSection(**timeouts))  # type: ignore[arg-type]
    mesh._data_ranks = [0]
    mesh._layout = SimpleNamespace(digest="")  # type: ignore[assignment]
    return mesh


def in_turn(*names: str) -> list[str]:
    return [f"{name} {when}" for name in names for when in ("begins", "ends")]


@pytest.mark.usefixtures("virtual_time")
async def test_staging_behind_a_long_step_does_not_use_up_its_own_time() -> None:
    rank = Rank(train_rows=0.4, begin_staging=0.01, finish_staging=0.01)
    mesh = make_mesh(rank, train_step_s=60.0, weights_s=0.2)
    step = asyncio.create_task(mesh.train_rows([[]], step=3))
    await asyncio.sleep(0)
    manifest = await mesh.stage_weights(0)
    await step
    assert rank.log == in_turn("train_rows", "begin_staging", "finish_staging")
    assert manifest.version == 1


@pytest.mark.usefixtures("virtual_time")
async def test_the_next_step_begins_once_staging_has_begun() -> None:
    rank = Rank(train_rows=0.01, begin_staging=0.01, finish_staging=60.0)
    mesh = make_mesh(rank)
    begun = asyncio.Event()
    staging = asyncio.create_task(mesh.stage_weights(0, when_begun=begun.set))
    await begun.wait()
    await mesh.train_rows([[]], step=3)
    assert rank.log == [*in_turn("begin_staging"), "finish_staging begins", *in_turn("train_rows")]
    staging.cancel()


@pytest.mark.usefixtures("virtual_time")
async def test_a_call_after_a_cancelled_one_waits_until_the_ranks_are_free() -> None:
    rank = Rank(train_rows=0.4, save_hf=0.01)
    mesh = make_mesh(rank, train_step_s=0.5)
    step = asyncio.create_task(mesh.train_rows([[]], step=3))
    never_begun = asyncio.create_task(mesh.train_rows([[]], step=4))
    await asyncio.sleep(0.2)
    for task in (step, never_begun):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await mesh.save_hf(Path("final"), source=Path("model"))
    assert rank.log == in_turn("train_rows", "save_hf")


@pytest.mark.usefixtures("virtual_time")
async def test_late_ranks_are_told_by_their_step_or_version_and_hold_nobody_up() -> None:
    rank = Rank(begin_staging=0.0, finish_staging=60.0, train_rows=60.0, save_hf=60.0)
    mesh = make_mesh(rank, train_step_s=0.1, weights_s=0.1)
    with pytest.raises(DeadlineExceeded, match=r"^the trainer making step 3 .* timeouts\.train_step_s sets"):
        await mesh.train_rows([[]], step=3)
    with pytest.raises(DeadlineExceeded, match=r"^the trainer writing final"):
        await mesh.save_hf(Path("final"), source=Path("model"))
    await asyncio.sleep(200.0)
    assert rank.log == in_turn("train_rows", "save_hf")
    with pytest.raises(DeadlineExceeded, match=r"^the trainer staging .*initial .* timeouts\.weights_s sets"):
        await mesh.stage_weights(0)


class RankOf:
    """A rank that does one thing for each call."""

    def __init__(self, **acts: Callable[..., Awaitable[object]]) -> None:
        self._acts = acts
        self.num_calls = 0

    def __getattr__(self, name: str) -> Endpoint:
        self.num_calls += 1
        return Endpoint(self._acts[name])


def mesh_of(*ranks: RankOf) -> TrainerMesh:
    actors = SimpleNamespace(slice=lambda procs: ranks[procs])
    return TrainerMesh(actors, len(ranks), TimeoutSection())  # type: ignore[arg-type]


def gives(answer: object) -> Callable[..., Awaitable[object]]:
    async def give(*arguments: object) -> object:
        return answer

    return give


async def fails(*arguments: object) -> None:
    raise ValueError("its payload is on a host that is gone")


async def waits(*arguments: object) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(("other", "is_stuck"), [(fails, False), (waits, True)])
async def test_ranks_that_wait_in_a_collective_for_one_that_has_failed_get_no_other_call(
    other: Callable[[], Awaitable[None]], is_stuck: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that reads from a lost host fails in the step; the call that saves the weights comes next."""
    monkeypatch.setattr(trainer_mesh, "PEERS_S", 0.05)
    ranks = [RankOf(save_hf=fails), RankOf(save_hf=other)]
    mesh = mesh_of(*ranks)
    for _ in range(3):
        with pytest.raises(ValueError, match="its payload"):
            await mesh.save_hf(Path("final"), source=Path("model"))
    assert mesh.is_stuck == is_stuck
    assert [one.num_calls for one in ranks] == [1 if is_stuck else 3] * 2


async def test_one_rank_whose_archive_leaves_out_versions_is_enough() -> None:
    ranks = [RankOf(flush_archive=gives(None)), RankOf(flush_archive=gives("full"))]
    assert await mesh_of(*ranks).flush_archive() == "full"
    assert await mesh_of(ranks[0]).flush_archive() is None


async def test_rows_of_a_bad_step_are_kept_or_the_reason_is_told(tmp_path: Path) -> None:
    (tmp_path / "bad_steps").touch()
    rank = SimpleNamespace(_bad_steps=tmp_path / "bad_steps", _rank=1)
    refused = await TrainerActor._keep_if_bad(rank, dataclasses.replace(RESULT, skip_reason="nan"), [])  # type: ignore[arg-type]
    assert refused.not_kept is not None and refused.not_kept.startswith("rows of trainer rank 1: ")
    assert await TrainerActor._keep_if_bad(rank, RESULT, []) == RESULT, "those of good steps are not kept"  # type: ignore[arg-type]
    rank._bad_steps = tmp_path / "other"
    kept = await TrainerActor._keep_if_bad(rank, dataclasses.replace(RESULT, skip_reason="nan"), [])  # type: ignore[arg-type]
    assert kept.not_kept is None
    assert [one.name for one in (tmp_path / "other").glob("step-*/*")] == ["rank-1.npz"]


async def test_the_largest_rank_says_how_much_memory_a_step_takes_and_any_what_was_not_kept() -> None:
    def rank(number: int, **fields: object) -> RankOf:
        result = dataclasses.replace(
            RESULT, metrics={"payload/num_read_shared": float(number)}, skip_reason="a spike", **fields
        )
        return RankOf(setup=gives(number), train_rows=gives(result))

    mesh = mesh_of(
        rank(0, memory=MemoryPeak(resident_bytes=3)),
        rank(1, memory=MemoryPeak(resident_bytes=8, gpu_bytes=2), not_kept="no room"),
    )
    await mesh.setup(None, host_ids=["a", "a"])  # type: ignore[arg-type]
    result = await mesh.train_rows([[], []], step=1)
    assert result.memory == MemoryPeak(resident_bytes=8, gpu_bytes=2)
    assert result.not_kept == "no room", "of any rank"
    assert result.metrics["payload/num_read_shared"] == 0.0, "all else is the first rank's"


# --- The thread of a rank ---

NUM_CALLS = 12


async def until(begun: threading.Event) -> None:
    """Wait for something that a thread does."""
    while not begun.is_set():
        await asyncio.sleep(0)


async def test_an_error_has_its_traceback_and_the_next_call_runs() -> None:
    def step() -> None:
        raise ValueError("the loss of row 3")

    thread = SerialExecutor("trains")
    with pytest.raises(ValueError, match="the loss of row 3") as caught:
        await thread.call(step)
    assert "step" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert await thread.call(lambda: 7) == 7


async def test_what_comes_after_a_cancelled_call_runs_behind_its_work() -> None:
    thread, log = SerialExecutor("trains"), []
    begun, let_go = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        let_go.wait()
        log.append("cancelled")

    first = asyncio.create_task(thread.call(work))
    await until(begun)
    first.cancel()
    second = asyncio.create_task(thread.call(lambda: log.append("second")))
    for _ in range(NUM_CALLS):
        await asyncio.sleep(0)
    assert log == []
    let_go.set()
    await second
    assert log == ["cancelled", "second"]


def _call_back_to_back() -> list[tuple[int, float]]:
    """The number of every call as it ran, and the mean over the ranks of those that met in its collective."""
    sums = []

    async def scenario() -> None:
        thread = SerialExecutor("trains")

        def collective(number: int) -> None:
            found = torch.tensor([float(number)])
            dist.all_reduce(found)
            sums.append((number, float(found) / dist.get_world_size()))

        async def call(number: int) -> None:
            async with thread.turn():
                # As a rank that has to wait for payloads of another host before it trains.
                if (number + dist.get_rank()) % 3 == 0:
                    await asyncio.sleep(0.01)
                await thread.run(lambda: collective(number))

        await asyncio.gather(*(call(number) for number in range(NUM_CALLS)))

    asyncio.run(scenario())
    return sums


def test_collectives_of_calls_back_to_back_meet_on_every_rank() -> None:
    for sums in run_ranks(3, _call_back_to_back):
        assert sums == [(number, float(number)) for number in range(NUM_CALLS)]


# --- Real ranks ---


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
    """The rows of two steps."""
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


@pytest.mark.processes
@pytest.mark.exhaustive
async def test_versions_are_those_of_their_steps_however_close_the_calls(tmp_path: Path) -> None:
    """And an error of a call has the traceback of the trainer's thread."""
    setup = _setup(write_tiny_model(tmp_path / "hf"))
    first, second = run_ranks(NUM_RANKS, _train, setup)[0]
    assert not any(torch.equal(first[name], second[name]) for name in first)
    processes = ProcessManager(tmp_path / "run", LocalHosts())
    try:
        trainer = await start_trainer(processes, setup, TimeoutSection())
        layout = await trainer.lay_out_weights(Dtype.FLOAT32)
        folders = [tmp_path / f"staging-{rank}" for rank in range(NUM_RANKS)]
        for folder in folders:
            folder.mkdir()
        await trainer.open_staging(folders, "shared_memory", generator_hosts=frozenset())
        answers = []
        # All at once: no rank is given time between two calls, and the ranks not the same calls at one time.
        for rank, actor in enumerate(trainer._ranks):
            for slot, rows in enumerate(_rows(setup, rank)):
                answers += [actor.train_rows.call_one(rows), actor.begin_staging.call_one(slot)]
            answers.append(actor.policy_version.call_one())
        found = await asyncio.gather(*(asyncio.ensure_future(answer) for answer in answers))
        assert found[4::5] == [2] * NUM_RANKS
        for slot, weights in enumerate((first, second)):
            shards = [await actor.finish_staging.call_one(slot) for actor in trainer._ranks]
            assert {shard.version for shard in shards} == {slot + 1}
            manifest = Manifest(
                version=slot + 1,
                slot=slot,
                layout_digest=layout.digest,
                checksums=tuple(shard.checksums for shard in shards),
            )
            staged = dict(StagedVersion(trainer.staged(manifest)).tensors())
            assert staged.keys() == weights.keys()
            assert all(torch.equal(staged[name], weights[name]) for name in weights)
        with pytest.raises(
            ActorError, match=r"(?s)policy_trainer\.py.* in train_step.*AttributeError: 'str' obj"
        ):
            await trainer.train_rows([["no row"]] * NUM_RANKS, step=3)  # type: ignore[list-item]
    finally:
        await processes.close()
