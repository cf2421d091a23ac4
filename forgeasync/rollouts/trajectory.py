"""The tokens of an episode as a tree of turns, each token recorded when it was first computed.

A turn is a run of given tokens and a run of sampled ones after it. The first turn's given tokens are the
first prompt; those of a later turn are what an environment added after the turn before. Turns that follow the
same turn begin branches: several answers to the same messages, or histories that were rewritten.

An engine gets the whole path from the root to a turn as the prompt of every request, and may compute all of
it again, for instance under newer weights. What was recorded of a token stays as it was when the token was
first computed, since that is what sampled the tokens after it; a later request adds only what lies beyond.
The last token of a turn becomes input only when a turn follows: its routing is that of the first request that
follows.

The trainer gets a branch, the path to a turn that no other follows, as one sequence. A turn on several
branches trains with the first of them; on the others its tokens are attended to like given ones, so that
every sampled token trains exactly once.

Shape suffixes: T tokens of one request's output, or of the response of a branch; S tokens of a path; R of
them with a routing record, M MoE layers, K top-k.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from forgeasync.rollouts.rollout import FinishReason, Rollout, VersionRange, VersionSpan
from forgeasync.rollouts.token_records import KeptTokens, RoutedExperts, all_kept, concatenate_kept_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeId:
    """What one agent samples in one episode of a group.

    ``group_id`` is the group's own, or a negative number for episodes that no buffer knows of (evaluation).
    """

    group_id: int
    index: int
    attempt: int = 0
    """How often the episode was begun again because its worker was lost."""
    agent: int = 0
    """Which of the environment's agents took the turns, by its place in the config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """Facts of one turn of the model; its other arrays stay where they were sampled."""

    turn: int
    """The turn's number in the tree of its episode, for turns that follow it."""
    ids_T: np.ndarray
    """The sampled tokens, int32; with finish reason ``stop`` the last one ended the turn."""
    text: str
    """Their text without special tokens, up to where one of the texts that end a turn begins."""
    finish_reason: FinishReason
    first_version: int
    """Policy version of the first token."""
    version: int
    """Policy version of the last token."""
    stop_text: str | None = None
    """The text that ended the turn; None where a token or a bound did."""

    @property
    def versions(self) -> VersionRange:
        """The versions that sampled the turn."""
        return VersionRange(first=self.first_version, last=self.version)

    @property
    def num_tokens(self) -> int:
        """Number of tokens sampled in this turn."""
        return len(self.ids_T)

    @property
    def last_id(self) -> int:
        """The last sampled token."""
        return int(self.ids_T[-1])


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
    """The path from the root of an episode's tree to one of its turns, which is last and may still grow."""

    def __init__(self, *, num_experts: int, before: "Trajectory | None" = None) -> None:
        """A turn without tokens, the first one or one after ``before``.

        ``num_experts`` is that of a layer of the model; it says how wide recorded ids are.
        """
        self._num_experts = num_experts
        self._before = before
        self._num_tokens_before = 0 if before is None else before.num_tokens
        self._given_ids = np.zeros(0, np.int32)
        self._parts: list[SampledTokens] = []
        self._spans: list[VersionSpan] = []
        """Counted from the turn's first sampled token."""
        self._rows: list[np.ndarray] | None = []
        self._num_rows = 0
        self._row_of_last_1MK: np.ndarray | None = None

    def continued(self) -> "Trajectory":
        """A new turn after this one, which has ended."""
        assert self._parts, "a turn follows one that was sampled"
        return Trajectory(num_experts=self._num_experts, before=self)

    @property
    def turns(self) -> tuple["Trajectory", ...]:
        """All turns of the path, the first one first."""
        path: list[Trajectory] = []
        turn: Trajectory | None = self
        while turn is not None:
            path.append(turn)
            turn = turn._before
        return tuple(reversed(path))

    @property
    def num_tokens_before(self) -> int:
        """Number of tokens of the turns before the last one."""
        return self._num_tokens_before

    @property
    def given_ids(self) -> np.ndarray:
        """Tokens given in the last turn, int32 [T]."""
        return self._given_ids

    @property
    def token_ids(self) -> list[int]:
        """All tokens of the path, which are the prompt of the next request."""
        return _joined(turn._ids for turn in self.turns).tolist()

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the path."""
        return self._num_tokens_before + len(self._given_ids) + self.num_sampled

    @property
    def num_sampled(self) -> int:
        """Number of tokens sampled in the last turn."""
        return sum(len(part.ids_T) for part in self._parts)

    @property
    def sampled_ids(self) -> np.ndarray:
        """Tokens sampled in the last turn, int32 [T]."""
        return _joined(part.ids_T for part in self._parts)

    @property
    def first_version(self) -> int:
        """Policy version of the first token sampled in the last turn."""
        return self._spans[0].version

    @property
    def last_version(self) -> int:
        """Policy version of the last sampled token."""
        return self._spans[-1].version

    def give(self, ids: np.ndarray) -> None:
        """Append tokens that the model did not sample: it will attend to them, and never train on them."""
        assert not self._parts, "tokens after sampled ones begin another turn"
        self._given_ids = np.concatenate([self._given_ids, ids.astype(np.int32)])

    def sample(self, sampled: SampledTokens) -> None:
        """Append what a request with all tokens of the path as its prompt has sampled."""
        assert self.num_tokens and len(sampled.ids_T), "tokens are sampled after others"
        start = self.num_sampled
        self._parts.append(sampled)
        for span in sampled.version_spans:
            _add_span(self._spans, span.version, start + span.start, start + span.end)
        if sampled.expert_ids_RMK is None:
            self._rows = None
            return
        if self._before is not None and self._before._row_of_last_1MK is None:
            # Only now was the last token before this turn an input. Copies free the rest of the request.
            last = self._num_tokens_before - 1
            self._before._row_of_last_1MK = sampled.expert_ids_RMK[last : last + 1].copy()
        if self._rows is not None:
            new_RMK = sampled.expert_ids_RMK[self._num_tokens_before + self._num_rows :].copy()
            self._rows.append(new_RMK)
            self._num_rows += len(new_RMK)

    @property
    def _ids(self) -> np.ndarray:
        return np.concatenate([self._given_ids, self.sampled_ids])

    def _routing(self, *, is_last: bool) -> list[np.ndarray] | None:
        """Records of the turn's tokens; on the path's last turn the last token has none."""
        if self._rows is None:
            return None
        if is_last:
            return self._rows
        return None if self._row_of_last_1MK is None else [*self._rows, self._row_of_last_1MK]


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A path to a turn that no other follows, and which of its turns train with it: the last ones."""

    turns: tuple[Trajectory, ...]
    num_turns_before: int
    """Turns that train with another branch: they are part of the prompt."""

    @property
    def prompt_ids(self) -> list[int]:
        """Tokens before the first one that trains with this branch."""
        first = self.turns[self.num_turns_before]
        return [*_joined(turn._ids for turn in self._turns_before).tolist(), *first._given_ids.tolist()]

    @property
    def response_ids(self) -> list[int]:
        """All tokens after the prompt."""
        return self.turns[-1].token_ids[len(self.prompt_ids) :]

    @property
    def has_one_turn(self) -> bool:
        """Whether the response is one turn: all its tokens were sampled."""
        return self.num_turns_before == len(self.turns) - 1

    @property
    def _turns_before(self) -> tuple[Trajectory, ...]:
        return self.turns[: self.num_turns_before]

    def rollout(self, *, text: str, finish_reason: FinishReason) -> Rollout:
        """Return the branch as the trainer takes it."""
        own = self.turns[self.num_turns_before :]
        prompt_ids = self.prompt_ids
        is_sampled, logprobs = [], []
        spans: list[VersionSpan] = []
        kept: list[KeptTokens] | None = []
        for number, turn in enumerate(own):
            if number:
                num_given = len(turn._given_ids)
                is_sampled.append(np.zeros(num_given, bool))
                logprobs.append(np.zeros(num_given, np.float32))
                if kept is not None:
                    kept.append(all_kept(num_given))
            start = sum(map(len, is_sampled))
            for span in turn._spans:
                _add_span(spans, span.version, start + span.start, start + span.end)
            is_sampled.append(np.ones(turn.num_sampled, bool))
            logprobs += [part.logprobs_T for part in turn._parts]
            of_parts = [part.kept_tokens for part in turn._parts if part.kept_tokens is not None]
            kept = None if kept is None or len(of_parts) < len(turn._parts) else [*kept, *of_parts]
        is_sampled_T = np.concatenate(is_sampled)
        return Rollout(
            prompt_ids_P=np.asarray(prompt_ids, np.int32),
            response_ids_T=np.asarray(self.turns[-1].token_ids[len(prompt_ids) :], np.int32),
            logprobs_T=np.concatenate(logprobs),
            version_spans=tuple(spans),
            text=text,
            finish_reason=finish_reason,
            routed_experts=self._routed_experts(),
            kept_tokens=None if kept is None else concatenate_kept_tokens(kept),
            is_sampled_T=None if is_sampled_T.all() else is_sampled_T,
        )

    def _routed_experts(self) -> RoutedExperts | None:
        rows: list[np.ndarray] = []
        for turn in self.turns:
            of_turn = turn._routing(is_last=turn is self.turns[-1])
            if of_turn is None:
                return None
            rows += of_turn
        return RoutedExperts.from_rows(
            np.concatenate(rows),
            num_tokens=self.turns[-1].num_tokens,
            num_experts=self.turns[-1]._num_experts,
        )


def branches(turns: Sequence[Trajectory]) -> tuple[Branch, ...]:
    """Return the branches of a tree, given all its turns in the order in which they began.

    A turn of which nothing was sampled, because its group was given up, is left out. Every other turn trains
    with the first branch that it is on.
    """
    sampled = [turn for turn in turns if turn._parts]
    followed = {id(turn._before) for turn in sampled}
    taken: set[int] = set()
    found = []
    for leaf in sampled:
        if id(leaf) in followed:
            continue
        path = leaf.turns
        num_before = sum(id(turn) in taken for turn in path)
        taken.update(map(id, path))
        found.append(Branch(turns=path, num_turns_before=num_before))
    return tuple(found)


def _joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int32), *parts])


def _add_span(spans: list[VersionSpan], version: int, start: int, end: int) -> None:
    last = spans[-1] if spans else None
    if last is not None and last.version == version and last.end == start:
        spans[-1] = VersionSpan(version=version, start=last.start, end=end)
    else:
        spans.append(VersionSpan(version=version, start=start, end=end))
