"""Archive of the published versions (``weights.archive``): files of every rank in the folder ``versions``.

A file ``00000020-rank-0.weights`` has a header with the layout of the rank, and version 20 whole. A record
for each later version follows, which is a patch from an older version of the file. The rank's next file
begins after ``checkpoint.every_steps`` versions. It begins earlier if the trainer was started again, if no
version of the file is staged, or if the disk has refused a record. A version belongs to the newest file that
begins with it or before, so a resumed run supersedes the versions that it makes again.

Every record has its length and checksum, and every version the checksums of its blocks.
"""

import contextlib
import logging
import os
import re
import shutil
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import torch
import xxhash

from forgeasync.config import Dtype
from forgeasync.weights.layout import TORCH_DTYPES, RankLayout, WeightLayout
from forgeasync.weights.ledger import BLOCK_BYTES, NO_PART, Patch, block_range, checksum
from forgeasync.weights.patches import StagedContent, apply, digest_of

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(\d{8,})-rank-(\d+)\.weights")
_FRAME = struct.Struct("<8sQQ")
"""What is before each record: a magic text, bytes of the record, their checksum."""
_MAGIC = b"forgever"
_VERSION = struct.Struct("<QQ")
"""Version, and digest of the version that it is a patch from; then come checksums, sizes and bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivePlan:
    """Where versions are archived, and how many."""

    folder: Path
    every_steps: int | None
    """Versions after which a file begins; None: one file."""
    num_kept: int | None
    """Versions to keep; None: all."""
    num_ranks: int
    start: str = ""
    """Identifier of the start of the trainer."""


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    """First record of a file."""

    start: str
    num_ranks: int
    dtype: Dtype
    layout: RankLayout


class ArchiveUnreadable(ValueError):
    """A version is not in the archive whole."""


def _file_name(first: int, rank: int) -> str:
    return f"{first:08d}-rank-{rank}.weights"


def _files(folder: Path) -> list[tuple[int, int]]:
    """Return first version and rank of every file, in order."""
    names = (_NAME.fullmatch(file.name) for file in folder.glob("*.weights"))
    return sorted((int(match[1]), int(match[2])) for match in names if match is not None)


def _checksum(record: np.ndarray) -> int:
    # In pieces: xxhash keeps the GIL.
    digest = xxhash.xxh3_64()
    for start in range(0, len(record), BLOCK_BYTES):
        digest.update(record[start : start + BLOCK_BYTES].data)
    return digest.intdigest()


def _append(file: BinaryIO, record: np.ndarray) -> None:
    file.write(_FRAME.pack(_MAGIC, len(record), _checksum(record)))
    file.write(record.data)
    file.flush()


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate arrays (uint8), and let other threads run meanwhile."""
    joined, end = np.empty(sum(map(len, parts)), np.uint8), 0
    for part in parts:
        joined[end : end + len(part)] = part
        end += len(part)
    return joined


class ArchiveWriter:
    """Writes the versions of one rank in a separate thread.

    Nothing waits for the disk. If it is full or too slow, versions are left out until it takes a whole one.
    """

    def __init__(self, plan: ArchivePlan, layout: RankLayout, dtype: torch.dtype) -> None:
        self._plan = plan
        self._layout = layout
        (name,) = (name for name, one in TORCH_DTYPES.items() if one is dtype)
        header = _Header(start=plan.start, num_ranks=plan.num_ranks, dtype=name, layout=layout)
        self._header = np.frombuffer(msgspec.json.encode(header), np.uint8)
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="weight-archive")
        self._waiting: list[tuple[Future[None], int]] = []
        """Records that are being written, with their bytes."""
        self._first = 0
        self._digests: set[int] = set()
        """Versions of the file that begins with ``_first``."""
        self._refusal: str | None = None
        self._file: BinaryIO | None = None
        self._file_first = 0

    def add(self, version: int, staged: StagedContent) -> str | None:
        """Copy a version out of its staging buffer and have it written.

        Returns why the archive leaves out versions; None if it has all of them.
        """
        patch = next((one for one in staged.patches[:1] if one.base in self._digests), None)
        every = self._plan.every_steps
        if self._refusal or (every is not None and version // every != self._first // every):
            patch = None
        if self._refusal and shutil.disk_usage(self._plan.folder.parent).free < self._layout.num_bytes:
            return self._refusal
        parts = self._parts(version, staged, patch)
        num_bytes = sum(map(len, parts))
        self._waiting = [one for one in self._waiting if not one[0].done()]
        if sum(size for _, size in self._waiting) + num_bytes > self._layout.buffer_bytes + BLOCK_BYTES:
            self._refuse(f"slower than versions are published; version {version} is left out")
            return self._refusal
        if patch is None:
            self._first, self._digests = version, set()
        self._digests.add(digest_of(staged.checksums))
        writing = self._writing.submit(self._write, _joined(parts), self._first, version, patch is None)
        self._waiting.append((writing, num_bytes))
        return self._refusal

    def flush(self) -> str | None:
        """Wait until everything is written that the disk takes; return as ``add``."""
        wait([writing for writing, _ in self._waiting])
        return self._refusal

    def _parts(self, version: int, staged: StagedContent, patch: Patch | None) -> list[np.ndarray]:
        sizes = np.full(self._layout.num_blocks, NO_PART) if patch is None else patch.sizes
        parts = [np.frombuffer(_VERSION.pack(version, 0 if patch is None else patch.base), np.uint8)]
        parts += [staged.checksums.view(np.uint8), sizes.astype(np.uint32).view(np.uint8)]
        if patch is not None:
            parts.append(staged.buffer[patch.start : int(patch.bounds()[-1])])
        for block in np.flatnonzero(sizes == NO_PART):
            parts.append(staged.buffer[block_range(int(block), self._layout.num_bytes)])
        return parts

    def _write(self, record: np.ndarray, first: int, version: int, is_whole: bool) -> None:
        try:
            if is_whole:
                self._begin(record, first)
            elif self._file is not None and self._file_first == first:
                _append(self._file, record)
        except OSError as error:
            # What is left of the record is found by its checksum.
            self._refuse(f"{error.strerror or error}; version {version} and later ones are left out")
            self._close()

    def _begin(self, record: np.ndarray, first: int) -> None:
        self._close()
        path = self._plan.folder / _file_name(first, self._layout.rank)
        partial = path.with_suffix(".partial")
        self._plan.folder.mkdir(parents=True, exist_ok=True)
        self._file = partial.open("wb")
        try:
            _append(self._file, self._header)
            _append(self._file, record)
            os.fsync(self._file.fileno())
            partial.replace(path)
        except OSError:
            self._close()
            partial.unlink(missing_ok=True)
            raise
        self._file_first, self._refusal = first, None
        if self._plan.num_kept is not None:
            self._remove_before(first - self._plan.num_kept)

    def _close(self) -> None:
        if self._file is not None:
            # Python tries to write again what the disk has refused.
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None

    def _refuse(self, reason: str) -> None:
        if self._refusal is None:
            logger.warning("%s: %s", self._plan.folder, reason)
            self._refusal = reason

    def _remove_before(self, version: int) -> None:
        """Remove this rank's files that ``version`` and later ones do not need; rank 0 also those of ranks
        that this trainer does not have."""
        own, num_ranks, files = self._layout.rank, self._plan.num_ranks, _files(self._plan.folder)
        oldest = max((first for first, rank in files if rank == own and first <= version), default=0)
        for first, rank in files:
            if first < oldest and (rank == own or (own == 0 and rank >= num_ranks)):
                (self._plan.folder / _file_name(first, rank)).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """A version in a file."""

    base: "_Record | None"
    checksums: np.ndarray
    sizes: np.ndarray
    data: np.ndarray

    def apply(self, image: np.ndarray, unit: np.dtype[np.unsignedinteger]) -> int | None:
        """Make an image of the base this version; return a block with another checksum, if there is one."""
        bounds = Patch(base=0, start=0, sizes=self.sizes).bounds()
        whole = int(bounds[-1])
        changed = self.checksums != (0 if self.base is None else self.base.checksums)
        for block in np.flatnonzero(changed | (self.sizes != 0)).tolist():
            where = block_range(block, len(image))
            if self.sizes[block] == NO_PART:
                image[where] = self.data[whole : whole + where.stop - where.start]
                whole += where.stop - where.start
            elif not apply(self.data[bounds[block] : bounds[block + 1]], image[where].view(unit)):
                return block
            if checksum(image[where]) != self.checksums[block]:
                return block
        return None


class _ArchiveFile:
    """One file, up to its first damage."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[int, _Record] = {}
        self.problem = "lacks it"
        data = np.asarray(np.memmap(path, np.uint8, "r")) if path.stat().st_size else np.empty(0, np.uint8)
        by_digest: dict[int, _Record] = {}
        payloads = self._payloads(data)
        if (header := next(payloads, None)) is None:
            return
        self.header = msgspec.json.decode(header.tobytes(), type=_Header)
        for record in payloads:
            version, base = _VERSION.unpack(record[: _VERSION.size].data)
            num_blocks, start = self.header.layout.num_blocks, _VERSION.size
            checksums = record[start : start + 8 * num_blocks].copy().view(np.uint64)
            sizes = record[start + 8 * num_blocks : start + 12 * num_blocks].copy().view(np.uint32)
            one = _Record(
                base=by_digest.get(base),
                checksums=checksums,
                sizes=sizes,
                data=record[start + 12 * num_blocks :],
            )
            # A version that was published twice is a patch from itself.
            self.records[version] = by_digest.setdefault(digest_of(checksums), one)

    def _payloads(self, data: np.ndarray) -> Iterator[np.ndarray]:
        at = 0
        while at == 0 or at < len(data):
            frame = data[at : at + _FRAME.size].tobytes()
            magic, size, expected = _FRAME.unpack(frame) if len(frame) == _FRAME.size else (b"", 0, 0)
            record = data[at + _FRAME.size : at + _FRAME.size + size]
            if magic != _MAGIC or len(record) != size or _checksum(record) != expected:
                self.problem = f"is damaged or cut off at byte {at:,}"
                return
            yield record
            at += _FRAME.size + size

    def image(self, version: int) -> torch.Tensor:
        """Return the bytes of a version, with every block of it and of the versions before checked."""
        layout = self.header.layout
        image = np.zeros(layout.num_bytes, np.uint8)
        unit = np.dtype(f"u{TORCH_DTYPES[self.header.dtype].itemsize}")
        chain = [self.records[version]]
        while (base := chain[-1].base) is not None:
            chain.append(base)
        for record in reversed(chain):
            if (block := record.apply(image, unit)) is not None:
                raise ArchiveUnreadable(f"{self.path}: block {block} has another checksum than was staged")
        return torch.from_numpy(image)


class _Archive:
    """All files of a folder, each opened when it is needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = _files(folder)
        self._open: dict[Path, _ArchiveFile] = {}

    def files_of(self, version: int) -> list[_ArchiveFile]:
        """Return the file of every rank that has a version."""
        files = [self._file_of(version, 0)]
        while len(files) < files[0].header.num_ranks:
            files.append(self._file_of(version, len(files)))
            if files[-1].header.start != files[0].header.start:
                words = f"{files[-1].path} is of another start of the trainer than {files[0].path.name}"
                raise ArchiveUnreadable(words)
        return files

    def _file_of(self, version: int, rank: int) -> _ArchiveFile:
        first = max((first for first, own in self._files if own == rank and first <= version), default=None)
        if first is None:
            raise ArchiveUnreadable(f"{self._folder} has no file of rank {rank} from this version or before")
        file = self._opened(first, rank)
        if version not in file.records:
            raise ArchiveUnreadable(f"{file.path} {file.problem}")
        return file

    def _opened(self, first: int, rank: int) -> _ArchiveFile:
        path = self._folder / _file_name(first, rank)
        if path not in self._open:
            self._open[path] = _ArchiveFile(path)
        return self._open[path]

    def readable(self) -> Iterator[int]:
        """Yield the versions that every rank has, ascending."""
        files = [self._opened(first, rank) for first, rank in self._files if rank == 0]
        for version in sorted({version for file in files for version in file.records}):
            with contextlib.suppress(ArchiveUnreadable):
                self.files_of(version)
                yield version


def read_version(folder: Path, version: int) -> tuple[WeightLayout, list[torch.Tensor]]:
    """Read an archived version: the layout of all weights, and those of every rank in their dtype.

    Raises:
        ArchiveUnreadable: The version is not there whole. The message has the file and the nearest versions.
    """
    archive = _Archive(folder)
    try:
        files = archive.files_of(version)
        layout = WeightLayout(
            dtype=TORCH_DTYPES[files[0].header.dtype], ranks=tuple(file.header.layout for file in files)
        )
        return layout, [file.image(version).view(layout.dtype) for file in files]
    except ArchiveUnreadable as problem:
        found = list(archive.readable())
        nearest = [one for one in found if one < version][-1:] + [one for one in found if one > version][:1]
        words = " and ".join(map(str, nearest)) or "none"
        raise ArchiveUnreadable(f"{problem}; nearest versions: {words}") from None
