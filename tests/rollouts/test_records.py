"""Records of routed experts and kept tokens: codec, packing, and what is refused."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.rollouts import (
    NO_DISTRIBUTION,
    NO_RECORD,
    CaptureSpec,
    KeptTokens,
    PayloadRef,
    RecordError,
    Rollout,
    RoutedExperts,
    all_kept,
    check_kept_tokens,
    check_rollout,
    decode_rollout,
    encode_group,
    expert_dtype,
    measure,
    read_from,
    write_into,
)
from forgeasync.trainer import TrainingSequence, pack_row
from tests.support.rollouts import FACTS, make_rollout

BOTH = CaptureSpec(routing=True, kept_tokens=True)


def through_memory(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    memory = bytearray(measure(arrays))
    checksum = write_into(memoryview(memory), arrays, "5")
    ref = PayloadRef(
        host_id="h", file="f", payload_id="5", offset=0, num_bytes=len(memory), checksum=checksum
    )
    return read_from(memoryview(memory), ref, copy=False)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_prompt_tokens=st.integers(1, 9),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    num_experts=st.sampled_from([8, 256, 300]),
    is_recorded=st.booleans(),
)
def test_any_group_survives_the_codec(
    seed: int, num_prompt_tokens: int, lengths: list[int], num_experts: int, is_recorded: bool
) -> None:
    facts = dataclasses.replace(FACTS, num_experts=num_experts)
    rollouts = [
        make_rollout(seed + i, num_prompt_tokens, length, facts=facts) for i, length in enumerate(lengths)
    ]
    # Siblings share a prompt, and some of them its record.
    prompt = rollouts[0].prompt_ids_P
    rollouts = [dataclasses.replace(rollout, prompt_ids_P=prompt) for rollout in rollouts]
    if not is_recorded:
        rollouts = [dataclasses.replace(r, routed_experts=None, kept_tokens=None) for r in rollouts]
    payload = encode_group([*rollouts, rollouts[0]])
    assert payload.prompt_of[-1] == payload.prompt_of[0]
    assert len(payload.prompts) == len(set(payload.prompt_of))
    for rollout, index, response in zip(
        [*rollouts, rollouts[0]], payload.prompt_of, payload.responses, strict=True
    ):
        trace = decode_rollout(through_memory(payload.prompts[index]), through_memory(response))
        np.testing.assert_array_equal(trace.prompt_ids_P, rollout.prompt_ids_P)
        np.testing.assert_array_equal(trace.response_ids_T, rollout.response_ids_T)
        np.testing.assert_array_equal(trace.logprobs_T, rollout.logprobs_T)
        if not is_recorded:
            assert trace.routed_experts is None and trace.kept_tokens is None
            continue
        assert trace.routed_experts.to_dense().tobytes() == rollout.routed_experts.to_dense().tobytes()
        assert trace.routed_experts.expert_ids_RMK.dtype == expert_dtype(num_experts)
        np.testing.assert_array_equal(trace.kept_tokens.offsets, rollout.kept_tokens.offsets)
        np.testing.assert_array_equal(trace.kept_tokens.ids_N, rollout.kept_tokens.ids_N)


def test_equal_prompt_records_are_stored_once_and_others_apart() -> None:
    one, other = make_rollout(0, 6, 4), make_rollout(1, 6, 4)
    full = RoutedExperts.from_rows(np.tile([0, 1], (9, 3, 1)), num_tokens=10, num_experts=FACTS.num_experts)
    one = dataclasses.replace(one, routed_experts=full)
    rerouted = full.expert_ids_RMK.copy()
    rerouted[2, 1] = (4, 7)
    other = dataclasses.replace(
        other,
        prompt_ids_P=one.prompt_ids_P,
        routed_experts=dataclasses.replace(full, expert_ids_RMK=rerouted),
    )
    payload = encode_group([one, one, other, one])
    assert payload.prompt_of == (0, 0, 1, 0)


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_packing_never_mixes_neighbours(seed: int, lengths: list[int]) -> None:
    rollouts = [make_rollout(seed + i, 1 + i % 3, length) for i, length in enumerate(lengths)]
    sequences = [
        TrainingSequence(
            prompt_ids_P=rollout.prompt_ids_P,
            response_ids_T=rollout.response_ids_T,
            behavior_logprobs_T=rollout.logprobs_T,
            ages_T=np.zeros(rollout.num_response_tokens, np.int32),
            advantage=1.0,
            # Every third has no records at all.
            expert_ids_SMK=None if i % 3 == 2 else rollout.routed_experts.to_dense(),
            kept_tokens=None if i % 3 == 2 else rollout.kept_tokens,
        )
        for i, rollout in enumerate(rollouts)
    ]
    row = pack_row(sequences)
    start, target = 0, 0
    for i, rollout in enumerate(rollouts):
        end = start + len(rollout.prompt_ids_P) + rollout.num_response_tokens
        if i % 3 == 2:
            assert (row.expert_ids_LMK[start:end] == NO_RECORD).all()
            assert all(len(row.kept_tokens.row(target + t)) == 0 for t in range(rollout.num_response_tokens))
        else:
            np.testing.assert_array_equal(row.expert_ids_LMK[start:end], rollout.routed_experts.to_dense())
            for t in range(rollout.num_response_tokens):
                np.testing.assert_array_equal(row.kept_tokens.row(target + t), rollout.kept_tokens.row(t))
        start, target = end, target + rollout.num_response_tokens
    assert (row.expert_ids_LMK[start:] == NO_RECORD).all()
    assert row.kept_tokens.num_tokens == row.num_targets == target


def test_rows_without_any_record_carry_none() -> None:
    row = pack_row([])
    assert row.expert_ids_LMK is None and row.kept_tokens.num_tokens == 0


def _with_ids(
    rollout: Rollout, *, ids: np.ndarray | None = None, recorded: np.ndarray | None = None
) -> Rollout:
    before = rollout.routed_experts
    routing = RoutedExperts(
        expert_ids_RMK=before.expert_ids_RMK if ids is None else ids,
        is_recorded_S=before.is_recorded_S if recorded is None else recorded,
    )
    return dataclasses.replace(rollout, routed_experts=routing)


def sound_rollout() -> Rollout:
    rollout = make_rollout(3, 4, 6)
    ids = np.tile(np.asarray([1, 5], np.uint8), (9, FACTS.num_layers, 1))
    return dataclasses.replace(
        rollout,
        routed_experts=RoutedExperts(expert_ids_RMK=ids, is_recorded_S=np.arange(10) < 9),
    )


def _with_logprob(rollout: Rollout, value: float) -> Rollout:
    logprobs_T = rollout.logprobs_T.copy()
    logprobs_T[4] = value
    return dataclasses.replace(rollout, logprobs_T=logprobs_T)


def test_a_sound_rollout_passes() -> None:
    check_rollout(sound_rollout(), BOTH, FACTS)
    for value in (0.0, 1e-4, -300.0):
        check_rollout(_with_logprob(sound_rollout(), value), BOTH, FACTS)
    unrecorded = dataclasses.replace(sound_rollout(), routed_experts=None, kept_tokens=None)
    check_rollout(unrecorded, CaptureSpec(routing=False, kept_tokens=False), FACTS)


def broken_rollouts() -> dict[str, tuple[Rollout, str]]:
    """By what is broken: a rollout, and what the message has to say (field and both values)."""
    rollout = sound_rollout()
    ids = rollout.routed_experts.expert_ids_RMK
    out_of_range, repeated = ids.copy(), ids.copy()
    out_of_range[3, 1, 1] = 8
    repeated[2, 2] = (5, 5)
    kept = rollout.kept_tokens
    token = int(rollout.response_ids_T[2])
    without = [kept.row(t).tolist() for t in range(6)]
    without[2] = [(token + 1) % 20, (token + 3) % 20]
    replace = dataclasses.replace
    return {
        "layers": (
            _with_ids(rollout, ids=ids[:, :2]),
            r"routed_experts: found 2 layers; must be the model's 3 MoE layers",
        ),
        "top-k": (
            _with_ids(rollout, ids=ids[..., :1]),
            r"routed_experts: found 1 experts per token; must be .* = 2",
        ),
        "range": (_with_ids(rollout, ids=out_of_range), r"routed_experts: found expert id 8; .*\[0, 8\)"),
        "negative": (
            _with_ids(rollout, ids=ids.astype(np.int16) - 2),
            r"routed_experts: found expert id -1; .*\[0, 8\)",
        ),
        "repeated": (
            _with_ids(rollout, ids=repeated),
            r"routed_experts: found ids \[5, 5\] of recorded token 2 in layer 2",
        ),
        "length": (
            _with_ids(rollout, recorded=np.arange(11) < 9),
            r"routed_experts: found 11 tokens; must be the sequence's 10",
        ),
        "rows": (
            _with_ids(rollout, ids=ids[:7]),
            r"routed_experts: found 7 rows; must be one for each of the 9 tokens",
        ),
        "no routing": (replace(rollout, routed_experts=None), r"routed_experts: found none"),
        "no kept": (replace(rollout, kept_tokens=None), r"kept_tokens: found none"),
        "logprobs": (
            replace(rollout, logprobs_T=rollout.logprobs_T[:4]),
            r"logprobs: found 4 values; must be 6, one for each token",
        ),
        "logprob nan": (
            _with_logprob(rollout, np.nan),
            r"logprobs: found nan at response token 4; must be finite",
        ),
        "logprob inf": (
            _with_logprob(rollout, -np.inf),
            r"logprobs: found -inf at response token 4; must be finite",
        ),
        "logprob positive": (
            _with_logprob(rollout, 0.5),
            r"logprobs: found 0\.5 at response token 4; .* at most 0",
        ),
        "no distribution": (
            replace(
                rollout,
                kept_tokens=KeptTokens.from_rows(
                    [[NO_DISTRIBUTION] if t == 2 else [int(rollout.response_ids_T[t])] for t in range(6)],
                    vocab_size=20,
                ),
            ),
            r"kept_tokens: found no distribution at response token 2; .* must be numbers",
        ),
        "sampled missing": (
            replace(rollout, kept_tokens=KeptTokens.from_rows(without, vocab_size=20)),
            rf"kept_tokens: found set of token 2 without the sampled id {token}; .* among its 2 ids",
        ),
        "kept range": (
            replace(
                rollout,
                kept_tokens=KeptTokens(offsets=np.asarray([0, 1, 1, 1, 1, 1, 1]), ids_N=np.asarray([20])),
            ),
            r"kept_tokens: found token id 20; .*\[0, 20\)",
        ),
        "kept length": (
            replace(rollout, kept_tokens=all_kept(5)),
            r"kept_tokens: found 5 sets; must be 6, one for each token",
        ),
        "kept repeated": (
            replace(
                rollout,
                kept_tokens=KeptTokens(
                    offsets=np.asarray([0, 2, 2, 2, 2, 2, 2]), ids_N=np.asarray([4, 4], np.int32)
                ),
            ),
            r"kept_tokens: found set of token 0 not strictly ascending",
        ),
    }


@pytest.mark.parametrize("name", sorted(broken_rollouts()))
def test_a_broken_record_is_refused_by_name(name: str) -> None:
    rollout, message = broken_rollouts()[name]
    with pytest.raises(RecordError, match=message):
        check_rollout(rollout, BOTH, FACTS)


def test_an_id_too_large_for_the_narrow_type_is_not_wrapped_around() -> None:
    routing = RoutedExperts.from_rows(np.full((3, 2, 1), 257), num_tokens=3, num_experts=8)
    assert routing.expert_ids_RMK.max() == 257


def test_a_set_that_keeps_everything_is_stored_empty() -> None:
    kept = KeptTokens.from_rows([[2, 0, 1], [1, 0], []], vocab_size=3)
    assert kept.offsets.tolist() == [0, 0, 2, 2] and kept.ids_N.tolist() == [0, 1]
    check_kept_tokens(kept, np.asarray([0, 1, 2], np.int32), vocab_size=3)
