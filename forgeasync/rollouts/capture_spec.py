"""The records of every rollout, and checks that they are sound."""

from dataclasses import dataclass

import numpy as np

from forgeasync.config import ModelFacts
from forgeasync.rollouts.kept_tokens import check_kept_tokens
from forgeasync.rollouts.rollout import Rollout
from forgeasync.rollouts.routing import RecordError, check_routing

MAX_LOGPROB = 1e-3
"""Rounding can put the log-probability of a sure token above 0, but no further than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSpec:
    """The records that an engine makes beside tokens and log-probabilities."""

    routing: bool
    """The experts that each token took in each layer that has experts."""
    kept_tokens: bool
    """The tokens that could have been drawn at each step."""
    num_dense_layers: int = 0
    """The first layers, which have no experts and no record."""


def check_rollout(rollout: Rollout, records: CaptureSpec, facts: ModelFacts) -> None:
    """Check that a rollout has the records asked for, and that they fit its tokens and the model.

    Raises:
        RecordError: names field, value and what would be right.
    """
    num_response_tokens = rollout.num_response_tokens
    if len(rollout.logprobs_T) != num_response_tokens:
        raise RecordError(
            "logprobs",
            f"{len(rollout.logprobs_T)} values",
            f"must be {num_response_tokens}, one for each token of the response",
        )
    _check_logprobs(rollout.logprobs_T)
    if records.routing:
        if rollout.routed_experts is None:
            raise RecordError(
                "routed_experts", "none", "trainer.routing_replay needs the engine to record them"
            )
        check_routing(
            rollout.routed_experts,
            num_tokens=len(rollout.prompt_ids_P) + num_response_tokens,
            num_layers=facts.num_moe_layers,
            top_k=facts.top_k,
            num_experts=facts.num_experts,
        )
    if records.kept_tokens:
        if rollout.kept_tokens is None:
            raise RecordError(
                "kept_tokens", "none", "trainer.keep_sampling_mask needs the engine to record them"
            )
        check_kept_tokens(rollout.kept_tokens, rollout.response_ids_T, vocab_size=facts.vocab_size)


def _check_logprobs(logprobs_T: np.ndarray) -> None:
    """One NaN would be in every gradient of its batch."""
    is_sound_T = np.isfinite(logprobs_T) & (logprobs_T <= MAX_LOGPROB)
    if not is_sound_T.all():
        token = int(np.argmin(is_sound_T))
        raise RecordError(
            "logprobs",
            f"{logprobs_T[token]:g} at response token {token}",
            "must be finite and at most 0, as every logarithm of a probability",
        )
