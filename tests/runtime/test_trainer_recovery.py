"""A trainer of real ranks that lose one in the middle of all that they do, against one that loses none."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from forgeasync.algorithms import Loss
from forgeasync.checkpoints import RUN_FILE, TRAINER_FOLDER, CheckpointLost, checkpoint_name, partial_folder
from forgeasync.config import (
    BadStepsSection,
    Dtype,
    OnBadStep,
    OptimizerSection,
    ParallelSection,
    RecoverySection,
    TimeoutSection,
    TrainerSection,
)
from forgeasync.models import read_model_facts
from forgeasync.observability import FaultLog
from forgeasync.rollouts import FinishReason, PayloadWriter
from forgeasync.runtime import (
    LOCAL_HOST_ID,
    OWN_ACTORS,
    ActorDied,
    LocalHosts,
    Minibatches,
    ProcessManager,
    SampledRollout,
    TrainerRecovery,
    make_folders,
    start_trainer,
    store_group,
    trainer_recovery,
)
from forgeasync.testing import write_tiny_model
from forgeasync.trainer import StepResult, TrainerSetup, items_of, whole_response
from forgeasync.weights import StagedVersion, WeightExchange, WeightLedger
from tests.support.rollouts import make_rollout
from tests.support.trainer_faults import ANSWERED, FaultyLoss, Moment, TrainerFault, Way

NUM_RANKS, NUM_STEPS, CHECKPOINT_AFTER = 2, 5, 3
LONG_S = 900.0
"""Limit of tests that start several trainers one after the other, on a machine with other work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a run of the trainer has made."""

    metrics: list[dict[str, str]]
    """Of each step, written out; times are left out."""
    staged: list[dict[str, torch.Tensor]]
    """The weights that each step has published."""
    state: dict[str, torch.Tensor]
    """Weights, moments, and random states at the end."""
    early: dict[str, torch.Tensor] | None
    """The same in the checkpoint on the way, written beside later steps; None if it was lost with a rank."""
    faults: dict[str, float]
    num_made_again: float
    told: list[str]


def make_batches(folder: Path, model: Path) -> list[Minibatches]:
    """A batch for each step: a rollout for each rank, its arrays in a payload store."""
    facts = read_model_facts(str(model))
    folder.mkdir()
    writer = PayloadWriter(folder, LOCAL_HOST_ID, 2**24)
    batches: list[Minibatches] = []
    for step in range(NUM_STEPS):
        rollouts = [
            SampledRollout(
                branches=(make_rollout(2 * step + index, 5, 20 + step, facts=facts),),
                finish_reason=FinishReason.STOP,
                episode=index,
            )
            for index in range(NUM_RANKS)
        ]
        stored = store_group(writer, rollouts, group_id=step, generator_rank=0)
        assert isinstance(stored, tuple)
        rows = [
            [list(items_of(one, whole_response(1.0 - 2 * index), weight=1.0))]
            for index, one in enumerate(stored)
        ]
        batches.append([rows])
    return batches


def make_setup(model: Path, loss: Loss, **recovery: object) -> TrainerSetup:
    has_snapshots = recovery.get("snapshot_every_steps", 1) == 1
    return TrainerSetup(
        section=TrainerSection(
            parallel=ParallelSection(num_procs=NUM_RANKS),
            tokens_per_row=128,
            max_fresh_mismatch=1e6,
            replay_probe_share=0.3,
            optimizer=OptimizerSection(learning_rate=1e-2, eps=1e-3, warmup_steps=3),
            recovery=RecoverySection.model_validate(recovery),
            bad_steps=BadStepsSection(on_nan=OnBadStep.ROLLBACK if has_snapshots else OnBadStep.SKIP),
        ),
        facts=read_model_facts(str(model)),
        temperature=1.0,
        loss=loss,
        seed=0,
        checkpoint=model,
    )


async def start_looking_after(
    processes: ProcessManager, setup: TrainerSetup, told: list[str], timeouts: TimeoutSection
) -> TrainerRecovery:
    async def reconnect(*weights: object) -> None:
        told.append("generators connected again")

    # Monarch reports the ends of an earlier test's trainer late, and a report does not say whose it is.
    processes.owned.update(OWN_ACTORS)
    trainer = await start_trainer(processes, setup, timeouts)
    generators = SimpleNamespace(
        actors=None, reconnect_weights=reconnect, pool=SimpleNamespace(add_listener=lambda act: None)
    )
    await trainer.connect(generators)  # type: ignore[arg-type]
    layout = await trainer.lay_out_weights(Dtype.FLOAT32)
    sizes = [2 * rank.num_bytes for rank in layout.ranks]
    folders = await make_folders([one.host for one in trainer.members], sizes)
    await trainer.open_staging(folders, "shared_memory", generator_hosts=frozenset())
    recovery = TrainerRecovery(
        processes,
        setup,
        timeouts,
        trainer=trainer,
        generators=generators,  # type: ignore[arg-type]
        first_version=0,
        tell=told.append,
    )
    await recovery.start()
    return recovery


async def make_steps(
    setup: TrainerSetup, batches: list[Minibatches], out: Path, timeouts: TimeoutSection
) -> Made:
    told: list[str] = []
    processes = ProcessManager(out, LocalHosts(), faults=FaultLog(out / "faults.jsonl", told.append))
    try:
        trainer = await start_looking_after(processes, setup, told, timeouts)
        exchange = WeightExchange(WeightLedger(lease_timeout_s=60.0))
        trainer.when_buffers_are_new(lambda: exchange.change(lambda ledger: ledger.forget_committed()))
        metrics, staged = [], []
        for step, minibatches in enumerate(batches, start=1):
            result = await trainer.train_items(minibatches, step=step)
            spoiled = setup.loss.spoiled_steps if isinstance(setup.loss, FaultyLoss) else ()
            assert result.policy_version == step
            assert (result.skip_reason is not None) == result.is_rolled_back == (step in spoiled)
            if (out / "marks").is_dir():
                (out / "marks" / f"{step}{ANSWERED}").touch()
            metrics.append(
                {name: repr(one) for name, one in result.metrics.items() if not name.startswith("time/")}
            )
            manifest = await exchange.publish(trainer.stage_weights)
            assert manifest is not None and manifest.version == step
            version = StagedVersion(trainer.staged(manifest))
            staged.append({name: tensor.clone() for name, tensor in version.tensors()})
            if step == CHECKPOINT_AFTER:
                await trainer.begin_checkpoint(out / checkpoint_name(step), run_state=b"early", keep=5)
            if step % (setup.section.recovery.snapshot_every_steps or 1) == 0:
                await trainer.until_safe(step)
        early = out / checkpoint_name(CHECKPOINT_AFTER)
        with contextlib.suppress(CheckpointLost):
            await trainer.finish_checkpoint()
        await trainer.begin_checkpoint(out / checkpoint_name(NUM_STEPS), run_state=b"end", keep=5)
        await trainer.finish_checkpoint()
        assert (out / checkpoint_name(NUM_STEPS)).is_dir()
        assert not processes._failure.done(), "deaths that are looked after end no run"
        return Made(
            metrics=metrics,
            staged=staged,
            state=read_checkpoint(out / checkpoint_name(NUM_STEPS)),
            early=read_checkpoint(early) if early.exists() else None,
            faults=processes.faults.metrics(),
            num_made_again=trainer.metrics()["trainer/num_steps_made_again"],
            told=told,
        )
    finally:
        await processes.close()


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    file = folder.with_suffix(".pt")
    dcp_to_torch_save(folder / TRAINER_FOLDER, file)
    state: dict[str, torch.Tensor] = torch.load(file)
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    model: Path
    batches: list[Minibatches]
    folder: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("recovery")
    model = write_tiny_model(folder / "hf")
    return World(model=model, batches=make_batches(folder / "payloads", model), folder=folder)


@pytest.fixture(scope="module")
def undisturbed(world: World) -> Made:
    """Without snapshots: they change nothing either."""
    setup = make_setup(world.model, Loss(), snapshot_every_steps=None)
    return asyncio.run(make_steps(setup, world.batches, world.folder / "undisturbed", TimeoutSection()))


def disturb(
    world: World,
    out: Path,
    *faults: TrainerFault,
    timeouts: TimeoutSection | None = None,
    spoiled_steps: tuple[int, ...] = (),
    **recovery: object,
) -> Made:
    marks = out / "marks"
    marks.mkdir(parents=True)
    loss = FaultyLoss(faults=faults, marks=str(marks), spoiled_steps=spoiled_steps)
    setup = make_setup(world.model, loss, **recovery)
    made = asyncio.run(make_steps(setup, world.batches, out, timeouts or TimeoutSection()))
    happened = [mark for mark in marks.iterdir() if not mark.name.endswith(ANSWERED)]
    assert len(happened) == len(faults), "every fault has happened"
    return made


def check(made: Made, expected: Made, *, num_faults: int) -> None:
    """All is equal to the last bit, and every fault was noticed and recovered from."""
    assert made.metrics == expected.metrics
    assert len({step["loss"] for step in made.metrics}) == NUM_STEPS, "steps that could not differ"
    for staged, others in zip(made.staged, expected.staged, strict=True):
        assert_same(staged, others)
    assert_same(made.state, expected.state)
    # A rank that is lost soon after the checkpoint began takes it along, unless it was written by then.
    if made.early is not None and expected.early is not None:
        assert_same(made.early, expected.early)
    else:
        assert any("was not finished: the trainer was lost" in text for text in made.told), made.told
    assert any("exp_avg_sq" in name for name in made.state) and any("rng" in name for name in made.state)
    assert made.faults["faults/detected_trainer"] == num_faults, made.told
    assert made.faults["faults/recovered_trainer"] == num_faults, made.told


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    differ = [name for name in found if not torch.equal(found[name], expected[name])]
    assert not differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Faults of a run of the trainer."""

    faults: tuple[TrainerFault, ...]
    made_again: tuple[int, ...] = (0,)
    """Possible numbers of complete steps that have to be made again."""
    says: str = ""
    """A pattern in what is told of it."""
    snapshot_every_steps: int = 1
    train_step_s: float = 600.0


UNANSWERED = r"has not answered for trainer\.recovery\.heartbeat_s = 8 s; ."
SNAPSHOT_LOST = "over_a_snapshot"
CASES = {
    SNAPSHOT_LOST: Case(faults=(TrainerFault(step=4, rank=0, moment=Moment.SNAPSHOT),), made_again=(1,)),
    "killed": Case(faults=(TrainerFault(step=2),)),
    "exits": Case(faults=(TrainerFault(step=1, rank=0, way=Way.EXIT),)),
    # The snapshot is written beside.
    "while_staging": Case(faults=(TrainerFault(step=2, moment=Moment.STAGING),), made_again=(0, 1)),
    "segfaults_over_a_snapshot": Case(
        faults=(TrainerFault(step=3, moment=Moment.SNAPSHOT, way=Way.SEGFAULT),), made_again=(1,)
    ),
    "stopped": Case(faults=(TrainerFault(step=2, way=Way.STOP),), made_again=(0, 1), says=UNANSWERED),
    "never_comes_to_a_collective": Case(
        faults=(TrainerFault(step=2, way=Way.HANG),),
        made_again=(0, 1),
        says="is stuck: the trainer making step 2 took longer than 60 s",
        train_step_s=60.0,
    ),
    # Armed in the step before, it happens when the files are to be shown.
    "while_a_checkpoint_is_written": Case(
        faults=(TrainerFault(step=CHECKPOINT_AFTER, rank=0, moment=Moment.CHECKPOINT),), made_again=(0, 1)
    ),
    "twice_with_snapshots_of_every_other_step": Case(
        faults=(TrainerFault(step=1), TrainerFault(step=4)), made_again=(1,), snapshot_every_steps=2
    ),
}


@pytest.mark.processes
@pytest.mark.timeout(LONG_S)
@pytest.mark.parametrize(
    "name", [SNAPSHOT_LOST, *(pytest.param(one, marks=pytest.mark.exhaustive) for one in list(CASES)[1:])]
)
def test_a_lost_rank_changes_nothing(world: World, undisturbed: Made, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    made = disturb(
        world,
        tmp_path / "run",
        *case.faults,
        timeouts=TimeoutSection(train_step_s=case.train_step_s),
        snapshot_every_steps=case.snapshot_every_steps,
    )
    check(made, undisturbed, num_faults=len(case.faults))
    assert made.num_made_again in case.made_again
    assert any(re.search(case.says, text) for text in made.told), made.told


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.timeout(LONG_S)
def test_a_step_that_was_rolled_back_is_made_and_rolled_back_again(world: World, tmp_path: Path) -> None:
    """Its snapshot is lost. The new trainer reads its start from the snapshot that the old one wrote."""
    expected = disturb(world, tmp_path / "undisturbed", spoiled_steps=(2,))
    assert_same(expected.staged[1], expected.staged[0])
    fault = TrainerFault(step=2, rank=0, moment=Moment.SNAPSHOT)
    made = disturb(world, tmp_path / "run", fault, spoiled_steps=(2,))
    check(made, expected, num_faults=1)
    assert made.num_made_again == 1


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.timeout(LONG_S)
def test_a_trainer_that_dies_again_and_again_ends_the_run_with_the_first_failure(
    world: World, tmp_path: Path
) -> None:
    """Each life ends in the same step, in another way."""
    out = tmp_path / "run"
    faults = (TrainerFault(step=2, way=way) for way in (Way.KILL, Way.EXIT, Way.SEGFAULT))
    with pytest.raises(ActorDied, match=r"trainer rank 1 \(process \d+\) has ended; see .*trainer-1.log"):
        disturb(world, out, *faults, max_restarts=2)
    events = [json.loads(line) for line in (out / "faults.jsonl").read_text().splitlines()]
    assert [one["event"] for one in events] == ["detected", "recovered"] * 2 + ["detected"]


# --- Checkpoints and exports whose trainer is lost, by trainers that are plain objects ---


@dataclass
class Mesh:
    """A trainer that does what it is told; ``opens_at`` is the version of its snapshots."""

    opens_at: int = 0
    num_procs: int = 1
    members: tuple[()] = ()
    weight_layout: None = None
    calls: list[tuple[str, object]] = field(default_factory=list)
    is_exporting: asyncio.Event = field(default_factory=asyncio.Event)
    answers_export: bool = True

    async def _nothing(self, *arguments: object) -> None:
        pass

    async def _no_items(self, *arguments: object) -> list[int]:
        return []

    connect = finish_snapshot = finish_checkpoint = _nothing
    snapshot_bytes = reopen_staging = _no_items

    async def open_snapshots(self, folders: list[Path], *, every_steps: int, at_most: int) -> int:
        return min(self.opens_at, at_most)

    async def train_items(self, minibatches: object, *, step: int) -> StepResult:
        self.calls.append(("step", step))
        return StepResult(
            policy_version=step,
            num_targets=1,
            num_padding_tokens=0,
            train_s=0.0,
            metrics={},
            skip_reason=None,
        )

    async def begin_checkpoint(self, folder: Path, *, run_state: bytes, keep: int) -> None:
        """Leave its files in the writing."""
        self.calls.append(("checkpoint", folder.name))
        partial_folder(folder).mkdir()

    async def policy_version(self) -> int:
        return 7

    async def save_hf(self, folder: Path, *, source: Path) -> int:
        self.calls.append(("export", folder.name))
        folder.mkdir()
        self.is_exporting.set()
        if not self.answers_export:
            await asyncio.Event().wait()
        return 7


@dataclass
class Lives:
    """Of a trainer, and of the one that replaces it."""

    first: Mesh
    second: Mesh
    recovery: TrainerRecovery = field(init=False)
    told: list[str] = field(default_factory=list)
    set_up_with: list[TrainerSetup] = field(default_factory=list)
    """What the second trainer was set up with."""

    async def lose(self) -> None:
        """Lose the first trainer, and wait for the second one."""
        life = self.recovery._life
        life.state._lose("trainer rank 0", "has died", ActorDied("trainer rank 0 has ended"))
        await life.until(lambda one: one.mesh is self.second or None)

    async def step(self, number: int) -> None:
        await self.recovery.train_items([], step=number)


@asynccontextmanager
async def trainers(
    first: Mesh, second: Mesh, *, resume_from: Path | None = None, first_version: int = 0
) -> AsyncIterator[Lives]:
    """A trainer, which the second one replaces."""
    lives = Lives(first, second)

    async def nothing(*arguments: object, **keywords: object) -> list[object]:
        return []

    async def spawn(*arguments: object, **keywords: object) -> Mesh:
        return second

    async def set_up(trainer: Mesh, setup: TrainerSetup) -> None:
        lives.set_up_with.append(setup)

    lives.recovery = TrainerRecovery(
        SimpleNamespace(faults=FaultLog(), peers=[], owned=set(), closing=[], log_dir=Path()),  # type: ignore[arg-type]
        TrainerSetup(
            section=SimpleNamespace(recovery=RecoverySection()),  # type: ignore[arg-type]
            facts=None,  # type: ignore[arg-type]
            temperature=1.0,
            loss=Loss(),
            seed=0,
            checkpoint=None,
            resume_from=resume_from,
        ),
        TimeoutSection(),
        trainer=first,  # type: ignore[arg-type]
        generators=SimpleNamespace(  # type: ignore[arg-type]
            pool=SimpleNamespace(add_listener=lambda act: None), reconnect_weights=nothing
        ),
        first_version=first_version,
        tell=lives.told.append,
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in ("make_folders", "kill_trainer"):
            patch.setattr(trainer_recovery, name, nothing)
        patch.setattr(trainer_recovery, "set_up_trainer", set_up)
        patch.setattr(trainer_recovery, "spawn_trainer", spawn)
        await lives.recovery.start()
        try:
            yield lives
        finally:
            await lives.recovery.close()


async def test_a_checkpoint_that_was_lost_with_its_trainer_is_not_taken_for_written(tmp_path: Path) -> None:
    async with trainers(Mesh(), Mesh(opens_at=2)) as lives:
        await lives.step(1)
        await lives.recovery.begin_checkpoint(tmp_path / "step-00000001", run_state=b"", keep=1)
        await lives.step(2)
        await lives.lose()
        with pytest.raises(CheckpointLost, match="step-00000001 was not finished: the trainer was lost"):
            await lives.recovery.finish_checkpoint()
        await lives.recovery.finish_checkpoint()
        assert "checkpoint step-00000001 was not finished: the trainer was lost as it wrote it" in lives.told
        assert not any(tmp_path.iterdir()), "its room may be needed"
        assert lives.second.calls == []


async def test_a_checkpoint_that_is_being_written_outlives_the_beginning_of_the_next(tmp_path: Path) -> None:
    """What a lost trainer has left of its own checkpoint goes; nothing else does."""
    first, second = tmp_path / "step-00000001", tmp_path / "step-00000002"
    async with trainers(Mesh(), Mesh(opens_at=2)) as lives:
        await lives.step(1)
        await lives.recovery.begin_checkpoint(first, run_state=b"", keep=1)
        await lives.step(2)
        partial_folder(second).mkdir()
        await lives.recovery.begin_checkpoint(second, run_state=b"", keep=1)
        assert partial_folder(first).is_dir()
        await lives.lose()
        with pytest.raises(CheckpointLost, match="step-00000002"):
            await lives.recovery.finish_checkpoint()
        assert not partial_folder(second).exists() and partial_folder(first).is_dir()


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_resumed_run_survives_its_trainer_when_its_first_checkpoint_is_gone(
    tmp_path: Path, is_there: bool
) -> None:
    """Newer checkpoints replace the one that it was resumed from."""
    checkpoint = tmp_path / "step-00000004"
    if is_there:
        checkpoint.mkdir()
        (checkpoint / RUN_FILE).touch()
    async with trainers(Mesh(), Mesh(opens_at=5), resume_from=checkpoint, first_version=4) as lives:
        await lives.step(5)
        await lives.lose()
        (setup,) = lives.set_up_with
        assert setup.resume_from == (checkpoint if is_there else None)


async def test_an_export_that_is_all_written_is_not_written_again(tmp_path: Path) -> None:
    """The trainer is lost between the last file and its answer. A folder of somebody else is none of its."""
    async with trainers(Mesh(answers_export=False), Mesh()) as lives:
        exporting = asyncio.create_task(lives.recovery.save_hf(tmp_path / "final", source=tmp_path))
        await lives.first.is_exporting.wait()
        await lives.lose()
        assert await exporting == 7
        assert lives.second.calls == []
        (tmp_path / "other").mkdir()
        with pytest.raises(FileExistsError):
            await lives.recovery.save_hf(tmp_path / "other", source=tmp_path)
