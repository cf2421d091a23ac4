"""Turns in flight as their log tells them, and what another generator continues of them.

Shape suffixes: N tokens; R rows of routed experts, M MoE layers, K top-k.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forgeasync.rollouts.in_flight_format import (
    FINISHES,
    MAGIC,
    BegunTurn,
    EndedTurn,
    ForgottenTurns,
    InFlightRecord,
    TokenBatch,
    decode,
    encode,
    joined,
)
from forgeasync.rollouts.kept_tokens import KeptTokens
from forgeasync.rollouts.rollout import FinishReason, VersionSpan
from forgeasync.rollouts.trajectory import EpisodeId, SampledTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTurn:
    """A turn, and what was sampled of it."""

    begun: BegunTurn
    batch: TokenBatch | None
    """None if nothing was."""
    ended: EndedTurn | None
    """None if it was under way, or has ended with its last token and nobody had noted it yet."""

    @property
    def num_tokens(self) -> int:
        """Number of its sampled tokens."""
        return 0 if self.batch is None else self.batch.num_tokens

    @property
    def num_parts(self) -> int:
        """How many requests of its response or episode have sampled, as far as this turn knows."""
        return 0 if self.batch is None else int(self.batch.parts_N.max()) + 1

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the turn ended with its last token; None if it goes on after it, as far as the engine knew."""
        return None if self.batch is None else FINISHES[int(self.batch.finishes_N[-1])]

    def tokens(self) -> SampledTokens:
        """Its tokens as one request of the whole path would have sampled them; there is at least one.

        Rows of tokens before ``begun.first_row`` are zeros: a trajectory knows those already.
        """
        batch = self.batch
        assert batch is not None, "a turn of which nothing was sampled"
        rows = batch.rows_RMK
        if rows is not None:
            rows = np.concatenate([np.zeros((self.begun.first_row, *rows.shape[1:]), rows.dtype), rows])
        kept = None
        if batch.num_kept_N is not None and batch.kept_ids_J is not None:
            offsets = np.zeros(batch.num_tokens + 1, np.int64)
            np.cumsum(batch.num_kept_N, out=offsets[1:])
            kept = KeptTokens(offsets=offsets, ids_N=batch.kept_ids_J)
        return SampledTokens(
            ids_T=batch.ids_N,
            logprobs_T=batch.logprobs_N,
            version_spans=_spans(batch.versions_N),
            expert_ids_RMK=rows,
            kept_tokens=kept,
        )

    def num_recorded(self) -> int:
        """Number of its first tokens of which all inputs have a record of their routing.

        All, where routing is not recorded. A token needs the rows of all tokens before it.
        """
        if self.batch is None or self.batch.rows_RMK is None:
            return self.num_tokens
        num_inputs = self.begun.first_row + np.cumsum(self.batch.num_rows_N)
        needed = self.begun.num_prompt_tokens + np.arange(self.num_tokens)
        has_rows_N = num_inputs >= needed
        return self.num_tokens if has_rows_N.all() else int(np.argmin(has_rows_N))

    def first(self, num_tokens: int) -> "LoggedTurn":
        """The turn with its first tokens only, as if no more had arrived."""
        if num_tokens >= self.num_tokens or self.batch is None:
            return self
        batch = self.batch.first(num_tokens) if num_tokens else None
        return LoggedTurn(begun=self.begun, batch=batch, ended=None)


def _spans(versions_N: np.ndarray) -> tuple[VersionSpan, ...]:
    starts = [0, *(np.flatnonzero(np.diff(versions_N)) + 1).tolist()]
    ends = [*starts[1:], len(versions_N)]
    return tuple(
        VersionSpan(version=int(versions_N[start]), start=start, end=end)
        for start, end in zip(starts, ends, strict=True)
    )


class LiveTurns:
    """The turns of a log that nobody has forgotten; the records of a log are applied in their order."""

    def __init__(self, records: Iterable[InFlightRecord] = ()) -> None:
        self._begun: dict[int, BegunTurn] = {}
        self._ended: dict[int, EndedTurn] = {}
        self._batches: list[TokenBatch] = []
        for record in records:
            self.apply(record)

    def apply(self, record: InFlightRecord) -> None:
        """Take one record in."""
        match record:
            case BegunTurn():
                self._begun[record.key] = record
            case TokenBatch():
                self._batches.append(record)
            case EndedTurn():
                self._ended[record.key] = record
            case ForgottenTurns():
                for key in record.keys:
                    self._begun.pop(key, None)
                    self._ended.pop(key, None)

    def snapshot(self) -> list[InFlightRecord]:
        """Records of a log that has these turns and nothing else."""
        return self._records(self._begun.keys())

    def of_group(self, group_id: int) -> list[LoggedTurn]:
        """The turns of one group, by episode and number, up to where each has ended."""
        keys = {key for key, begun in self._begun.items() if begun.episode.group_id == group_id}
        batch = self._tokens(keys)
        turns = []
        for key in keys:
            ended = self._ended.get(key)
            own = None if batch is None else batch.take(batch.keys_N == key)
            turn = LoggedTurn(
                begun=self._begun[key], batch=own if own is not None and own.num_tokens else None, ended=ended
            )
            if ended is not None and turn.num_tokens > ended.num_tokens:
                assert turn.batch is not None
                turn = LoggedTurn(begun=turn.begun, batch=turn.batch.first(ended.num_tokens), ended=ended)
            turns.append(turn)
        return sorted(turns, key=_order)

    def group_ids(self) -> set[int]:
        """Groups with at least one turn."""
        return {begun.episode.group_id for begun in self._begun.values()}

    def _records(self, keys: Collection[int]) -> list[InFlightRecord]:
        batch = self._tokens(keys)
        return [
            *(self._begun[key] for key in keys),
            *([] if batch is None else [batch]),
            *(self._ended[key] for key in keys if key in self._ended),
        ]

    def _tokens(self, keys: Collection[int]) -> TokenBatch | None:
        """All tokens of some turns, each turn's in order; None if there is none."""
        if not self._batches:
            return None
        # At once: a log has many batches, each with few tokens.
        self._batches = [joined(self._batches)]
        (batch,) = self._batches
        found = batch.take(np.isin(batch.keys_N, np.fromiter(keys, np.int64, len(keys))))
        return found if found.num_tokens else None


def _order(turn: LoggedTurn) -> tuple[int, int, int, int]:
    episode = turn.begun.episode
    return episode.index, episode.agent, episode.attempt, turn.begun.number


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumableGroup:
    """What another generator can continue of a group."""

    data: bytes
    """For ``group_turns``."""
    num_kept: int
    """Tokens that it continues from."""
    num_lost: int
    """Tokens that the log has, but not their routing."""


def keep_group(turns: Sequence[LoggedTurn]) -> ResumableGroup:
    """The turns of one group with all tokens that are recorded in full.

    An episode is left out that has turns after one whose last tokens are not.
    """
    followed = {(turn.begun.episode, turn.begun.after) for turn in turns}
    broken = {
        turn.begun.episode
        for turn in turns
        if turn.num_recorded() < turn.num_tokens and (turn.begun.episode, turn.begun.number) in followed
    }
    kept = [turn.first(turn.num_recorded()) for turn in turns if turn.begun.episode not in broken]
    num_kept = sum(turn.num_tokens for turn in kept)
    return ResumableGroup(
        data=b"".join([MAGIC, *(encode(record) for turn in kept for record in turn_records(turn))]),
        num_kept=num_kept,
        num_lost=sum(turn.num_tokens for turn in turns) - num_kept,
    )


def turn_records(turn: LoggedTurn) -> list[InFlightRecord]:
    """The records of one turn."""
    return [
        turn.begun,
        *([] if turn.batch is None else [turn.batch]),
        *([] if turn.ended is None else [turn.ended]),
    ]


def ended_turns(turns: Iterable[LoggedTurn]) -> Mapping[EpisodeId, frozenset[int]]:
    """The numbers of the turns that are known to have ended, by episode.

    Those whose last tokens cannot be continued from count as not ended.
    """
    ended: defaultdict[EpisodeId, set[int]] = defaultdict(set)
    for turn in turns:
        if turn.ended is not None:
            ended[turn.begun.episode].add(turn.begun.number)
    return {episode: frozenset(numbers) for episode, numbers in ended.items()}


def group_turns(data: bytes) -> tuple[LoggedTurn, ...]:
    """The turns of a group, from ``ResumableGroup.data``; by episode and number.

    Raises:
        ValueError: ``data`` is not the whole of it.
    """
    log = decode(data)
    if log.num_torn_bytes:
        raise ValueError(f"the last {log.num_torn_bytes} of {len(data)} bytes are no whole record")
    live = LiveTurns(log.records)
    return tuple(turn for group_id in sorted(live.group_ids()) for turn in live.of_group(group_id))
