"""Steps that are skipped, rolled back, or end the run: bits of the state on two gloo ranks."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from forgeasync.config import BadStepsSection, OnBadStep, ParallelSection
from forgeasync.models import read_model_facts
from forgeasync.trainer import (
    BadStep,
    MismatchTooLarge,
    NonFiniteWeights,
    PackedRow,
    PolicyTrainer,
    StepJudge,
    StepResult,
    TrainingSequence,
    local_parts,
    pack_rows,
    write_rows,
)
from tests.support.processes import run_ranks
from tests.support.trainers import TOKENS_PER_ROW, local, make_sequences, make_trainer

TWO_RANKS = ParallelSection(num_procs=2, expert=2)
WINDOW = 4
ROWS_WERE_SEEN = ["probe_owed"]
"""Tells how many rows there were: all that a step changes that is not made."""

State = dict[str, torch.Tensor]


@dataclass(slots=True)
class Seen:
    """What one rank saw."""

    results: dict[str, StepResult] = field(default_factory=dict)
    differs: dict[str, list[str]] = field(default_factory=dict)
    """By case: names of the tensors that are not what they should be."""
    errors: dict[str, str] = field(default_factory=dict)
    limits: list[float | None] = field(default_factory=list)
    """Of the gradient norm, by step."""
    norms: dict[str, Sequence[float]] = field(default_factory=dict)
    """What the rule for spikes remembers, by trainer."""
    verdict: BadStep | None = None


def _state(trainer: PolicyTrainer) -> State:
    """This rank's part of all that the next step depends on, but the version."""
    tensors = {name: tensor.clone() for name, tensor in local_parts(trainer.state.tensors())}
    del tensors["policy_version"]
    return tensors


def _differ(one: State, other: State) -> list[str]:
    assert one.keys() == other.keys() and any("exp_avg_sq" in name for name in one)
    return [name for name in one if not torch.equal(one[name], other[name])]


def _changed(rows: list[PackedRow], change: Callable[[np.ndarray], np.ndarray]) -> list[PackedRow]:
    """The rows, on the second rank with other advantages."""
    if dist.get_rank() == 0:
        return rows
    return [dataclasses.replace(row, advantages_L=change(row.advantages_L)) for row in rows]


def _spoil(advantages_L: np.ndarray) -> np.ndarray:
    return np.full_like(advantages_L, np.nan)


class World:
    """Trainers of one model, and rows for them."""

    def __init__(self, folder: Path, sequences: list[TrainingSequence], out: Path) -> None:
        self._folder = folder
        self._out = out
        self._num_trainers = 0
        rank = dist.get_rank()
        self.rows = [
            pack_rows(sequences[first : first + 4], tokens_per_row=TOKENS_PER_ROW, num_ranks=2)[rank]
            for first in (0, 4, 8)
        ]

    def trainer(self, *, snapshots: bool = True, **section: object) -> PolicyTrainer:
        trainer = make_trainer(
            self._folder,
            TWO_RANKS,
            replay_probe_share=0.3,
            bad_steps=BadStepsSection.model_validate(section),
        )
        if snapshots:
            trainer.open_snapshots(self.snapshot_folder(), every_steps=1, at_most=0)
            self._num_trainers += 1
        return trainer

    def snapshot_folder(self, number: int | None = None) -> Path:
        folder = self._out / f"snapshots-{self._num_trainers if number is None else number}"
        folder.mkdir(exist_ok=True)
        return folder


def _roll_back(world: World, seen: Seen) -> None:
    """In the first batch, whose snapshot is that of the start, and in the second one."""
    first, second, third = world.rows
    trainer, alone = world.trainer(on_nan="rollback"), world.trainer(on_nan="rollback")
    for name in ("first batch", "second batch"):
        before = _state(trainer)
        seen.results[name] = trainer.train_batch([first, _changed(second, _spoil), third])
        seen.differs[name] = _differ(before, _state(trainer))
        seen.results[f"after {name}"] = trainer.train_batch([third, first])
        alone.train_batch([third, first])
        seen.differs[f"after {name}"] = _differ(_state(alone), _state(trainer))


def _skip_and_stop(world: World, seen: Seen) -> None:
    first, second, third = world.rows
    trainer = world.trainer()
    trainer.train_batch([first])
    before = _state(trainer)
    seen.results["skip"] = trainer.train_batch([_changed(second, _spoil)])
    seen.differs["skip"] = _differ(before, _state(trainer))
    stopping = world.trainer(snapshots=False, on_nan="stop")
    before = _state(stopping)
    seen.results["stop"] = stopping.train_batch([_changed(first, _spoil), third])
    seen.differs["stop"] = _differ(before, _state(stopping))
    without = world.trainer(snapshots=False, on_nan="rollback")
    try:
        without.train_batch([_changed(first, _spoil)])
    except ValueError as error:
        seen.errors["no snapshot"] = str(error)


def _spoil_weights(world: World, seen: Seen) -> None:
    """An optimizer whose step makes one weight of the second rank infinite."""
    for name, has_snapshots, on_nan in (
        ("weights", True, "skip"),
        ("weights, stop", True, "stop"),
        ("weights without snapshots", False, "skip"),
    ):
        trainer = world.trainer(snapshots=has_snapshots, on_nan=on_nan)
        trainer.train_batch([world.rows[0]])
        before, step = _state(trainer), trainer._optimizer.step
        weight = dict(trainer.model.named_parameters())["layers.1.attention.qkv_linear.wq.weight"].detach()
        shard = local(weight)

        def spoiling(step: Callable[[], object] = step, shard: torch.Tensor = shard) -> None:
            step()
            if dist.get_rank() == 1:
                shard.view(-1)[2] = torch.inf

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer._optimizer, "step", spoiling)
            try:
                seen.results[name] = trainer.train_batch([world.rows[1]])
            except NonFiniteWeights as error:
                seen.errors[name] = str(error)
        if has_snapshots:
            seen.differs[name] = _differ(before, _state(trainer))


def _spike(world: World, seen: Seen, out: Path) -> None:
    rows = world.rows
    section = {"on_spike": "skip", "spike_factor": 3.0, "spike_window": WINDOW}
    trainer = world.trainer(**section)
    number = world._num_trainers - 1
    for index in range(WINDOW):
        result = trainer.train_batch([rows[index % 2]])
        seen.limits.append(result.metrics.get("grad_norm_limit"))
        seen.results[f"before {index}"] = result
    before = _state(trainer)
    seen.results["spike"] = trainer.train_batch([_changed(rows[2], lambda advantages_L: advantages_L * 1e4)])
    seen.differs["spike"] = _differ(before, _state(trainer))
    seen.results["after spike"] = trainer.train_batch([rows[0]])
    seen.norms["trainer"] = trainer._judge.spikes.norms if trainer._judge.spikes else ()
    trainer.finish_snapshot()
    again = world.trainer(snapshots=False, **section)
    again.open_snapshots(world.snapshot_folder(number), every_steps=1, at_most=99)
    seen.differs["started again"] = _differ(_state(trainer), _state(again))
    seen.norms["started again"] = again._judge.spikes.norms if again._judge.spikes else ()
    trainer.begin_checkpoint(out / "step-00000006", run_state=b"{}", keep=2)
    trainer.finish_checkpoint()
    # Rank 0 gives the checkpoint its name after the other rank has ended its part.
    dist.barrier()
    for name, other in {
        "resumed": world.trainer(snapshots=False, **section),
        "another window": world.trainer(snapshots=False, **section | {"spike_window": WINDOW + 1}),
        "off": world.trainer(snapshots=False),
    }.items():
        other.resume(out / "step-00000006")
        assert other.policy_version == 6
        seen.norms[name] = other._judge.spikes.norms if other._judge.spikes else ()


def _with(rows: list[PackedRow], field: str, value: float) -> list[PackedRow]:
    """The rows, on the second rank with one target's number replaced."""
    if dist.get_rank() == 0:
        return rows
    values_L = getattr(rows[0], field).copy()
    values_L[rows[0].mask_L.nonzero()[0][1]] = value
    return [dataclasses.replace(rows[0], **{field: values_L}), *rows[1:]]


def _not_finite(world: World, seen: Seen, folder: Path, out: Path) -> None:
    """A number of the second rank: in its data, in its gradients, and at last in its weights."""
    rows = world.rows[0]
    trainer, alone = world.trainer(snapshots=False), world.trainer(snapshots=False)
    parameter = dict(trainer.model.named_parameters())["layers.1.attention.qkv_linear.wq.weight"]
    before, accumulate = _state(trainer), trainer._accumulate_gradients

    def poisoned(*arguments: object) -> str | None:
        problem = accumulate(*arguments)
        if dist.get_rank() == 1:
            local(parameter.grad).view(-1)[0] = torch.inf
        return problem

    with pytest.MonkeyPatch.context() as patch:
        for name, bad_rows in {
            "nan advantage": _with(rows, "advantages_L", np.nan),
            "inf log-probability": _with(rows, "behavior_logprobs_L", -np.inf),
            "inf gradient": rows,
        }.items():
            if name == "inf gradient":
                patch.setattr(trainer, "_accumulate_gradients", poisoned)
            seen.results[name] = trainer.train_step(bad_rows)
            seen.differs[name] = _differ(before, _state(trainer))
    seen.results["after skipped"] = trainer.train_step(rows)
    alone.train_step(rows)
    try:
        trainer.train_step(rows, max_fresh_mismatch=1e-3)
    except MismatchTooLarge as error:
        seen.errors["mismatch"] = str(error)
    seen.differs["after skipped"] = _differ(_state(alone), _state(trainer))
    write_rows(out / "rows", rows, rank=dist.get_rank(), reason="why")
    if dist.get_rank() == 1:
        local(parameter.detach()).view(-1)[3] = torch.nan
    for name, call in {
        "export": lambda: trainer.save_hf(out / "export", source=folder),
        "checkpoint": lambda: trainer.begin_checkpoint(out / "step-00000004", run_state=b"{}", keep=2),
        "publishing": lambda: trainer.require_finite_weights("publishing"),
    }.items():
        try:
            call()
        except NonFiniteWeights as error:
            seen.errors[name] = str(error)


def _observe(folder: Path, sequences: list[TrainingSequence], out: Path) -> Seen:
    seen, world = Seen(), World(folder, sequences, out)
    _roll_back(world, seen)
    _skip_and_stop(world, seen)
    _spoil_weights(world, seen)
    _spike(world, seen, out)
    _not_finite(world, seen, folder, out)
    judge = StepJudge(BadStepsSection(on_spike=OnBadStep.ROLLBACK, spike_factor=2.0, spike_window=WINDOW))
    for _ in range(WINDOW):
        judge.made(1.0)
    # The ranks differ in the last bits: for one of them it is a spike.
    seen.verdict = judge.judge([None], [], 2.0 + dist.get_rank() * 1e-12)
    return seen


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def seen(folder: Path, out: Path) -> list[Seen]:
    sequences = make_sequences(12, read_model_facts(str(folder)))
    return run_ranks(2, _observe, folder, sequences, out)


def test_a_batch_that_is_rolled_back_leaves_no_trace(seen: list[Seen]) -> None:
    """Not in a bit of weights, moments and random states, and none in the steps after it."""
    for rank in seen:
        for name, version in (("first batch", 1), ("second batch", 3)):
            result = rank.results[name]
            assert not rank.differs[name] and not rank.differs[f"after {name}"]
            assert result.is_rolled_back and not result.ends_run and result.policy_version == version
            assert result.metrics["trainer/num_optimizer_steps"] == 0
            assert (result.skip_reason or "").startswith("step 2 of 3: the loss of row "), result.skip_reason
            assert "on trainer rank 1 is nan" in (result.skip_reason or "")
            after = rank.results[f"after {name}"]
            assert after.skip_reason is None and not after.is_rolled_back
            assert after.policy_version == version + 1


def test_a_step_that_is_skipped_changes_neither_weights_nor_moments(seen: list[Seen]) -> None:
    for rank in seen:
        result = rank.results["skip"]
        assert rank.differs["skip"] == ROWS_WERE_SEEN
        assert result.skip_reason is not None and not result.is_rolled_back and not result.ends_run
        assert result.policy_version == 2


def test_a_step_that_ends_the_run_changes_nothing_and_is_the_last_of_its_batch(seen: list[Seen]) -> None:
    for rank in seen:
        result = rank.results["stop"]
        assert rank.differs["stop"] == ROWS_WERE_SEEN and result.ends_run and not result.is_rolled_back
        assert (result.skip_reason or "").startswith("step 1 of 2: the loss of row ")


def test_weights_that_a_step_has_made_infinite_are_rolled_back(seen: list[Seen]) -> None:
    for rank in seen:
        for name in ("weights", "weights, stop"):
            result = rank.results[name]
            assert result.is_rolled_back and not rank.differs[name]
            assert result.ends_run == (name == "weights, stop")
            assert "q_proj.weight has values that are nan or infinite on trainer rank 1" in (
                result.skip_reason or ""
            )
        text = rank.errors["weights without snapshots"]
        assert text.startswith("step 2 is refused, and there is no snapshot before it") and "q_proj" in text


def test_without_snapshots_nothing_is_rolled_back_in_silence(seen: list[Seen]) -> None:
    for rank in seen:
        text = rank.errors["no snapshot"]
        assert text.startswith("trainer.bad_steps: step 1 is to be rolled back") and "skip or stop" in text


def test_a_spike_on_one_rank_is_skipped_on_all(seen: list[Seen]) -> None:
    for rank in seen:
        norms = [rank.results[f"before {index}"].metrics["grad_norm"] for index in range(WINDOW)]
        assert all(rank.results[f"before {index}"].skip_reason is None for index in range(WINDOW))
        assert rank.limits == [None] * WINDOW
        result = rank.results["spike"]
        limit = 3.0 * (sorted(norms)[1] + sorted(norms)[2]) / 2
        assert result.metrics["grad_norm_limit"] == pytest.approx(limit)
        assert result.metrics["grad_norm"] > limit and math.isfinite(result.metrics["grad_norm"])
        assert "trainer.bad_steps.spike_factor = 3 times the median of the last 4" in (
            result.skip_reason or ""
        )
        assert rank.differs["spike"] == ROWS_WERE_SEEN
        assert rank.results["after spike"].skip_reason is None
        assert rank.results["after spike"].metrics["grad_norm_limit"] == pytest.approx(limit)


def test_what_spikes_are_judged_by_goes_on_with_the_run(seen: list[Seen]) -> None:
    """From a snapshot, and from a checkpoint, also of a run that judged them otherwise."""
    for rank in seen:
        norms = [rank.results[name].metrics["grad_norm"] for name in ("before 1", "before 2", "before 3")]
        norms.append(rank.results["after spike"].metrics["grad_norm"])
        assert rank.norms["trainer"] == norms
        assert rank.norms["started again"] == rank.norms["resumed"] == norms
        assert not rank.differs["started again"]
        assert rank.norms["another window"] == [] and rank.norms["off"] == ()


def test_a_spike_that_one_rank_alone_sees_is_one_for_all(seen: list[Seen]) -> None:
    verdicts = [rank.verdict for rank in seen]
    assert verdicts[0] is not None and verdicts[0] == verdicts[1]
    assert verdicts[0].remedy is OnBadStep.ROLLBACK and "is 2, more than 2" in verdicts[0].reason


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nan advantage", "on trainer rank 1 is nan: the advantage of its target 1 is nan"),
        ("inf log-probability", "the generator's log-probability of its target 1 is -inf"),
        (
            "inf gradient",
            "the reduced gradient of layers.1.attention.qkv_linear.wq.weight has values that are nan or "
            "infinite on trainer rank",
        ),
    ],
)
def test_what_is_not_finite_on_one_rank_is_skipped_on_all(seen: list[Seen], name: str, text: str) -> None:
    for rank in seen:
        assert text in (rank.results[name].skip_reason or ""), rank.results[name].skip_reason
        assert set(rank.differs[name]) <= set(ROWS_WERE_SEEN)


def test_the_step_after_skipped_ones_is_taken_as_if_they_had_not_been(seen: list[Seen]) -> None:
    for rank in seen:
        result = rank.results["after skipped"]
        assert result.skip_reason is None and result.policy_version == 4
        assert set(rank.differs["after skipped"]) <= set(ROWS_WERE_SEEN)
        assert math.isfinite(result.metrics["loss"]) and math.isfinite(result.metrics["grad_norm"])


def test_data_of_another_distribution_is_not_trained_on(seen: list[Seen]) -> None:
    for rank in seen:
        assert "trainer.max_fresh_mismatch = 0.001" in rank.errors["mismatch"]


def test_weights_that_are_not_finite_go_nowhere(seen: list[Seen], out: Path) -> None:
    for rank in seen:
        for name in ("export", "checkpoint", "publishing"):
            assert "on trainer rank 1" in rank.errors[name], rank.errors
            assert "wq" in rank.errors[name] or "q_proj" in rank.errors[name]
    assert not (out / "export").exists() and not (out / "step-00000004").exists()


def test_the_rows_of_a_bad_step_can_be_read_back(seen: list[Seen], out: Path) -> None:
    with np.load(out / "rows" / "rank-0.npz") as arrays:
        assert str(arrays["reason"]) == "why"
        assert arrays["row0.mask_L"].any()
        assert len(arrays["row0.kept_offsets"]) == arrays["row0.mask_L"].sum() + 1
