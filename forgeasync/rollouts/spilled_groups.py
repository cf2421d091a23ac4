"""Files of finished groups on disk, from which a resumed run can train after all of its processes ended.

A file holds one group: a header of fixed size, the group's facts as JSON (versions of tokens, scores,
locations of arrays), and an exact copy of its payload file in shared memory. The header has the lengths and
checksums of both parts, so a reader detects truncation or damage anywhere.

A file is written under a temporary name, flushed, and renamed. The trainer maps the arrays from the file,
because the groups of many steps may not fit into the payload store.
"""

import dataclasses
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from forgeasync.files import replacing
from forgeasync.rollouts.payloads import align
from forgeasync.rollouts.rollout import EVERY_HOST, Group, PayloadRef
from forgeasync.rollouts.score import Score

SUFFIX = ".group"
"""End of the names of files with a finished group."""

MAGIC = b"FAKEPT1\n"

_HEADER = struct.Struct("<8sQQQQ")
"""Header: magic, length of the facts in bytes, length of the arrays in bytes, xxh3_64 of each."""


class SpilledGroupTorn(ValueError):
    """The content of a group's file is not what was written, or not readable by this version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpilledGroup:
    """A sampled and scored group, with the choice of rollouts that train."""

    group: Group
    """The group with all of its rollouts."""
    rewards: tuple[float, ...]
    """Rewards of the rollouts that train."""
    kept: tuple[int, ...]
    """Indices in ``group`` of the rollouts that train."""
    scores: tuple[Score, ...]
    """Scores of the rollouts that train."""

    def with_refs(self, change: Callable[[PayloadRef], PayloadRef]) -> "SpilledGroup":
        """Return the group with ``change`` applied to all references to its arrays."""
        rollouts = tuple(
            dataclasses.replace(
                rollout,
                branches=tuple(
                    dataclasses.replace(
                        branch, prompt=change(branch.prompt), response=change(branch.response)
                    )
                    for branch in rollout.branches
                ),
            )
            for rollout in self.group.rollouts
        )
        return dataclasses.replace(self, group=dataclasses.replace(self.group, rollouts=rollouts))


def file_name(draw_id: int) -> str:
    """Return the name of a group's file, unique for each attempt at each prompt."""
    return f"{draw_id:020d}{SUFFIX}"


def encode_facts(kept: SpilledGroup) -> bytes:
    """Encode the group without its arrays, padded so that the arrays after it are aligned."""
    facts = msgspec.json.encode(kept)
    return facts.ljust(align(_HEADER.size + len(facts)) - _HEADER.size)


def write_spilled(target: Path, facts: bytes, source: str) -> None:
    """Write the file of a group and flush it.

    Args:
        target: Path of the file.
        facts: Result of ``encode_facts``.
        source: Payload file of the group in this host's shared memory.

    Raises:
        OSError: The disk is full or fails, or ``source`` was freed. ``target`` is then not created.
    """
    with open(source, "rb") as arrays, mmap.mmap(arrays.fileno(), 0, prot=mmap.PROT_READ) as body:
        checksums = xxhash.xxh3_64_intdigest(facts), xxhash.xxh3_64_intdigest(body)
        header = _HEADER.pack(MAGIC, len(facts), len(body), *checksums)
        with replacing(target, is_flushed=True) as file:
            file.write(header + facts)
            file.write(body)


def try_write_kept(target: Path, facts: bytes, source: str) -> str | None:
    """Write a group's file as ``write_spilled`` does; return a description of the error, or None."""
    try:
        write_spilled(target, facts, source)
    except FileNotFoundError as error:
        if error.filename == source:
            return "a group was trained on, and its arrays freed, before it was its turn to be written"
        return f"{target}: {error.strerror}"
    except OSError as error:
        return f"{target}: {error.strerror or error}"
    return None


def read_spilled(file: Path) -> SpilledGroup:
    """Read a group's file and verify all of it.

    The references of the result point into the file, with ``EVERY_HOST`` as their host.

    Raises:
        SpilledGroupTorn: The content is not what was written, or not readable by this version.
    """
    with file.open("rb") as opened:
        num_bytes = os.fstat(opened.fileno()).st_size
        if num_bytes < _HEADER.size:
            raise SpilledGroupTorn(f"{file} is cut off in its header: it has {num_bytes} bytes")
        with mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as memory, memoryview(memory) as whole:
            start, facts = _checked(whole, file)
    try:
        kept = msgspec.json.decode(facts, type=SpilledGroup)
    except (msgspec.MsgspecError, ValueError) as error:
        raise SpilledGroupTorn(f"{file} is of another version of this package: {error}") from None
    path = str(file.resolve())

    def moved(ref: PayloadRef) -> PayloadRef:
        return dataclasses.replace(ref, host_id=EVERY_HOST, file=path, offset=start + ref.offset)

    return kept.with_refs(moved)


def _checked(whole: memoryview, file: Path) -> tuple[int, bytes]:
    """Verify a file; return the offset of the arrays in bytes, and the encoded facts."""
    magic, num_facts, num_arrays, facts_checksum, arrays_checksum = _HEADER.unpack_from(whole)
    start = _HEADER.size + num_facts
    if magic != MAGIC:
        raise SpilledGroupTorn(f"{file} does not begin as the file of a group")
    if len(whole) != start + num_arrays:
        raise SpilledGroupTorn(f"{file} has {len(whole)} bytes, and {start + num_arrays} were written")
    for what, part, checksum in (
        ("facts", whole[_HEADER.size : start], facts_checksum),
        ("arrays", whole[start:], arrays_checksum),
    ):
        with part:
            if xxhash.xxh3_64_intdigest(part) != checksum:
                raise SpilledGroupTorn(f"{file} has other {what} than were written: its checksum differs")
    return start, bytes(whole[_HEADER.size : start])
