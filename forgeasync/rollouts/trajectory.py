"""A conversation as one row of tokens: some given, some sampled, each recorded when it was first computed.

A trajectory begins with given tokens, the first prompt. Whatever comes after them is the response of its
rollout: the model's turns and what an environment added between them. An engine gets the whole trajectory as
the prompt of every request, and may compute all of it again, for instance under newer weights. What was
recorded of a token stays as it was when the token was first computed, since that is what sampled the tokens
after it; a later request adds only what lies beyond.

Shape suffixes: T tokens of one request's output, or of the whole response; S tokens of the trajectory; R of
them with a routing record, M MoE layers, K top-k.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forgeasync.rollouts.kept_tokens import KeptTokens, all_kept, concatenate
from forgeasync.rollouts.rollout import FinishReason, Rollout, VersionSpan
from forgeasync.rollouts.routing import RoutedExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeId:
    """One episode of a group.

    ``group_id`` is the group's own, or a negative number for episodes that no buffer knows of (evaluation).
    """

    group_id: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """Facts of one turn of the model; its arrays stay where they were sampled."""

    text: str
    num_tokens: int
    """Number of tokens sampled in this turn."""
    finish_reason: FinishReason
    last_id: int
    """The last sampled token: with finish reason ``stop`` the one that ended the turn."""
    version: int
    """Policy version of the last token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """What an engine made of a trajectory in one request.

    ``ids_T`` (int32) and ``logprobs_T`` (float32) are of the sampled tokens, of which there is at least one;
    ``version_spans`` cover them, counted from the first of them. ``expert_ids_RMK`` has a row for every input
    of the request: all tokens of the trajectory so far and all sampled ones but the last; None where routing
    is not recorded. ``kept_tokens`` is None where kept sets are not.
    """

    ids_T: np.ndarray
    logprobs_T: np.ndarray
    version_spans: tuple[VersionSpan, ...]
    expert_ids_RMK: np.ndarray | None
    kept_tokens: KeptTokens | None

    def first(self, num_tokens: int) -> "SampledTokens":
        """The first of the sampled tokens, as if the request had ended there."""
        num_dropped = len(self.ids_T) - num_tokens
        if num_dropped == 0:
            return self
        rows, kept = self.expert_ids_RMK, self.kept_tokens
        return SampledTokens(
            ids_T=self.ids_T[:num_tokens],
            logprobs_T=self.logprobs_T[:num_tokens],
            version_spans=tuple(
                VersionSpan(version=span.version, start=span.start, end=min(span.end, num_tokens))
                for span in self.version_spans
                if span.start < num_tokens
            ),
            expert_ids_RMK=None if rows is None else rows[: len(rows) - num_dropped],
            kept_tokens=None if kept is None else kept.slice(0, num_tokens),
        )


class Trajectory:
    """Grows by given and by sampled tokens, and becomes one rollout."""

    def __init__(self, *, num_experts: int) -> None:
        """``num_experts`` is that of a layer of the model; it says how wide recorded ids are."""
        self._num_experts = num_experts
        self._token_ids: list[int] = []
        self._num_prompt_tokens = 0
        self._is_sampled: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._spans: list[VersionSpan] = []
        self._kept: list[KeptTokens] | None = []
        self._rows: list[np.ndarray] | None = []
        self._num_rows = 0

    @property
    def token_ids(self) -> Sequence[int]:
        """All tokens so far, which are the prompt of the next request; must not be changed."""
        return self._token_ids

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def response_ids(self) -> Sequence[int]:
        """All tokens after the first prompt."""
        return self._token_ids[self._num_prompt_tokens :]

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The given tokens before the first sampled one."""
        return self._token_ids[: self._num_prompt_tokens]

    @property
    def has_one_turn(self) -> bool:
        """Whether nothing was given after the first prompt."""
        return all(part.all() for part in self._is_sampled)

    @property
    def last_version(self) -> int:
        """Policy version of the last sampled token."""
        return self._spans[-1].version

    def give(self, ids: np.ndarray) -> None:
        """Append tokens that the model did not sample: it will attend to them, and never train on them."""
        self._token_ids += ids.tolist()
        if not self._logprobs:
            self._num_prompt_tokens = len(self._token_ids)
            return
        if not len(ids):
            return
        self._is_sampled.append(np.zeros(len(ids), bool))
        self._logprobs.append(np.zeros(len(ids), np.float32))
        if self._kept is not None:
            self._kept.append(all_kept(len(ids)))

    def sample(self, sampled: SampledTokens) -> None:
        """Append what a request with all tokens so far as its prompt has sampled."""
        num_new = len(sampled.ids_T)
        assert self._num_prompt_tokens and num_new, "tokens are sampled after others"
        start = len(self._token_ids) - self._num_prompt_tokens
        self._token_ids += sampled.ids_T.tolist()
        self._is_sampled.append(np.ones(num_new, bool))
        self._logprobs.append(sampled.logprobs_T)
        for span in sampled.version_spans:
            self._add_span(span.version, start + span.start, start + span.end)
        if self._kept is not None and sampled.kept_tokens is not None:
            self._kept.append(sampled.kept_tokens)
        else:
            self._kept = None
        if self._rows is not None and sampled.expert_ids_RMK is not None:
            # The first of these rows is the record of the turn's last token before, which only now was input.
            new_RMK = sampled.expert_ids_RMK[self._num_rows :].copy()
            self._rows.append(new_RMK)
            self._num_rows += len(new_RMK)
        else:
            self._rows = None

    def rollout(self, *, text: str, finish_reason: FinishReason) -> Rollout:
        """The trajectory as it is now; it ends with a sampled token."""
        assert self._is_sampled and self._is_sampled[-1][-1], "nothing is given after the last turn"
        is_sampled_T = np.concatenate(self._is_sampled)
        routed_experts = None
        if self._rows is not None:
            routed_experts = RoutedExperts.from_rows(
                np.concatenate(self._rows), num_tokens=self.num_tokens, num_experts=self._num_experts
            )
        return Rollout(
            prompt_ids_P=np.asarray(self.prompt_ids, np.int32),
            response_ids_T=np.asarray(self.response_ids, np.int32),
            logprobs_T=np.concatenate(self._logprobs),
            version_spans=tuple(self._spans),
            text=text,
            finish_reason=finish_reason,
            routed_experts=routed_experts,
            kept_tokens=None if self._kept is None else concatenate(self._kept),
            is_sampled_T=None if is_sampled_T.all() else is_sampled_T,
        )

    def _add_span(self, version: int, start: int, end: int) -> None:
        last = self._spans[-1] if self._spans else None
        if last is not None and last.version == version and last.end == start:
            self._spans[-1] = VersionSpan(version=version, start=last.start, end=end)
        else:
            self._spans.append(VersionSpan(version=version, start=start, end=end))
