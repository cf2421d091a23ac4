"""Several optimizer steps on one batch: weights, versions, the policy at the batch's start, skipped steps."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from pydantic import PrivateAttr

from forgeasync.algorithms import DecoupledPpo, Loss, RowLoss, RowTokens
from forgeasync.config import OptimizerSection, check_without_model
from forgeasync.models import read_model_facts
from forgeasync.testing import write_tiny_model
from forgeasync.trainer import PackedRow, PolicyTrainer, items_of, pack_row, split_by_groups, whole_response
from tests.support.buffer_world import make_group
from tests.support.config_samples import minimal_config, only
from tests.support.processes import run_ranks
from tests.support.trainers import make_sequences, make_trainer, named_tensors

NUM_STEPS = 4

Minibatches = Sequence[Sequence[PackedRow]]


class SeeingLoss(Loss):
    """A loss that keeps what it is called on."""

    _seen: list[RowTokens] = PrivateAttr(default_factory=list)

    @property
    def seen(self) -> list[RowTokens]:
        return self._seen

    def __call__(self, row: RowTokens, *, total: torch.Tensor | float) -> RowLoss:
        self._seen.append(dataclasses.replace(row, logprobs_T=row.logprobs_T.detach().clone()))
        return super().__call__(row, total=total)


def unclipped_trainer(folder: Path, loss: Loss) -> PolicyTrainer:
    optimizer = OptimizerSection(learning_rate=1e-3, max_grad_norm=1e9)
    return make_trainer(folder, loss=loss, temperature=0.8, tokens_per_row=512, optimizer=optimizer)


def weights_of(trainer: PolicyTrainer) -> list[torch.Tensor]:
    return [*named_tensors(trainer).values()]


def own_rows(folder: Path) -> list[list[PackedRow]]:
    """A row for each step, sampled by the policy of the start."""
    sequences = make_sequences(2 * NUM_STEPS, read_model_facts(str(folder)))
    trainer = unclipped_trainer(folder, Loss())
    with torch.no_grad():
        own = [
            dataclasses.replace(one, behavior_logprobs_T=trainer.logprobs(pack_row([one])).numpy())
            for one in sequences
        ]
    return [[pack_row(own[index : index + 2])] for index in range(0, len(own), 2)]


def steps_of_one_batch_do_what_batches_of_one_step_do(folder: Path, rows: Minibatches) -> None:
    """Weights bit for bit; only the version tells them apart. Metrics are means over the steps."""
    trainer, other = unclipped_trainer(folder, Loss()), unclipped_trainer(folder, Loss())
    found = trainer.train_batch(rows)
    steps = []
    for one in rows:
        assert not all(map(torch.equal, weights_of(trainer), weights_of(other))), "the last step counts"
        steps.append(other.train_batch([one]))
    assert all(map(torch.equal, weights_of(trainer), weights_of(other)))
    assert found.policy_version == 1 and [one.policy_version for one in steps] == [1, 2, 3, 4]
    assert found.num_targets == sum(step.num_targets for step in steps)
    assert found.num_padding_tokens == sum(step.num_padding_tokens for step in steps)
    for name in ("loss", "grad_norm", "mismatch/kl", "objective/clipped_share", "learning_rate"):
        expected = math.fsum(step.metrics[name] for step in steps) / NUM_STEPS
        assert found.metrics[name] == pytest.approx(expected, rel=1e-12, abs=1e-15), name
    largest = max(step.metrics["mismatch/logprob_abs_max"] for step in steps)
    assert found.metrics["mismatch/logprob_abs_max"] == largest
    assert found.metrics["trainer/num_optimizer_steps"] == NUM_STEPS
    assert all(step.metrics["trainer/num_optimizer_steps"] == 1 for step in steps)
    # Later steps have moved the weights under which the tokens were sampled.
    fresh = [step.metrics["mismatch/fresh_logprob_abs_mean"] for step in steps]
    assert found.metrics["mismatch/fresh_logprob_abs_mean"] == fresh[0] < fresh[2] / 10


def decoupled_ppo_is_clipped_around_the_policy_at_the_start_of_the_batch(
    folder: Path, rows: Minibatches
) -> None:
    seeing, together = SeeingLoss(objective=DecoupledPpo()), [[row for (row,) in rows]]
    for batch, num_forwards in ((rows, NUM_STEPS + NUM_STEPS - 1), (together, NUM_STEPS)):
        trainer = unclipped_trainer(folder, seeing)
        with torch.no_grad():
            proximal = [trainer.logprobs(row) for (row,) in rows]
        seeing.seen.clear()
        calls: list[int] = []
        trainer.model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        clipped_share = trainer.train_batch(batch).metrics["objective/clipped_share"]
        assert len(calls) == num_forwards, "one for each row, and one more for the rows of later steps"
        if batch is together:
            assert clipped_share == 0.0
            continue
        assert clipped_share > 0.0
        first, *later = seeing.seen
        assert first.proximal_logprobs_T is None and len(later) == NUM_STEPS - 1
        for row, proximal_T in zip(later, proximal[1:], strict=True):
            assert row.proximal_logprobs_T is not None and torch.equal(row.proximal_logprobs_T, proximal_T)
            assert float(((row.logprobs_T - proximal_T).exp() - 1.0).abs().max()) > 0.2, "not its own"


def _keep(promise: Callable[[Path, Minibatches], None], folder: Path) -> None:
    promise(folder, own_rows(folder))


@pytest.mark.parametrize(
    "promise",
    [
        steps_of_one_batch_do_what_batches_of_one_step_do,
        decoupled_ppo_is_clipped_around_the_policy_at_the_start_of_the_batch,
    ],
)
def test_in_a_trainer(promise: Callable[[Path, Minibatches], None], tmp_path: Path) -> None:
    run_ranks(1, _keep, promise, write_tiny_model(tmp_path / "hf", scale=4.0))


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
        (["trainer.steps_per_batch=4"], "= 4: must divide algorithm.groups_per_step = 2"),
        (
            ["trainer.steps_per_batch=2", "trainer.parallel.num_procs=8"],
            "= 2: an optimizer step has 4 rollouts; must be at least 8, one for each data-parallel rank",
        ),
    ],
)
def test_steps_that_cannot_be_made_are_refused(overrides: list[str], words: str) -> None:
    assert check_without_model(minimal_config("trainer.steps_per_batch=2")) == []
    message = only(check_without_model(minimal_config(*overrides)))
    assert message.startswith("trainer.steps_per_batch") and words in message
