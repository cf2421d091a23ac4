"""Names the shared memory that the generators of one host use together for weights."""

from dataclasses import dataclass
from pathlib import Path

from forgeasync.config import ShadowMemory
from forgeasync.weights import ALONE, HostShare


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The receive buffer of a host and, with ``shadow: host``, the shadows of its workers."""

    receive_buffer: Path
    shadow: ShadowMemory = ShadowMemory.HOST
    share: HostShare = ALONE
    """Which part of every version this generator fetches, and fills of the host's shadows, as long as the
    host's generators do not change; the first one makes the files."""
    is_joining: bool = False
    """Whether the files are there and in use: this generator comes later than the others."""

    @property
    def makes_files(self) -> bool:
        return self.share.index == 0 and not self.is_joining

    def shadow_file(self, worker_rank: int) -> Path:
        """The file for the next version of a worker rank, which has the same weights in all generators."""
        return self.receive_buffer.with_name(f"{self.receive_buffer.name}-shadow-{worker_rank}")
