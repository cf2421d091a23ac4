"""Records of the tokens that a generator has in flight, and how they are written as bytes.

A log is ``MAGIC`` and records one after another. Each record has its length and a checksum before it, so that
a reader can cut a log off where the process that wrote it died: what it reads is always the beginning of what
was written. The records of one engine step are one record, whose arrays have a place for every token.

Shape suffixes: N tokens of any turns, in the order in which they were sampled; R rows of routed experts,
M MoE layers, K top-k; J kept ids of all tokens.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from forgeasync.rollouts.rollout import FinishReason
from forgeasync.rollouts.trajectory import EpisodeId

MAGIC = b"forgeasync in flight 1\n"

FINISHES = (None, *FinishReason)
"""Why a turn ended with a token, by the number in the log; None: it goes on."""


NO_ROWS = np.zeros((0, 0, 0), np.uint8)
"""Where routing is recorded, of tokens that came without."""


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
        """Place of the first token whose routing is known only since this turn.

        The last token of the turn before becomes an input only now.
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
    """Rows of routed experts that came with each token, int32: with a request's first token those of its
    prompt, as far as they were not known."""
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
        rows, kept = self.rows_RMK, self.kept_ids_J
        return TokenBatch(
            **{name: array[is_taken_N] for name, array in self._columns()},
            rows_RMK=None if rows is None else rows[np.repeat(is_taken_N, self.num_rows_N)],
            num_kept_N=None if self.num_kept_N is None else self.num_kept_N[is_taken_N],
            kept_ids_J=None
            if kept is None or self.num_kept_N is None
            else kept[np.repeat(is_taken_N, self.num_kept_N)],
        )

    def first(self, num_tokens: int) -> "TokenBatch":
        """The first tokens."""
        return self.take(np.arange(self.num_tokens) < num_tokens)

    def _columns(self) -> list[tuple[str, np.ndarray]]:
        return [
            ("keys_N", self.keys_N),
            ("ids_N", self.ids_N),
            ("logprobs_N", self.logprobs_N),
            ("versions_N", self.versions_N),
            ("parts_N", self.parts_N),
            ("finishes_N", self.finishes_N),
            ("num_rows_N", self.num_rows_N),
        ]


def joined(batches: Sequence[TokenBatch]) -> TokenBatch:
    """All tokens of at least one batch, which record the same."""
    first = batches[0]
    columns = [dict(batch._columns()) for batch in batches]
    return TokenBatch(
        **{name: np.concatenate([one[name] for one in columns]) for name in columns[0]},
        rows_RMK=None if first.rows_RMK is None else _joined_rows(batches),
        num_kept_N=None
        if first.num_kept_N is None
        else np.concatenate([batch.num_kept_N for batch in batches]),
        kept_ids_J=None
        if first.kept_ids_J is None
        else np.concatenate([batch.kept_ids_J for batch in batches]),
    )


def _joined_rows(batches: Sequence[TokenBatch]) -> np.ndarray:
    some = [batch.rows_RMK for batch in batches if batch.rows_RMK is not None and len(batch.rows_RMK)]
    return np.concatenate(some) if some else NO_ROWS


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

_FRAME = struct.Struct("<QIB")
"""Bytes of the record after this head, their checksum (CRC-32, which the kind is part of), the kind."""
_BEGUN = struct.Struct("<8q")
_BATCH = struct.Struct("<5qBB")
_ENDED = struct.Struct("<qqBBB")
_NONE = -1
_COLUMN_TYPES: dict[str, np.dtype] = {
    "keys_N": np.dtype(np.int64),
    "ids_N": np.dtype(np.int32),
    "logprobs_N": np.dtype(np.float32),
    "versions_N": np.dtype(np.int32),
    "parts_N": np.dtype(np.int32),
    "finishes_N": np.dtype(np.uint8),
    "num_rows_N": np.dtype(np.int32),
}


def encode(record: InFlightRecord) -> bytes:
    """A record as it stands in a log, with its head."""
    match record:
        case BegunTurn():
            kind, parts = 1, _begun_parts(record)
        case TokenBatch():
            kind, parts = 2, _batch_parts(record)
        case EndedTurn():
            kind, parts = 3, _ended_parts(record)
        case ForgottenTurns():
            kind, parts = 4, [np.asarray(record.keys, np.int64).tobytes()]
    body = b"".join(parts)
    return _FRAME.pack(len(body), _checksum(kind, body), kind) + body


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedLog:
    """The whole records at the beginning of a log."""

    records: tuple[InFlightRecord, ...]
    num_torn_bytes: int
    """Bytes after the last whole record, which its writer had no time to finish."""


def decode(log: bytes) -> DecodedLog:
    """Read a log up to its last whole record. Arrays are views of ``log``.

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
    while offset + _FRAME.size <= len(log):
        num_bytes, checksum, kind = _FRAME.unpack_from(log, offset)
        start, end = offset + _FRAME.size, offset + _FRAME.size + num_bytes
        if end > len(log) or _checksum(kind, view[start:end]) != checksum:
            return
        yield _decode_one(kind, view[start:end]), end
        offset = end


def _checksum(kind: int, body: bytes | memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(bytes([kind])))


def _decode_one(kind: int, body: memoryview) -> InFlightRecord:
    match kind:
        case 1:
            return _decode_begun(body)
        case 2:
            return _decode_batch(body)
        case 3:
            return _decode_ended(body)
        case 4:
            return ForgottenTurns(keys=tuple(np.frombuffer(body, np.int64).tolist()))
    raise AssertionError(f"record of kind {kind}, with a valid checksum")


def _begun_parts(turn: BegunTurn) -> list[bytes]:
    episode = turn.episode
    head = _BEGUN.pack(
        turn.key,
        episode.group_id,
        episode.index,
        episode.attempt,
        episode.agent,
        turn.number,
        _NONE if turn.after is None else turn.after,
        turn.num_tokens_before,
    )
    return [head, turn.given_ids.astype(np.int32).tobytes()]


def _decode_begun(body: memoryview) -> BegunTurn:
    key, group_id, index, attempt, agent, number, after, num_before = _BEGUN.unpack_from(body)
    return BegunTurn(
        key=key,
        episode=EpisodeId(group_id=group_id, index=index, attempt=attempt, agent=agent),
        number=number,
        after=None if after == _NONE else after,
        num_tokens_before=num_before,
        given_ids=np.frombuffer(body, np.int32, offset=_BEGUN.size),
    )


def _batch_parts(batch: TokenBatch) -> list[bytes]:
    rows, kept = batch.rows_RMK, batch.kept_ids_J
    shape = (0, 0, 0) if rows is None else rows.shape
    head = _BATCH.pack(
        batch.num_tokens,
        *shape,
        0 if kept is None else len(kept),
        0 if rows is None else rows.itemsize,
        kept is not None,
    )
    parts = [head]
    for name, array in batch._columns():
        assert array.dtype == _COLUMN_TYPES[name] and len(array) == batch.num_tokens, name
        parts.append(array.tobytes())
    if rows is not None:
        assert rows.dtype in (np.uint8, np.uint16), rows.dtype
        parts.append(rows.tobytes())
    if kept is not None and batch.num_kept_N is not None:
        parts += [batch.num_kept_N.astype(np.int32).tobytes(), kept.astype(np.int32).tobytes()]
    return parts


def _decode_batch(body: memoryview) -> TokenBatch:
    num_tokens, *shape, num_kept, item_size, has_kept = _BATCH.unpack_from(body)
    offset = _BATCH.size

    def array(dtype: np.dtype, count: int) -> np.ndarray:
        nonlocal offset
        found = np.frombuffer(body, dtype, count, offset)
        offset += found.nbytes
        return found

    columns = {name: array(dtype, num_tokens) for name, dtype in _COLUMN_TYPES.items()}
    rows = None
    if item_size:
        rows = array(np.dtype(f"u{item_size}"), int(np.prod(shape))).reshape(shape)
    widths = array(np.dtype(np.int32), num_tokens) if has_kept else None
    kept = array(np.dtype(np.int32), num_kept) if has_kept else None
    assert offset == len(body), "a record's arrays fill it"
    return TokenBatch(**columns, rows_RMK=rows, num_kept_N=widths, kept_ids_J=kept)


def _ended_parts(turn: EndedTurn) -> list[bytes]:
    head = _ENDED.pack(
        turn.key,
        turn.num_tokens,
        FINISHES.index(turn.finish_reason),
        turn.has_end_token,
        turn.stop_text is not None,
    )
    return [head, (turn.stop_text or "").encode()]


def _decode_ended(body: memoryview) -> EndedTurn:
    key, num_tokens, finish, has_end_token, has_stop_text = _ENDED.unpack_from(body)
    finish_reason = FINISHES[finish]
    assert finish_reason is not None
    return EndedTurn(
        key=key,
        num_tokens=num_tokens,
        finish_reason=finish_reason,
        has_end_token=bool(has_end_token),
        stop_text=bytes(body[_ENDED.size :]).decode() if has_stop_text else None,
    )
