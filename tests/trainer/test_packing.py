"""Rows keep sequences apart, in order and complete; plans use every sequence once."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.config import ROW_ALIGNMENT
from forgeasync.rollouts import NO_RECORD, KeptTokens, num_row_tokens, plan_rows, row_cost
from forgeasync.trainer import PackedRow, TrainingSequence, pack_row, pack_rows


def make_sequence(prompt: list[int], response: list[int], advantage: float = 1.0) -> TrainingSequence:
    return TrainingSequence(
        prompt_ids_P=np.asarray(prompt, np.int32),
        response_ids_T=np.asarray(response, np.int32),
        behavior_logprobs_T=-np.asarray(response, np.float32),
        ages_T=np.asarray(response, np.int32) % 3,
        advantage=advantage,
        weight=advantage + 3.0,
    )


def test_each_response_token_is_predicted_by_the_token_before_it() -> None:
    row = pack_row([make_sequence([1, 2], [3, 4], 0.5), make_sequence([5], [6], -1.0)])
    assert row.token_ids_L[:6].tolist() == [1, 2, 3, 4, 5, 6]
    assert row.positions_L[:6].tolist() == [0, 1, 2, 3, 0, 1]
    assert row.visible_until_L[:6].tolist() == [4, 4, 4, 4, 6, 6]
    assert row.places_T.tolist() == [1, 2, 4]
    assert row.target_ids_T.tolist() == [3, 4, 6]
    assert row.behavior_logprobs_T.tolist() == [-3.0, -4.0, -6.0]
    assert row.advantages_T.tolist() == [0.5, 0.5, -1.0]
    assert row.sample_weights_T.tolist() == [3.5, 3.5, 2.0]
    assert row.ages_T.tolist() == [0, 1, 0]
    assert row.sequence_ids_T.tolist() == [0, 0, 1]


def test_rows_have_the_dtypes_that_a_trainer_takes() -> None:
    row = pack_row([make_sequence([1, 2], [3, 4])])
    found = {
        field.name: array.dtype
        for field in dataclasses.fields(row)
        if isinstance(array := getattr(row, field.name), np.ndarray)
    }
    of_tokens = ("token_ids_L", "positions_L", "visible_until_L", "num_uses_L")
    integers = (*of_tokens, "places_T", "target_ids_T", "sequence_ids_T")
    numbers = ("behavior_logprobs_T", "advantages_T", "sample_weights_T")
    expected = dict.fromkeys(integers, np.int64) | dict.fromkeys(numbers, np.float32)
    assert found == expected | {"ages_T": np.int32}


def test_common_beginnings_are_shared() -> None:
    """Depth-first: the prompt, a response, and two that begin with 3 again."""
    sequences = [
        make_sequence([1, 2], [3, 4], 0.5),
        make_sequence([5], [6]),
        make_sequence([1, 2], [4], -0.5),
        make_sequence([1, 2], [3, 5, 6], 1.5),
    ]
    row = pack_row(sequences, share_prefixes=True)
    assert row.token_ids_L[:9].tolist() == [1, 2, 3, 4, 5, 6, 4, 5, 6]
    assert row.positions_L[:9].tolist() == [0, 1, 2, 3, 3, 4, 2, 0, 1]
    assert row.visible_until_L[:9].tolist() == [7, 7, 6, 4, 6, 6, 7, 9, 9]
    assert row.num_uses_L[:10].tolist() == [3, 3, 2, 1, 1, 1, 1, 1, 1, 0]
    assert row.places_T.tolist() == [1, 2, 1, 2, 4, 1, 7]
    assert row.target_ids_T.tolist() == [3, 4, 3, 5, 6, 4, 6]
    assert row.sequence_ids_T.tolist() == [0, 0, 1, 1, 1, 2, 3]
    assert row.advantages_T.tolist() == [0.5, 0.5, 1.5, 1.5, 1.5, -0.5, 1.0]


@pytest.mark.parametrize("differs_at", [0, 2, 3])
def test_a_tree_splits_where_recorded_experts_differ(differs_at: int) -> None:
    """Of two sequences that are alike, one layer of one token has another expert."""
    ids_SMK = np.arange(5 * 2 * 3).reshape(5, 2, 3).astype(np.int16)
    other_SMK = ids_SMK.copy()
    other_SMK[differs_at, 1, 2] += 100
    one = make_sequence([1, 2, 3], [4, 5])
    sequences = [dataclasses.replace(one, expert_ids_SMK=ids) for ids in (ids_SMK, other_SMK, ids_SMK)]
    row = pack_row(sequences, share_prefixes=True)
    num_tokens = int((row.num_uses_L > 0).sum())
    assert num_tokens == 5 + 5 - differs_at
    assert row.num_targets == 6 and row.num_uses_L.sum() == 15
    for index in range(3):
        place = row.places_T[row.sequence_ids_T == index][0]
        path = [k for k in range(place + 1) if row.visible_until_L[k] > place]
        assert row.token_ids_L[path].tolist() == [1, 2, 3]


@given(
    sequences=st.lists(
        st.tuples(
            st.lists(st.integers(1, 2), min_size=1, max_size=4),
            st.lists(st.integers(1, 2), min_size=1, max_size=12),
        ),
        max_size=12,
    )
)
def test_a_target_sees_the_tokens_before_it_in_its_sequence(
    sequences: list[tuple[list[int], list[int]]],
) -> None:
    packed = [make_sequence(prompt, response) for prompt, response in sequences]
    row = pack_row(packed, share_prefixes=True)
    found = []
    for target, place in enumerate(row.places_T):
        path = [k for k in range(place + 1) if row.visible_until_L[k] > place]
        assert row.positions_L[path].tolist() == list(range(len(path)))
        found.append((row.token_ids_L[path].tolist(), row.target_ids_T[target]))
    expected = [
        ([*prompt, *response[:index]], token)
        for prompt, response in sequences
        for index, token in enumerate(response)
    ]
    assert sorted(found) == sorted(expected)
    prefixes = {(*prompt, *response)[:n] for prompt, response in sequences for n in range(1, 17)}
    num_nodes = len(prefixes)
    assert int((row.num_uses_L > 0).sum()) == num_nodes, "each beginning is computed once"
    assert row.num_uses_L.sum() == sum(one.num_tokens for one in packed)


def test_records_lie_where_their_tokens_do() -> None:
    """Of two sequences one has expert ids, the other kept sets; what nothing is known of is marked."""
    ids_SMK = np.arange(4 * 2 * 3).reshape(4, 2, 3).astype(np.int16)
    kept = KeptTokens.from_rows([[7, 6]], vocab_size=50)
    row = pack_row(
        [
            dataclasses.replace(make_sequence([5], [6]), kept_tokens=kept),
            dataclasses.replace(make_sequence([1, 2], [3, 4]), expert_ids_SMK=ids_SMK),
        ]
    )
    assert row.expert_ids_LMK is not None and row.expert_ids_LMK.dtype == np.int16
    assert row.expert_ids_LMK.shape == (ROW_ALIGNMENT, 2, 3)
    np.testing.assert_array_equal(row.expert_ids_LMK[2:6], ids_SMK)
    assert (row.expert_ids_LMK[:2] == NO_RECORD).all() and (row.expert_ids_LMK[6:] == NO_RECORD).all()
    assert [row.kept_tokens.row(index).tolist() for index in range(3)] == [[6, 7], [], []]
    assert pack_row([make_sequence([1], [2])]).expert_ids_LMK is None


def test_a_row_is_as_long_as_it_must_be() -> None:
    full = make_sequence([1] * (ROW_ALIGNMENT - 4), [2] * 4)
    assert len(pack_row([full]).token_ids_L) == ROW_ALIGNMENT
    assert len(pack_row([full, make_sequence([1], [2])]).token_ids_L) == 2 * ROW_ALIGNMENT


def test_long_ones_first_into_the_emptiest_row() -> None:
    """Over two ranks, rows of 12 tokens: 22 tokens fit into a row each, 24 in five parts do not."""
    assert plan_rows([5, 9, 2, 6], tokens_per_row=12, num_ranks=2) == [[[1, 2], [3, 0]]]
    assert plan_rows([5, 9, 2, 6, 2], tokens_per_row=12, num_ranks=2) == [[[1], [3]], [[0], [2, 4]]]
    assert plan_rows([12, 12], tokens_per_row=12, num_ranks=2) == [[[0], [1]]], "full to the last token"
    assert plan_rows([], tokens_per_row=12, num_ranks=2) == [[[], []]]


def test_sequences_with_one_prompt_are_planned_together() -> None:
    """Three sequences with a prompt of 6 tokens take 6 + 3 + 2 + 1."""
    prefixes = [[("a", 6)], [("b", 2)], [("a", 6)], [("c", 1)], [("a", 6)]]
    lengths = [8, 5, 7, 4, 9]
    assert plan_rows(lengths, tokens_per_row=40, num_ranks=1, prefixes=prefixes) == [[[4, 0, 2, 1, 3]]]
    assert num_row_tokens([4, 0, 2, 1, 3], lengths, prefixes) == 6 + 3 + 2 + 1 + 5 + 4
    # In two rows they take 12 and 5 + 4; a bundle of half a row would have one of them.
    assert plan_rows(lengths, tokens_per_row=20, num_ranks=1, prefixes=prefixes) == [[[4, 0, 2]], [[1, 3]]]
    # A bundle of a whole row would leave nothing to the other rank.
    assert plan_rows([6] * 4, tokens_per_row=20, num_ranks=2, prefixes=[[("a", 2)]] * 4) == [[[0, 1], [2, 3]]]


def test_branches_of_one_episode_are_planned_together() -> None:
    """Four episodes of one prompt, each with two branches of 20 tokens that have 15 in common."""
    prefixes = [[("prompt", 5), (episode, 15)] for episode in (0, 1, 2, 3) * 2]
    lengths = [20] * 8
    (rows,) = plan_rows(lengths, tokens_per_row=50, num_ranks=2, prefixes=prefixes)
    assert sorted(map(sorted, rows)) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [num_row_tokens(row, lengths, prefixes) for row in rows] == [5 + 2 * (10 + 2 * 5)] * 2
    # With one branch at a time, the prompt alone would be common: 65 tokens.
    prompts = [one[:1] for one in prefixes]
    assert len(plan_rows(lengths, tokens_per_row=50, num_ranks=2, prefixes=prompts)) == 2


@given(
    items=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40)), max_size=60),
    tokens_per_row=st.integers(64, 256),
    num_ranks=st.integers(1, 4),
)
def test_plans_with_prompts_use_every_sequence_once_and_never_overfill(
    items: list[tuple[int, int]], tokens_per_row: int, num_ranks: int
) -> None:
    prefixes = [[(key, 3 + 5 * key)] for key, _ in items]
    lengths = [3 + 5 * key + num for key, num in items]
    plan = plan_rows(lengths, tokens_per_row=tokens_per_row, num_ranks=num_ranks, prefixes=prefixes)
    rows = [row for microbatch in plan for row in microbatch]
    assert sorted(index for row in rows for index in row) == list(range(len(items)))
    assert all(len(microbatch) == num_ranks for microbatch in plan)
    assert all(num_row_tokens(row, lengths, prefixes) <= tokens_per_row for row in rows)
    without = plan_rows(lengths, tokens_per_row=tokens_per_row, num_ranks=num_ranks)
    assert len(plan) <= len(without) + 1


def computed(row: PackedRow) -> tuple[int, int]:
    """Number of tokens of a row, and of pairs of a token and one that it sees; every pair is looked at."""
    num = int((row.num_uses_L > 0).sum())
    is_seen = row.visible_until_L[None, :num] > np.arange(num)[:, None]
    return num, int(np.tril(is_seen).sum())


@given(
    trees=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 2), st.lists(st.integers(1, 2), min_size=1, max_size=12)),
        max_size=12,
    ),
    share=st.booleans(),
    is_apart=st.booleans(),
)
def test_the_cost_of_a_row_is_that_of_its_tokens_and_of_what_they_see(
    trees: list[tuple[int, int, list[int]]], share: bool, is_apart: bool
) -> None:
    """A prompt, a turn of two tokens or none, and a response.

    Exact if responses begin apart; otherwise their common beginnings are not counted once.
    """
    sequences = [
        make_sequence(
            [10 + key] * (1 + 3 * key),
            [*[50 + turn] * (2 * (turn > 0)), *([100 + index] if is_apart else []), *response],
        )
        for index, (key, turn, response) in enumerate(trees)
    ]
    lengths, whole = [one.num_tokens for one in sequences], range(len(sequences))
    prefixes = [
        [(key, 1 + 3 * key), *([((key, turn), 3 + 3 * key)] if turn else [])] for key, turn, _ in trees
    ]
    paths = prefixes if share else None
    num_tokens, num_pairs = computed(pack_row(sequences, share_prefixes=share))
    cost = row_cost(whole, lengths, paths, pair_cost=0.25)
    if is_apart or not share:
        assert num_row_tokens(whole, lengths, paths) == num_tokens
        assert cost == num_tokens + 0.25 * num_pairs
    else:
        assert cost >= num_tokens + 0.25 * num_pairs


PAIR_COST = 0.005


def waited_for(sequences: list[TrainingSequence], plan: list[list[list[int]]], *, share: bool) -> float:
    """Work of each microbatch's costliest rank, which all wait for, relative to the mean of the ranks."""
    costs = []
    for rows in plan:
        found = (computed(pack_row([sequences[i] for i in row], share_prefixes=share)) for row in rows)
        costs.append([num_tokens + PAIR_COST * num_pairs for num_tokens, num_pairs in found])
    return sum(map(max, costs)) / (sum(map(sum, costs)) / len(plan[0]))


RESPONSES = [396, 296, 256, 196, 196, *[96] * 6, *[26] * 30]
SKEWED = {
    "long responses and short ones": [(0, 4, num) for num in RESPONSES],
    "long prompts and short ones": [(key, 320 // (key + 1), 30) for key in range(12) for _ in range(4)],
}


@pytest.mark.parametrize("name", SKEWED)
def test_a_skewed_batch_is_balanced_by_cost(name: str) -> None:
    sizes, share = SKEWED[name], name.startswith("long prompts")
    sequences = [
        make_sequence([1000 + key] * prompt, [2000 + index] * response)
        for index, (key, prompt, response) in enumerate(sizes)
    ]
    by_cost, by_tokens = (
        plan_rows(
            [prompt + response for _, prompt, response in sizes],
            tokens_per_row=1024,
            num_ranks=4,
            prefixes=[[(key, prompt)] for key, prompt, _ in sizes] if share else None,
            pair_cost=pair_cost,
        )
        for pair_cost in (PAIR_COST, 0.0)
    )
    assert waited_for(sequences, by_cost, share=share) < 1.03
    assert waited_for(sequences, by_tokens, share=share) > 1.1


@given(
    sizes=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 120)), min_size=1, max_size=40),
    tokens_per_row=st.integers(256, 512),
    num_ranks=st.integers(1, 4),
    share=st.booleans(),
    pair_cost=st.sampled_from([0.001, 0.01, 0.1]),
)
def test_ranks_never_wait_longer_than_if_tokens_were_balanced(
    sizes: list[tuple[int, int]], tokens_per_row: int, num_ranks: int, share: bool, pair_cost: float
) -> None:
    prefixes = [[(key, 3 + 30 * key)] for key, _ in sizes] if share else None
    lengths = [3 + 30 * key + num for key, num in sizes]
    plans, waits = [], []
    for balanced in (pair_cost, 0.0):
        plan = plan_rows(
            lengths, tokens_per_row=tokens_per_row, num_ranks=num_ranks, prefixes=prefixes, pair_cost=balanced
        )
        rows = [row for microbatch in plan for row in microbatch]
        assert sorted(index for row in rows for index in row) == list(range(len(sizes)))
        assert all(num_row_tokens(row, lengths, prefixes) <= tokens_per_row for row in rows)
        costs = [[row_cost(row, lengths, prefixes, pair_cost=pair_cost) for row in one] for one in plan]
        plans.append(plan)
        waits.append(sum(map(max, costs)))
    assert len(plans[0]) <= len(plans[1])
    if len(plans[0]) == len(plans[1]):
        assert waits[0] <= waits[1] * (1 + 1e-9)


def test_padding_is_marked_and_trains_nothing() -> None:
    row = pack_row([make_sequence([1], [2])])
    assert len(row.token_ids_L) == ROW_ALIGNMENT
    assert row.num_uses_L.tolist() == [1, 1] + [0] * (ROW_ALIGNMENT - 2)
    assert row.visible_until_L.tolist() == [2, 2] + [ROW_ALIGNMENT] * (ROW_ALIGNMENT - 2)
    assert row.positions_L[2] == 0, "padding must not continue the last sequence"
    assert row.num_targets == 1
    empty = pack_row([])
    assert empty.num_targets == 0 and not empty.num_uses_L.any()


def test_a_sequence_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sequence 1 has 65 tokens.*tokens_per_row = 64"):
        plan_rows([3, 65], tokens_per_row=64, num_ranks=1)


@given(
    lengths=st.lists(st.integers(2, 64), max_size=60),
    tokens_per_row=st.integers(64, 256),
    num_ranks=st.integers(1, 4),
)
def test_plans_use_every_sequence_once_and_never_overfill(
    lengths: list[int], tokens_per_row: int, num_ranks: int
) -> None:
    plan = plan_rows(lengths, tokens_per_row=tokens_per_row, num_ranks=num_ranks)
    rows = [row for microbatch in plan for row in microbatch]
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(len(microbatch) == num_ranks for microbatch in plan)
    assert all(sum(lengths[index] for index in row) <= tokens_per_row for row in rows)


@given(
    sequences=st.lists(
        st.tuples(
            st.lists(st.integers(1, 50), min_size=1, max_size=20),
            st.lists(st.integers(1, 50), min_size=1, max_size=40),
        ),
        max_size=30,
    ),
    num_ranks=st.integers(1, 3),
)
def test_every_response_token_comes_out_of_its_row(
    sequences: list[tuple[list[int], list[int]]], num_ranks: int
) -> None:
    rows = pack_rows(
        [make_sequence(prompt, response) for prompt, response in sequences],
        tokens_per_row=128,
        num_ranks=num_ranks,
    )
    assert len({len(of_rank) for of_rank in rows}) == 1, "every rank has as many microbatches"
    unpacked = []
    for row in (row for of_rank in rows for row in of_rank):
        ends = np.flatnonzero(row.visible_until_L == np.arange(1, len(row.token_ids_L) + 1)) + 1
        for index, tokens in enumerate(np.split(row.token_ids_L, ends)[: row.num_sequences]):
            unpacked.append((tokens.tolist(), row.target_ids_T[row.sequence_ids_T == index].tolist()))
    expected = [(prompt + response, response) for prompt, response in sequences]
    assert sorted(unpacked) == sorted(expected)
