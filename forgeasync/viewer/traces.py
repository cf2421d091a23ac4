"""The traces of a run's processes, read as they are written: ``logs/*.trace.jsonl``."""

from pathlib import Path

from forgeasync.tracing import SUFFIX, Lane
from forgeasync.viewer.appended_lines import AppendedLines


class Traces:
    """All traces of a run. Opens nothing that stays open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, AppendedLines] = {}
        self._lanes: dict[Path, Lane] = {}
        self.problem: str | None = None
        """Why traces cannot be looked for; None: they can, or there are none."""

    @property
    def lanes(self) -> list[Lane]:
        """The processes whose first line was read."""
        return [lane for lane in self._lanes.values() if lane.opened is not None]

    def read_some(self) -> bool:
        """Read a piece of the first file that has anything new; returns whether one had."""
        self._look()
        for path, file in self._files.items():
            if (piece := file.read()) is not None:
                if piece.is_anew:
                    self._lanes[path] = Lane()
                for line in piece.lines():
                    self._lanes[path].add(line)
                return True
        return False

    def _look(self) -> None:
        self.problem = None
        try:
            paths = sorted(self._folder.glob(f"*{SUFFIX}"))
        except OSError as error:
            self.problem = f"{self._folder} cannot be read: {error.strerror}"
            return
        for path in paths:
            if path not in self._files:
                self._files[path] = AppendedLines(path)
                self._lanes[path] = Lane()

    @property
    def problems(self) -> list[str]:
        """What of the traces could not be read or written, in words."""
        found = [] if self.problem is None else [self.problem]
        found += [file.problem for file in self._files.values() if file.problem is not None]
        for path, lane in self._lanes.items():
            if lane.num_damaged:
                found.append(
                    f"{path.name}: {lane.num_damaged} damaged lines were left out; the first: "
                    f"{lane.first_damage}"
                )
            if lane.num_lost:
                found.append(f"{path.name}: the process could not write {lane.num_lost} lines")
        return found
