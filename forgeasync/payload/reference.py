"""What actors send each other in place of a payload's bytes."""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass


class PayloadGone(LookupError):
    """The payload's file was freed, or never existed."""


class PayloadTorn(ValueError):
    """The bytes found are not those that were written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadRef:
    """Where one payload lies, and how to know that it is this one.

    ``file`` is a path on the host ``host_id``; the payload is its bytes [offset, offset + num_bytes).
    ``checksum`` is the xxh3_64 of the payload's body; ``payload_id`` is unique in the run.
    """

    payload_id: str
    host_id: str
    file: str
    offset: int
    num_bytes: int
    checksum: int


def whole_pages(num_bytes: int) -> int:
    """What a file of ``num_bytes`` takes of its host's memory, in bytes."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def group_num_bytes(refs: Sequence[PayloadRef]) -> int:
    """What the file of a group takes of its host's memory, in bytes: the size to settle a reservation with.

    ``refs`` are all references of one ``PayloadWriter.write_group``.
    """
    assert len({ref.file for ref in refs}) == 1, "payloads of several groups"
    return whole_pages(max(ref.offset + ref.num_bytes for ref in refs))


def gone(ref: PayloadRef) -> PayloadGone:
    """The error for a payload whose file is not there (any more)."""
    return PayloadGone(
        f"payload {ref.payload_id}: file is gone on host {ref.host_id}: expected {ref.file}, found nothing "
        "(freed, or never written)"
    )


def torn(ref: PayloadRef, field: str, *, expected: object, found: object) -> PayloadTorn:
    """The error for a payload of which ``field`` is not what the reference says."""
    return PayloadTorn(
        f"payload {ref.payload_id} in {ref.file} of host {ref.host_id}: {field} should be {expected!r} "
        f"but is {found!r}"
    )
