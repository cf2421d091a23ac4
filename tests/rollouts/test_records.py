"""Records of routed experts and kept tokens: codec, packing, and what is refused."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.rollouts import (
    NO_DISTRIBUTION,
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
    is_shared=st.booleans(),
)
def test_any_group_survives_the_codec(
    seed: int,
    num_prompt_tokens: int,
    lengths: list[int],
    num_experts: int,
    is_recorded: bool,
    is_shared: bool,
) -> None:
    facts = dataclasses.replace(FACTS, num_experts=num_experts)
    made = [
        make_rollout(seed + i, num_prompt_tokens, length, facts=facts) for i, length in enumerate(lengths)
    ]
    # Siblings share a prompt and some of them its record, but for episodes that begin differently.
    changes = {"prompt_ids_P": made[0].prompt_ids_P} if is_shared else {}
    if not is_recorded:
        changes |= {"routed_experts": None, "kept_tokens": None}
    rollouts = [dataclasses.replace(one, **changes) for one in [*made, made[0]]]
    payload = encode_group(rollouts)
    assert payload.prompt_of[-1] == payload.prompt_of[0]
    assert len(payload.prompts) == len(set(payload.prompt_of))
    for rollout, index, response in zip(rollouts, payload.prompt_of, payload.responses, strict=True):
        trace = decode_rollout(through_memory(payload.prompts[index]), through_memory(response))
        for name in ("prompt_ids_P", "response_ids_T", "logprobs_T"):
            np.testing.assert_array_equal(getattr(trace, name), getattr(rollout, name))
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


def sound_rollout() -> Rollout:
    ids = np.tile(np.asarray([1, 5], np.uint8), (9, FACTS.num_layers, 1))
    routing = RoutedExperts(expert_ids_RMK=ids, is_recorded_S=np.arange(10) < 9)
    return dataclasses.replace(make_rollout(3, 4, 6), routed_experts=routing)


SOUND = sound_rollout()
IDS = SOUND.routed_experts.expert_ids_RMK
KEPT = [SOUND.kept_tokens.row(t).tolist() for t in range(6)]
TOKEN = int(SOUND.response_ids_T[2])


def spoiled(array: np.ndarray, at: object, value: object) -> np.ndarray:
    copy = array.copy()
    copy[at] = value
    return copy


def with_routing(ids: np.ndarray, recorded: np.ndarray | None = None) -> dict[str, RoutedExperts]:
    recorded = np.arange(10) < 9 if recorded is None else recorded
    return {"routed_experts": RoutedExperts(expert_ids_RMK=ids, is_recorded_S=recorded)}


def with_logprob(value: float) -> dict[str, np.ndarray]:
    return {"logprobs_T": spoiled(SOUND.logprobs_T, 4, value)}


def with_kept(row: list[int]) -> dict[str, KeptTokens]:
    """``row`` for token 2."""
    return {"kept_tokens": KeptTokens.from_rows([*KEPT[:2], row, *KEPT[3:]], vocab_size=20)}


def with_first_kept(*ids: int) -> dict[str, KeptTokens]:
    """``ids`` for token 0 as they are, and everything for the others."""
    return {"kept_tokens": KeptTokens(offsets=np.array([0, *[len(ids)] * 6]), ids_N=np.array(ids, np.int32))}


def test_a_sound_rollout_passes() -> None:
    check_rollout(SOUND, BOTH, FACTS)
    for value in (0.0, 1e-4, -300.0):
        check_rollout(dataclasses.replace(SOUND, **with_logprob(value)), BOTH, FACTS)
    unrecorded = dataclasses.replace(SOUND, routed_experts=None, kept_tokens=None)
    check_rollout(unrecorded, CaptureSpec(routing=False, kept_tokens=False), FACTS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (with_routing(IDS[:, :2]), "routed_experts: found 2 layers; must be the model's 3 MoE layers"),
        (with_routing(IDS[..., :1]), "routed_experts: found 1 experts per token; must be .* = 2"),
        (with_routing(spoiled(IDS, (3, 1, 1), 8)), r"routed_experts: found expert id 8; .*\[0, 8\)"),
        (with_routing(IDS.astype(np.int16) - 2), r"routed_experts: found expert id -1; .*\[0, 8\)"),
        (with_routing(spoiled(IDS, (2, 2), 5)), r"found ids \[5, 5\] of recorded token 2 in layer 2"),
        (with_routing(IDS, np.arange(11) < 9), "routed_experts: found 11 tokens; must be .* 10"),
        (with_routing(IDS[:7]), "routed_experts: found 7 rows; must be one for each of the 9 tokens"),
        ({"routed_experts": None}, "routed_experts: found none"),
        ({"kept_tokens": None}, "kept_tokens: found none"),
        ({"logprobs_T": SOUND.logprobs_T[:4]}, "logprobs: found 4 values; must be 6"),
        (with_logprob(np.nan), "logprobs: found nan at response token 4; must be finite"),
        (with_logprob(-np.inf), "logprobs: found -inf at response token 4; must be finite"),
        (with_logprob(0.5), r"logprobs: found 0\.5 at response token 4; .* at most 0"),
        (with_kept([NO_DISTRIBUTION]), "kept_tokens: found no distribution at response token 2; .* numbers"),
        (with_kept([(TOKEN + 1) % 20]), f"found set of token 2 without the sampled id {TOKEN}; .* its 1 ids"),
        (with_first_kept(20), r"kept_tokens: found token id 20; .*\[0, 20\)"),
        (with_first_kept(4, 4), "kept_tokens: found set of token 0 not strictly ascending"),
        ({"kept_tokens": all_kept(5)}, "kept_tokens: found 5 sets; must be 6, one for each token"),
    ],
)
def test_a_broken_record_is_refused_by_name(changes: dict[str, object], words: str) -> None:
    with pytest.raises(RecordError, match=words):
        check_rollout(dataclasses.replace(SOUND, **changes), BOTH, FACTS)


def test_an_id_too_large_for_the_narrow_type_is_not_wrapped_around() -> None:
    routing = RoutedExperts.from_rows(np.full((3, 2, 1), 257), num_tokens=3, num_experts=8)
    assert routing.expert_ids_RMK.max() == 257


def test_a_set_that_keeps_everything_is_stored_empty() -> None:
    kept = KeptTokens.from_rows([[2, 0, 1], [1, 0], []], vocab_size=3)
    assert kept.offsets.tolist() == [0, 0, 2, 2] and kept.ids_N.tolist() == [0, 1]
    check_kept_tokens(kept, np.asarray([0, 1, 2], np.int32), vocab_size=3)
