"""A trainer of real ranks that lose one in the middle of all that they do, against one that loses none."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from forgeasync.algorithms import Loss
from forgeasync.checkpoints import TRAINER_FOLDER, checkpoint_name
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
)
from forgeasync.testing import write_tiny_model
from forgeasync.trainer import TrainerSetup, items_of, whole_response
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
    early: dict[str, torch.Tensor]
    """The same in the checkpoint on the way."""
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
    processes: ProcessManager, setup: TrainerSetup, out: Path, told: list[str], timeouts: TimeoutSection
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
        trainer = await start_looking_after(processes, setup, out, told, timeouts)
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
        await trainer.begin_checkpoint(out / checkpoint_name(NUM_STEPS), run_state=b"end", keep=5)
        await trainer.finish_checkpoint()
        assert (out / checkpoint_name(NUM_STEPS)).is_dir()
        assert not processes._failure.done(), "deaths that are looked after end no run"
        return Made(
            metrics=metrics,
            staged=staged,
            state=read_checkpoint(out / checkpoint_name(NUM_STEPS)),
            early=read_checkpoint(out / checkpoint_name(CHECKPOINT_AFTER)),
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
    assert_same(made.early, expected.early)
    assert any("exp_avg_sq" in name for name in made.state) and any("rng" in name for name in made.state)
    assert made.faults["faults/detected_trainer"] == num_faults, made.told
    assert made.faults["faults/recovered_trainer"] == num_faults, made.told


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    differ = [name for name in found if not torch.equal(found[name], expected[name])]
    assert not differ


@pytest.mark.processes
def test_a_rank_that_dies_over_the_snapshot_of_a_step_that_was_answered(
    world: World, undisturbed: Made, tmp_path: Path
) -> None:
    made = disturb(world, tmp_path / "run", TrainerFault(step=4, rank=0, moment=Moment.SNAPSHOT))
    check(made, undisturbed, num_faults=1)
    assert made.num_made_again == 1, "step 4 had no snapshot on rank 0"


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.timeout(LONG_S)
@pytest.mark.parametrize(
    ("fault", "num_made_again"),
    [
        (TrainerFault(step=2), 0),
        (TrainerFault(step=1, rank=0, way=Way.EXIT), 0),
        (TrainerFault(step=2, moment=Moment.STAGING), 0),
        (TrainerFault(step=3, moment=Moment.SNAPSHOT, way=Way.SEGFAULT), 1),
    ],
)
def test_ranks_that_end_in_other_ways_and_at_other_moments(
    world: World, undisturbed: Made, tmp_path: Path, fault: TrainerFault, num_made_again: int
) -> None:
    made = disturb(world, tmp_path / "run", fault)
    check(made, undisturbed, num_faults=1)
    if fault.moment is not Moment.STAGING:
        assert made.num_made_again == num_made_again
    else:
        assert made.num_made_again <= 1, "the snapshot is written beside"


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.timeout(LONG_S)
def test_a_rank_that_is_stopped(world: World, undisturbed: Made, tmp_path: Path) -> None:
    made = disturb(world, tmp_path / "run", TrainerFault(step=2, way=Way.STOP))
    check(made, undisturbed, num_faults=1)
    (told,) = [
        text for text in made.told if "has not answered for trainer.recovery.heartbeat_s = 8 s; " in text
    ]
    assert "; the controller waits in " in told and "train" in told.partition("waits in ")[2]


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.timeout(LONG_S)
def test_a_collective_that_never_ends(world: World, undisturbed: Made, tmp_path: Path) -> None:
    timeouts = TimeoutSection(train_step_s=60.0)
    made = disturb(world, tmp_path / "run", TrainerFault(step=2, way=Way.HANG), timeouts=timeouts)
    check(made, undisturbed, num_faults=1)
    assert any("is stuck: the trainer making step 2 took longer than 60 s" in text for text in made.told)


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.timeout(LONG_S)
def test_a_checkpoint_whose_writer_dies_is_written_again(
    world: World, undisturbed: Made, tmp_path: Path
) -> None:
    """The fault is armed in the step before, and happens when the files are to be shown."""
    fault = TrainerFault(step=CHECKPOINT_AFTER, rank=0, moment=Moment.CHECKPOINT)
    made = disturb(world, tmp_path / "run", fault)
    check(made, undisturbed, num_faults=1)


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.timeout(LONG_S)
def test_snapshots_of_every_other_step(world: World, undisturbed: Made, tmp_path: Path) -> None:
    faults = (TrainerFault(step=1), TrainerFault(step=4))
    made = disturb(world, tmp_path / "run", *faults, snapshot_every_steps=2)
    check(made, undisturbed, num_faults=2)
    assert made.num_made_again == 1, "step 3"


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
    (out / "marks").mkdir(parents=True)
    faults = tuple(TrainerFault(step=2, way=way) for way in (Way.KILL, Way.EXIT, Way.SEGFAULT))
    setup = make_setup(world.model, FaultyLoss(faults=faults, marks=str(out / "marks")), max_restarts=2)
    with pytest.raises(ActorDied, match=r"trainer rank 1 \(process \d+\) has ended; see .*trainer-1.log"):
        asyncio.run(make_steps(setup, world.batches, out, TimeoutSection()))
    events = [json.loads(line) for line in (out / "faults.jsonl").read_text().splitlines()]
    assert [one["event"] for one in events] == ["detected", "recovered"] * 2 + ["detected"]
