"""Rollouts whose arrays lie nowhere, for what only looks at their facts."""

import itertools

from forgeasync.rollouts import FinishReason, PayloadRef, StoredBranch, StoredRollout, VersionSpan

_payload_ids = itertools.count()


def make_ref(*, num_bytes: int = 100) -> PayloadRef:
    return PayloadRef(
        host_id="nowhere",
        file="nothing",
        payload_id=str(next(_payload_ids)),
        offset=0,
        num_bytes=num_bytes,
        checksum=0,
    )


def make_stored_rollout(
    *spans: tuple[int, int, int],
    num_prompt_tokens: int = 1,
    text: str = "",
    finish_reason: FinishReason = FinishReason.STOP,
) -> StoredRollout:
    """``spans`` are (version, start, end)."""
    return StoredRollout(
        generator_rank=0,
        branches=(
            StoredBranch(
                prompt=make_ref(),
                response=make_ref(),
                num_prompt_tokens=num_prompt_tokens,
                num_response_tokens=spans[-1][2],
                version_spans=tuple(VersionSpan(version=v, start=start, end=end) for v, start, end in spans),
                text=text,
            ),
        ),
        finish_reason=finish_reason,
    )
