"""Rollouts whose arrays lie nowhere, for what only looks at their facts."""

import dataclasses
import itertools

import numpy as np

from forgeasync.config import ModelFacts
from forgeasync.rollouts import (
    FinishReason,
    KeptTokens,
    PayloadRef,
    Rollout,
    RoutedExperts,
    StoredBranch,
    StoredRollout,
    VersionSpan,
)
from tests.support import config_samples

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


FACTS = dataclasses.replace(
    config_samples.FACTS,
    num_layers=3,
    hidden_size=32,
    num_heads=2,
    vocab_size=20,
    expert_hidden_size=32,
    max_position_embeddings=64,
)


def make_routing(rng: np.random.Generator, num_tokens: int, facts: ModelFacts) -> RoutedExperts:
    """Distinct random ids, in random order, for a random prefix of the tokens."""
    num_recorded = int(rng.integers(0, num_tokens + 1))
    scores = rng.random((num_recorded, facts.num_layers, facts.num_experts))
    return RoutedExperts.from_rows(
        scores.argsort(-1)[..., : facts.top_k], num_tokens=num_tokens, num_experts=facts.num_experts
    )


def make_rollout(
    seed: int, num_prompt_tokens: int, num_response_tokens: int, *, facts: ModelFacts = FACTS
) -> Rollout:
    rng = np.random.default_rng(seed)
    response = rng.integers(0, facts.vocab_size, num_response_tokens).astype(np.int32)
    rows = [
        list({int(token), *rng.integers(0, facts.vocab_size, rng.integers(0, facts.vocab_size)).tolist()})
        for token in response
    ]
    return Rollout(
        prompt_ids_P=rng.integers(0, facts.vocab_size, num_prompt_tokens).astype(np.int32),
        response_ids_T=response,
        logprobs_T=-rng.exponential(size=num_response_tokens).astype(np.float32),
        version_spans=(VersionSpan(version=0, start=0, end=num_response_tokens),),
        text="",
        finish_reason=FinishReason.STOP,
        routed_experts=make_routing(rng, num_prompt_tokens + num_response_tokens, facts),
        kept_tokens=KeptTokens.from_rows(rows, vocab_size=facts.vocab_size),
    )
