"""Steps that are skipped, rolled back, or end the run: bits of the state on two gloo ranks."""

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from forgeasync.config import BadStepsSection, OnBadStep, ParallelSection
from forgeasync.models import read_model_facts
from forgeasync.trainer import (
    MismatchTooLarge,
    NonFiniteWeights,
    PackedRow,
    PolicyTrainer,
    StepJudge,
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
WEIGHT = "layers.1.attention.qkv_linear.wq.weight"

State = dict[str, torch.Tensor]


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
    return [dataclasses.replace(row, advantages_T=change(row.advantages_T)) for row in rows]


def _spoiled(rows: list[PackedRow]) -> list[PackedRow]:
    return _changed(rows, lambda advantages_T: np.full_like(advantages_T, np.nan))


def _with(rows: list[PackedRow], field: str, value: float) -> list[PackedRow]:
    """The rows, on the second rank with one target's number replaced."""
    if dist.get_rank() == 0:
        return rows
    values_T = getattr(rows[0], field).copy()
    values_T[1] = value
    return [dataclasses.replace(rows[0], **{field: values_T}), *rows[1:]]


def _spoil_one(tensor: torch.Tensor, value: float = torch.inf) -> None:
    """One value of the second rank's shard."""
    if dist.get_rank() == 1:
        local(tensor.detach()).view(-1)[2] = value


class World:
    """Trainers of one model, and rows for them."""

    def __init__(self, folder: Path, sequences: list[TrainingSequence], out: Path) -> None:
        self.folder = folder
        self.out = out
        self.num_trainers = 0
        rank = dist.get_rank()
        self.rows = [
            pack_rows(sequences[first : first + 4], tokens_per_row=TOKENS_PER_ROW, num_ranks=2)[rank]
            for first in (0, 4, 8)
        ]

    def trainer(self, *, snapshots: bool = True, **section: object) -> PolicyTrainer:
        bad_steps = BadStepsSection.model_validate(section)
        trainer = make_trainer(self.folder, TWO_RANKS, replay_probe_share=0.3, bad_steps=bad_steps)
        if snapshots:
            self.num_trainers += 1
            self.open_snapshots(trainer, at_most=0)
        return trainer

    def open_snapshots(self, trainer: PolicyTrainer, *, at_most: int) -> None:
        """In the folder of the newest trainer with snapshots."""
        folder = self.out / f"snapshots-{self.num_trainers}"
        folder.mkdir(exist_ok=True)
        trainer.open_snapshots(folder, every_steps=1, at_most=at_most)


def a_batch_that_is_rolled_back_leaves_no_trace(world: World) -> None:
    """Not in a bit of weights, moments and random states, and none in the steps after it.

    In the first batch, whose snapshot is that of the start, and in a later one.
    """
    first, second, third = world.rows
    trainer, alone = world.trainer(on_nan="rollback"), world.trainer(on_nan="rollback")
    for version in (1, 3):
        before = _state(trainer)
        result = trainer.train_batch([first, _spoiled(second), third])
        assert not _differ(before, _state(trainer))
        assert result.is_rolled_back and not result.ends_run and result.policy_version == version
        assert result.metrics["trainer/num_optimizer_steps"] == 0
        assert re.match(r"step 2 of 3: the loss of row \d on trainer rank 1 is nan", str(result.skip_reason))
        after = trainer.train_batch([third, first])
        alone.train_batch([third, first])
        assert not _differ(_state(alone), _state(trainer))
        assert after.skip_reason is None and not after.is_rolled_back
        assert after.policy_version == version + 1


def a_step_that_is_skipped_or_ends_the_run_changes_neither_weights_nor_moments(world: World) -> None:
    """Whether it is alone in its batch or between others."""
    first, second, third = world.rows
    trainer, alone = world.trainer(), world.trainer()
    trainer.train_batch([first])
    before = _state(trainer)
    result = trainer.train_batch([_spoiled(second)])
    assert _differ(before, _state(trainer)) == ROWS_WERE_SEEN
    assert result.skip_reason is not None and not result.is_rolled_back and not result.ends_run
    assert result.policy_version == 2
    result = trainer.train_batch([third, _spoiled(second), first])
    assert str(result.skip_reason).startswith("step 2 of 3: the loss of row ")
    assert result.policy_version == 3 and result.metrics["trainer/num_optimizer_steps"] == 2
    for batch in ([first], [third, first]):
        alone.train_batch(batch)
    assert _differ(_state(alone), _state(trainer)) == ROWS_WERE_SEEN
    stopping = world.trainer(snapshots=False, on_nan="stop")
    before = _state(stopping)
    result = stopping.train_batch([_spoiled(first), third])
    assert _differ(before, _state(stopping)) == ROWS_WERE_SEEN, "the last of its batch"
    assert result.ends_run and not result.is_rolled_back
    assert str(result.skip_reason).startswith("step 1 of 2: the loss of row ")
    with pytest.raises(ValueError, match=r"trainer.bad_steps: step 1 must be rolled back.* skip or stop"):
        world.trainer(snapshots=False, on_nan="rollback").train_batch([_spoiled(first)])


def weights_that_a_step_has_made_infinite_are_rolled_back(world: World) -> None:
    """By an optimizer that makes one weight of the second rank infinite."""
    for has_snapshots, on_nan in ((True, "skip"), (True, "stop"), (False, "skip")):
        trainer = world.trainer(snapshots=has_snapshots, on_nan=on_nan)
        trainer.train_batch([world.rows[0]])
        before, weight = _state(trainer), dict(trainer.model.named_parameters())[WEIGHT]
        trainer._optimizer.register_step_post_hook(lambda *_, weight=weight: _spoil_one(weight))
        if not has_snapshots:
            with pytest.raises(
                NonFiniteWeights, match=r"^step 2 is refused, and there is no snapshot.*q_proj"
            ):
                trainer.train_batch([world.rows[1]])
            continue
        result = trainer.train_batch([world.rows[1]])
        assert result.is_rolled_back and not _differ(before, _state(trainer))
        assert result.ends_run == (on_nan == "stop")
        named = "q_proj.weight has values that are nan or infinite on trainer rank 1"
        assert named in str(result.skip_reason)


def a_spike_on_one_rank_is_skipped_on_all_and_judged_by_norms_that_go_on_with_the_run(world: World) -> None:
    """From a snapshot, and from a checkpoint, also of a run that judged them otherwise."""
    rows = world.rows
    section = {"on_spike": "skip", "spike_factor": 3.0, "spike_window": WINDOW}
    trainer = world.trainer(**section)
    norms = []
    for index in range(WINDOW):
        result = trainer.train_batch([rows[index % 2]])
        assert result.skip_reason is None and "grad_norm_limit" not in result.metrics
        norms.append(result.metrics["grad_norm"])
    limit = 3.0 * (sorted(norms)[1] + sorted(norms)[2]) / 2
    before = _state(trainer)
    spike = trainer.train_batch([_changed(rows[2], lambda advantages_T: advantages_T * 1e4)])
    assert _differ(before, _state(trainer)) == ROWS_WERE_SEEN
    assert spike.metrics["grad_norm_limit"] == pytest.approx(limit)
    assert limit < spike.metrics["grad_norm"] < math.inf
    assert "trainer.bad_steps.spike_factor = 3 times the median of the last 4" in str(spike.skip_reason)
    after = trainer.train_batch([rows[0]])
    assert after.skip_reason is None and after.metrics["grad_norm_limit"] == pytest.approx(limit)

    def remembered(one: PolicyTrainer) -> list[float]:
        return list(one._judge.spikes.norms) if one._judge.spikes else []

    norms = [*norms[1:], after.metrics["grad_norm"]]
    trainer.finish_snapshot()
    again = world.trainer(snapshots=False, **section)
    world.open_snapshots(again, at_most=99)
    assert not _differ(_state(trainer), _state(again))
    assert remembered(trainer) == remembered(again) == norms
    folder = world.out / "step-00000006"
    trainer.begin_checkpoint(folder, run_state=b"{}", keep=2)
    trainer.finish_checkpoint()
    # Rank 0 gives the checkpoint its name after the other rank has ended its part.
    dist.barrier()
    for changes, expected in ((section, norms), (section | {"spike_window": WINDOW + 1}, []), ({}, [])):
        other = world.trainer(snapshots=False, **changes)
        other.resume(folder)
        assert other.policy_version == 6 and remembered(other) == expected


def a_spike_that_one_rank_alone_sees_is_one_for_all(world: World) -> None:
    """The ranks differ in the last bits."""
    judge = StepJudge(BadStepsSection(on_spike=OnBadStep.ROLLBACK, spike_factor=2.0, spike_window=WINDOW))
    for _ in range(WINDOW):
        judge.made(1.0)
    verdict = judge.judge(None, [], 2.0 + dist.get_rank() * 1e-12)
    assert verdict is not None and verdict.remedy is OnBadStep.ROLLBACK
    assert "is 2, more than 2" in verdict.reason


def what_is_not_finite_on_one_rank_is_skipped_on_all_and_leaves_no_trace(world: World) -> None:
    """A number of the second rank: in its data, and in its gradients."""
    rows = world.rows[0]
    trainer, alone = world.trainer(snapshots=False), world.trainer(snapshots=False)
    parameter = dict(trainer.model.named_parameters())[WEIGHT]
    before, accumulate = _state(trainer), trainer._accumulate_gradients

    def poisoned(*arguments: object) -> str | None:
        problem = accumulate(*arguments)
        _spoil_one(parameter.grad)
        return problem

    with pytest.MonkeyPatch.context() as patch:
        for bad_rows, accumulating, text in (
            (
                _with(rows, "advantages_T", np.nan),
                accumulate,
                "rank 1 is nan: the advantage of its target 1 is",
            ),
            (
                _with(rows, "behavior_logprobs_T", -np.inf),
                accumulate,
                "log-probability of its target 1 is -inf",
            ),
            (rows, poisoned, f"the reduced gradient of {WEIGHT} has values that are nan or infinite on"),
        ):
            patch.setattr(trainer, "_accumulate_gradients", accumulating)
            reason = trainer.train_step(bad_rows).skip_reason
            assert text in str(reason), reason
            assert set(_differ(before, _state(trainer))) <= set(ROWS_WERE_SEEN)
    result = trainer.train_step(rows)
    alone.train_step(rows)
    assert result.skip_reason is None and result.policy_version == 4
    assert math.isfinite(result.metrics["loss"]) and math.isfinite(result.metrics["grad_norm"])
    after = _state(trainer)
    assert set(_differ(_state(alone), after)) <= set(ROWS_WERE_SEEN)
    with pytest.raises(MismatchTooLarge, match=r"trainer.max_fresh_mismatch = 0.001"):
        trainer.train_step(rows, max_fresh_mismatch=1e-3)
    assert set(_differ(after, _state(trainer))) <= set(ROWS_WERE_SEEN)


def weights_that_are_not_finite_go_nowhere(world: World) -> None:
    trainer, out = world.trainer(snapshots=False), world.out
    _spoil_one(dict(trainer.model.named_parameters())[WEIGHT], torch.nan)
    for call in (
        lambda: trainer.save_hf(out / "export", source=world.folder),
        lambda: trainer.begin_checkpoint(out / "step-00000004", run_state=b"{}", keep=2),
        lambda: trainer.require_finite_weights("publishing"),
    ):
        with pytest.raises(NonFiniteWeights, match=r"(wq|q_proj).* on trainer rank 1"):
            call()
    assert not (out / "export").exists() and not (out / "step-00000004").exists()


def the_rows_of_a_bad_step_can_be_read_back(world: World) -> None:
    write_rows(world.out / "rows", world.rows[0], rank=dist.get_rank(), reason="why")
    with np.load(world.out / "rows" / f"rank-{dist.get_rank()}.npz") as arrays:
        assert str(arrays["reason"]) == "why"
        assert len(arrays["row0.places_T"]) > 0
        assert len(arrays["row0.kept_offsets"]) == len(arrays["row0.places_T"]) + 1


def _keep(promises: list[Callable[[World], None]], folder: Path, out: Path) -> None:
    for promise in promises:
        own = out / promise.__name__[:40]
        own.mkdir(exist_ok=True)
        promise(World(folder, make_sequences(12, read_model_facts(str(folder))), own))


@pytest.mark.parametrize(
    "promises",
    [
        [a_batch_that_is_rolled_back_leaves_no_trace],
        [a_step_that_is_skipped_or_ends_the_run_changes_neither_weights_nor_moments],
        [weights_that_a_step_has_made_infinite_are_rolled_back],
        [a_spike_on_one_rank_is_skipped_on_all_and_judged_by_norms_that_go_on_with_the_run],
        [what_is_not_finite_on_one_rank_is_skipped_on_all_and_leaves_no_trace],
        [
            a_spike_that_one_rank_alone_sees_is_one_for_all,
            weights_that_are_not_finite_go_nowhere,
            the_rows_of_a_bad_step_can_be_read_back,
        ],
    ],
    ids=lambda promises: promises[0].__name__,
)
def test_of_bad_steps(promises: list[Callable[[World], None]], folder: Path, tmp_path: Path) -> None:
    run_ranks(2, _keep, promises, folder, tmp_path)
