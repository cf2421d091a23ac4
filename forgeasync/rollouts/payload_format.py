"""The layout of a payload in its file, and the reference that actors send in place of its bytes."""

import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash


class PayloadGone(LookupError):
    """The payload's file was freed, or never existed."""


class PayloadTorn(ValueError):
    """The bytes found are not those that were written."""


EVERY_HOST = ""
"""``host_id`` of a file on a disk that all hosts of the run see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadRef:
    """The place of one payload, and how to verify that its bytes are the right ones.

    ``file`` is a path on the host ``host_id``, or on ``EVERY_HOST``; the payload is its bytes [offset,
    offset + num_bytes).
    ``checksum`` is the xxh3_64 of the payload's body; ``payload_id`` is unique in the run.
    """

    payload_id: str
    host_id: str
    file: str
    offset: int
    num_bytes: int
    checksum: int


def whole_pages(num_bytes: int) -> int:
    """Return the bytes that a file of ``num_bytes`` takes of its host's memory."""
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


MAGIC = b"FAPAYLD\n"

FORMAT_VERSION = 1

ALIGNMENT = 64
"""Alignment of arrays in a payload and of payloads in a file: a cache line, enough for any vector unit."""


_HEADER = struct.Struct("<8sQ32sQQ")

_TABLE_LENGTH = struct.Struct("<Q")

_MAX_PAYLOAD_ID_BYTES = 32

assert _HEADER.size == ALIGNMENT


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """One array; ``offset`` counts bytes from the first array."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


_ENCODER = msgspec.msgpack.Encoder()

_DECODER = msgspec.msgpack.Decoder(list[_Entry])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The layout of a payload; positions and lengths in bytes."""

    entries: list[_Entry]
    table: bytes
    arrays_start: int
    num_bytes: int


def align(position: int) -> int:
    """The first position from ``position`` on at which an array may start."""
    return -(-position // ALIGNMENT) * ALIGNMENT


def _dtype_name(name: str, dtype: np.dtype) -> str:
    # A structured dtype's str says its size only, and what numpy does not know (bfloat16) reads as raw bytes:
    # neither would come back as it went in.
    if dtype.hasobject or np.dtype(dtype.str) != dtype:
        raise ValueError(
            f"array {name!r} has dtype {dtype!r}, which its name {dtype.str!r} does not describe in full; "
            "a payload holds plain dtypes only"
        )
    return dtype.str


def _plan(arrays: Mapping[str, np.ndarray]) -> _Plan:
    entries, end = [], 0
    for name, array in arrays.items():
        offset = align(end)
        entries.append(
            _Entry(name=name, dtype=_dtype_name(name, array.dtype), shape=array.shape, offset=offset)
        )
        end = offset + array.nbytes
    table = _ENCODER.encode(entries)
    arrays_start = align(_HEADER.size + _TABLE_LENGTH.size + len(table))
    return _Plan(entries=entries, table=table, arrays_start=arrays_start, num_bytes=arrays_start + end)


def measure(arrays: Mapping[str, np.ndarray]) -> int:
    """Return the bytes that a payload of these arrays takes.

    Raises:
        ValueError: a dtype holds objects or is more than its name (structured dtypes).
    """
    return _plan(arrays).num_bytes


def write_into(memory: memoryview, arrays: Mapping[str, np.ndarray], payload_id: str) -> int:
    """Write a payload into the first ``measure(arrays)`` bytes of ``memory``; returns the body's checksum.

    Every array is copied once, from wherever it lies into ``memory``, in C order.

    Raises:
        ValueError: a dtype holds objects or is more than its name (structured dtypes).
    """
    plan = _plan(arrays)
    encoded_id = payload_id.encode("ascii")
    assert len(encoded_id) <= _MAX_PAYLOAD_ID_BYTES and not encoded_id.endswith(b"\0"), payload_id
    assert len(memory) >= plan.num_bytes, f"{plan.num_bytes} bytes do not fit into {len(memory)}"
    table_start = _HEADER.size + _TABLE_LENGTH.size
    _TABLE_LENGTH.pack_into(memory, _HEADER.size, len(plan.table))
    memory[table_start : table_start + len(plan.table)] = plan.table
    end = table_start + len(plan.table)
    for entry, array in zip(plan.entries, arrays.values(), strict=True):
        start = plan.arrays_start + entry.offset
        # Memory that was used before must not show through between two arrays.
        memory[end:start] = bytes(start - end)
        np.copyto(np.ndarray(entry.shape, array.dtype, buffer=memory, offset=start), array, casting="no")
        end = start + array.nbytes
    memory[end : plan.num_bytes] = bytes(plan.num_bytes - end)
    body = memory[_HEADER.size : plan.num_bytes]
    checksum = xxhash.xxh3_64_intdigest(body)
    _HEADER.pack_into(memory, 0, MAGIC, FORMAT_VERSION, encoded_id, len(body), checksum)
    return checksum


def _check(memory: memoryview, ref: PayloadRef) -> None:
    if len(memory) < ref.num_bytes:
        raise torn(ref, "length in bytes", expected=ref.num_bytes, found=len(memory))
    magic, version, encoded_id, num_body_bytes, checksum = _HEADER.unpack_from(memory)
    expected_id = ref.payload_id.encode("ascii").ljust(_MAX_PAYLOAD_ID_BYTES, b"\0")
    for field, expected, found in (
        ("magic", MAGIC, magic),
        ("format version", FORMAT_VERSION, version),
        ("payload id", expected_id, encoded_id),
        ("body length", ref.num_bytes - _HEADER.size, num_body_bytes),
        ("checksum in the header", ref.checksum, checksum),
    ):
        if found != expected:
            raise torn(ref, field, expected=expected, found=found)
    computed = xxhash.xxh3_64_intdigest(memory[_HEADER.size : ref.num_bytes])
    if computed != ref.checksum:
        raise torn(ref, "checksum of the body", expected=ref.checksum, found=computed)


def read_from(memory: memoryview, ref: PayloadRef, *, copy: bool) -> dict[str, np.ndarray]:
    """The arrays of the payload that starts at ``memory``'s first byte, in the order they were written.

    With ``copy`` every array owns its memory; without, they are views which keep ``memory`` alive, and are
    read-only where it is.

    Raises:
        PayloadTorn: length, magic, format version, id or checksum is not what ``ref`` says.
    """
    _check(memory, ref)
    (num_table_bytes,) = _TABLE_LENGTH.unpack_from(memory, _HEADER.size)
    table_start = _HEADER.size + _TABLE_LENGTH.size
    arrays_start = align(table_start + num_table_bytes)
    arrays = {}
    for entry in _DECODER.decode(memory[table_start : table_start + num_table_bytes]):
        view = np.ndarray(
            entry.shape, np.dtype(entry.dtype), buffer=memory, offset=arrays_start + entry.offset
        )
        arrays[entry.name] = view.copy() if copy else view
    return arrays
