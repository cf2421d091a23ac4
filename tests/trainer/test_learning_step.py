"""One real optimizer step from rewards to weights: the better rollout becomes likelier, worse ones less."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from forgeasync.algorithms import Grpo
from forgeasync.config import AlgorithmSection, OptimizerSection, RoutingReplay
from forgeasync.models import read_model_facts
from forgeasync.rollouts import Group, Step, TokenTrace
from forgeasync.testing import write_tiny_model
from forgeasync.trainer import (
    PolicyTrainer,
    StepResult,
    TokenPlaces,
    TrainingSequence,
    pack_row,
    pack_rows,
    training_items,
    training_sequence,
)
from tests.support.buffer_world import make_task
from tests.support.processes import run_ranks
from tests.support.rollouts import make_stored_rollout
from tests.support.trainers import make_trainer

NUM_ROLLOUTS = 4
NUM_TOKENS = 12
TOKENS_PER_ROW = 32
"""Two rollouts fit."""


def make_trace(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> TokenTrace:
    return TokenTrace(
        prompt_ids_P=np.array(prompt_ids, np.int32),
        response_ids_T=np.array(response_ids, np.int32),
        logprobs_T=np.zeros(NUM_TOKENS, np.float32),
        routed_experts=None,
        kept_tokens=None,
    )


def random_traces(folder: Path) -> list[TokenTrace]:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, read_model_facts(str(folder)).vocab_size, (1 + NUM_ROLLOUTS, NUM_TOKENS))
    return [make_trace(ids[0, :3], response_ids) for response_ids in ids[1:]]


def make_group(
    rewards: Sequence[float],
    *,
    texts: Sequence[str] = ("",) * NUM_ROLLOUTS,
    steps: tuple[tuple[Step, ...], ...] | None = None,
) -> Group:
    return Group(
        group_id=0,
        draw_id=0,
        task=make_task(0),
        rollouts=tuple(make_stored_rollout((0, 0, NUM_TOKENS), text=text) for text in texts),
        rewards=tuple(rewards),
        steps=steps,
    )


def steady_trainer(folder: Path, **options: Any) -> PolicyTrainer:
    """A trainer of small steps, unless ``options`` say otherwise."""
    defaults = {"optimizer": OptimizerSection(learning_rate=1e-4), "tokens_per_row": TOKENS_PER_ROW}
    return make_trainer(folder, temperature=0.8, **defaults | options)


def logprobs_of(trainer: PolicyTrainer, sequences: Sequence[TrainingSequence]) -> np.ndarray:
    """By sequence and token."""
    with torch.no_grad():
        return np.stack([trainer.logprobs(pack_row([one])).numpy() for one in sequences])


def sequences_of(
    trainer: PolicyTrainer, group: Group, traces: Sequence[TokenTrace], places: TokenPlaces | None = None
) -> list[TrainingSequence]:
    """As the app makes them; the responses were sampled by the trainer's own policy."""
    algorithm = AlgorithmSection(advantage=Grpo(), group_size=len(traces), groups_per_step=1)
    sequences = [
        training_sequence(
            item,
            trace,
            trained_version=trainer.policy_version,
            routing_replay=RoutingReplay.OFF,
            keep_sampling_mask=True,
            places=places or TokenPlaces(None),
        )
        for item, trace in zip(training_items([group], [1.0], algorithm), traces, strict=True)
    ]
    own = zip(sequences, logprobs_of(trainer, sequences), strict=True)
    return [dataclasses.replace(one, behavior_logprobs_T=logprobs_T) for one, logprobs_T in own]


def train_on(trainer: PolicyTrainer, sequences: Sequence[TrainingSequence]) -> StepResult:
    return trainer.train_step(pack_rows(sequences, tokens_per_row=TOKENS_PER_ROW, num_ranks=1)[0])


def a_step_makes_the_better_rollout_likelier_and_the_worse_ones_less_likely(folder: Path) -> None:
    for best in (0, 3):
        trainer = steady_trainer(folder)
        group = make_group([float(index == best) for index in range(NUM_ROLLOUTS)])
        sequences = sequences_of(trainer, group, random_traces(folder))
        before = logprobs_of(trainer, sequences)
        train_on(trainer, sequences)
        gains = (logprobs_of(trainer, sequences) - before).sum(-1)
        assert gains[best] > 0.01, gains
        assert (np.delete(gains, best) < -0.001).all(), gains


def a_step_makes_a_rewarded_step_likelier_than_one_that_is_not(folder: Path) -> None:
    """Two responses of digits, each with two steps of six characters.

    By hand: first steps have 0.87 - 0.87 = 0, the second steps -0.87 and 0.87.
    """
    trainer, tokenizer = steady_trainer(folder), AutoTokenizer.from_pretrained(folder)
    rng = np.random.default_rng(3)
    texts = ["".join(map(str, rng.integers(0, 10, NUM_TOKENS))) for _ in range(2)]
    traces = [make_trace(tokenizer.encode("4+1="), tokenizer.encode(text)) for text in texts]
    steps = tuple((Step(end=6, value=value), Step(end=NUM_TOKENS, value=1.0 - value)) for value in (1.0, 0.0))
    group = make_group((0.0, 0.0), texts=texts, steps=steps)
    sequences = sequences_of(trainer, group, traces, TokenPlaces(folder))
    before = logprobs_of(trainer, sequences)
    train_on(trainer, sequences)
    gains = (logprobs_of(trainer, sequences) - before).reshape(2, 2, 6).sum(-1).tolist()
    (first, unrewarded), (second, rewarded) = gains
    assert rewarded > 0.01 and unrewarded < -0.01, gains
    assert abs(first) < rewarded / 2 and abs(second) < rewarded / 2, gains


def the_scheduled_learning_rate_is_what_the_optimizer_steps_with(folder: Path) -> None:
    schedule = OptimizerSection(learning_rate=1e-2, warmup_steps=2, decay_steps=(3, 5))
    trainer = steady_trainer(folder, optimizer=schedule)
    of_groups: list[set[float]] = []
    trainer._optimizer.register_step_pre_hook(
        lambda optimizer, *_: of_groups.append({group["lr"] for group in optimizer.param_groups})
    )
    for rate in (0.5e-2, 1e-2, 1e-2, 0.5e-2, 0.0, 0.0):
        before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        sequences = sequences_of(trainer, make_group([1.0, 0.0, 0.5, 0.0]), random_traces(folder))
        assert train_on(trainer, sequences).metrics["learning_rate"] == pytest.approx(rate)
        assert [*of_groups.pop()] == pytest.approx([rate])
        pairs = zip(trainer.model.parameters(), before, strict=True)
        moved = max(float((parameter.detach() - old).abs().max()) for parameter, old in pairs)
        if trainer.policy_version == 1 or rate == 0.0:
            # Adam moves a weight by about the learning rate in its first steps.
            assert moved == pytest.approx(rate, rel=0.1)


@pytest.mark.parametrize(
    "promise",
    [
        a_step_makes_the_better_rollout_likelier_and_the_worse_ones_less_likely,
        a_step_makes_a_rewarded_step_likelier_than_one_that_is_not,
        the_scheduled_learning_rate_is_what_the_optimizer_steps_with,
    ],
)
def test_in_a_trainer(promise: Callable[[Path], None], tmp_path: Path) -> None:
    run_ranks(1, promise, write_tiny_model(tmp_path / "hf", scale=4.0))
