"""A tree of turns against a naive reference: what is first recorded of a token stays, and trains once."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.config import RoutingReplay
from forgeasync.rollouts import (
    NO_RECORD,
    FinishReason,
    KeptTokens,
    PayloadReader,
    PayloadWriter,
    Rollout,
    SampledTokens,
    Trajectory,
    VersionSpan,
    branches,
    check_kept_tokens,
    decode_rollout,
    encode_group,
    num_row_tokens,
)
from forgeasync.runtime import SampledRollout, store_group
from forgeasync.trainer import (
    TokenPlaces,
    TrainingItem,
    TrainingSequence,
    assign_rows,
    items_of,
    pack_row,
    training_sequence,
    whole_response,
)
from tests.support.payloads import HOST, MIB
from tests.support.rollouts import make_stored_rollout

NUM_EXPERTS, NUM_LAYERS, TOP_K, VOCABULARY = 300, 2, 3, 50


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn after an earlier one; weights change before it, and after some tokens of its requests."""

    after: int
    """Which turn it follows, counted from the last one; beyond the first one: none, it is a root."""
    num_given: int
    requests: tuple[int, ...]
    """Numbers of tokens; more than one where the turn is ended at a swap and resumed."""
    swap_before: bool
    swap_after: int | None


@dataclass(slots=True, kw_only=True)
class Token:
    """What the engine first computed of one token, written down one by one."""

    id: int
    experts: np.ndarray | None = None
    logprob: float = 0.0
    version: int | None = None
    """None: it was given."""
    kept: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Engine:
    """An engine of scripted weights. It computes a request's prompt at once, then token after token."""

    rng: np.random.Generator
    version: int = 3

    def experts(self) -> np.ndarray:
        """The choice [M, K] for a token; another one every time, so that every copy shows."""
        return np.stack([self.rng.permutation(NUM_EXPERTS)[:TOP_K] for _ in range(NUM_LAYERS)])

    def given(self, num_tokens: int) -> list[Token]:
        return [Token(id=int(self.rng.integers(0, VOCABULARY))) for _ in range(num_tokens)]

    def sample(self, path: list[Token], num_tokens: int, swap_after: int | None) -> SampledTokens:
        """Append tokens to the path."""
        rows = [self.experts() for _ in path]
        ids, logprobs, spans, kept = [], [], [], []
        for index in range(num_tokens):
            for token, row in zip(path, rows, strict=True):
                if token.experts is None:
                    token.experts = row
            new = Token(id=int(self.rng.integers(0, VOCABULARY)), version=self.version)
            new.logprob = -float(self.rng.exponential(10.0))
            others = self.rng.permutation(VOCABULARY)[: self.rng.integers(0, VOCABULARY + 1)].tolist()
            new.kept = sorted({new.id, *others})
            path.append(new)
            ids.append(new.id)
            logprobs.append(new.logprob)
            kept.append(new.kept)
            spans.append(VersionSpan(version=self.version, start=index, end=index + 1))
            if index == swap_after:
                self.version += 1
            if index < num_tokens - 1:
                rows.append(self.experts())
        return SampledTokens(
            ids_T=np.asarray(ids, np.int32),
            logprobs_T=np.asarray(logprobs, np.float32),
            version_spans=tuple(spans),
            expert_ids_RMK=np.stack(rows).astype(np.uint16),
            kept_tokens=KeptTokens.from_rows(kept, vocab_size=VOCABULARY),
        )


turns = st.builds(
    Turn,
    after=st.sampled_from([0, 0, 0, 1, 2, 100]),
    num_given=st.integers(0, 4),
    requests=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    swap_before=st.booleans(),
    swap_after=st.none() | st.integers(0, 4),
)
scripts = st.lists(turns, min_size=1, max_size=7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    paths: list[list[Token]]
    """Of every branch."""
    rollouts: list[Rollout]
    sampled: list[Token]
    """All of them, in order."""


def play(seed: int, script: list[Turn]) -> Played:
    engine = Engine(np.random.default_rng(seed))
    trajectories: list[Trajectory] = []
    paths: list[list[Token]] = []
    sampled: list[Token] = []
    followed: set[int] = set()
    for turn in script:
        engine.version += turn.swap_before
        before = len(paths) - 1 - turn.after
        if before >= 0:
            followed.add(before)
            trajectory, path = trajectories[before].continued(), list(paths[before])
        else:
            trajectory, path = Trajectory(num_experts=NUM_EXPERTS), []
        given = engine.given(turn.num_given if path else turn.num_given + 1)
        path += given
        trajectory.give(np.array([token.id for token in given], np.int32))
        for num_tokens in turn.requests:
            trajectory.sample(engine.sample(path, num_tokens, turn.swap_after))
        sampled += path[len(path) - sum(turn.requests) :]
        assert trajectory.token_ids == [token.id for token in path]
        assert trajectory.sampled_ids.tolist() == [token.id for token in path[-sum(turn.requests) :]]
        trajectories.append(trajectory)
        paths.append(path)
    found = branches(trajectories)
    leaves = [path for index, path in enumerate(paths) if index not in followed]
    assert len(found) == len(leaves)
    return Played(
        paths=leaves,
        rollouts=[branch.rollout(text="", finish_reason=FinishReason.STOP) for branch in found],
        sampled=sampled,
    )


def positions(rollout: Rollout) -> list[int]:
    """Positions in the whole path of the tokens that train."""
    is_sampled_T = rollout.is_sampled_T
    if is_sampled_T is None:
        is_sampled_T = np.ones(rollout.num_response_tokens, bool)
    return (len(rollout.prompt_ids_P) + np.flatnonzero(is_sampled_T)).tolist()


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), script=scripts)
def test_each_sampled_token_trains_once_with_what_was_first_computed(seed: int, script: list[Turn]) -> None:
    """From the tree through payloads to a row that has all branches of two episodes."""
    of_episodes = (play(seed + 1, script[:1]), play(seed, script))
    paths = [path for played in of_episodes for path in played.paths]
    rollouts = [rollout for played in of_episodes for rollout in played.rollouts]
    payload = encode_group(rollouts)
    sequences = []
    for index, rollout in enumerate(rollouts):
        spans = [(span.version, span.start, span.end) for span in rollout.version_spans]
        stored = make_stored_rollout(*spans, num_prompt_tokens=len(rollout.prompt_ids_P))
        item = TrainingItem(
            branch=stored.branches[0],
            advantages=whole_response(index - 0.5),
            weight=1.0 + index,
        )
        sequences.append(
            training_sequence(
                item,
                decode_rollout(payload.prompts[payload.prompt_of[index]], payload.responses[index]),
                trained_version=100,
                routing_replay=RoutingReplay.ALL,
                keep_sampling_mask=True,
                places=TokenPlaces(None),
            )
        )
    row = pack_row(sequences)
    found: list[int] = []
    trained: list[int] = []
    offset = 0
    for index, (path, rollout) in enumerate(zip(paths, rollouts, strict=True)):
        pairs = itertools.pairwise(rollout.version_spans)
        assert all(a.end < b.start or a.version != b.version for a, b in pairs)
        check_kept_tokens(rollout.kept_tokens, rollout.response_ids_T, vocab_size=VOCABULARY)
        for position in positions(rollout):
            token = path[position]
            trained.append(id(token))
            # The position before a token predicts it.
            at = offset + position - 1
            found.append(at)
            target = len(found) - 1
            assert row.target_ids_T[target] == token.id
            assert row.behavior_logprobs_T[target] == np.float32(token.logprob)
            assert row.ages_T[target] == 100 - token.version
            assert row.advantages_T[target] == index - 0.5 and row.sample_weights_T[target] == 1.0 + index
            kept_row = row.kept_tokens.row(len(found) - 1).tolist()
            assert kept_row == (token.kept if len(token.kept) < VOCABULARY else [])
        end = offset + len(path)
        assert row.token_ids_L[offset:end].tolist() == [token.id for token in path]
        experts_SMK = [np.sort(token.experts) for token in path[:-1]]
        assert row.expert_ids_LMK[offset : end - 1].tolist() == np.array(experts_SMK).tolist()
        assert (row.expert_ids_LMK[end - 1] == NO_RECORD).all(), "the last token was never input"
        offset = end
    assert found == row.places_T.tolist() and row.kept_tokens.num_tokens == len(found)
    assert sorted(trained) == sorted(id(token) for played in of_episodes for token in played.sampled)


def in_rows(
    of_episodes: Sequence[Played], folder: Path, replay: RoutingReplay, tokens_per_row: int
) -> tuple[list[TrainingItem], list[int]]:
    """The items of a group, and the tokens that each of its rows has."""
    rollouts = [
        SampledRollout(branches=tuple(one.rollouts), finish_reason=FinishReason.STOP, episode=index)
        for index, one in enumerate(of_episodes)
    ]
    stored = store_group(PayloadWriter(folder, HOST, MIB), rollouts, group_id=0, generator_rank=0)
    assert isinstance(stored, tuple)
    items = [item for one in stored for item in items_of(one, whole_response(1.0), weight=1.0)]
    reader = PayloadReader(HOST)

    def sequence(item: TrainingItem) -> TrainingSequence:
        trace = decode_rollout(reader.read(item.branch.prompt), reader.read(item.branch.response))
        return training_sequence(
            item,
            trace,
            trained_version=100,
            routing_replay=replay,
            keep_sampling_mask=True,
            places=TokenPlaces(None),
        )

    (rows,) = assign_rows(
        items,
        tokens_per_row=tokens_per_row,
        num_ranks=1,
        pair_cost=0.0,
        share_prefixes=True,
        routing_replay=replay,
    )
    packed = [pack_row([sequence(item) for item in row], share_prefixes=True) for row in rows]
    return items, [int((row.num_uses_L > 0).sum()) for row in packed]


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**31), script=scripts, replay=st.sampled_from(RoutingReplay))
def test_what_branches_have_in_common_is_planned_for(
    seed: int, script: list[Turn], replay: RoutingReplay, tmp_path_factory: pytest.TempPathFactory
) -> None:
    of_episodes = (play(seed, script), play(seed + 1, script))
    paths = [path for played in of_episodes for path in played.paths]
    folder, longest = tmp_path_factory.mktemp("payloads"), max(map(len, paths))
    items, num_tokens = in_rows(of_episodes, folder, replay, longest + longest // 2)
    assert max(num_tokens) <= longest + longest // 2, "rows are never longer than allowed"
    lengths, prefixes = map(len, paths), [item.prefixes for item in items]
    planned = num_row_tokens(range(len(items)), list(lengths), prefixes)
    assert planned == len({id(token) for path in paths for token in path})


def test_branches_of_an_episode_share_a_row(tmp_path: Path) -> None:
    """Two episodes of 60 tokens, after which branches of given tokens and 2 more part."""
    last = dataclasses.replace(FIRST, after=0, requests=(2,))
    of_episodes = [
        play(
            seed,
            [
                FIRST,
                dataclasses.replace(last, num_given=one),
                dataclasses.replace(last, num_given=other, after=1),
            ],
        )
        for seed, (one, other) in enumerate([(10, 7), (9, 0)])
    ]
    _, num_tokens = in_rows(of_episodes, tmp_path, RoutingReplay.ALL, 150)
    # By length alone, 72 and 62 tokens would share a row, and 71 and 69.
    assert num_tokens == [60 + 12 + 9, 60 + 11 + 2]


FIRST = Turn(after=100, num_given=49, requests=(10,), swap_before=False, swap_after=None)
"""With one token more that is given at a root."""


def test_a_turn_that_was_given_up_is_on_no_branch() -> None:
    first = Trajectory(num_experts=NUM_EXPERTS)
    first.give(np.array([1], np.int32))
    first.sample(Engine(np.random.default_rng(0)).sample([Token(id=1)], 2, None))
    second = first.continued()
    second.give(np.array([2], np.int32))
    (branch,) = branches([first, second])
    assert branch.response_ids == first.sampled_ids.tolist()


def test_without_records_there_are_none() -> None:
    trajectory = Trajectory(num_experts=NUM_EXPERTS)
    trajectory.give(np.array([1]))
    engine, path = Engine(np.random.default_rng(0)), [Token(id=1)]
    for _ in range(2):
        sampled = engine.sample(path, 1, None)
        trajectory.sample(dataclasses.replace(sampled, expert_ids_RMK=None, kept_tokens=None))
    (branch,) = branches([trajectory])
    rollout = branch.rollout(text="", finish_reason=FinishReason.STOP)
    assert rollout.routed_experts is None and rollout.kept_tokens is None and rollout.is_sampled_T is None
    assert rollout.version_spans == (VersionSpan(version=3, start=0, end=2),)
