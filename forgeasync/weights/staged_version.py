"""A published version read back from the trainer's staging buffers, when the trainer itself cannot be asked.

The buffers are files in shared memory of the trainer's hosts: they outlive its procs, as long as the run's
folder there exists.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from forgeasync.weights.layout import Box, WeightLayout
from forgeasync.weights.manifest import Manifest, block_range, checksum
from forgeasync.weights.staging import SharedFile
from forgeasync.weights.transports.transport import StagingSource


class VersionUnreadable(OSError):
    """A staged version is gone, is on another host, or does not match its manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    rank: int
    box: Box
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedWeights:
    """The staged version, and where it is."""

    manifest: Manifest
    layout: WeightLayout
    sources: tuple[StagingSource, ...]
    """Staging sources by trainer rank."""


class StagedVersion:
    """Reads one version: assembles whole tensors from the parts that ranks have staged."""

    def __init__(self, staged: StagedWeights) -> None:
        """Map the buffers of all ranks and check every block.

        Raises:
            VersionUnreadable: a buffer is not a file of this host, or a block has another checksum than the
                manifest says.
        """
        manifest, layout = staged.manifest, staged.layout
        self._layout = layout
        self._buffers = [
            _open(source.paths[manifest.slot], rank.num_bytes)
            for source, rank in zip(staged.sources, layout.ranks, strict=True)
        ]
        for rank, buffer, checksums in zip(layout.ranks, self._buffers, manifest.checksums, strict=True):
            for block, expected in enumerate(checksums.tolist()):
                if checksum(buffer.memory[block_range(block, rank.num_bytes)]) != expected:
                    raise VersionUnreadable(
                        f"block {block} of rank {rank.rank} is not that of version {manifest.version}"
                    )
        self._parts: dict[str, list[_Part]] = {}
        for rank_index, rank in enumerate(layout.ranks):
            for piece in rank.pieces:
                size = piece.box.num_elements * layout.dtype.itemsize
                for index, name in enumerate(piece.names):
                    part = _Part(rank=rank_index, box=piece.box, offset=piece.offset + index * size)
                    self._parts.setdefault(name, []).append(part)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor whole, with its name, one at a time."""
        for name, parts in self._parts.items():
            whole = torch.empty(self._layout.shapes[name], dtype=self._layout.dtype)
            for part in parts:
                stop = part.offset + part.box.num_elements * self._layout.dtype.itemsize
                stored = self._buffers[part.rank].bytes[part.offset : stop].view(self._layout.dtype)
                place = tuple(
                    slice(start, start + size)
                    for start, size in zip(part.box.start, part.box.size, strict=True)
                )
                whole[place] = stored.view(part.box.size)
            yield name, whole


def _open(path: Path, num_bytes: int) -> SharedFile:
    try:
        return SharedFile(path, num_bytes, is_new=False)
    except (OSError, ValueError) as error:
        raise VersionUnreadable(f"{path} cannot be read: {error}") from error
