"""Several optimizer steps on one batch: weights, versions, the policy at the batch's start, skipped steps."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import PrivateAttr

from forgeasync.algorithms import DecoupledPpo, Loss, RowLoss, RowTokens
from forgeasync.config import OptimizerSection, check_without_model
from forgeasync.models import read_model_facts
from forgeasync.testing import write_tiny_model
from forgeasync.trainer import (
    PackedRow,
    PolicyTrainer,
    StepResult,
    items_of,
    pack_row,
    split_by_groups,
    whole_response,
)
from tests.support.buffer_world import make_group
from tests.support.config_samples import minimal_config, only
from tests.support.processes import run_ranks
from tests.support.trainers import make_sequences, make_trainer, whole

NUM_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A batch: what it reported, and the weights after it."""

    result: StepResult
    weights: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    in_one_batch: Trained
    in_batches: list[Trained]
    """The same minibatches as batches of one step each."""
    proximal: list[torch.Tensor]
    """By minibatch: log-probabilities under the weights before the batch."""
    seen: list[RowTokens]
    """By minibatch: what decoupled PPO was given."""
    decoupled: Trained
    decoupled_in_one_step: Trained
    num_forwards: tuple[int, int]
    """Forward passes of decoupled PPO over the four rows: in one step, and in four."""
    with_bad_step: Trained
    without_bad_step: Trained


class SeeingLoss(Loss):
    """A loss that keeps what it is called on."""

    _seen: list[RowTokens] = PrivateAttr(default_factory=list)

    @property
    def seen(self) -> list[RowTokens]:
        return self._seen

    def __call__(self, row: RowTokens, *, total: torch.Tensor | float) -> RowLoss:
        tensors = {f.name: getattr(row, f.name) for f in dataclasses.fields(row)}
        self._seen.append(
            RowTokens(**{k: None if v is None else v.detach().clone() for k, v in tensors.items()})
        )
        return super().__call__(row, total=total)


def unclipped_trainer(folder: Path, loss: Loss) -> PolicyTrainer:
    optimizer = OptimizerSection(learning_rate=1e-3, max_grad_norm=1e9)
    return make_trainer(folder, loss=loss, temperature=0.8, tokens_per_row=512, optimizer=optimizer)


def weights_of(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: whole(parameter) for name, parameter in trainer.model.named_parameters()}


def train(trainer: PolicyTrainer, minibatches: Sequence[Sequence[PackedRow]]) -> Trained:
    return Trained(result=trainer.train_batch(minibatches), weights=weights_of(trainer))


def count_forwards(trainer: PolicyTrainer, minibatches: Sequence[Sequence[PackedRow]]) -> int:
    calls = []
    hook = trainer.model.register_forward_hook(lambda *_: calls.append(1))
    trainer.train_batch(minibatches)
    hook.remove()
    return len(calls)


def spoiled(row: PackedRow) -> PackedRow:
    return dataclasses.replace(row, behavior_logprobs_L=np.full_like(row.behavior_logprobs_L, np.nan))


def _observe(folder: Path) -> Observed:
    sequences = make_sequences(8, read_model_facts(str(folder)))
    trainer = unclipped_trainer(folder, Loss())
    rows = []
    with torch.no_grad():
        for index in range(0, 8, 2):
            pair = [
                dataclasses.replace(one, behavior_logprobs_T=trainer.logprobs(pack_row([one])).numpy())
                for one in sequences[index : index + 2]
            ]
            rows.append([pack_row(pair)])
        proximal = [trainer.logprobs(row) for (row,) in rows]
    batches = unclipped_trainer(folder, Loss())
    decoupled, seen = Loss(objective=DecoupledPpo()), SeeingLoss(objective=DecoupledPpo())
    together = [[row for (row,) in rows]]
    bad = [rows[0], [spoiled(rows[1][0])], rows[2]]
    return Observed(
        in_one_batch=train(trainer, rows),
        in_batches=[train(batches, [one]) for one in rows],
        proximal=proximal,
        decoupled=train(unclipped_trainer(folder, seen), rows),
        seen=seen.seen,
        decoupled_in_one_step=train(unclipped_trainer(folder, decoupled), together),
        num_forwards=(
            count_forwards(unclipped_trainer(folder, decoupled), together),
            count_forwards(unclipped_trainer(folder, decoupled), rows),
        ),
        with_bad_step=train(unclipped_trainer(folder, Loss()), bad),
        without_bad_step=train(unclipped_trainer(folder, Loss()), [rows[0], rows[2]]),
    )


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "hf", scale=4.0)
    return run_ranks(1, _observe, folder)[0]


def same(one: Trained, other: Trained) -> bool:
    return all(torch.equal(tensor, other.weights[name]) for name, tensor in one.weights.items())


def test_steps_of_one_batch_move_the_weights_as_batches_of_one_step_do(observed: Observed) -> None:
    """Bit for bit; only the version tells them apart."""
    assert same(observed.in_one_batch, observed.in_batches[-1])
    assert not same(observed.in_one_batch, observed.in_batches[-2]), "the last step counts"
    assert observed.in_one_batch.result.policy_version == 1
    assert [one.result.policy_version for one in observed.in_batches] == [1, 2, 3, 4]


def test_a_batch_reports_means_over_its_steps(observed: Observed) -> None:
    found, steps = observed.in_one_batch.result, [one.result for one in observed.in_batches]
    assert found.num_targets == sum(step.num_targets for step in steps)
    assert found.num_padding_tokens == sum(step.num_padding_tokens for step in steps)
    for name in ("loss", "grad_norm", "mismatch/kl", "objective/clipped_share", "learning_rate"):
        expected = math.fsum(step.metrics[name] for step in steps) / NUM_STEPS
        assert found.metrics[name] == pytest.approx(expected, rel=1e-12, abs=1e-15), name
    largest = max(step.metrics["mismatch/logprob_abs_max"] for step in steps)
    assert found.metrics["mismatch/logprob_abs_max"] == largest
    assert found.metrics["trainer/num_optimizer_steps"] == NUM_STEPS
    assert [step.metrics["trainer/num_optimizer_steps"] for step in steps] == [1] * NUM_STEPS


def test_only_the_first_step_has_fresh_tokens(observed: Observed) -> None:
    """They were sampled under the weights before the batch, which later steps have moved."""
    first = observed.in_batches[0].result.metrics["mismatch/fresh_logprob_abs_mean"]
    assert observed.in_one_batch.result.metrics["mismatch/fresh_logprob_abs_mean"] == first
    assert observed.in_batches[2].result.metrics["mismatch/fresh_logprob_abs_mean"] > 10 * first


def test_decoupled_ppo_is_clipped_around_the_policy_at_the_start_of_the_batch(observed: Observed) -> None:
    first, *later = observed.seen
    assert first.proximal_logprobs_T is None and len(later) == NUM_STEPS - 1
    for row, proximal_T in zip(later, observed.proximal[1:], strict=True):
        assert row.proximal_logprobs_T is not None and torch.equal(row.proximal_logprobs_T, proximal_T)
        ratio_T = (row.logprobs_T - proximal_T).exp()
        assert float((ratio_T - 1.0).abs().max()) > 0.2, "its own ratio is not 1"
    assert observed.decoupled.result.metrics["objective/clipped_share"] > 0.0
    assert observed.decoupled_in_one_step.result.metrics["objective/clipped_share"] == 0.0


def test_the_policy_at_the_start_costs_no_forward_pass_with_one_step(observed: Observed) -> None:
    in_one, in_four = observed.num_forwards
    assert in_one == NUM_STEPS, "one for each row"
    assert in_four == NUM_STEPS + NUM_STEPS - 1, "and one more for the rows of later steps"


def test_a_step_that_is_not_finite_leaves_the_others_of_its_batch(observed: Observed) -> None:
    assert same(observed.with_bad_step, observed.without_bad_step)
    result = observed.with_bad_step.result
    assert result.skip_reason is not None and result.skip_reason.startswith("step 2 of 3: the loss of row 1 ")
    assert result.policy_version == 1 and result.metrics["trainer/num_optimizer_steps"] == 2
    assert observed.without_bad_step.result.skip_reason is None


@pytest.mark.parametrize("num_minibatches", [1, 2, 4])
def test_minibatches_are_whole_groups_in_order(num_minibatches: int) -> None:
    """Groups of unlike sizes: filters may have left rollouts out."""
    groups = [make_group(texts=texts) for texts in (("a", "b"), ("c",), ("d", "e", "f"), ("g", "h"))]
    items = [
        item
        for group in groups
        for rollout in group.rollouts
        for item in items_of(rollout, whole_response(0.0), weight=1.0)
    ]
    found = split_by_groups(items, groups, num_minibatches)
    texts = ["".join(item.branch.text for item in part) for part in found]
    assert texts == {1: ["abcdefgh"], 2: ["abc", "defgh"], 4: ["ab", "c", "def", "gh"]}[num_minibatches]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.steps_per_batch=4"], ["= 4: must divide algorithm.groups_per_step = 2"]),
        (
            ["trainer.steps_per_batch=2", "trainer.parallel.num_procs=8"],
            ["= 2: an optimizer step has 4 rollouts; must be at least 8, one for each data-parallel rank"],
        ),
    ],
)
def test_steps_that_cannot_be_made_are_refused(overrides: list[str], words: list[str]) -> None:
    assert check_without_model(minimal_config("trainer.steps_per_batch=2")) == []
    message = only(check_without_model(minimal_config(*overrides)))
    assert message.startswith("trainer.steps_per_batch")
    for word in words:
        assert word in message
