"""Format of the lines of ``ledger.jsonl``: events, and checksums that detect damage.

A line is a JSON object that begins with its number and ends with its checksum:

    {"n":17,"event":"sampled","prompt":3,"group":5,"crc":"9f21c0aa"}

``crc`` is zlib's CRC-32 of the line's bytes before ``,"crc":``, as eight hexadecimal digits. It starts from
the checksum of the line before (0 for the first line), so it covers all lines up to this one.
"""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from forgeasync.buffer.prompts import (
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
"""Version of the format, which the first line states."""


class LedgerEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="event"):
    """An event of the whole run."""


class Opened(LedgerEvent, frozen=True, kw_only=True, tag="opened"):
    """First line of a ledger. In a new run, all counts are 0.

    A resumed run whose folder has no ledger begins one with the counts of its checkpoint. That ledger lacks
    the prompts that ended earlier.
    """

    format: Count
    run: str
    seed: int
    groups_per_step: Count
    step: Count = 0
    next_group: Count = 0
    num_submitted: Count = 0
    waiting: tuple[tuple[Count, Count], ...] = ()
    """Prompt and attempt of each prompt that was submitted earlier and has not ended."""


class Checkpointed(LedgerEvent, frozen=True, kw_only=True, tag="checkpointed"):
    """A checkpoint of this state was begun. It may not have been completed."""

    step: Count


class Resumed(LedgerEvent, frozen=True, kw_only=True, tag="resumed"):
    """The run continues from a checkpoint. Everything after the checkpoint's line is undone."""

    step: Count
    line: Count
    """Number of the ``checkpointed`` line of that checkpoint."""
    groups_per_step: Count
    batches: tuple[tuple[Count, ...], ...] = ()
    """Prompts of the steps to repeat with the same groups, in step order."""


class Ended(LedgerEvent, frozen=True, kw_only=True, tag="ended"):
    """The run has made all its steps."""

    unfinished: tuple[Count, ...]
    """Prompts that had not ended. They end as unfinished."""


AnyEvent = AnyPromptEvent | Opened | Checkpointed | Resumed | Ended
"""An event of a ledger: of a prompt, or of the run."""

# msgspec does not accept the alias AnyEvent, so the union is written out.
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
    """A position in a ledger, after its first ``num_lines`` lines."""

    num_lines: int
    checksum: int
    """Checksum of the last of these lines; 0 if there are none."""


START = LedgerPosition(num_lines=0, checksum=0)
"""Position before the first line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointedBuffer:
    """The replay buffer's part of a checkpoint."""

    snapshot: BufferSnapshot
    ledger: LedgerPosition
    """Position after the checkpoint's ``checkpointed`` line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedBuffer:
    """The replay buffer's state in a run that continues from a checkpoint."""

    checkpointed: CheckpointedBuffer
    batches: tuple[tuple[int, ...], ...] = ()
    """See ``Resumed.batches``."""
    num_groups: int = 0
    """Number of groups that will be restored."""


class BadLine(ValueError):
    """A line differs from what was written at its position of the ledger."""


def encode_line(event: AnyEvent, after: LedgerPosition) -> tuple[bytes, LedgerPosition]:
    """Encode an event as the line after a position; return the line and the position after it."""
    number = after.num_lines + 1
    said = b'{"n":%d,' % number + msgspec.json.encode(event)[1:-1]
    checksum = zlib.crc32(said, after.checksum)
    return said + b',"crc":"%08x"}\n' % checksum, LedgerPosition(num_lines=number, checksum=checksum)


def encode_lines(events: Sequence[AnyEvent], after: LedgerPosition) -> tuple[bytes, LedgerPosition]:
    """Encode events in order as the lines after a position. See ``encode_line``."""
    lines = []
    for event in events:
        line, after = encode_line(event, after)
        lines.append(line)
    return b"".join(lines), after


def decode_line(line: bytes, after: LedgerPosition) -> tuple[AnyEvent, LedgerPosition]:
    """Decode the line after a position; return its event and the position after it.

    ``line`` has no newline.

    Raises:
        BadLine: This is not the line that was written there.
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
        raise BadLine(f"is not an event of a ledger ({error}): {_shown(line)}") from None
    return event, LedgerPosition(num_lines=number, checksum=checksum)


def position_after(line: bytes) -> LedgerPosition | None:
    """Return the position after a line by the number and checksum that it states, unchecked.

    Returns None if it does not have the form of a ledger's line.
    """
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    return LedgerPosition(num_lines=int(match["number"]), checksum=int(match["crc"], 16))


def _shown(line: bytes) -> str:
    text = line.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 160 else text[:160] + "...")
