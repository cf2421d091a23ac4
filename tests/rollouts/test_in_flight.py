"""The log of tokens in flight: what is read is the beginning of what was written, wherever it was cut."""

import dataclasses
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.rollouts import (
    FINISHES,
    MAGIC,
    MIN_SEGMENT_BYTES,
    BegunTurn,
    EndedTurn,
    EpisodeId,
    FinishReason,
    ForgottenTurns,
    InFlightLog,
    InFlightRecord,
    LoggedTurn,
    TokenBatch,
    decode,
    encode,
    group_turns,
    in_flight,
    keep_group,
    read_in_flight,
    remove_in_flight,
    segment_limit,
)

NUM_LAYERS, TOP_K = 2, 3


def make_ended(key: int, num_tokens: int) -> EndedTurn:
    return EndedTurn(
        key=key, num_tokens=num_tokens, finish_reason=FinishReason.STOP, has_end_token=False, stop_text="x"
    )


def make_begun(key: int, *, group_id: int = 0, index: int = 0, num_given: int = 2) -> BegunTurn:
    return BegunTurn(
        key=key,
        episode=EpisodeId(group_id=group_id, index=index, attempt=key % 3, agent=key % 2),
        number=key % 5,
        after=None if key % 4 == 0 else key % 4,
        num_tokens_before=0,
        given_ids=np.arange(num_given, dtype=np.int32) + key % 1000,
    )


def make_batch(
    rng: np.random.Generator,
    keys: list[int],
    *,
    num_rows: list[int] | None = None,
    routing: bool = True,
    kept: bool = True,
    expert_type: type = np.uint8,
) -> TokenBatch:
    """A token of each key, with records of any size."""
    num = len(keys)
    rows = rng.integers(0, 4, num) if num_rows is None else np.asarray(num_rows)
    widths = rng.integers(0, 5, num)
    shape = (int(rows.sum()), NUM_LAYERS, TOP_K)
    return TokenBatch(
        keys_N=np.asarray(keys, np.int64),
        ids_N=rng.integers(0, 2**31, num).astype(np.int32),
        # Not a number is data like any other: a check of records refuses it, the log does not.
        logprobs_N=np.where(rng.random(num) < 0.1, np.nan, -rng.exponential(30, num)).astype(np.float32),
        versions_N=rng.integers(0, 3, num).astype(np.int32),
        parts_N=rng.integers(0, 3, num).astype(np.int32),
        finishes_N=np.zeros(num, np.uint8),
        num_rows_N=rows.astype(np.int32),
        rows_RMK=rng.integers(0, 256, shape).astype(expert_type) if routing else None,
        num_kept_N=widths.astype(np.int32) if kept else None,
        kept_ids_J=rng.integers(-1, 2**31, int(widths.sum())).astype(np.int32) if kept else None,
    )


KEYS = st.integers(0, 2**40)
RECORDS = st.one_of(
    st.builds(make_begun, KEYS, group_id=st.integers(-3, 2**40), num_given=st.integers(0, 9)),
    st.builds(
        make_batch,
        st.integers(0, 2**32).map(np.random.default_rng),
        st.lists(KEYS, min_size=1, max_size=5),
        routing=st.booleans(),
        kept=st.booleans(),
        expert_type=st.sampled_from([np.uint8, np.uint16]),
    ),
    st.builds(
        EndedTurn,
        key=KEYS,
        num_tokens=st.integers(1, 2**40),
        finish_reason=st.sampled_from(FinishReason),
        has_end_token=st.booleans(),
        stop_text=st.none() | st.text(max_size=5),
    ),
    st.builds(ForgottenTurns, keys=st.lists(KEYS, max_size=4).map(tuple)),
)


def assert_begins(found: Sequence[InFlightRecord], written: list[InFlightRecord]) -> None:
    """What is found is what was written first."""
    for record, wanted in zip(found, written, strict=False):
        assert type(record) is type(wanted)
        for name in wanted.__slots__:
            one, other = getattr(record, name), getattr(wanted, name)
            if isinstance(other, np.ndarray):
                assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
            else:
                assert one == other, name


@settings(max_examples=40, deadline=None)
@given(st.lists(RECORDS, max_size=5), st.integers(0, 255))
def test_a_log_cut_anywhere_reads_as_its_beginning(written: list[InFlightRecord], other: int) -> None:
    parts = [encode(record) for record in written]
    log = MAGIC + b"".join(parts)
    ends = np.cumsum([len(MAGIC), *map(len, parts)])
    for length in range(len(log) + 1):
        found = decode(log[:length])
        num_whole = int((ends[1:] <= length).sum())
        assert len(found.records) == num_whole
        assert found.num_torn_bytes == max(length - ends[num_whole], 0)
        if length >= len(MAGIC):
            # Memory that was never written may follow; it may even be what was to be written there.
            assert_begins(decode(log[:length] + bytes([other]) * 99).records, written)
    assert_begins(decode(log).records, written)


@settings(max_examples=60, deadline=None)
@given(st.lists(RECORDS, min_size=1, max_size=4), st.data())
def test_a_changed_byte_is_never_read(written: list[InFlightRecord], data: st.DataObject) -> None:
    parts = [encode(record) for record in written]
    log = bytearray(MAGIC + b"".join(parts))
    place = data.draw(st.integers(len(MAGIC), len(log) - 1))
    log[place] ^= data.draw(st.integers(1, 255))
    found = decode(bytes(log)).records
    ends = np.cumsum([len(MAGIC), *map(len, parts)])[1:]
    assert len(found) == int((ends <= place).sum())
    assert_begins(found, written)


@dataclass(slots=True, kw_only=True)
class Turn:
    group_id: int
    tokens: list[tuple[object, ...]] = field(default_factory=list)
    ended_at: int | None = None


def tokens_of(batch: TokenBatch | None) -> Iterator[tuple[object, ...]]:
    """Each token of a batch, with its own records."""
    if batch is None:
        return
    rows, kept = (np.append(0, np.cumsum(one)) for one in (batch.num_rows_N, batch.num_kept_N))
    for at in range(batch.num_tokens):
        yield (
            int(batch.ids_N[at]),
            batch.logprobs_N[at].tobytes(),
            int(batch.versions_N[at]),
            int(batch.parts_N[at]),
            batch.rows_RMK[rows[at] : rows[at + 1]].tolist(),
            batch.kept_ids_J[kept[at] : kept[at + 1]].tolist(),
        )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), num_steps=st.integers(1, 60), limit=st.integers(1, 3000))
def test_a_log_has_what_was_appended_and_not_forgotten(
    tmp_path_factory: pytest.TempPathFactory, seed: int, num_steps: int, limit: int
) -> None:
    """Against lists that were written down token by token, with segments of few records."""
    folder = tmp_path_factory.mktemp("logs") / "log"
    rng = np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_flight, "MIN_SEGMENT_BYTES", limit)
        log = InFlightLog(folder)
        turns: dict[int, Turn] = {}
        for key in range(num_steps):
            open_keys = [key for key, turn in turns.items() if turn.ended_at is None]
            match rng.integers(0, 6):
                case 0 | 1:
                    turns[key] = Turn(group_id=key % 3)
                    log.append(make_begun(key, group_id=key % 3, index=key))
                case 2 if open_keys:
                    ended = int(rng.choice(open_keys))
                    # A text ends a turn tokens before the engine hears of it.
                    num = max(len(turns[ended].tokens) - int(rng.integers(0, 2)), 1)
                    turns[ended].ended_at = num
                    log.append(make_ended(ended, num))
                case 3 if rng.random() < 0.5:
                    gone = [key for key, turn in turns.items() if turn.group_id == key % 2]
                    log.append(ForgottenTurns(keys=tuple(gone)))
                    for one in gone:
                        del turns[one]
                case _ if open_keys:
                    batch = make_batch(rng, list(rng.choice(open_keys, 3)))
                    log.append(batch)
                    for one, token in zip(batch.keys_N.tolist(), tokens_of(batch), strict=True):
                        turns[one].tokens.append(token)
            assert_reads_as(log.folder, turns)
            assert len(list(folder.iterdir())) == 1, "old segments are removed"
        log.close()
    assert not folder.exists()


def assert_reads_as(folder: Path, turns: dict[int, Turn]) -> None:
    # Rows are of any number here: nothing is cut for missing ones.
    live = in_flight.LiveTurns(decode(next(folder.glob("segment-*")).read_bytes()).records)
    found = [turn for group_id in live.group_ids() for turn in live.of_group(group_id)]
    assert {turn.begun.key for turn in found} == turns.keys()
    for turn in found:
        wanted = turns[turn.begun.key]
        assert turn.begun.episode.group_id == wanted.group_id
        assert list(tokens_of(turn.batch)) == wanted.tokens[: wanted.ended_at]
        assert (turn.ended is None) == (wanted.ended_at is None)


def test_segments_are_replaced_when_half_of_them_is_gone() -> None:
    assert segment_limit(0) == segment_limit(MIN_SEGMENT_BYTES // 2) == MIN_SEGMENT_BYTES
    assert segment_limit(10**9) == 2 * 10**9


def test_a_segment_that_is_not_finished_is_not_read(tmp_path: Path) -> None:
    folder, begun = tmp_path / "log", make_begun(1, group_id=5)
    InFlightLog(folder).append(begun, make_batch(np.random.default_rng(0), [1], num_rows=[2]))
    (segment,) = folder.iterdir()
    whole = read_in_flight(folder, [5])
    assert whole.problem is None and whole.num_kept == 1
    (folder / "partial").write_bytes((MAGIC + encode(begun))[:30])
    assert read_in_flight(folder, [5]) == whole
    # It has its name, and its writer died before it removed the one before.
    (folder / "partial").rename(folder / f"segment-{2:08d}")
    assert segment.exists() and read_in_flight(folder, [5]).num_kept == 0


def test_a_log_that_cannot_be_read_is_told_in_words(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    assert "log cannot be read: [Errno 2]" in read_in_flight(folder, [1]).problem
    folder.mkdir()
    assert "log has no segment" in read_in_flight(folder, [1]).problem
    (folder / f"segment-{1:08d}").write_bytes(b"PK" + bytes(100))
    found = read_in_flight(folder, [1])
    assert found.groups == {} and "begins with b'PK" in found.problem
    for _ in range(2):
        remove_in_flight(folder)
        assert not folder.exists()


def test_no_room_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = InFlightLog(tmp_path / "log")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            log.append(make_begun(0))
        with pytest.raises(OSError, match="No space left"):
            InFlightLog(tmp_path / "other")
    assert not (tmp_path / "other").exists()
    log.close()


def make_turn(number: int, rows: list[int]) -> LoggedTurn:
    """Of an episode's two turns, with two given tokens and as many sampled ones as ``rows`` has entries."""
    begun = BegunTurn(
        key=number,
        episode=EpisodeId(group_id=4, index=0),
        number=number,
        after=number - 1 if number else None,
        num_tokens_before=5 * number,
        given_ids=np.asarray([3, 4], np.int32),
    )
    batch = make_batch(np.random.default_rng(number), [number] * len(rows), num_rows=rows)
    ended = make_ended(number, len(rows)) if not number else None
    return LoggedTurn(begun=begun, batch=batch, ended=ended)


@pytest.mark.parametrize(
    ("rows", "num_kept"), [([2, 1, 1], 3), ([2, 1, 0], 2), ([2, 0, 0], 1), ([2, 0, 2], 1), ([1, 1, 1], 0)]
)
def test_tokens_without_the_routing_of_all_before_them_are_lost(rows: list[int], num_kept: int) -> None:
    """Also those whose rows have come later: what was sampled between would have none."""
    group = keep_group([make_turn(0, rows)])
    assert (group.num_kept, group.num_lost) == (num_kept, 3 - num_kept)
    (turn,) = group_turns(group.data)
    assert turn.num_tokens == num_kept and (turn.ended is None) == (num_kept < 3)


def test_a_later_turn_has_the_row_of_the_token_before_it() -> None:
    second = make_turn(1, [3, 1])
    group = keep_group([make_turn(0, [2, 1, 1]), second])
    assert (group.num_kept, group.num_lost) == (5, 0)
    tokens = group_turns(group.data)[1].tokens()
    assert len(tokens.expert_ids_RMK) == 5 + 2 + 2 - 1
    assert not tokens.expert_ids_RMK[:4].any()
    assert tokens.expert_ids_RMK[4:].tolist() == second.batch.rows_RMK.tolist()


def test_an_episode_is_left_out_that_goes_on_after_lost_tokens() -> None:
    group = keep_group([make_turn(0, [2, 1, 0]), make_turn(1, [3])])
    assert (group.num_kept, group.num_lost) == (0, 4) and group_turns(group.data) == ()


def test_half_of_a_group_is_refused() -> None:
    data = keep_group([make_turn(0, [2, 1])]).data
    with pytest.raises(ValueError, match=f"the last 5 of {len(data) + 5} bytes are not a whole record"):
        group_turns(data + bytes(5))


def test_versions_become_spans_and_the_last_token_may_end_the_turn() -> None:
    batch = dataclasses.replace(
        make_batch(np.random.default_rng(2), [0] * 4, num_rows=[2, 1, 1, 1]),
        versions_N=np.asarray([3, 3, 4, 3], np.int32),
        finishes_N=np.asarray([0, 0, 0, FINISHES.index(FinishReason.LENGTH)], np.uint8),
    )
    turn = LoggedTurn(begun=make_begun(0), batch=batch, ended=None)
    spans = [(span.version, span.start, span.end) for span in turn.tokens().version_spans]
    assert spans == [(3, 0, 2), (4, 2, 3), (3, 3, 4)]
    assert turn.finish_reason is FinishReason.LENGTH and turn.first(3).finish_reason is None
