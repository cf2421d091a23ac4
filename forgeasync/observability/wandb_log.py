"""Weights & Biases beside TensorBoard, for runs whose config has ``logging.wandb``.

The ``wandb`` package runs in a process of its own, which is this module as a program. In the controller,
``wandb.init``, ``finish`` and the package's own exit hook would wait for as long as W&B hangs. A W&B that
hangs, fails or dies costs its own lines, which are counted. Only the end of a run waits, for at most
``END_S``.

The process reads JSON lines from its standard input: first what ``wandb.init`` is given, then the values of
each step, until the end of file, which ends the W&B run. It answers each line on its standard output with
``taken``, or with what has gone wrong.
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

if TYPE_CHECKING:  # the process of W&B starts without them
    from forgeasync.config import LoggingSection, WandbSection

MAX_KEPT_LINES = 1000
"""Most lines that wait for W&B; further ones are lost."""

END_S = 10.0
"""Time for the process to end the W&B run. What was not sent by then lies in the folder."""

TAKEN = "taken"

MAX_PROBLEM = 300
"""Characters of a problem that are told."""


def check_wandb(section: "LoggingSection") -> Iterator[Problem]:
    """Check that a run that wants W&B has the package."""
    if section.wandb is not None and importlib.util.find_spec("wandb") is None:
        yield Problem(
            field="logging.wandb",
            value=section.wandb.project,
            remedy="needs the wandb package: pip install 'forgeasync[wandb]', or set null",
        )


class WandbLog:
    """The W&B run of one run. A thread of its own waits for the process that has the ``wandb`` package."""

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
        """``folder`` gets W&B's files, ``log_file`` what it prints. ``config`` is shown with the run.

        ``say`` is called once, from ``add`` or ``close``, if W&B does not take lines.
        """
        self._folder = folder
        self._say = say
        self._problem: str | None = None
        """The first one."""
        self._has_said = False
        self._num_refused = 0
        """Lines that were not handed on, because too many wait."""
        self._num_failed = 0
        """Lines that W&B has not taken. Only the thread counts them."""
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
                # Ctrl-C ends the run, and the run ends this process.
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
        """Lines that W&B has not taken and will not."""
        return self._num_refused + self._num_failed

    def add(self, values: Mapping[str, float | int]) -> None:
        """Hand a line of finite values on; waits for nothing."""
        assert all(map(math.isfinite, values.values())), "what is not finite is counted elsewhere"
        if self._lines.qsize() < MAX_KEPT_LINES:
            self._lines.put(json.dumps(values, allow_nan=False))
        else:
            self._num_refused += 1
            self._note("does not take lines any more")
        self._tell()

    def close(self) -> None:
        """End the W&B run and its process; a second call does nothing."""
        if self._process.stdout is None or self._process.stdout.closed:
            return
        self._lines.put(None)
        self._thread.join(END_S)
        if self._thread.is_alive():
            self._note(f"has not ended within {END_S:g} s; `wandb sync` sends what is in {self._folder}")
        # With wandb's own processes, also those that are left.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._thread.join()
        self._process.stdout.close()
        self._tell()

    def _hand_on(self, given: Mapping[str, object]) -> None:
        """Hand lines on until ``close``, and end the process."""
        self._ask(json.dumps(given))
        while (line := self._lines.get()) is not None:
            self._num_failed += not self._ask(line)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _ask(self, line: str) -> bool:
        """Return whether the process has taken a line."""
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
            self._say(f"W&B: {self._problem}; the run goes on without it, metrics.jsonl has all numbers")
            self._has_said = True


# --- the process ---


def _run_id(folder: Path) -> tuple[str, bool]:
    """Return the id under which W&B knows the run of a folder, and whether it was made before."""
    file = folder / "id"
    if file.exists():
        return file.read_text(encoding="utf-8").strip(), True
    made = secrets.token_hex(8)
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(made + "\n", encoding="utf-8")
    return made, False


def _answer(descriptor: int, words: str) -> None:
    # The other end may be gone, and the W&B run is to be ended all the same.
    with contextlib.suppress(BrokenPipeError):
        os.write(descriptor, " ".join(words.split())[:MAX_PROBLEM].encode() + b"\n")


def main() -> int:
    """Hand on what comes; return the exit code."""
    # The end of file ends this process, after the last lines of a run that was told to stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # What libraries print is no answer.
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
        # Steps that are made again after a resumption are further points, and no step is refused as too old.
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
