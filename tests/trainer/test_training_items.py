"""From scored groups to the sequences of a row: signs, order, what a batch is, what is replayed."""

import dataclasses

import numpy as np
import pytest

from forgeasync.algorithms import Advantage, DrGrpo, Grpo, ReinforcePlusPlus
from forgeasync.config import AlgorithmSection, OptimizerSection, RoutingReplay
from forgeasync.rollouts import NO_RECORD, Group, KeptTokens, RoutedExperts, TokenTrace
from forgeasync.trainer import (
    TokenPlaces,
    TrainingSequence,
    assign_rows,
    items_of,
    scheduled_learning_rate,
    training_items,
    training_sequence,
    whole_response,
)
from tests.support.buffer_world import make_task
from tests.support.rollouts import make_stored_rollout


def make_group(group_id: int, rewards: tuple[float, ...], *, num_tokens: int = 3) -> Group:
    return Group(
        group_id=group_id,
        draw_id=group_id,
        task=make_task(group_id),
        rollouts=tuple(make_stored_rollout((0, 0, num_tokens), text=f"{group_id}/{r}") for r in rewards),
        rewards=rewards,
    )


def algorithm(advantage: Advantage) -> AlgorithmSection:
    return AlgorithmSection(advantage=advantage, group_size=4, groups_per_step=2)


def test_items_are_the_rollouts_in_their_order() -> None:
    groups = [make_group(0, (0.0, 1.0)), make_group(1, (1.0, 0.0, 3.0))]
    items = training_items(groups, [1.0, 2.5], algorithm(DrGrpo()))
    assert [item.weight for item in items] == [1.0, 1.0, 2.5, 2.5, 2.5]
    assert [item.branch for item in items] == [
        branch for group in groups for one in group.rollouts for branch in one.branches
    ]
    assert [item.advantages[0].value for item in items] == pytest.approx([-0.5, 0.5, -1 / 3, -4 / 3, 5 / 3])


def test_every_item_is_dealt_once_and_as_many_rows_to_every_rank() -> None:
    items = training_items(
        [make_group(index, (0.0, 1.0, 0.5), num_tokens=9) for index in range(5)], [1.0] * 5, algorithm(Grpo())
    )
    # Two items of 1 + 9 tokens fit in a row.
    rows = assign_rows(items, tokens_per_row=25, num_ranks=3, pair_cost=0.0)
    assert [len(of_rank) for of_rank in rows] == [3, 3, 3]
    assigned = [id(item) for of_rank in rows for row in of_rank for item in row]
    assert sorted(assigned) == sorted(map(id, items))
    assert all(sum(item.num_tokens for item in row) <= 25 for of_rank in rows for row in of_rank)
    assert items[0].num_tokens == 10


def test_ranks_are_balanced_by_what_tokens_see_too() -> None:
    """With prompts of a token: 51 tokens see 1,326, 31 see 496 and 9 see 45."""
    lengths = (50, 30, 30, *[8] * 12)
    stored = [make_stored_rollout((0, 0, num)) for num in lengths]
    items = [item for one in stored for item in items_of(one, whole_response(1.0), weight=1.0)]

    def num_tokens(pair_cost: float) -> list[int]:
        rows = assign_rows(items, tokens_per_row=200, num_ranks=2, pair_cost=pair_cost)
        return [sum(item.num_tokens for item in row) for ((row),) in rows]

    assert num_tokens(0.0) == [114, 107]
    # A token costs 1, and 1 for each that it sees: 2 x 527 + 9 x 54 = 1,540, and 1,377 + 3 x 54 = 1,539.
    assert num_tokens(1.0) == [2 * 31 + 9 * 9, 51 + 3 * 9]


NUM_PROMPT_TOKENS = 3
TRACE = TokenTrace(
    prompt_ids_P=np.array([7, 8, 9], np.int32),
    response_ids_T=np.array([1, 2, 3, 4], np.int32),
    logprobs_T=np.array([-0.5, -1.0, -1.5, -2.0], np.float32),
    # The last token was never fed to the model.
    routed_experts=RoutedExperts.from_rows(
        np.arange(6 * 2 * 2).reshape(6, 2, 2) % 5, num_tokens=7, num_experts=8
    ),
    kept_tokens=KeptTokens.from_rows([[1, 5], [2], [3, 6], [4]], vocab_size=10),
)


def sequence_of(
    routing_replay: RoutingReplay = RoutingReplay.ALL,
    *,
    keep_sampling_mask: bool = True,
    spans: tuple[tuple[int, int, int], ...] = ((4, 0, 1), (7, 1, 4)),
) -> TrainingSequence:
    rollout = make_stored_rollout(*spans, num_prompt_tokens=NUM_PROMPT_TOKENS)
    return training_sequence(
        items_of(rollout, whole_response(-0.75), weight=2.5)[0],
        TRACE,
        trained_version=7,
        routing_replay=routing_replay,
        keep_sampling_mask=keep_sampling_mask,
        places=TokenPlaces(None),
    )


def test_response_replay_leaves_prompts_to_the_trainer() -> None:
    whole = TRACE.routed_experts.to_dense()
    assert (whole[:-1] != NO_RECORD).all() and (whole[-1] == NO_RECORD).all()
    replayed = sequence_of(RoutingReplay.RESPONSE).expert_ids_SMK
    assert (replayed[:NUM_PROMPT_TOKENS] == NO_RECORD).all()
    np.testing.assert_array_equal(replayed[NUM_PROMPT_TOKENS:], whole[NUM_PROMPT_TOKENS:])
    np.testing.assert_array_equal(sequence_of(RoutingReplay.ALL).expert_ids_SMK, whole)
    assert sequence_of(RoutingReplay.OFF).expert_ids_SMK is None


def test_a_sequence_has_the_trace_and_the_age_of_every_token() -> None:
    sequence = sequence_of()
    assert sequence.prompt_ids_P.tolist() == [7, 8, 9]
    assert sequence.response_ids_T.tolist() == [1, 2, 3, 4]
    assert sequence.behavior_logprobs_T.tolist() == [-0.5, -1.0, -1.5, -2.0]
    assert sequence.ages_T.tolist() == [3, 0, 0, 0] and sequence.ages_T.dtype == np.int32
    assert sequence.advantage == -0.75 and sequence.weight == 2.5
    assert sequence.kept_tokens is TRACE.kept_tokens
    assert sequence_of(keep_sampling_mask=False).kept_tokens is None


@pytest.mark.parametrize("spans", [((4, 0, 1), (8, 1, 4)), ((4, 0, 1), (5, 2, 4))])
def test_a_token_without_a_version_or_newer_than_the_trained_weights_is_a_bug(
    spans: tuple[tuple[int, int, int], ...],
) -> None:
    with pytest.raises(AssertionError, match="no newer"):
        sequence_of(spans=spans)


def test_the_learning_rate_warms_up_stays_and_decays_to_zero() -> None:
    def schedule(**section: object) -> list[float]:
        optimizer = OptimizerSection(learning_rate=0.5, **section)
        return [scheduled_learning_rate(optimizer, step) for step in range(1, 10)]

    assert schedule() == [0.5] * 9
    assert schedule(warmup_steps=4) == [0.125, 0.25, 0.375, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert schedule(decay_steps=(4, 8)) == [0.5, 0.5, 0.5, 0.5, 0.375, 0.25, 0.125, 0.0, 0.0]
    assert schedule(warmup_steps=2, decay_steps=(4, 8)) == [0.25, 0.5, 0.5, 0.5, 0.375, 0.25, 0.125, 0.0, 0.0]
    both = schedule(warmup_steps=8, decay_steps=(4, 8))
    assert both[5] == 0.5 * 6 / 8 * 2 / 4, "the factors multiply where the two overlap"


@pytest.mark.parametrize("offset", [0.0, 1e7, 1e12])
def test_rewards_far_from_zero_are_told_apart(offset: float) -> None:
    group = make_group(0, (offset + 1.0, offset, offset, offset))
    found = [item.advantages[0].value for item in training_items([group], [1.0], algorithm(Grpo()))]
    assert found == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-4)


def test_agents_are_compared_with_themselves() -> None:
    """Two agents of zero-sum games: each has a baseline of its own, and branches share an advantage."""
    rewards = (1.0, -1.0, 0.0, 0.0, -1.0, 1.0)
    group = make_group(0, rewards)
    rollouts = tuple(
        dataclasses.replace(
            rollout, agent=index % 2, episode=index // 2, branches=rollout.branches * (1 + (index == 3))
        )
        for index, rollout in enumerate(group.rollouts)
    )
    groups = [dataclasses.replace(group, rollouts=rollouts), make_group(1, (5.0, 7.0))]
    items = training_items(groups, [1.0, 1.0], algorithm(DrGrpo()))
    found = [item.advantages[0].value for item in items]
    assert found == [1.0, -1.0, 0.0, 0.0, 0.0, -1.0, 1.0, -1.0, 1.0]
    # Over the batch: agent 0 has five rewards, agent 1 three.
    items = training_items(groups, [1.0, 1.0], algorithm(ReinforcePlusPlus()))
    of_judge = [item.advantages[0].value for item in items if item.branch in rollouts[5].branches]
    assert of_judge == [pytest.approx(1.0, abs=1e-5)]
    first = np.array([1.0, 0.0, -1.0, 5.0, 7.0])
    expected = (1.0 - first.mean()) / (first.std(ddof=1) + 1e-6)
    assert items[0].advantages[0].value == pytest.approx(expected, abs=1e-5)
