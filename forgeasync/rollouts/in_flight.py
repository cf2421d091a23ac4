"""Log of the tokens that a generator has in flight, from which another generator can continue.

The log is a file in the host's shared memory, which outlives the process that writes it. It holds ``MAGIC``
followed by records. The head of each record has its length and a checksum, so a reader stops where the writer
died: it always reads a prefix of what was written. The tokens of one engine step are one record.

``InFlightLog`` writes the log, ``read_in_flight`` reads it after the writer's death, and ``LoggedTurn`` is
one turn of the model in it.

Shape suffixes: N tokens of any turns, in the order in which they were sampled; R rows of routed experts,
M MoE layers, K top-k; J kept ids of all tokens.
"""

import os
import re
import shutil
import struct
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from forgeasync.rollouts.rollout import FinishReason, RequestSpan, VersionSpan
from forgeasync.rollouts.token_records import KeptTokens
from forgeasync.rollouts.trajectory import EpisodeId, SampledTokens

MAGIC = b"forgeasync in flight 2\n"
"""First bytes of a log, with the version of its format."""

FINISHES = (None, *FinishReason)
"""Finish reasons by the number in ``TokenBatch.finishes_N``; None if the turn continues after the token."""

NO_ROWS = np.zeros((0, 0, 0), np.uint8)
"""Empty array of routing rows, for tokens without new rows in a log that records routing."""

MIN_SEGMENT_BYTES = 4 * 2**20
"""Size in bytes up to which a segment is not replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunTurn:
    """Record of a turn of the model that begins, before a token is sampled."""

    key: int
    """Identifier of the turn within its log."""
    episode: EpisodeId
    """Response or episode to which the turn belongs."""
    number: int
    """Index of the turn within its episode; 0 for a response."""
    after: int | None
    """Number of the turn that this one follows; None for the first turn of a tree."""
    num_tokens_before: int
    """Number of tokens of the turns on the path before this one."""
    given_ids: np.ndarray
    """Tokens given after those of earlier turns, int32."""

    @property
    def first_row(self) -> int:
        """Position on the path of the first token whose routing this turn records.

        It is the last token of the turn before, which becomes an input of the model only now.
        """
        return max(self.num_tokens_before - 1, 0)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens on the path before the first one that the turn samples."""
        return self.num_tokens_before + len(self.given_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Sampled tokens of one or several turns, with the complete record of each."""

    keys_N: np.ndarray
    """``BegunTurn.key`` of each token's turn, int64."""
    ids_N: np.ndarray
    """Token ids, int32."""
    logprobs_N: np.ndarray
    """Log-probability of each token, float32."""
    versions_N: np.ndarray
    """Policy version that sampled each token, int32."""
    parts_N: np.ndarray
    """Index of the request that sampled each token, among those of its response or episode, int32."""
    finishes_N: np.ndarray
    """Index into ``FINISHES`` for each token, uint8: whether the turn ended with it, and why."""
    num_rows_N: np.ndarray
    """Number of routing rows that came with each token, int32.

    The first token of a request brings the rows of those prompt tokens that had none.
    """
    rows_RMK: np.ndarray | None
    """Routed experts, uint8 or uint16; None where routing is not recorded."""
    num_kept_N: np.ndarray | None
    """Size of each token's kept set, int32, 0 for the whole vocabulary; None where they are not recorded."""
    kept_ids_J: np.ndarray | None
    """Kept ids of all tokens, int32; None where they are not recorded."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the batch."""
        return len(self.ids_N)

    def take(self, is_taken_N: np.ndarray) -> "TokenBatch":
        """Return the batch with only the tokens marked in ``is_taken_N`` (bool)."""

        def selected(name: str, array: np.ndarray) -> np.ndarray:
            if name == "rows_RMK":
                return array[np.repeat(is_taken_N, self.num_rows_N)]
            if name == "kept_ids_J":
                assert self.num_kept_N is not None
                return array[np.repeat(is_taken_N, self.num_kept_N)]
            return array[is_taken_N]

        return self._changed(selected)

    def first(self, num_tokens: int) -> "TokenBatch":
        """Return the batch with only its first tokens."""
        return self.take(np.arange(self.num_tokens) < num_tokens)

    def _changed(self, change: Callable[[str, np.ndarray], np.ndarray]) -> "TokenBatch":
        """Return the batch with ``change`` applied to each array by name. Missing arrays stay None."""
        arrays = {one.name: getattr(self, one.name) for one in fields(self)}
        changed = {name: change(name, array) for name, array in arrays.items() if array is not None}
        return replace(self, **changed)


def joined(batches: Sequence[TokenBatch]) -> TokenBatch:
    """Concatenate at least one batch. All must have the same kinds of records."""

    def join(name: str, first: np.ndarray) -> np.ndarray:
        arrays: list[np.ndarray] = [getattr(batch, name) for batch in batches]
        if name == "rows_RMK":
            # ``NO_ROWS`` has 0 layers, so it cannot be concatenated with others.
            arrays = [array for array in arrays if len(array)] or [NO_ROWS]
        return np.concatenate(arrays)

    return batches[0]._changed(join)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedTurn:
    """Record of a turn that has ended. Tokens of it beyond ``num_tokens`` do not count."""

    key: int
    num_tokens: int
    finish_reason: FinishReason
    has_end_token: bool
    stop_text: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgottenTurns:
    """Record of turns that the log may drop: they are stored elsewhere or were given up."""

    keys: tuple[int, ...]
    """``BegunTurn.key`` of each turn."""


InFlightRecord = BegunTurn | TokenBatch | EndedTurn | ForgottenTurns
"""A record of the log of tokens in flight."""

_KINDS = (BegunTurn, TokenBatch, EndedTurn, ForgottenTurns)
"""Types of records by the kind in a record's head."""

_HEAD = struct.Struct("<QIB")
"""Head of a record: number of bytes after the head, CRC-32 of kind and these bytes, and the kind."""


def _array_to_parts(array: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return array.dtype.str, array.shape, array.tobytes()


def _array_of_parts(kind: type, parts: Any) -> np.ndarray:
    dtype, shape, data = parts
    return np.frombuffer(data, dtype).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_array_to_parts)
_DECODERS = [msgspec.msgpack.Decoder(kind, dec_hook=_array_of_parts) for kind in _KINDS]


def encode(record: InFlightRecord) -> bytes:
    """Return the bytes of a record in a log, including its head."""
    kind, body = _KINDS.index(type(record)), _ENCODER.encode(record)
    return _HEAD.pack(len(body), _checksum(kind, body), kind) + body


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedLog:
    """Complete records at the beginning of a log."""

    records: tuple[InFlightRecord, ...]
    num_torn_bytes: int
    """Number of bytes after the last complete record, from a write that did not finish."""


def decode(log: bytes) -> DecodedLog:
    """Decode a log up to its last complete record.

    Raises:
        ValueError: ``log`` does not begin with ``MAGIC``.
    """
    if not log.startswith(MAGIC[: len(log)]):
        raise ValueError(f"begins with {log[: len(MAGIC)]!r}; a log of tokens in flight with {MAGIC!r}")
    records, offset = [], len(MAGIC)
    for record, end in _whole_records(log):
        records.append(record)
        offset = end
    return DecodedLog(records=tuple(records), num_torn_bytes=max(len(log) - offset, 0))


def _whole_records(log: bytes) -> Iterator[tuple[InFlightRecord, int]]:
    view, offset = memoryview(log), len(MAGIC)
    while offset + _HEAD.size <= len(log):
        num_bytes, checksum, kind = _HEAD.unpack_from(log, offset)
        start, end = offset + _HEAD.size, offset + _HEAD.size + num_bytes
        if end > len(log) or _checksum(kind, view[start:end]) != checksum:
            return
        yield _DECODERS[kind].decode(view[start:end]), end
        offset = end


def _checksum(kind: int, body: bytes | memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(bytes([kind])))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTurn:
    """One turn of a log, with its sampled tokens."""

    begun: BegunTurn
    batch: TokenBatch | None
    """Sampled tokens of the turn; None if there are none."""
    ended: EndedTurn | None
    """Record of the turn's end; None if it was not logged. The log may still have the turn's last token."""

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens of the turn."""
        return 0 if self.batch is None else self.batch.num_tokens

    @property
    def num_parts(self) -> int:
        """Number of requests of the response or episode up to the last one that sampled in this turn."""
        return 0 if self.batch is None else int(self.batch.parts_N.max()) + 1

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason why the turn ended with its last logged token; None if the engine had not ended it there."""
        return None if self.batch is None else FINISHES[int(self.batch.finishes_N[-1])]

    def tokens(self) -> SampledTokens:
        """Return the turn's tokens as the result of one request with the whole path as its prompt.

        The turn must have at least one token. Rows of tokens before ``begun.first_row`` are zeros, which a
        ``Trajectory`` ignores because it has these rows already.
        """
        batch = self.batch
        assert batch is not None, "a turn of which nothing was sampled"
        rows = batch.rows_RMK
        if rows is not None:
            rows = np.concatenate([np.zeros((self.begun.first_row, *rows.shape[1:]), rows.dtype), rows])
        kept = None
        if batch.num_kept_N is not None and batch.kept_ids_J is not None:
            kept = KeptTokens.of_widths(batch.num_kept_N, batch.kept_ids_J)
        return SampledTokens(
            ids_T=batch.ids_N,
            logprobs_T=batch.logprobs_N,
            version_spans=tuple(
                VersionSpan(version=version, start=start, end=end)
                for version, start, end in _runs(batch.versions_N)
            ),
            request_spans=tuple(
                RequestSpan(request=request, start=start, end=end)
                for request, start, end in _runs(batch.parts_N)
            ),
            expert_ids_RMK=rows,
            kept_tokens=kept,
        )

    def num_recorded(self) -> int:
        """Return the number of leading tokens whose inputs, all tokens before them, have routing rows.

        Returns the number of all tokens where routing is not recorded.
        """
        if self.batch is None or self.batch.rows_RMK is None:
            return self.num_tokens
        num_inputs = self.begun.first_row + np.cumsum(self.batch.num_rows_N)
        needed = self.begun.num_prompt_tokens + np.arange(self.num_tokens)
        has_rows_N = num_inputs >= needed
        return self.num_tokens if has_rows_N.all() else int(np.argmin(has_rows_N))

    def first(self, num_tokens: int) -> "LoggedTurn":
        """Return the turn with only its first tokens, as if no others had been logged."""
        if num_tokens >= self.num_tokens or self.batch is None:
            return self
        batch = self.batch.first(num_tokens) if num_tokens else None
        return LoggedTurn(begun=self.begun, batch=batch, ended=None)

    def records(self) -> list[InFlightRecord]:
        """Return the records of a log that has this turn alone."""
        return [one for one in (self.begun, self.batch, self.ended) if one is not None]


def _runs(values_N: np.ndarray) -> list[tuple[int, int, int]]:
    """Return the value, start and end of each run of equal values."""
    starts = [0, *(np.flatnonzero(np.diff(values_N)) + 1).tolist()]
    ends = [*starts[1:], len(values_N)]
    return [(int(values_N[start]), start, end) for start, end in zip(starts, ends, strict=True)]


class LiveTurns:
    """Turns of a log that were not forgotten."""

    def __init__(self, records: Iterable[InFlightRecord]) -> None:
        """Apply the records of a log in order."""
        self._begun: dict[int, BegunTurn] = {}
        self._ended: dict[int, EndedTurn] = {}
        batches: list[TokenBatch] = []
        for record in records:
            match record:
                case BegunTurn():
                    self._begun[record.key] = record
                case TokenBatch():
                    batches.append(record)
                case EndedTurn():
                    self._ended[record.key] = record
                case ForgottenTurns():
                    for key in record.keys:
                        self._begun.pop(key, None)
                        self._ended.pop(key, None)
        # Joined once and not per turn, because a log has many batches with few tokens each.
        self._batch = joined(batches) if batches else None

    def snapshot(self) -> list[InFlightRecord]:
        """Return the records of a log that has exactly these turns."""
        batch = self._tokens(self._begun.keys())
        ended = [self._ended[key] for key in self._begun if key in self._ended]
        return [*self._begun.values(), *([] if batch is None else [batch]), *ended]

    def group_ids(self) -> set[int]:
        """Return the ids of groups with at least one turn."""
        return {begun.episode.group_id for begun in self._begun.values()}

    def of_group(self, group_id: int) -> list[LoggedTurn]:
        """Return the turns of one group, sorted by episode and number, without tokens after a turn's end."""
        keys = [key for key, begun in self._begun.items() if begun.episode.group_id == group_id]
        batch = self._tokens(keys)
        turns = []
        for key in keys:
            ended = self._ended.get(key)
            own = None if batch is None else batch.take(batch.keys_N == key)
            if own is not None and ended is not None:
                own = own.first(ended.num_tokens)
            sampled = own if own is not None and own.num_tokens else None
            turns.append(LoggedTurn(begun=self._begun[key], batch=sampled, ended=ended))
        return sorted(turns, key=_order)

    def _tokens(self, keys: Collection[int]) -> TokenBatch | None:
        """Return all tokens of the turns with these keys, in log order; None if there are none."""
        if self._batch is None:
            return None
        found = self._batch.take(np.isin(self._batch.keys_N, np.fromiter(keys, np.int64, len(keys))))
        return found if found.num_tokens else None


def _order(turn: LoggedTurn) -> tuple[int, int, int, int]:
    episode = turn.begun.episode
    return episode.index, episode.agent, episode.attempt, turn.begun.number


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumableGroup:
    """Turns of one group from which another generator can continue, with their encoding."""

    data: bytes
    """Encoded turns, the input of ``group_turns``."""
    num_kept: int
    """Number of tokens in ``data``."""
    num_lost: int
    """Number of logged tokens that are not in ``data``, because routing rows are missing."""


def keep_group(turns: Sequence[LoggedTurn]) -> ResumableGroup:
    """Encode the turns of one group, up to the last token of each turn that has a complete record.

    Leaves out an episode if turns follow one of its turns whose record is incomplete.
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
        data=b"".join([MAGIC, *(encode(record) for turn in kept for record in turn.records())]),
        num_kept=num_kept,
        num_lost=sum(turn.num_tokens for turn in turns) - num_kept,
    )


def group_turns(data: bytes) -> tuple[LoggedTurn, ...]:
    """Decode ``ResumableGroup.data``; return the group's turns, sorted by episode and number.

    Raises:
        ValueError: ``data`` is incomplete or not a log.
    """
    log = decode(data)
    if log.num_torn_bytes:
        raise ValueError(f"the last {log.num_torn_bytes} of {len(data)} bytes are not a whole record")
    live = LiveTurns(log.records)
    return tuple(turn for group_id in sorted(live.group_ids()) for turn in live.of_group(group_id))


def ended_turns(turns: Iterable[LoggedTurn]) -> Mapping[EpisodeId, frozenset[int]]:
    """Return the numbers of the turns that ended, by episode.

    Turns that ``keep_group`` has shortened count as not ended.
    """
    ended: defaultdict[EpisodeId, set[int]] = defaultdict(set)
    for turn in turns:
        if turn.ended is not None:
            ended[turn.begun.episode].add(turn.begun.number)
    return {episode: frozenset(numbers) for episode, numbers in ended.items()}


def segment_limit(num_live_bytes: int) -> int:
    """Return the size in bytes above which a segment is replaced.

    ``num_live_bytes`` is the segment's initial size, that of the turns then in flight. With a factor of 2,
    each written byte is copied once more on average. A log takes about twice the bytes that were in flight
    when its segment began, plus the new segment while it is replaced.
    """
    return max(MIN_SEGMENT_BYTES, 2 * num_live_bytes)


class InFlightLog:
    """Writes the log of one process. Not thread-safe.

    The log is one file at a time, a segment. When a segment has grown past ``segment_limit``, a new one
    replaces it, which begins with all turns still in flight. The new segment gets its name after these are
    written, and only then is the old one removed. So the newest segment is complete whenever the process
    dies. Nothing is synced, because the log is in memory.
    """

    def __init__(self, folder: Path) -> None:
        """Create ``folder`` and begin a log in it.

        Raises:
            OSError: The folder exists, or memory is full.
        """
        folder.mkdir(mode=0o700)
        self._folder = folder
        self._number = 0
        self._descriptor = -1
        try:
            self._begin_segment([])
        except BaseException:
            shutil.rmtree(folder)
            raise

    @property
    def folder(self) -> Path:
        """Folder of the log."""
        return self._folder

    def append(self, *records: InFlightRecord) -> None:
        """Append records. When this returns, they outlive the process.

        Raises:
            OSError: Memory is full. Close the log then, because a torn record hides all records after it.
        """
        data = b"".join(map(encode, records))
        _write(self._descriptor, data)
        self._num_bytes += len(data)
        if self._num_bytes > self._limit:
            log = decode(self._path.read_bytes())
            assert not log.num_torn_bytes, "this process has written all of it"
            self._begin_segment(LiveTurns(log.records).snapshot())

    def close(self) -> None:
        """Close the log and remove its folder."""
        os.close(self._descriptor)
        shutil.rmtree(self._folder)

    @property
    def _path(self) -> Path:
        return self._folder / f"segment-{self._number:08d}"

    def _begin_segment(self, live: list[InFlightRecord]) -> None:
        data = b"".join([MAGIC, *map(encode, live)])
        partial = self._folder / "partial"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write(descriptor, data)
            old = self._path
            self._number += 1
            os.rename(partial, self._path)
        except BaseException:
            os.close(descriptor)
            raise
        if self._descriptor >= 0:
            os.close(self._descriptor)
            old.unlink()
        self._descriptor = descriptor
        self._num_bytes = len(data)
        self._limit = segment_limit(len(data))


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlightRead:
    """Groups that a dead process had in flight, read from its log."""

    groups: Mapping[int, bytes]
    """``ResumableGroup.data`` by group, for ``continued`` of ``GeneratorActor.sample_group`` and for
    ``restore_episodes``."""
    num_kept: int = 0
    """Number of tokens from which these groups continue."""
    num_lost: int = 0
    """Number of logged tokens of these groups that are lost, because routing rows are missing."""
    num_torn_bytes: int = 0
    """Number of bytes at the log's end from a write that did not finish."""
    problem: str | None = None
    """Reason why the log could not be read; None if it was."""


def read_in_flight(folder: Path, group_ids: Collection[int]) -> InFlightRead:
    """Read the groups ``group_ids`` from the log in ``folder``, whose process has ended.

    Does not raise if the log is missing or cannot be read: ``problem`` of the result then has the reason.
    """
    try:
        segments = sorted(path for path in folder.iterdir() if re.fullmatch(r"segment-\d{8}", path.name))
        if not segments:
            return InFlightRead(groups={}, problem=f"{folder} has no segment of a log")
        log = decode(segments[-1].read_bytes())
    except (OSError, ValueError) as error:
        return InFlightRead(groups={}, problem=f"the log in {folder} cannot be read: {error}")
    live = LiveTurns(log.records)
    kept = {
        group_id: keep_group(live.of_group(group_id)) for group_id in live.group_ids().intersection(group_ids)
    }
    return InFlightRead(
        groups={group_id: group.data for group_id, group in kept.items()},
        num_kept=sum(group.num_kept for group in kept.values()),
        num_lost=sum(group.num_lost for group in kept.values()),
        num_torn_bytes=log.num_torn_bytes,
    )


def remove_in_flight(folder: Path) -> None:
    """Remove the log of a process that has ended. Does nothing if there is none."""
    shutil.rmtree(folder, ignore_errors=True)
