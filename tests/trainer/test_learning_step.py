"""One real optimizer step from rewards to weights: the better rollout becomes likelier, worse ones less."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from forgeasync.algorithms import Grpo
from forgeasync.config import AlgorithmSection, OptimizerSection, RoutingReplay
from forgeasync.models import read_model_facts
from forgeasync.rollouts import Group, Step, StoredRollout, TokenTrace
from forgeasync.testing import write_tiny_model
from forgeasync.trainer import (
    PolicyTrainer,
    StepResult,
    TokenPlaces,
    TrainingItem,
    TrainingSequence,
    assign_rows,
    items_of,
    pack_row,
    training_items,
    training_sequence,
    whole_response,
)
from tests.support.buffer_world import make_task
from tests.support.processes import run_ranks
from tests.support.rollouts import make_stored_rollout
from tests.support.trainers import make_trainer

NUM_ROLLOUTS = 4
NUM_TOKENS = 12
NUM_PROMPT_TOKENS = 3
TOKENS_PER_ROW = 32
"""Two rollouts fit."""

SCHEDULE = OptimizerSection(learning_rate=1e-2, warmup_steps=2, decay_steps=(3, 5))
SCHEDULED = [0.5e-2, 1e-2, 1e-2, 0.5e-2, 0.0, 0.0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Log-probabilities [rollout] of whole responses before and after one step, by which one was better."""

    before: list[float]
    after: list[float]
    best: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """Of every step: learning rates of the optimizer's groups, the reported one, how far weights moved."""

    of_groups: list[set[float]]
    reported: list[float]
    moved: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    learned: list[Learned]
    scheduled: Scheduled
    step_gains: list[list[float]]
    """By rollout and step, how much likelier the step became: the first rollout's first step was rewarded,
    and the second one's second."""
    aged: dict[int | None, StepResult]
    """By ``max_token_age``, of a batch whose tokens are 0, 1 and 2 versions old."""


class Batches:
    """Batches of one group over fixed responses, on their way from rewards to packed rows."""

    def __init__(self, vocab_size: int) -> None:
        rng = np.random.default_rng(0)
        prompt_ids_P = rng.integers(0, vocab_size, NUM_PROMPT_TOKENS).astype(np.int32)
        self.traces = [
            TokenTrace(
                prompt_ids_P=prompt_ids_P,
                response_ids_T=rng.integers(0, vocab_size, NUM_TOKENS).astype(np.int32),
                logprobs_T=np.zeros(NUM_TOKENS, np.float32),
                routed_experts=None,
                kept_tokens=None,
            )
            for _ in range(NUM_ROLLOUTS)
        ]

    def step(
        self, trainer: PolicyTrainer, rewards: Sequence[float], *spans: tuple[int, int, int]
    ) -> StepResult:
        """Train on the group as the app does; the responses were sampled by the trainer's own policy."""
        rollouts = [self._rollout(index, spans or ((0, 0, NUM_TOKENS),)) for index in range(NUM_ROLLOUTS)]
        group = Group(
            group_id=0, draw_id=0, task=make_task(0), rollouts=tuple(rollouts), rewards=tuple(rewards)
        )
        algorithm = AlgorithmSection(advantage=Grpo(), group_size=NUM_ROLLOUTS, groups_per_step=1)
        items = training_items([group], [1.0], algorithm)
        (rows,) = assign_rows(items, tokens_per_row=TOKENS_PER_ROW, num_ranks=1)
        behavior = self._logprobs(trainer)
        return trainer.train_step(
            [
                pack_row([self._sequence(item, behavior[int(item.branch.text)], trainer) for item in row])
                for row in rows
            ]
        )

    def logprobs(self, trainer: PolicyTrainer) -> list[float]:
        """Of whole responses."""
        return [float(logprobs_T.sum()) for logprobs_T in self._logprobs(trainer)]

    def _logprobs(self, trainer: PolicyTrainer) -> list[np.ndarray]:
        zeros = np.zeros(NUM_TOKENS, np.float32)
        items = [
            item
            for i in range(NUM_ROLLOUTS)
            for item in items_of(self._rollout(i, ((0, 0, NUM_TOKENS),)), whole_response(0.0), weight=1.0)
        ]
        with torch.no_grad():
            return [trainer.logprobs(pack_row([self._sequence(i, zeros, trainer)])).numpy() for i in items]

    def _rollout(self, index: int, spans: Sequence[tuple[int, int, int]]) -> StoredRollout:
        return make_stored_rollout(*spans, num_prompt_tokens=NUM_PROMPT_TOKENS, text=str(index))

    def _sequence(
        self, item: TrainingItem, behavior_T: np.ndarray, trainer: PolicyTrainer
    ) -> TrainingSequence:
        trace = self.traces[int(item.branch.text)]
        return training_sequence(
            item,
            TokenTrace(
                prompt_ids_P=trace.prompt_ids_P,
                response_ids_T=trace.response_ids_T,
                logprobs_T=behavior_T,
                routed_experts=None,
                kept_tokens=None,
            ),
            trained_version=trainer.policy_version,
            routing_replay=RoutingReplay.OFF,
            keep_sampling_mask=True,
            places=TokenPlaces(None),
        )


def steady_trainer(folder: Path, **options: Any) -> PolicyTrainer:
    """A trainer of small steps, unless ``options`` say otherwise."""
    defaults = {"optimizer": OptimizerSection(learning_rate=1e-4), "tokens_per_row": TOKENS_PER_ROW}
    return make_trainer(folder, temperature=0.8, **defaults | options)


def _learn(folder: Path, batches: Batches, best: int) -> Learned:
    trainer = steady_trainer(folder)
    before = batches.logprobs(trainer)
    batches.step(trainer, [1.0 if index == best else 0.0 for index in range(NUM_ROLLOUTS)])
    return Learned(before=before, after=batches.logprobs(trainer), best=best)


def _learn_steps(folder: Path) -> list[list[float]]:
    """One step on two responses of digits, each with two steps of six characters."""
    trainer = steady_trainer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rng = np.random.default_rng(3)
    texts = ["".join(map(str, rng.integers(0, 10, NUM_TOKENS))) for _ in range(2)]
    traces = [
        TokenTrace(
            prompt_ids_P=np.array(tokenizer.encode("4+1="), np.int32),
            response_ids_T=np.array(tokenizer.encode(text), np.int32),
            logprobs_T=np.zeros(NUM_TOKENS, np.float32),
            routed_experts=None,
            kept_tokens=None,
        )
        for text in texts
    ]
    group = Group(
        group_id=0,
        draw_id=0,
        task=make_task(0),
        rollouts=tuple(make_stored_rollout((0, 0, NUM_TOKENS), text=text) for text in texts),
        rewards=(0.0, 0.0),
        steps=(
            (Step(end=6, value=1.0), Step(end=NUM_TOKENS, value=0.0)),
            (Step(end=6, value=0.0), Step(end=NUM_TOKENS, value=1.0)),
        ),
    )
    algorithm = AlgorithmSection(advantage=Grpo(), group_size=2, groups_per_step=1)
    places = TokenPlaces(folder)

    def sequences() -> list[TrainingSequence]:
        return [
            training_sequence(
                item,
                trace,
                trained_version=0,
                routing_replay=RoutingReplay.OFF,
                keep_sampling_mask=True,
                places=places,
            )
            for item, trace in zip(training_items([group], [1.0], algorithm), traces, strict=True)
        ]

    def logprobs() -> np.ndarray:
        with torch.no_grad():
            return np.stack([trainer.logprobs(pack_row([one])).numpy() for one in sequences()])

    before = logprobs()
    own = zip(sequences(), before, strict=True)
    row = pack_row([dataclasses.replace(one, behavior_logprobs_T=logprobs_T) for one, logprobs_T in own])
    trainer.train_step([row])
    return (logprobs() - before).reshape(2, 2, 6).sum(-1).tolist()


def _schedule(folder: Path, batches: Batches) -> Scheduled:
    trainer = steady_trainer(folder, optimizer=SCHEDULE)
    of_groups: list[set[float]] = []
    trainer._optimizer.register_step_pre_hook(
        lambda optimizer, *_: of_groups.append({group["lr"] for group in optimizer.param_groups})
    )
    reported, moved = [], []
    for _ in SCHEDULED:
        before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        result = batches.step(trainer, [1.0, 0.0, 0.5, 0.0])
        reported.append(result.metrics["learning_rate"])
        moved.append(
            max(
                float((parameter.detach() - old).abs().max())
                for parameter, old in zip(trainer.model.parameters(), before, strict=True)
            )
        )
    return Scheduled(of_groups=of_groups, reported=reported, moved=moved)


def _age(folder: Path, batches: Batches, max_token_age: int | None) -> StepResult:
    trainer = steady_trainer(folder, max_token_age=max_token_age)
    trainer.state.policy_version = 2
    return batches.step(trainer, [1.0, 0.0, 0.0, 0.0], (0, 0, 3), (1, 3, 8), (2, 8, NUM_TOKENS))


def _observe(folder: Path) -> Observed:
    batches = Batches(read_model_facts(str(folder)).vocab_size)
    return Observed(
        learned=[_learn(folder, batches, best) for best in (0, 3)],
        scheduled=_schedule(folder, batches),
        step_gains=_learn_steps(folder),
        aged={max_age: _age(folder, batches, max_age) for max_age in (None, 0, 1, 2)},
    )


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "hf", scale=4.0)
    return run_ranks(1, _observe, folder)[0]


def test_a_step_makes_the_better_rollout_likelier_and_the_worse_ones_less_likely(observed: Observed) -> None:
    for learned in observed.learned:
        gains = [after - before for before, after in zip(learned.before, learned.after, strict=True)]
        assert gains[learned.best] > 0.01, gains
        assert all(gain < -0.001 for index, gain in enumerate(gains) if index != learned.best), gains


def test_a_step_makes_a_rewarded_step_likelier_than_one_that_is_not(observed: Observed) -> None:
    """By hand: first steps have 0.87 - 0.87 = 0, the second steps -0.87 and 0.87."""
    (first, unrewarded), (second, rewarded) = observed.step_gains
    assert rewarded > 0.01 and unrewarded < -0.01, observed.step_gains
    assert abs(first) < rewarded / 2 and abs(second) < rewarded / 2, observed.step_gains


def test_the_scheduled_learning_rate_is_what_the_optimizer_steps_with(observed: Observed) -> None:
    scheduled = observed.scheduled
    assert all(len(rates) == 1 for rates in scheduled.of_groups)
    assert [min(rates) for rates in scheduled.of_groups] == pytest.approx(SCHEDULED)
    assert scheduled.reported == pytest.approx(SCHEDULED)
    # Adam moves a weight by about the learning rate in its first steps.
    assert scheduled.moved[0] == pytest.approx(SCHEDULED[0], rel=0.1)
    assert scheduled.moved[4:] == [0.0, 0.0]


def test_tokens_that_are_too_old_are_not_trained_on(observed: Observed) -> None:
    young = {None: 12, 0: 4, 1: 9, 2: 12}
    for max_age, result in observed.aged.items():
        assert result.num_targets == NUM_ROLLOUTS * young[max_age]
        rejected = result.metrics.get("off_policy/rejected_token_share")
        assert rejected == (None if max_age is None else pytest.approx(1 - young[max_age] / NUM_TOKENS))
    norms = {max_age: result.metrics["grad_norm"] for max_age, result in observed.aged.items()}
    assert norms[2] == norms[None]
    assert len({norms[0], norms[1], norms[2]}) == 3, "gradients are of the young tokens"
