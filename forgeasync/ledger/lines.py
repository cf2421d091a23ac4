"""The lines of ``ledger.jsonl``: what they say, and how a damaged one is told from a good one.

A line is a JSON object, with its number first and its checksum last:

    {"n":17,"event":"sampled","prompt":3,"group":5,"crc":"9f21c0aa"}

``crc`` is the CRC-32 of zlib over the line's bytes before ``,"crc":``, in eight hexadecimal digits. It starts
from the checksum of the line before (0 for the first line), so that it holds for all lines up to its own.
"""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from forgeasync.buffer import (
    AnyPromptEvent,
    BufferSnapshot,
    Count,
    Dropped,
    Restored,
    Sampled,
    Scored,
    Started,
    Submitted,
    Trained,
)

FORMAT = 1
"""Version of the format; written into the first line."""


class LedgerEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="event"):
    """Something that happened to the run as a whole."""


class Opened(LedgerEvent, frozen=True, kw_only=True, tag="opened"):
    """The first line. A new run has no steps, groups and prompts behind it.

    A ledger can begin later, if a run is resumed in a folder that has none: prompts that ended before are not
    in it.
    """

    format: Count
    run: str
    seed: int
    groups_per_step: Count
    step: Count = 0
    next_group: Count = 0
    num_submitted: Count = 0
    waiting: tuple[tuple[Count, Count], ...] = ()
    """Prompts that were submitted before and have not ended, each with its attempt."""


class Checkpointed(LedgerEvent, frozen=True, kw_only=True, tag="checkpointed"):
    """A checkpoint of this state was begun. It may never have been finished."""

    step: Count


class Resumed(LedgerEvent, frozen=True, kw_only=True, tag="resumed"):
    """The run goes on from a checkpoint: all that happened after its line is undone."""

    step: Count
    line: Count
    """Line that the checkpoint's ``checkpointed`` is in."""
    groups_per_step: Count
    batches: tuple[tuple[Count, ...], ...] = ()
    """Prompts of the next steps, which are made again with the groups that they had before."""


class Ended(LedgerEvent, frozen=True, kw_only=True, tag="ended"):
    """The run has made all its steps; these prompts had not ended and never will."""

    unfinished: tuple[Count, ...]


AnyEvent = AnyPromptEvent | Opened | Checkpointed | Resumed | Ended

# A union that is written out, as its decoder wants it.
_DECODER: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(
    Submitted
    | Started
    | Sampled
    | Scored
    | Restored
    | Dropped
    | Trained
    | Opened
    | Checkpointed
    | Resumed
    | Ended
)

_LINE = re.compile(
    rb'(?P<said>\{"n":(?P<number>0|[1-9][0-9]{0,17}),(?P<event>"event":.*)),"crc":"(?P<crc>[0-9a-f]{8})"\}'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerPosition:
    """A place in a ledger: its lines up to there."""

    num_lines: int
    checksum: int
    """Checksum of the last of them; 0 before the first."""


START = LedgerPosition(num_lines=0, checksum=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointedBuffer:
    """The replay buffer's part of a checkpoint."""

    snapshot: BufferSnapshot
    ledger: LedgerPosition
    """The ledger with all that had happened by then; its last line is the ``checkpointed``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedBuffer:
    """The replay buffer of a run that goes on from a checkpoint."""

    checkpointed: CheckpointedBuffer
    batches: tuple[tuple[int, ...], ...] = ()
    """See ``Resumed.batches``."""
    num_groups: int = 0
    """Groups that will be restored."""


class BadLine(ValueError):
    """A line that is not what was once written at its place."""


def encode_line(event: AnyEvent, after: LedgerPosition) -> tuple[bytes, LedgerPosition]:
    """Write an event as the line that follows a position; return the line and the position behind it."""
    number = after.num_lines + 1
    said = b'{"n":%d,' % number + msgspec.json.encode(event)[1:-1]
    checksum = zlib.crc32(said, after.checksum)
    return said + b',"crc":"%08x"}\n' % checksum, LedgerPosition(num_lines=number, checksum=checksum)


def encode_lines(events: Sequence[AnyEvent], after: LedgerPosition) -> tuple[bytes, LedgerPosition]:
    """Write events one after the other; see ``encode_line``."""
    lines = []
    for event in events:
        line, after = encode_line(event, after)
        lines.append(line)
    return b"".join(lines), after


def decode_line(line: bytes, after: LedgerPosition) -> tuple[AnyEvent, LedgerPosition]:
    """Read the line that follows a position, without its newline.

    Raises:
        BadLine: it is not the line that was written there; says why.
    """
    number = after.num_lines + 1
    match = _LINE.fullmatch(line)
    if match is None:
        raise BadLine(f"is not a line of a ledger: {_shown(line)}")
    if (found := int(match["number"])) != number:
        raise BadLine(
            f"has the number {found}, but line {number} must have the number {number}: "
            + ("lines before it are missing" if found > number else "it is repeated, or in the wrong place")
        )
    checksum = zlib.crc32(match["said"], after.checksum)
    if b"%08x" % checksum != match["crc"]:
        raise BadLine(
            f"was altered: its checksum is {match['crc'].decode()}, what it says has {checksum:08x}: "
            f"{_shown(line)}"
        )
    try:
        event = _DECODER.decode(b"{" + match["event"] + b"}")
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadLine(f"says nothing that a ledger can say ({error}): {_shown(line)}") from None
    return event, LedgerPosition(num_lines=number, checksum=checksum)


def position_after(line: bytes) -> LedgerPosition | None:
    """Return the position that a line says it ends at, unchecked; None if it is no line of a ledger."""
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    return LedgerPosition(num_lines=int(match["number"]), checksum=int(match["crc"], 16))


def _shown(line: bytes) -> str:
    text = line.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 160 else text[:160] + "...")
