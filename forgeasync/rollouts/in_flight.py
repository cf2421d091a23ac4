"""The tokens that a generator has in flight, logged so that another generator can continue from them.

The log is a file in the host's shared memory, which outlives the process that writes it. It is ``MAGIC`` and
records one after another. Each record has its length and a checksum before it, so that a reader can cut the
log off where its writer died: what is read is always the beginning of what was written. The tokens of one
engine step are one record.

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

from forgeasync.rollouts.rollout import FinishReason, VersionSpan
from forgeasync.rollouts.token_records import KeptTokens
from forgeasync.rollouts.trajectory import EpisodeId, SampledTokens

MAGIC = b"forgeasync in flight 2\n"

FINISHES = (None, *FinishReason)
"""Why a turn ended with a token, by the number in ``TokenBatch.finishes_N``; None: it goes on."""

NO_ROWS = np.zeros((0, 0, 0), np.uint8)
"""Rows of tokens that came without any, where routing is recorded."""

MIN_SEGMENT_BYTES = 4 * 2**20
"""Smaller segments are not worth replacing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunTurn:
    """A turn of the model has begun, before anything of it is sampled."""

    key: int
    """Names the turn in its log."""
    episode: EpisodeId
    """The response or the episode that it belongs to."""
    number: int
    """Its place among the turns of its episode; 0 for a response."""
    after: int | None
    """The turn that it follows; None for the first one of a tree."""
    num_tokens_before: int
    """Tokens of the turns before it."""
    given_ids: np.ndarray
    """The tokens given after those, int32."""

    @property
    def first_row(self) -> int:
        """Place of the first token whose routing becomes known with this turn.

        The last token of the turn before is an input only from here on.
        """
        return max(self.num_tokens_before - 1, 0)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the first one that the turn samples."""
        return self.num_tokens_before + len(self.given_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Tokens of one or several turns, each with everything that is recorded of it."""

    keys_N: np.ndarray
    """The turn of each token, int64."""
    ids_N: np.ndarray
    """int32."""
    logprobs_N: np.ndarray
    """float32."""
    versions_N: np.ndarray
    """The policy version that sampled each, int32."""
    parts_N: np.ndarray
    """Which request of its response or episode has sampled each, int32."""
    finishes_N: np.ndarray
    """Index into ``FINISHES``, uint8: whether the turn ended with this token."""
    num_rows_N: np.ndarray
    """Rows of routed experts that came with each token, int32. The first token of a request brings those of
    its prompt that were not known."""
    rows_RMK: np.ndarray | None
    """uint8 or uint16; None where routing is not recorded."""
    num_kept_N: np.ndarray | None
    """Size of each token's kept set, int32, 0 for the whole vocabulary; None where they are not recorded."""
    kept_ids_J: np.ndarray | None
    """int32."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids_N)

    def take(self, is_taken_N: np.ndarray) -> "TokenBatch":
        """The tokens that are marked (bool [N])."""

        def taken(name: str, array: np.ndarray) -> np.ndarray:
            if name == "rows_RMK":
                return array[np.repeat(is_taken_N, self.num_rows_N)]
            if name == "kept_ids_J":
                assert self.num_kept_N is not None
                return array[np.repeat(is_taken_N, self.num_kept_N)]
            return array[is_taken_N]

        return self._changed(taken)

    def first(self, num_tokens: int) -> "TokenBatch":
        """The first tokens."""
        return self.take(np.arange(self.num_tokens) < num_tokens)

    def _changed(self, change: Callable[[str, np.ndarray], np.ndarray]) -> "TokenBatch":
        """The batch with other arrays; what is not recorded stays None."""
        arrays = {one.name: getattr(self, one.name) for one in fields(self)}
        changed = {name: change(name, array) for name, array in arrays.items() if array is not None}
        return replace(self, **changed)


def joined(batches: Sequence[TokenBatch]) -> TokenBatch:
    """All tokens of at least one batch, which record the same."""

    def join(name: str, first: np.ndarray) -> np.ndarray:
        arrays: list[np.ndarray] = [getattr(batch, name) for batch in batches]
        if name == "rows_RMK":
            # ``NO_ROWS`` does not know how many layers there are.
            arrays = [array for array in arrays if len(array)] or [NO_ROWS]
        return np.concatenate(arrays)

    return batches[0]._changed(join)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedTurn:
    """A turn has ended; further tokens of it do not count."""

    key: int
    num_tokens: int
    finish_reason: FinishReason
    has_end_token: bool
    stop_text: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgottenTurns:
    """Turns whose tokens nobody will ask for: they are stored elsewhere, or were given up."""

    keys: tuple[int, ...]


InFlightRecord = BegunTurn | TokenBatch | EndedTurn | ForgottenTurns

_KINDS = (BegunTurn, TokenBatch, EndedTurn, ForgottenTurns)
"""By the number in a record's head."""

_HEAD = struct.Struct("<QIB")
"""Bytes of the record after this head, their checksum (CRC-32, which the kind is part of), the kind."""


def _array_to_parts(array: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return array.dtype.str, array.shape, array.tobytes()


def _array_of_parts(kind: type, parts: Any) -> np.ndarray:
    dtype, shape, data = parts
    return np.frombuffer(data, dtype).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_array_to_parts)
_DECODERS = [msgspec.msgpack.Decoder(kind, dec_hook=_array_of_parts) for kind in _KINDS]


def encode(record: InFlightRecord) -> bytes:
    """A record as it stands in a log, with its head."""
    kind, body = _KINDS.index(type(record)), _ENCODER.encode(record)
    return _HEAD.pack(len(body), _checksum(kind, body), kind) + body


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedLog:
    """The whole records at the beginning of a log."""

    records: tuple[InFlightRecord, ...]
    num_torn_bytes: int
    """Bytes after the last whole record, which its writer had no time to finish."""


def decode(log: bytes) -> DecodedLog:
    """Read a log up to its last whole record.

    Raises:
        ValueError: ``log`` does not begin as a log does.
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
    """A turn, and what was sampled of it."""

    begun: BegunTurn
    batch: TokenBatch | None
    """None if nothing was."""
    ended: EndedTurn | None
    """None if the turn was being sampled, or its last token was logged and its end was not."""

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
            kept = KeptTokens.of_widths(batch.num_kept_N, batch.kept_ids_J)
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

    def records(self) -> list[InFlightRecord]:
        """The records of a log that has this turn."""
        return [one for one in (self.begun, self.batch, self.ended) if one is not None]


def _spans(versions_N: np.ndarray) -> tuple[VersionSpan, ...]:
    starts = [0, *(np.flatnonzero(np.diff(versions_N)) + 1).tolist()]
    ends = [*starts[1:], len(versions_N)]
    return tuple(
        VersionSpan(version=int(versions_N[start]), start=start, end=end)
        for start, end in zip(starts, ends, strict=True)
    )


class LiveTurns:
    """The turns of a log that were not forgotten."""

    def __init__(self, records: Iterable[InFlightRecord]) -> None:
        """Apply the records of a log in their order."""
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
        # At once: a log has many batches, each with few tokens.
        self._batch = joined(batches) if batches else None

    def snapshot(self) -> list[InFlightRecord]:
        """Records of a log that has these turns and nothing else."""
        batch = self._tokens(self._begun.keys())
        ended = [self._ended[key] for key in self._begun if key in self._ended]
        return [*self._begun.values(), *([] if batch is None else [batch]), *ended]

    def group_ids(self) -> set[int]:
        """Groups with at least one turn."""
        return {begun.episode.group_id for begun in self._begun.values()}

    def of_group(self, group_id: int) -> list[LoggedTurn]:
        """The turns of one group, by episode and number, up to where each has ended."""
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
        """All tokens of some turns, each turn's in order; None if there is none."""
        if self._batch is None:
            return None
        found = self._batch.take(np.isin(self._batch.keys_N, np.fromiter(keys, np.int64, len(keys))))
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
        data=b"".join([MAGIC, *(encode(record) for turn in kept for record in turn.records())]),
        num_kept=num_kept,
        num_lost=sum(turn.num_tokens for turn in turns) - num_kept,
    )


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


def ended_turns(turns: Iterable[LoggedTurn]) -> Mapping[EpisodeId, frozenset[int]]:
    """The numbers of the turns that are known to have ended, by episode.

    Those whose last tokens cannot be continued from count as not ended.
    """
    ended: defaultdict[EpisodeId, set[int]] = defaultdict(set)
    for turn in turns:
        if turn.ended is not None:
            ended[turn.begun.episode].add(turn.begun.number)
    return {episode: frozenset(numbers) for episode, numbers in ended.items()}


def segment_limit(num_live_bytes: int) -> int:
    """Bytes from which a segment is replaced that began with ``num_live_bytes`` of turns in flight.

    On average each byte that is written is then copied once more. A log takes at most twice what was in
    flight when its segment began, and as much again while it is replaced.
    """
    return max(MIN_SEGMENT_BYTES, 2 * num_live_bytes)


class InFlightLog:
    """Writes the log of one process; not for several threads at once.

    The log is one file at a time, a segment. A segment that has grown past ``segment_limit`` is followed by a
    new one, which begins with everything that is still in flight. The new one gets its name when that is
    written, and only then is the old one removed: the newest segment has all there is, whenever the process
    dies. Nothing is synced, since memory needs no disk.
    """

    def __init__(self, folder: Path) -> None:
        """Begin a log in ``folder``, which is made.

        Raises:
            OSError: there is a folder already, or no room.
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
        """Where the log is."""
        return self._folder

    def append(self, *records: InFlightRecord) -> None:
        """Append records; when this returns, they outlive the process.

        Raises:
            OSError: there is no room. Close the log then: what follows could not be read.
        """
        data = b"".join(map(encode, records))
        _write(self._descriptor, data)
        self._num_bytes += len(data)
        if self._num_bytes > self._limit:
            log = decode(self._path.read_bytes())
            assert not log.num_torn_bytes, "this process has written all of it"
            self._begin_segment(LiveTurns(log.records).snapshot())

    def close(self) -> None:
        """Remove the log."""
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
    """What a process that is gone had in flight."""

    groups: Mapping[int, bytes]
    """By group, for ``continued`` of ``GeneratorActor.sample_group`` and for ``restore_episodes``."""
    num_kept: int = 0
    """Tokens of these groups that are continued from."""
    num_lost: int = 0
    """Tokens of these groups that are in the log, but cannot be continued from: their routing is missing."""
    num_torn_bytes: int = 0
    """What the process was writing when it died."""
    problem: str | None = None
    """Why there is nothing, in words; None: the log was read."""


def read_in_flight(folder: Path, group_ids: Collection[int]) -> InFlightRead:
    """Read some groups from the log in ``folder``, whose process has ended.

    ``problem`` of the result says so if the log is missing or cannot be read.
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
    """Remove the log of a process that has ended; no error if there is none."""
    shutil.rmtree(folder, ignore_errors=True)
