"""A trajectory against a naive reference: what is first recorded of a token stays, and trains once."""

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.config.trainer import RoutingReplay
from forgeasync.rollouts.group_payload import decode_rollout, encode_group
from forgeasync.rollouts.kept_tokens import KeptTokens, check_kept_tokens
from forgeasync.rollouts.rollout import FinishReason, Rollout, StoredRollout, VersionSpan
from forgeasync.rollouts.routing import NO_RECORD
from forgeasync.rollouts.trajectory import SampledTokens, Trajectory
from forgeasync.trainer.advantage_spans import TokenPlaces, whole_response
from forgeasync.trainer.batch import TrainingItem, training_sequence
from forgeasync.trainer.packing import pack_row
from tests.support.rollouts import make_ref

NUM_EXPERTS, NUM_LAYERS, TOP_K, VOCABULARY = 300, 2, 3, 50


@dataclass(frozen=True, slots=True)
class Give:
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One request; weights are swapped in after some of its tokens."""

    num_tokens: int
    swap_after: int | None


@dataclass(frozen=True, slots=True)
class Swap:
    """Between requests."""


def experts(position: int, version: int) -> np.ndarray:
    """The choice [M, K] that the weights of a version make for a position."""
    rng = np.random.default_rng([position, version])
    return np.stack([rng.permutation(NUM_EXPERTS)[:TOP_K] for _ in range(NUM_LAYERS)])


@dataclass(slots=True)
class Engine:
    """An engine of scripted weights, and what it first computed of every token, written down one by one."""

    seed: int
    version: int = 3
    ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    experts: dict[int, np.ndarray] = field(default_factory=dict)
    logprobs: dict[int, float] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    kept: dict[int, list[int]] = field(default_factory=dict)

    def give(self, num_tokens: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, len(self.ids)])
        ids = rng.integers(0, VOCABULARY, num_tokens)
        self.ids += ids.tolist()
        if not self.versions:
            self.num_prompt_tokens = len(self.ids)
        return ids

    def sample(self, num_tokens: int, swap_after: int | None) -> SampledTokens:
        """Everything before is computed anew at once, then one token after the other."""
        rows = [experts(position, self.version) for position in range(len(self.ids))]
        ids, logprobs, spans, kept = [], [], [], []
        for index in range(num_tokens):
            position = len(self.ids)
            for before in range(position):
                self.experts.setdefault(before, rows[before])
            rng = np.random.default_rng([self.seed, position])
            token = int(rng.integers(0, VOCABULARY))
            ids.append(token)
            logprobs.append(-float(rng.exponential(10.0)))
            others = rng.permutation(VOCABULARY)[: rng.integers(0, VOCABULARY + 1)].tolist()
            kept.append(sorted({token, *others}))
            spans.append(VersionSpan(version=self.version, start=index, end=index + 1))
            self.ids.append(token)
            self.logprobs[position] = logprobs[-1]
            self.versions[position] = self.version
            self.kept[position] = kept[-1]
            if index == swap_after:
                self.version += 1
            if index < num_tokens - 1:
                rows.append(experts(position, self.version))
        return SampledTokens(
            ids_T=np.asarray(ids, np.int32),
            logprobs_T=np.asarray(logprobs, np.float32),
            version_spans=tuple(spans),
            expert_ids_RMK=np.stack(rows).astype(np.uint16),
            kept_tokens=KeptTokens.from_rows(kept, vocab_size=VOCABULARY),
        )


samples = st.builds(Sample, st.integers(1, 5), st.none() | st.integers(0, 4))
steps = st.lists(st.one_of(st.builds(Give, st.integers(0, 4)), samples, st.builds(Swap)), max_size=10)


def play(seed: int, num_prompt_tokens: int, script: list[Give | Sample | Swap]) -> tuple[Engine, Rollout]:
    """The script, which begins with a prompt and ends with a turn."""
    engine, trajectory = Engine(seed=seed), Trajectory(num_experts=NUM_EXPERTS)
    for step in [Give(num_prompt_tokens), *script, Sample(2, None)]:
        match step:
            case Give(num_tokens):
                trajectory.give(engine.give(num_tokens))
            case Sample(num_tokens, swap_after):
                trajectory.sample(engine.sample(num_tokens, swap_after))
            case Swap():
                engine.version += 1
    assert list(trajectory.token_ids) == engine.ids
    return engine, trajectory.rollout(text="", finish_reason=FinishReason.STOP)


def labels(rollout: Rollout) -> dict[int, int]:
    """Position in the whole trajectory and version of each sampled token, by the rollout's spans."""
    start = len(rollout.prompt_ids_P)
    return {
        start + index: span.version for span in rollout.version_spans for index in range(span.start, span.end)
    }


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), num_prompt_tokens=st.integers(1, 5), script=steps)
def test_a_trajectory_has_what_was_first_computed(
    seed: int, num_prompt_tokens: int, script: list[Give | Sample | Swap]
) -> None:
    engine, rollout = play(seed, num_prompt_tokens, script)
    start = engine.num_prompt_tokens
    assert rollout.prompt_ids_P.tolist() == engine.ids[:start]
    assert rollout.response_ids_T.tolist() == engine.ids[start:]
    is_sampled_T = rollout.is_sampled_T
    if is_sampled_T is None:
        is_sampled_T = np.ones(rollout.num_response_tokens, bool)
    assert (start + np.flatnonzero(is_sampled_T)).tolist() == sorted(engine.versions)
    assert labels(rollout) == engine.versions
    spans = rollout.version_spans
    assert all(a.end < b.start or a.version != b.version for a, b in itertools.pairwise(spans))
    for index in range(rollout.num_response_tokens):
        assert rollout.logprobs_T[index] == np.float32(engine.logprobs.get(start + index, 0.0))
        kept = engine.kept.get(start + index, [])
        assert rollout.kept_tokens.row(index).tolist() == (kept if len(kept) < VOCABULARY else [])
    check_kept_tokens(rollout.kept_tokens, rollout.response_ids_T, vocab_size=VOCABULARY)
    dense_SMK = rollout.routed_experts.to_dense()
    assert (dense_SMK[-1] == NO_RECORD).all(), "the last token was never input"
    for position in range(len(engine.ids) - 1):
        assert dense_SMK[position].tolist() == np.sort(engine.experts[position]).tolist()


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), script=steps)
def test_each_sampled_token_trains_once_with_its_own_records(
    seed: int, script: list[Give | Sample | Swap]
) -> None:
    """From the trajectory through payloads to a row that has another trajectory before it."""
    first, second = play(seed + 1, 2, [Sample(1, None), Give(2)]), play(seed, 3, script)
    payload = encode_group([first[1], second[1]])
    sequences = []
    for index, (_, rollout) in enumerate((first, second)):
        trace = decode_rollout(payload.prompts[payload.prompt_of[index]], payload.responses[index])
        stored = StoredRollout(
            generator_rank=0,
            prompt=make_ref(),
            response=make_ref(),
            num_prompt_tokens=len(rollout.prompt_ids_P),
            num_response_tokens=rollout.num_response_tokens,
            version_spans=rollout.version_spans,
            text="",
            finish_reason=FinishReason.STOP,
        )
        item = TrainingItem(rollout=stored, advantages=whole_response(index - 0.5), weight=1.0 + index)
        sequences.append(
            training_sequence(
                item,
                trace,
                trained_version=100,
                routing_replay=RoutingReplay.ALL,
                keep_sampling_mask=True,
                places=TokenPlaces(None),
            )
        )
        assert stored.num_sampled_tokens == len((first, second)[index][0].versions)
    row = pack_row(sequences)
    targets, found = np.flatnonzero(row.mask_L), []
    offset = 0
    for index, (engine, _) in enumerate((first, second)):
        for position in sorted(engine.versions):
            # The position before a token predicts it.
            at = offset + position - 1
            found.append(at)
            assert row.target_ids_L[at] == engine.ids[position]
            assert row.behavior_logprobs_L[at] == np.float32(engine.logprobs[position])
            assert row.ages_L[at] == 100 - engine.versions[position]
            assert row.advantages_L[at] == index - 0.5 and row.sample_weights_L[at] == 1.0 + index
            kept = engine.kept[position]
            kept_row = row.kept_tokens.row(len(found) - 1).tolist()
            assert kept_row == (kept if len(kept) < VOCABULARY else [])
        assert row.token_ids_L[offset : offset + len(engine.ids)].tolist() == engine.ids
        assert (row.expert_ids_LMK[offset : offset + len(engine.ids) - 1] != NO_RECORD).all()
        offset += len(engine.ids)
    assert found == targets.tolist() and row.kept_tokens.num_tokens == len(found)


def test_without_records_there_are_none() -> None:
    trajectory = Trajectory(num_experts=8)
    trajectory.give(np.array([1, 2]))
    for token in (3, 4):
        trajectory.sample(
            SampledTokens(
                ids_T=np.array([token], np.int32),
                logprobs_T=np.array([-1.0], np.float32),
                version_spans=(VersionSpan(version=0, start=0, end=1),),
                expert_ids_RMK=None,
                kept_tokens=None,
            )
        )
    rollout = trajectory.rollout(text="", finish_reason=FinishReason.STOP)
    assert rollout.routed_experts is None and rollout.kept_tokens is None and rollout.is_sampled_T is None
    assert rollout.version_spans == (VersionSpan(version=0, start=0, end=2),)


@pytest.mark.parametrize("records_routing", [True, False])
def test_episodes_that_begin_differently_keep_their_own_prompts(records_routing: bool) -> None:
    """Without routing records nothing but the ids tells prompts apart."""
    rollouts = []
    for seed in (0, 1, 0):
        _, rollout = play(seed, 3, [])
        if not records_routing:
            object.__setattr__(rollout, "routed_experts", None)
        rollouts.append(rollout)
    payload = encode_group(rollouts)
    assert payload.prompt_of == (0, 1, 0)
    for rollout, index in zip(rollouts, payload.prompt_of, strict=True):
        assert payload.prompts[index]["ids"].tolist() == rollout.prompt_ids_P.tolist()
