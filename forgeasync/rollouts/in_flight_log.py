"""The log of what a generator has in flight: files in its host's shared memory, which outlive its process.

The log is one file at a time, a segment. One that has grown past ``segment_limit`` is followed by a new one,
which begins with everything that is still in flight; it gets its name when that is written, and only then is
the old one removed. So at any moment the newest segment has all there is, whenever the process dies. Nothing
is synced: memory needs no disk.
"""

import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from forgeasync.rollouts.in_flight import LiveTurns, keep_group
from forgeasync.rollouts.in_flight_format import MAGIC, InFlightRecord, decode, encode

MIN_SEGMENT_BYTES = 4 * 2**20
"""Smaller segments are not worth replacing."""

_SEGMENT = re.compile(r"segment-(\d{8})")


def segment_limit(num_live_bytes: int) -> int:
    """Bytes from which a segment is replaced that began with ``num_live_bytes`` of turns in flight.

    So each byte that is written is copied once more on average, and a log takes at most twice what was in
    flight when its segment began, and again as much while it is replaced.
    """
    return max(MIN_SEGMENT_BYTES, 2 * num_live_bytes)


class InFlightLog:
    """Writes the log of one process; not for several threads at once."""

    def __init__(self, folder: Path) -> None:
        """Begin a log in ``folder``, which is made.

        Raises:
            OSError: there is a folder already, or no room.
        """
        folder.mkdir(mode=0o700)
        self._folder = folder
        self._number = 0
        self._descriptor = -1
        try:
            self._begin_segment([])
        except BaseException:
            shutil.rmtree(folder)
            raise

    @property
    def folder(self) -> Path:
        """Where the log is."""
        return self._folder

    def append(self, *records: InFlightRecord) -> None:
        """Append records; when this returns, they outlive the process.

        Raises:
            OSError: there is no room. The log is then to be closed: what follows could not be read.
        """
        data = b"".join(map(encode, records))
        _write(self._descriptor, data)
        self._num_bytes += len(data)
        if self._num_bytes > self._limit:
            log = decode(self._path.read_bytes())
            assert not log.num_torn_bytes, "this process has written all of it"
            self._begin_segment(LiveTurns(log.records).snapshot())

    def close(self) -> None:
        """Remove the log."""
        os.close(self._descriptor)
        shutil.rmtree(self._folder)

    @property
    def _path(self) -> Path:
        return self._folder / f"segment-{self._number:08d}"

    def _begin_segment(self, live: list[InFlightRecord]) -> None:
        data = b"".join([MAGIC, *map(encode, live)])
        partial = self._folder / "partial"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write(descriptor, data)
            old = self._path
            self._number += 1
            os.rename(partial, self._path)
        except BaseException:
            os.close(descriptor)
            raise
        if self._descriptor >= 0:
            os.close(self._descriptor)
            old.unlink()
        self._descriptor = descriptor
        self._num_bytes = len(data)
        self._limit = segment_limit(len(data))


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlightRead:
    """What a process that is gone had in flight."""

    groups: Mapping[int, bytes]
    """By group, for ``continued`` of ``GeneratorActor.sample_group`` and for ``restore_episodes``."""
    num_kept: int = 0
    """Tokens of these groups that are continued from."""
    num_lost: int = 0
    """Tokens of these groups that are in the log, but cannot be continued from: their routing is missing."""
    num_torn_bytes: int = 0
    """What the process was writing when it died."""
    problem: str | None = None
    """Why there is nothing, in words; None: the log was read."""


def read_in_flight(folder: Path, group_ids: Collection[int]) -> InFlightRead:
    """Read of some groups what the log in ``folder`` has of them; its process has ended.

    A log that is missing or cannot be read is told in words.
    """
    try:
        segments = sorted(path for path in folder.iterdir() if _SEGMENT.fullmatch(path.name))
        if not segments:
            return InFlightRead(groups={}, problem=f"{folder} has no segment of a log")
        log = decode(segments[-1].read_bytes())
    except (OSError, ValueError) as error:
        return InFlightRead(groups={}, problem=f"the log in {folder} cannot be read: {error}")
    live = LiveTurns(log.records)
    kept = {
        group_id: keep_group(live.of_group(group_id)) for group_id in live.group_ids().intersection(group_ids)
    }
    return InFlightRead(
        groups={group_id: group.data for group_id, group in kept.items()},
        num_kept=sum(group.num_kept for group in kept.values()),
        num_lost=sum(group.num_lost for group in kept.values()),
        num_torn_bytes=log.num_torn_bytes,
    )


def remove_in_flight(folder: Path) -> None:
    """Remove the log of a process that has ended; no error if there is none."""
    shutil.rmtree(folder, ignore_errors=True)
