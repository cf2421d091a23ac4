"""The tokens of an episode as a tree of turns. Each token is recorded when it is first computed.

A turn is a sequence of given tokens followed by a sequence of sampled tokens. The given tokens of the first
turn are the first prompt; those of a later turn were added by the environment after the turn before. If
several turns follow the same turn, they begin branches: several answers to the same messages, or rewritten
histories.

The prompt of every request to an engine is the whole path from the root to a turn, and the engine may
recompute all of it, for instance under newer weights. The record of a token remains that of its first
computation, because the tokens after it were sampled from that; a later request only adds records of new
tokens. The last token of a turn becomes an input only when another turn follows, so its routing comes from
the first request that follows.

The trainer gets each branch, the path to a turn that no other follows, as one sequence. A turn on several
branches trains with the first of them. On the others, its tokens are attended to like given ones. So every
sampled token trains exactly once.

``plan_rows`` packs the sequences of a batch into rows, and assigns rows to data-parallel ranks.

Shape suffixes: T tokens of one request's output, or of the response of a branch; S tokens of a path; R of
them with a routing record, M MoE layers, K top-k.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from forgeasync.config import ROW_ALIGNMENT
from forgeasync.rollouts.rollout import FinishReason, RequestSpan, Rollout, VersionRange, VersionSpan
from forgeasync.rollouts.token_records import KeptTokens, RoutedExperts, all_kept, concatenate_kept_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeId:
    """Identifies the turns of one agent in one attempt at an episode, or a single response."""

    group_id: int
    """Id of the group, or a negative number for episodes outside the buffer (evaluation)."""
    index: int
    """Index of the episode in its group."""
    attempt: int = 0
    """Number of earlier attempts, whose workers were lost."""
    agent: int = 0
    """Index of the agent that took the turns, in the order of the environment's config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """Facts of one turn of the model, for messages. The turn's other arrays stay where it was sampled."""

    turn: int
    """Number of the turn in the tree of its episode, by which later turns refer to it."""
    ids_T: np.ndarray
    """Sampled tokens, int32. With finish reason ``stop``, the last one ended the turn."""
    text: str
    """Text of the tokens without special tokens, up to the stop text if there is one."""
    finish_reason: FinishReason
    first_version: int
    """Policy version of the first token."""
    version: int
    """Policy version of the last token."""
    stop_text: str | None = None
    """Text that ended the turn; None if a token or a limit ended it."""

    @property
    def versions(self) -> VersionRange:
        """Policy versions that sampled the turn."""
        return VersionRange(first=self.first_version, last=self.version)

    @property
    def num_tokens(self) -> int:
        """Number of tokens sampled in this turn."""
        return len(self.ids_T)

    @property
    def last_id(self) -> int:
        """Id of the last sampled token."""
        return int(self.ids_T[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """Tokens, at least one, that an engine sampled in one or in consecutive requests, with their records."""

    ids_T: np.ndarray
    """Sampled tokens, int32."""
    logprobs_T: np.ndarray
    """Log-probabilities of the sampled tokens, float32."""
    version_spans: tuple[VersionSpan, ...]
    """Policy versions of the sampled tokens. Positions count from the first of them."""
    expert_ids_RMK: np.ndarray | None
    """Routing of each input of the request; None if not recorded.

    The inputs are the prompt, that is the whole path so far, and all sampled tokens but the last.
    """
    kept_tokens: KeptTokens | None
    """Kept sets of the sampled tokens; None if not recorded."""
    request_spans: tuple[RequestSpan, ...] = ()
    """Requests that sampled the tokens, with positions as in ``version_spans``."""

    def first(self, num_tokens: int) -> "SampledTokens":
        """Return the first sampled tokens, as if the request had ended after them."""
        num_dropped = len(self.ids_T) - num_tokens
        if num_dropped == 0:
            return self
        rows, kept = self.expert_ids_RMK, self.kept_tokens
        return SampledTokens(
            ids_T=self.ids_T[:num_tokens],
            logprobs_T=self.logprobs_T[:num_tokens],
            version_spans=_cut(self.version_spans, num_tokens),
            request_spans=_cut(self.request_spans, num_tokens),
            expert_ids_RMK=None if rows is None else rows[: len(rows) - num_dropped],
            kept_tokens=None if kept is None else kept.slice(0, num_tokens),
        )


class Trajectory:
    """Path from the root of an episode's tree to one of its turns, the last one, which may still grow.

    Each instance stores its last turn and refers to the trajectory before it.
    """

    def __init__(self, *, num_experts: int, before: "Trajectory | None" = None) -> None:
        """Begin a turn without tokens.

        Args:
            num_experts: Number of experts of a layer, which determines the type of recorded ids.
            before: Path that the turn follows; None for the first turn of a tree.
        """
        self._num_experts = num_experts
        self._before = before
        self._num_tokens_before = 0 if before is None else before.num_tokens
        self._given_ids = np.zeros(0, np.int32)
        self._parts: list[SampledTokens] = []
        self._spans: list[VersionSpan] = []
        """Policy versions of the turn's tokens. Positions count from its first sampled token."""
        self._requests: list[RequestSpan] = []
        """Requests that sampled the turn's tokens. Positions count from the first of them."""
        self._rows: list[np.ndarray] | None = []
        self._num_rows = 0
        self._row_of_last_1MK: np.ndarray | None = None

    def continued(self) -> "Trajectory":
        """Begin a new turn after this one, which has ended."""
        assert self._parts, "a turn follows one that was sampled"
        return Trajectory(num_experts=self._num_experts, before=self)

    @property
    def turns(self) -> tuple["Trajectory", ...]:
        """All turns of the path, from the root to the last."""
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
        """All tokens of the path, which form the prompt of the next request."""
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
        """Append tokens that the model did not sample. It attends to them, and does not train on them."""
        assert not self._parts, "tokens after sampled ones begin another turn"
        self._given_ids = np.concatenate([self._given_ids, ids.astype(np.int32)])

    def sample(self, sampled: SampledTokens) -> None:
        """Append the result of a request whose prompt was the whole path."""
        assert self.num_tokens and len(sampled.ids_T), "tokens are sampled after others"
        start = self.num_sampled
        self._parts.append(sampled)
        _add_spans(self._spans, sampled.version_spans, start)
        _add_spans(self._requests, sampled.request_spans, start)
        if sampled.expert_ids_RMK is None:
            self._rows = None
            return
        if self._before is not None and self._before._row_of_last_1MK is None:
            # The last token before this turn was an input for the first time. Copies let the memory of the
            # request's other rows be freed.
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
        """Return the routing rows of the turn's tokens; None if they were not recorded.

        The last token of the path's last turn has no row.
        """
        if self._rows is None:
            return None
        if is_last:
            return self._rows
        return None if self._row_of_last_1MK is None else [*self._rows, self._row_of_last_1MK]


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Path to a turn that no other follows, and the number of its turns that do not train with it."""

    turns: tuple[Trajectory, ...]
    """All turns of the path."""
    num_turns_before: int
    """Number of initial turns that train with another branch. They are part of this branch's prompt."""
    forks: tuple[tuple[int, int], ...]
    """See ``Rollout.forks``."""

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
        """Whether the response is a single turn, so that all its tokens were sampled."""
        return self.num_turns_before == len(self.turns) - 1

    @property
    def _turns_before(self) -> tuple[Trajectory, ...]:
        return self.turns[: self.num_turns_before]

    def rollout(self, *, text: str, finish_reason: FinishReason) -> Rollout:
        """Return the branch as one training sequence."""
        own = self.turns[self.num_turns_before :]
        prompt_ids = self.prompt_ids
        is_sampled, logprobs = [], []
        spans: list[VersionSpan] = []
        requests: list[RequestSpan] = []
        kept: list[KeptTokens] | None = []
        for number, turn in enumerate(own):
            if number:
                num_given = len(turn._given_ids)
                is_sampled.append(np.zeros(num_given, bool))
                logprobs.append(np.zeros(num_given, np.float32))
                if kept is not None:
                    kept.append(all_kept(num_given))
            start = sum(map(len, is_sampled))
            _add_spans(spans, turn._spans, start)
            _add_spans(requests, turn._requests, start)
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
            request_spans=tuple(requests),
            forks=self.forks,
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
    """Return the branches of a tree, given all of its turns in the order in which they began.

    Leaves out turns without sampled tokens, whose group was given up. Every other turn trains with the first
    branch that contains it.
    """
    sampled = [turn for turn in turns if turn._parts]
    num_followers = Counter(id(turn._before) for turn in sampled)
    trained_with: dict[int, int] = {}
    found: list[Branch] = []
    for leaf in sampled:
        if id(leaf) in num_followers:
            continue
        path = leaf.turns
        num_before = sum(id(turn) in trained_with for turn in path)
        for turn in path:
            trained_with.setdefault(id(turn), len(found))
        forks = tuple((trained_with[id(x)], x.num_tokens) for x in path if num_followers[id(x)] > 1)
        found.append(Branch(turns=path, num_turns_before=num_before, forks=forks))
    return tuple(found)


def _joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int32), *parts])


Span = TypeVar("Span", VersionSpan, RequestSpan)


def _add_spans(spans: list[Span], added: Iterable[Span], offset: int) -> None:
    """Append spans whose positions count from ``offset``; adjacent spans of one thing become one."""
    for span in added:
        start, end = offset + span.start, offset + span.end
        last = spans[-1] if spans else None
        if last is not None and last.end == start and replace(last, start=span.start, end=span.end) == span:
            spans[-1] = replace(last, end=end)
        else:
            spans.append(replace(span, start=start, end=end))


def _cut(spans: Iterable[Span], num_tokens: int) -> tuple[Span, ...]:
    """Return the spans of the first tokens."""
    return tuple(replace(span, end=min(span.end, num_tokens)) for span in spans if span.start < num_tokens)


def padded_length(num_tokens: int) -> int:
    """Return the length of a row of ``num_tokens`` tokens, padded to a multiple of ``ROW_ALIGNMENT``."""
    return max(1, -(-num_tokens // ROW_ALIGNMENT)) * ROW_ALIGNMENT


Prefixes = Sequence[tuple[Hashable, int]]
"""Prefixes of a sequence that others may have too, shortest first: a key and the number of tokens.

Keys are equal where tokens and their records are. Sequences with a common key have equal prefixes before it.
"""


def plan_rows(
    lengths: Sequence[int],
    *,
    tokens_per_row: int,
    num_ranks: int,
    prefixes: Sequence[Prefixes] | None = None,
    pair_cost: float = 0.0,
) -> list[list[list[int]]]:
    """Assign sequences to rows and rows to ranks. ``plan[microbatch][rank]`` lists indices of sequences.

    Puts the costliest sequences first (``row_cost``), each into the row with the lowest cost that has room
    for it. The number of rows is the smallest multiple of ``num_ranks`` with which this succeeds. Every rank
    gets the same number of microbatches. Ranks wait for the costliest row of a microbatch, so its rows have
    similar costs, and if ranks would wait less with rows of similar numbers of tokens, those are used.
    Deterministic, and depends on lengths and prefixes alone.

    With the ``prefixes`` of each sequence, a row has every prefix once, and sequences with a common prefix
    are assigned together: as many as fit in half a row, or in a whole one if ranks wait less then.

    Raises:
        ValueError: A sequence is longer than a row.
    """
    for index, length in enumerate(lengths):
        if length > tokens_per_row:
            raise ValueError(
                f"sequence {index} has {length} tokens, more than trainer.tokens_per_row = {tokens_per_row}"
            )

    def cost_of(row: Sequence[int]) -> float:
        return row_cost(row, lengths, prefixes, pair_cost=pair_cost)

    prefixes = [()] * len(lengths) if prefixes is None else prefixes
    choices = []
    for most in (tokens_per_row // 2, tokens_per_row):
        bundles = _bundles(range(len(lengths)), lengths, prefixes, most)
        sizes = [num_row_tokens(bundle, lengths, prefixes) for bundle in bundles]
        choices += [(bundles, sizes, loads) for loads in ([cost_of(bundle) for bundle in bundles], sizes)]
    num_microbatches = max(1, -(-min(sum(sizes) for _, sizes, _ in choices) // (tokens_per_row * num_ranks)))
    plans: list[list[list[list[int]]]] = []
    while not plans:
        for bundles, sizes, loads in choices:
            filled = _fill(loads, sizes, tokens_per_row, num_microbatches * num_ranks)
            if filled is not None:
                rows = [[index for bundle in row for index in bundles[bundle]] for row in filled]
                rows.sort(key=cost_of, reverse=True)
                plans.append([rows[first : first + num_ranks] for first in range(0, len(rows), num_ranks)])
        num_microbatches += 1
    return min(plans, key=lambda plan: sum(cost_of(rows[0]) for rows in plan))


def num_row_tokens(row: Sequence[int], lengths: Sequence[int], prefixes: Sequence[Prefixes] | None) -> int:
    """Return the tokens of a row of ``plan_rows``, which has every prefix once."""
    return int(row_cost(row, lengths, prefixes, pair_cost=0.0))


def row_cost(
    row: Sequence[int], lengths: Sequence[int], prefixes: Sequence[Prefixes] | None, *, pair_cost: float
) -> float:
    """Return the cost of a row of ``plan_rows``: its tokens, and ``pair_cost`` for each that a token sees.

    A token sees itself and the tokens before it in its sequence.
    """

    def of_first(num_tokens: int) -> float:
        return num_tokens + pair_cost * (num_tokens * (num_tokens + 1) // 2)

    own, of_parts = 0.0, dict[Hashable, float]()
    for index in row:
        before = 0.0
        for key, num_tokens in () if prefixes is None else prefixes[index]:
            of_parts[key] = of_first(num_tokens) - before
            before = of_first(num_tokens)
        own += of_first(lengths[index]) - before
    return own + sum(of_parts.values())


def _bundles(
    indices: Sequence[int], lengths: Sequence[int], prefixes: Sequence[Prefixes], most: int, depth: int = 0
) -> list[list[int]]:
    """Return sequences with common prefixes together, in bundles of at most ``most`` tokens if possible.

    The first ``depth`` prefixes of the sequences are equal.
    """
    alike: dict[Hashable, list[int]] = {}
    for index in indices:
        path = prefixes[index]
        alike.setdefault(path[depth] if depth < len(path) else index, []).append(index)
    bundles = []
    for these in alike.values():
        parts = [these] if len(these) == 1 else _bundles(these, lengths, prefixes, most, depth + 1)
        bundle: list[int] = []
        for part in sorted(parts, key=lambda part: (-max(lengths[index] for index in part), part)):
            if bundle and num_row_tokens([*bundle, *part], lengths, prefixes) > most:
                bundles.append(bundle)
                bundle = []
            bundle = [*bundle, *part]
        bundles.append(bundle)
    return bundles


def _fill(
    loads: Sequence[float], sizes: Sequence[int], tokens_per_row: int, num_rows: int
) -> list[list[int]] | None:
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    load, room = np.zeros(num_rows), np.full(num_rows, tokens_per_row)
    for index in sorted(range(len(loads)), key=lambda index: (-loads[index], index)):
        row = int(np.where(room >= sizes[index], load, np.inf).argmin())
        if room[row] < sizes[index]:
            return None
        rows[row].append(index)
        load[row] += loads[index]
        room[row] -= sizes[index]
    return rows
