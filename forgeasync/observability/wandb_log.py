"""Logging to Weights & Biases, for runs whose config has ``logging.wandb``.

The ``wandb`` package runs in a separate process, which executes this module as a program. In the controller,
``wandb.init``, ``finish`` and the package's exit hook would block for as long as W&B hangs. If W&B hangs,
fails or dies, only its own lines are lost, and they are counted. Only the end of a run waits for it, for at
most ``END_S``.

The process reads JSON lines from its standard input: first the arguments of ``wandb.init``, then the values
of each step. The end of file ends the W&B run. It answers each line on its standard output with ``taken``, or
with a description of the error.
"""

import contextlib
import importlib.util
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from forgeasync.schema import Problem

if TYPE_CHECKING:  # The process of W&B must start without these imports.
    from forgeasync.config import LoggingSection, WandbSection

MAX_KEPT_LINES = 1000
"""Maximum number of lines that wait for W&B. Further ones are lost."""

END_S = 10.0
"""Seconds for the process to end the W&B run. Lines that are not sent by then remain in the folder."""

TAKEN = "taken"

MAX_PROBLEM = 300
"""Maximum number of characters of a reported error."""


def check_wandb(section: "LoggingSection") -> Iterator[Problem]:
    """Check that the ``wandb`` package is installed if the config has ``logging.wandb``."""
    if section.wandb is not None and importlib.util.find_spec("wandb") is None:
        yield Problem(
            field="logging.wandb",
            value=section.wandb.project,
            remedy="needs the wandb package: pip install 'forgeasync[wandb]', or set null",
        )


class WandbLog:
    """Sends a run's metrics to W&B. A thread waits for the process that runs the ``wandb`` package."""

    def __init__(
        self,
        section: "WandbSection",
        folder: Path,
        *,
        log_file: Path,
        name: str,
        config: Mapping[str, object],
        say: Callable[[str], None],
    ) -> None:
        """Start the process and the W&B run.

        Args:
            section: The config's ``logging.wandb`` section.
            folder: Folder for W&B's files.
            log_file: File to which the process's output is appended.
            name: Name of the run in W&B.
            config: Config that W&B shows with the run.
            say: Function that gets one message, from ``add`` or ``close``, if W&B does not accept lines.
        """
        self._folder = folder
        self._say = say
        self._problem: str | None = None
        """First error, if any."""
        self._has_said = False
        self._num_refused = 0
        """Number of lines that were dropped because too many wait."""
        self._num_failed = 0
        """Number of lines that W&B did not accept. Only the thread changes it."""
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "forgeasync.observability.wandb_log"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                # Ctrl-C must not reach this process directly. The run ends it.
                start_new_session=True,
            )
        given = {
            "folder": str(folder.resolve()),
            "project": section.project,
            "entity": section.entity,
            "mode": section.mode.value,
            "name": name,
            "config": dict(config),
        }
        self._thread = threading.Thread(target=self._hand_on, args=(given,), name="wandb", daemon=True)
        self._thread.start()

    @property
    def num_errors(self) -> int:
        """Number of lines that W&B has not accepted and will not get again."""
        return self._num_refused + self._num_failed

    def add(self, values: Mapping[str, float | int]) -> None:
        """Queue a line of finite values for W&B, without waiting."""
        assert all(map(math.isfinite, values.values())), "what is not finite is counted elsewhere"
        if self._lines.qsize() < MAX_KEPT_LINES:
            self._lines.put(json.dumps(values, allow_nan=False))
        else:
            self._num_refused += 1
            self._note("stopped accepting lines")
        self._tell()

    def close(self) -> None:
        """End the W&B run and its process, within ``END_S``. A second call does nothing."""
        if self._process.stdout is None or self._process.stdout.closed:
            return
        self._lines.put(None)
        self._thread.join(END_S)
        if self._thread.is_alive():
            self._note(f"has not ended within {END_S:g} s; `wandb sync` sends what is in {self._folder}")
        # Also kills the processes that wandb itself started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._thread.join()
        self._process.stdout.close()
        self._tell()

    def _hand_on(self, given: Mapping[str, object]) -> None:
        """Send lines to the process until ``close``, and then end it. Runs in the thread."""
        self._ask(json.dumps(given))
        while (line := self._lines.get()) is not None:
            self._num_failed += not self._ask(line)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _ask(self, line: str) -> bool:
        """Send a line to the process, and return whether it accepted the line."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline().rstrip("\n")
        if answer == TAKEN:
            return True
        self._note(answer or f"has ended with exit code {self._process.wait()}")
        return False

    def _note(self, problem: str) -> None:
        self._problem = self._problem or problem

    def _tell(self) -> None:
        if self._problem is not None and not self._has_said:
            self._say(f"W&B: {self._problem}; the run continues without it; metrics.jsonl has all numbers")
            self._has_said = True


# --- the process ---


def _run_id(folder: Path) -> tuple[str, bool]:
    """Return the W&B id of a folder's run, and whether it existed before."""
    file = folder / "id"
    if file.exists():
        return file.read_text(encoding="utf-8").strip(), True
    made = secrets.token_hex(8)
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(made + "\n", encoding="utf-8")
    return made, False


def _answer(descriptor: int, words: str) -> None:
    # The reader may be gone, but the W&B run must still be ended.
    with contextlib.suppress(BrokenPipeError):
        os.write(descriptor, " ".join(words.split())[:MAX_PROBLEM].encode() + b"\n")


def main() -> int:
    """Log the lines of standard input to W&B; return the exit code."""
    # Only the end of file ends this process, after the last lines of a run that is being stopped.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Libraries that print to standard output must not write into the answers.
    answers, sys.stdout = os.dup(1), sys.stderr
    os.dup2(2, 1)
    given = json.loads(sys.stdin.readline())
    folder = Path(given["folder"])
    try:
        import wandb

        run_id, was_there = _run_id(folder)
        is_online = given["mode"] == "online"
        run = wandb.init(
            project=given["project"],
            entity=given["entity"],
            name=given["name"],
            config=given["config"],
            mode=given["mode"],
            dir=str(folder),
            id=run_id,
            resume="allow" if was_there and is_online else None,
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True
            ),
        )
        # With its own step metric, W&B accepts repeated steps after a resumption as further points.
        run.define_metric("*", step_metric="step")
    except Exception as error:
        _answer(answers, f"wandb.init: {type(error).__name__}: {error}")
        return 1
    _answer(answers, TAKEN)
    for line in sys.stdin:
        try:
            run.log(json.loads(line))
        except Exception as error:
            _answer(answers, f"run.log: {type(error).__name__}: {error}")
        else:
            _answer(answers, TAKEN)
    run.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
