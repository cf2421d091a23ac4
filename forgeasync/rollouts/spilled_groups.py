"""Finished groups on the disk: what a run needs to train on them after all of its processes are gone.

A file has one group: a header of fixed size, its facts as JSON (tokens' versions, scores, places of arrays),
and the bytes of its file in shared memory, as they are there. The fixed header has the lengths and checksums
of both parts, so that a reader notices if a file was cut or altered anywhere.

A file is written under another name, flushed, and renamed. A trainer maps the arrays where they are: the
groups of many steps may be more than fits into the payload store.
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

MAGIC = b"FAKEPT1\n"

_HEADER = struct.Struct("<8sQQQQ")
"""Magic, bytes of the facts, bytes of the arrays, checksums (xxh3_64) of both."""


class SpilledGroupTorn(ValueError):
    """The file is not what was once written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpilledGroup:
    """A group that was sampled and scored, and what its scoring left of it."""

    group: Group
    """All of its rollouts."""
    rewards: tuple[float, ...]
    kept: tuple[int, ...]
    """The rollouts that train, by their places in the group."""
    scores: tuple[Score, ...]
    """Those of the rollouts that train."""

    def with_refs(self, change: Callable[[PayloadRef], PayloadRef]) -> "SpilledGroup":
        """The same group with its arrays at other places."""
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
    """The name of a group's file: one for each attempt at each prompt."""
    return f"{draw_id:020d}{SUFFIX}"


def encode_facts(kept: SpilledGroup) -> bytes:
    """The group without its arrays, padded so that they begin where arrays may."""
    facts = msgspec.json.encode(kept)
    return facts.ljust(align(_HEADER.size + len(facts)) - _HEADER.size)


def write_kept(target: Path, facts: bytes, source: str) -> None:
    """Write the file of a group whose arrays lie in ``source`` on this host; it is on the disk then.

    Raises:
        OSError: the disk refuses, or ``source`` was freed; nothing is left behind.
    """
    with open(source, "rb") as arrays, mmap.mmap(arrays.fileno(), 0, prot=mmap.PROT_READ) as body:
        checksums = xxhash.xxh3_64_intdigest(facts), xxhash.xxh3_64_intdigest(body)
        header = _HEADER.pack(MAGIC, len(facts), len(body), *checksums)
        with replacing(target, is_flushed=True) as file:
            file.write(header + facts)
            file.write(body)


def try_write_kept(target: Path, facts: bytes, source: str) -> str | None:
    """Write a group's file, as ``write_kept`` does; what has prevented it, in words."""
    try:
        write_kept(target, facts, source)
    except FileNotFoundError as error:
        if error.filename == source:
            return "a group was trained on, and its arrays freed, before it was its turn to be written"
        return f"{target}: {error.strerror}"
    except OSError as error:
        return f"{target}: {error.strerror or error}"
    return None


def read_kept(file: Path) -> SpilledGroup:
    """Read and check a whole file; its arrays are to be read from there, on any host that sees it.

    Raises:
        SpilledGroupTorn: it is not what was once written.
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
    """The byte at which the arrays begin, and the facts."""
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
