"""Weights & Biases beside TensorBoard, for runs whose config has ``logging.wandb``.

Another process talks to W&B (``wandb_process.py``), over pipes that nobody here waits for: a W&B that hangs,
fails or dies costs its own lines, which are counted, and nothing else. Only the end of a run waits, for at
most ``END_S``.
"""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from forgeasync.config import LoggingSection, WandbSection
from forgeasync.observability.wandb_process import TAKEN
from forgeasync.schema import Problem

MAX_KEPT_BYTES = 4 << 20
"""So much is kept for a process that does not read; what comes then is lost."""

END_S = 10.0
"""Time for the process to end the W&B run. What was not sent by then lies in the folder."""

LOOK_S = 0.05


def check_wandb(section: LoggingSection) -> Iterator[Problem]:
    """Whether a run that wants W&B has the package."""
    if section.wandb is not None and importlib.util.find_spec("wandb") is None:
        yield Problem(
            field="logging.wandb",
            value=section.wandb.project,
            remedy="needs the wandb package: pip install 'forgeasync[wandb]', or set null",
        )


class WandbLog:
    """The W&B run of one run."""

    def __init__(
        self,
        section: WandbSection,
        folder: Path,
        *,
        log_file: Path,
        name: str,
        config: Mapping[str, object],
        say: Callable[[str], None],
    ) -> None:
        """``folder`` gets W&B's files, ``log_file`` what it prints. ``config`` is shown with the run."""
        self._folder = folder
        self._say = say
        self._kept: deque[bytes] = deque()
        self._num_kept_bytes = 0
        self._num_sent = 0
        self._num_answered = 0
        self._num_lost = 0
        self._answers = b""
        self._has_said = False
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "forgeasync.observability.wandb_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # Ctrl-C ends the run, and the run ends this.
                start_new_session=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._writer, self._reader = self._process.stdin.fileno(), self._process.stdout.fileno()
        for descriptor in (self._writer, self._reader):
            os.set_blocking(descriptor, False)
        given = {
            "folder": str(folder.resolve()),
            "project": section.project,
            "entity": section.entity,
            "mode": section.mode.value,
            "name": name,
            "config": dict(config),
        }
        self._keep(json.dumps(given))
        # It begins at once: starting takes W&B longer than the run has for its end.
        self._exchange()

    @property
    def num_errors(self) -> int:
        """Lines that W&B has not taken and will not."""
        return self._num_lost

    def add(self, values: Mapping[str, float | int]) -> None:
        """Hand a line of finite values on; waits for nothing."""
        assert all(map(math.isfinite, values.values())), "what is not finite is counted elsewhere"
        if self._num_kept_bytes > MAX_KEPT_BYTES:
            self._lose(1, "does not take lines any more")
        elif self._process.poll() is not None:
            self._lose(1, f"has ended with exit code {self._process.returncode}")
        else:
            self._num_sent += 1
            self._keep(json.dumps(values, allow_nan=False))
        self._exchange()

    def close(self) -> None:
        """End the W&B run, and its process; a second call does nothing."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        end_s = time.monotonic() + END_S
        while self._kept and self._process.poll() is None and time.monotonic() < end_s:
            self._exchange()
            time.sleep(LOOK_S)
        # The descriptor is closed even if the last bytes cannot be written.
        self._process.stdin.close()
        while self._process.poll() is None and time.monotonic() < end_s:
            self._read_answers()
            time.sleep(LOOK_S)
        self._read_answers()
        if self._process.poll() is None:
            self._tell(f"has not ended within {END_S:g} s; `wandb sync` sends what is in {self._folder}")
        try:
            # With wandb's own processes, also those that are left.
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        if missing := self._num_sent - self._num_answered:
            self._num_answered += missing
            self._lose(missing, f"has not taken the last {missing} lines")

    def _keep(self, line: str) -> None:
        data = line.encode() + b"\n"
        self._kept.append(data)
        self._num_kept_bytes += len(data)

    def _exchange(self) -> None:
        """Write what the process takes now, and read what it says."""
        try:
            while self._kept:
                num_written = os.write(self._writer, self._kept[0])
                self._num_kept_bytes -= num_written
                rest = self._kept.popleft()[num_written:]
                if rest:
                    self._kept.appendleft(rest)
        except BlockingIOError:
            pass  # it is busy: later
        except BrokenPipeError:
            # It has ended, and says why below.
            self._kept.clear()
            self._num_kept_bytes = 0
        self._read_answers()
        if self._process.poll() is not None and (missing := self._num_sent - self._num_answered):
            self._num_answered = self._num_sent
            self._lose(missing, f"has ended with exit code {self._process.returncode}")

    def _read_answers(self) -> None:
        try:
            while data := os.read(self._reader, 1 << 16):
                self._answers += data
        except BlockingIOError:
            pass  # no more for now
        *lines, self._answers = self._answers.split(b"\n")
        for line in lines:
            words = line.decode(errors="replace")
            if words.startswith("wandb.init: "):
                self._tell(words)
                continue
            self._num_answered += 1
            if words != TAKEN:
                self._lose(1, words)

    def _lose(self, num: int, why: str) -> None:
        self._num_lost += num
        self._tell(why)

    def _tell(self, why: str) -> None:
        if not self._has_said:
            self._say(f"W&B: {why}; the run goes on without it, metrics.jsonl has all numbers")
            self._has_said = True
