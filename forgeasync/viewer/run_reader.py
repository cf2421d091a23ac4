"""Everything that is read of one run folder, kept up to date as the run writes. Writes nothing."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forgeasync.observability import RunDir
from forgeasync.viewer.appended_lines import MAX_LINE_BYTES, AppendedLines, Piece
from forgeasync.viewer.definitions import known_definition
from forgeasync.viewer.fault_lines import FaultLines
from forgeasync.viewer.ledger_lines import LedgerLines
from forgeasync.viewer.metric_table import MetricTable
from forgeasync.viewer.rollout_index import RolloutIndex
from forgeasync.viewer.settings import ConfigUnreadable, read_settings
from forgeasync.viewer.token_index import TokenIndex
from forgeasync.viewer.traces import Traces

DEMO_RUN = Path(__file__).parent / "demo"
"""A small recorded run; its generator was killed on the way."""

MAX_SHOWN_KEYS = 5
MAX_DIGITS = 18

_LAST_LOG_BYTES = 4096


class NoRun(ValueError):
    """A folder that is none of a run; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How much of a file was read."""

    file: str
    num_read_bytes: int
    num_unread_bytes: int


class RunReader:
    """One run. Not safe for threads: whoever has several takes a lock."""

    def __init__(self, path: Path, *, with_rollouts: bool = True, with_traces: bool = True) -> None:
        """Opens nothing that stays open; without ``with_rollouts`` neither these nor tokens are read, and
        without ``with_traces`` no traces.

        Raises:
            NoRun: the folder is not there, or has none of a run's files.
        """
        self.run_dir = RunDir(path=path)
        if not path.is_dir():
            raise NoRun(f"{path} is no folder; must be the folder of a run")
        files = (self.run_dir.metrics, self.run_dir.ledger, self.run_dir.config)
        if not any(file.is_file() for file in files):
            names = ", ".join(file.name for file in files)
            raise NoRun(f"{path} has none of {names}; must be the folder of a run")
        self.name = path.resolve().name
        self.metrics = MetricTable()
        self.ledger = LedgerLines()
        self.faults = FaultLines()
        self.rollouts = RolloutIndex()
        self.tokens = TokenIndex()
        self.traces = Traces(self.run_dir.logs)
        self._with_traces = with_traces
        self._files = [AppendedLines(self.run_dir.metrics), AppendedLines(self.run_dir.faults)]
        self._files.append(AppendedLines(self.run_dir.ledger))
        if with_rollouts:
            self._files.append(AppendedLines(self.run_dir.rollouts))
            self._files.append(AppendedLines(self.run_dir.tokens))
        self._num_overlong = {file.path: 0 for file in self._files}
        self._settings: dict[str, str] = {}
        self._settings_problem: str | None = None
        self._settings_time: float | None = None

    # ---- reading

    def read_some(self) -> bool:
        """Read a piece of the first file that has anything new; returns whether one had.

        Curves come before groups, groups before rollouts, those before the processes' traces, and values of
        tokens last.
        """
        self._read_settings()
        early = [file for file in self._files if file.path != self.run_dir.tokens]
        late = [file for file in self._files if file.path == self.run_dir.tokens]
        return (
            self._read_some_of(early)
            or (self._with_traces and self.traces.read_some())
            or self._read_some_of(late)
        )

    def _read_some_of(self, files: Sequence[AppendedLines]) -> bool:
        for file in files:
            if (piece := file.read()) is not None:
                self._take(file.path, piece)
                return True
        return False

    def read_all(self) -> None:
        """Read everything that is there."""
        while self.read_some():
            pass

    def _take(self, path: Path, piece: Piece) -> None:
        if piece.is_anew:
            self._forget(path)
        self._num_overlong[path] += piece.num_overlong
        if path == self.run_dir.ledger:
            self.ledger.add(piece)
        elif path == self.run_dir.rollouts:
            self.rollouts.add(piece.data, start=piece.start)
        elif path == self.run_dir.tokens:
            self.tokens.add(piece.data, start=piece.start)
        else:
            lines = self.metrics if path == self.run_dir.metrics else self.faults
            for line in piece.lines():
                lines.add(line)

    def _forget(self, path: Path) -> None:
        self._num_overlong[path] = 0
        if path == self.run_dir.ledger:
            self.ledger = LedgerLines()
        elif path == self.run_dir.rollouts:
            self.rollouts = RolloutIndex()
        elif path == self.run_dir.tokens:
            self.tokens = TokenIndex()
        elif path == self.run_dir.metrics:
            self.metrics = MetricTable()
        else:
            self.faults = FaultLines()

    def _read_settings(self) -> None:
        with contextlib.suppress(OSError):
            time_s = self.run_dir.config.stat().st_mtime
            if time_s == self._settings_time:
                return
            self._settings_time = time_s
        try:
            self._settings, self._settings_problem = read_settings(self.run_dir.config), None
        except ConfigUnreadable as error:
            self._settings, self._settings_problem = {}, str(error)

    # ---- questions

    @property
    def settings(self) -> Mapping[str, str]:
        """The config's values as text by their dotted keys; empty if it cannot be read."""
        return self._settings

    def whole_setting(self, key: str) -> int | None:
        """A value of the config that is a whole number; None if it has none there."""
        text = self._settings.get(key, "")
        return int(text) if text.isascii() and text.isdecimal() and len(text) < MAX_DIGITS else None

    @property
    def progress(self) -> list[Progress]:
        """How much of each file was read."""
        return [
            Progress(
                file=file.path.name, num_read_bytes=file.position, num_unread_bytes=file.num_unread_bytes
            )
            for file in self._files
        ]

    @property
    def problems(self) -> list[str]:
        """What of the folder could not be read, or was left out; in words."""
        found = [file.problem for file in self._files if file.problem is not None]
        found += self.traces.problems
        if self._settings_problem is not None:
            found.append(self._settings_problem)
        if self.ledger.refusal is not None:
            found.append(f"ledger.jsonl {self.ledger.refusal}; groups are not shown")
        if self.ledger.num_damaged:
            found.append(
                f"ledger.jsonl: {self.ledger.num_damaged} damaged lines were left out; "
                f"the first: {self.ledger.first_damage}"
            )
        if self.ledger.lives.num_odd:
            found.append(
                f"ledger.jsonl: {self.ledger.lives.num_odd} events do not follow from those before; "
                "python -m apps.verify says more"
            )
        damaged = {
            "metrics.jsonl": self.metrics.num_damaged,
            "faults.jsonl": self.faults.num_damaged,
            "rollouts.jsonl": self.rollouts.num_damaged,
            "tokens.jsonl": self.tokens.num_damaged,
        }
        found += [f"{file}: {num} damaged lines were left out" for file, num in damaged.items() if num]
        found += [
            f"{path.name}: {num} lines were too long to be read"
            for path, num in self._num_overlong.items()
            if num
        ]
        if keys := [key for key in self.metrics.keys if known_definition(key) is None]:
            more = "" if len(keys) <= MAX_SHOWN_KEYS else f" and {len(keys) - MAX_SHOWN_KEYS} more"
            named = ", ".join(keys[:MAX_SHOWN_KEYS])
            found.append(f"metrics that this version of forgeasync does not define: {named}{more}")
        return found

    def last_log_line(self) -> str | None:
        """Return the last line of run.log, which says how a run ended; None if there is none."""
        try:
            with self.run_dir.run_log.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - _LAST_LOG_BYTES))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return None
        return lines[-1] if lines else None

    def task_of(self, prompt: int) -> tuple[str, str] | None:
        """Return source and id of a prompt's task; None if the ledger does not say them (any more)."""
        offset = self.ledger.lives.offset_of_prompt(prompt)
        if offset is None:
            return None
        try:
            with self.run_dir.ledger.open("rb") as file:
                file.seek(offset)
                said = json.loads(file.readline(MAX_LINE_BYTES))
            return str(said["source"]), str(said["task_id"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None

    def procs(self) -> list[dict[str, object]]:
        """Return the processes in procs.json with role, rank, pid, host and since when; empty without it."""
        try:
            listed = json.loads(self.run_dir.procs.read_bytes())["procs"]
            return [{key: one[key] for key in ("role", "rank", "pid", "host", "since_s")} for one in listed]
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return []
