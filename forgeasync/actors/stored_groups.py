"""What generators answer about groups and responses; stores the arrays of a group, or refuses it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forgeasync.buffer import DropReason
from forgeasync.environments import Response, response_of
from forgeasync.rollouts import (
    EpisodeId,
    EpisodeOutcome,
    FinishReason,
    PayloadRef,
    PayloadStoreFull,
    PayloadWriter,
    Rollout,
    StoredBranch,
    StoredRollout,
    VersionRange,
    encode_group,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedGroup:
    """A group that must not be trained on, or does not fit."""

    problem: str | None
    """Which rollout and why; None: nothing went wrong, but nobody has scored it."""
    reason: DropReason = DropReason.BAD_RECORD
    outcomes: tuple[EpisodeOutcome, ...] = ()
    """All attempts at the episodes of the group, if it has episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedResponse:
    """A response of a group that has ended, while others of the group may go on."""

    index: int
    """Its place in the group."""
    response: Response


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledResponse:
    """A response that is not trained on."""

    response: Response
    versions: VersionRange
    ids_T: np.ndarray
    """Its tokens, int32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelledGroup:
    """A group that was given up because it would have been too old to train on at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedEpisode:
    """What an agent has sampled in an episode that trains."""

    episode: EpisodeId
    is_truncated: bool
    """Whether the episode ended because its context was full."""


def sampled_response(rollout: Rollout) -> SampledResponse:
    """Return what is known of a rollout that is not trained on."""
    spans = rollout.version_spans
    return SampledResponse(
        response=response_of(rollout),
        versions=VersionRange(first=spans[0].version, last=spans[-1].version),
        ids_T=rollout.response_ids_T,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRollout:
    """A rollout on its way into the payload store."""

    branches: tuple[Rollout, ...]
    finish_reason: FinishReason
    episode: int
    agent: int = 0


def store_group(
    writer: PayloadWriter, rollouts: Sequence[SampledRollout], *, group_id: int, generator_rank: int
) -> tuple[StoredRollout, ...] | RefusedGroup:
    """Write a group's arrays, or return that there is no room for them."""
    payload = encode_group([branch for rollout in rollouts for branch in rollout.branches])
    try:
        refs = writer.write_group([*payload.prompts, *payload.responses])
    except PayloadStoreFull as error:
        return RefusedGroup(problem=f"group {group_id}: {error}", reason=DropReason.OVERSIZED)
    prompts, responses = refs[: len(payload.prompts)], refs[len(payload.prompts) :]
    stored = zip((prompts[index] for index in payload.prompt_of), responses, strict=True)
    return tuple(
        StoredRollout(
            generator_rank=generator_rank,
            branches=tuple(_stored_branch(branch, *next(stored)) for branch in rollout.branches),
            finish_reason=rollout.finish_reason,
            episode=rollout.episode,
            agent=rollout.agent,
        )
        for rollout in rollouts
    )


def _stored_branch(branch: Rollout, prompt: PayloadRef, response: PayloadRef) -> StoredBranch:
    return StoredBranch(
        prompt=prompt,
        response=response,
        num_prompt_tokens=len(branch.prompt_ids_P),
        num_response_tokens=branch.num_response_tokens,
        version_spans=branch.version_spans,
        text=branch.text,
    )
