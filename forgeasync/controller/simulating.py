"""Has a process simulate for a run, and keeps what it says in ``prediction.json``."""

import subprocess
import sys
import threading
from pathlib import Path

from pydantic import ValidationError

from forgeasync.prediction import Prediction, PredictionRecord, PredictionRequest, write_prediction

LIMIT_S = 1800.0
"""Time for one request; the runs with most GPUs take minutes."""


class Simulating:
    """One request at a time. ``record`` may be read at any time."""

    def __init__(
        self, file: Path, log: Path, *, profile: str, profile_of: str, limit_s: float = LIMIT_S
    ) -> None:
        """``file`` is the prediction's, ``log`` takes what the process prints besides."""
        self._file = file
        self._log = log
        self._profile = profile
        self._profile_of = profile_of
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self.record: PredictionRecord | None = None
        """What has been predicted so far."""
        self.problems: list[str] = []
        """What went wrong so far; the run goes on without it."""

    @property
    def is_busy(self) -> bool:
        """Whether a request is under way."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, request: PredictionRequest) -> None:
        """Start with a request; there is none under way."""
        assert not self.is_busy and not self._is_closed
        self._thread = threading.Thread(target=self._serve, args=(request,), name="simulating", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Wait until the request under way is answered, but not for longer than this."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def close(self) -> None:
        """End the process, with or without an answer; a second call does nothing."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()
        if self._thread is not None:
            self._thread.join()

    def _serve(self, request: PredictionRequest) -> None:
        try:
            problem = self._simulate(request)
        except (OSError, ValidationError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            self._failed(problem)

    def _simulate(self, request: PredictionRequest) -> str | None:
        """Have a process answer; returns what went wrong."""
        command = [sys.executable, "-m", "forgeasync.prediction.process"]
        with self._log.open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        self._process = process
        is_late = threading.Event()

        def end_late() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(self._limit_s, end_late)
        timer.daemon = True
        timer.start()
        with process:
            assert process.stdin is not None and process.stdout is not None
            try:
                if self._is_closed:
                    process.kill()
                process.stdin.write(request.model_dump_json().encode())
                process.stdin.close()
                for line in process.stdout:
                    self._keep(Prediction.model_validate_json(line, strict=True))
            except BaseException:
                # Leaving the block waits for it.
                process.kill()
                raise
            finally:
                timer.cancel()
        if is_late.is_set():
            return f"it was not ready within {self._limit_s:g} s"
        code = process.returncode
        return None if code == 0 else f"its process ended with exit code {code} (see {self._log})"

    def _keep(self, found: Prediction) -> None:
        if self.record is None:
            self.record = PredictionRecord(
                profile=self._profile, profile_of=self._profile_of, start=found, newest=found
            )
        else:
            self.record = self.record.with_news(found)
        try:
            write_prediction(self.record, self._file)
        except OSError as error:
            self._failed(f"{self._file} cannot be written: {error.strerror}")

    def _failed(self, problem: str) -> None:
        # What closing has killed has not failed.
        if not self._is_closed:
            self.problems.append(problem)
