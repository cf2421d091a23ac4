"""A group's arrays as payloads: what is written once where it was sampled and read once where it is trained.

The rollouts of a group share their prompt, and nearly always its routing record too: each distinct prompt
with its record is one payload, which the rollouts refer to by index. Records differ where weights were
swapped in between two rollouts' first steps, or where batching rounded a gate differently; prompts differ
where an environment begins the episodes of a task differently.

Shape suffixes: P prompt tokens, T response tokens, S = P + T, R recorded tokens, M MoE layers, K top-k.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forgeasync.rollouts.kept_tokens import KeptTokens
from forgeasync.rollouts.rollout import Rollout
from forgeasync.rollouts.routing import RoutedExperts, concatenate_routing
from forgeasync.rollouts.teacher_record import TeacherRecord, teacher_record

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPayload:
    """Payloads of one group: ``prompts`` are distinct, ``prompt_of[i]`` is the one of rollout i."""

    prompts: tuple[Arrays, ...]
    responses: tuple[Arrays, ...]
    prompt_of: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTrace:
    """The arrays of one rollout that a trainer needs, token by token.

    int32 ids, float32 logprobs; ``routed_experts`` covers prompt and response; None: not recorded, or all
    tokens kept. ``is_sampled_T``: bool, None where all were.
    """

    prompt_ids_P: np.ndarray
    response_ids_T: np.ndarray
    logprobs_T: np.ndarray
    routed_experts: RoutedExperts | None
    kept_tokens: KeptTokens | None
    is_sampled_T: np.ndarray | None = None
    teacher: TeacherRecord | None = None
    """None where no teacher has seen it."""


def encode_group(rollouts: Sequence[Rollout]) -> GroupPayload:
    """The payloads of a group; the inverse is ``decode_rollout`` with the payloads of one rollout."""
    prompts: list[Arrays] = []
    known: list[tuple[np.ndarray, RoutedExperts | None]] = []
    prompt_of: list[int] = []
    responses: list[Arrays] = []
    for rollout in rollouts:
        prompt_record, response_record = None, None
        if rollout.routed_experts is not None:
            prompt_record, response_record = rollout.routed_experts.split(len(rollout.prompt_ids_P))
        index = _find(known, rollout.prompt_ids_P, prompt_record)
        if index is None:
            index = len(prompts)
            known.append((rollout.prompt_ids_P, prompt_record))
            prompts.append({"ids": rollout.prompt_ids_P, **_routing_arrays(prompt_record)})
        prompt_of.append(index)
        responses.append(
            {
                "ids": rollout.response_ids_T,
                "logprobs": rollout.logprobs_T,
                **_routing_arrays(response_record),
                **_kept_arrays(rollout.kept_tokens),
                **({} if rollout.is_sampled_T is None else {"is_sampled": rollout.is_sampled_T}),
            }
        )
    return GroupPayload(prompts=tuple(prompts), responses=tuple(responses), prompt_of=tuple(prompt_of))


def decode_rollout(prompt: Arrays, response: Arrays) -> TokenTrace:
    """One rollout from its two payloads."""
    records = [record for arrays in (prompt, response) if (record := _routing(arrays)) is not None]
    assert len(records) in (0, 2), "prompt and response are recorded alike"
    return TokenTrace(
        prompt_ids_P=prompt["ids"],
        response_ids_T=response["ids"],
        logprobs_T=response["logprobs"],
        routed_experts=concatenate_routing(records) if records else None,
        kept_tokens=_kept(response),
        is_sampled_T=response.get("is_sampled"),
        teacher=teacher_record(response),
    )


def _find(
    known: Sequence[tuple[np.ndarray, RoutedExperts | None]],
    prompt_ids_P: np.ndarray,
    record: RoutedExperts | None,
) -> int | None:
    for index, (ids_P, other) in enumerate(known):
        is_same_record = (other is None and record is None) or (
            other is not None and record is not None and other.equals(record)
        )
        if is_same_record and np.array_equal(ids_P, prompt_ids_P):
            return index
    return None


def _routing_arrays(record: RoutedExperts | None) -> dict[str, np.ndarray]:
    if record is None:
        return {}
    return {"expert_ids": record.expert_ids_RMK, "is_recorded": record.is_recorded_S}


def _routing(arrays: Arrays) -> RoutedExperts | None:
    if "expert_ids" not in arrays:
        return None
    return RoutedExperts(expert_ids_RMK=arrays["expert_ids"], is_recorded_S=arrays["is_recorded"])


def _kept_arrays(kept: KeptTokens | None) -> dict[str, np.ndarray]:
    if kept is None:
        return {}
    return {"kept_widths": np.diff(kept.offsets).astype(np.int32), "kept_ids": kept.ids_N}


def _kept(arrays: Arrays) -> KeptTokens | None:
    if "kept_widths" not in arrays:
        return None
    offsets = np.zeros(len(arrays["kept_widths"]) + 1, np.int64)
    np.cumsum(arrays["kept_widths"], out=offsets[1:])
    return KeptTokens(offsets=offsets, ids_N=arrays["kept_ids"])
