"""Whether a run is alive, from its run.lock and without touching the lock.

Whoever tries a lock holds it for a moment, and a run that starts just then would have to wait: so the process
that the file names is looked up instead.
"""

import json
import socket
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from forgeasync.observability import Holder

CLOCK_SLACK_S = 2.0
"""Difference of the clocks by which a process's start and its line in the file are told."""


class Life(StrEnum):
    """What is known of the process that is the run."""

    RUNNING = "running"
    ENDED = "ended"
    """It has ended in order: its last step, told to stop, or an error that it has reported."""
    DIED = "died"
    """It is gone, and has not said so."""
    ELSEWHERE = "elsewhere"
    """It runs, or ran, on another machine, which cannot be asked from here."""
    UNKNOWN = "unknown"
    """There is no run.lock, or it cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLife:
    """A run's life, in words too."""

    life: Life
    words: str


def run_life(lock: Path) -> RunLife:
    """Look at the process that a run.lock names."""
    try:
        holder = Holder(**json.loads(lock.read_bytes()[:4096]))
        is_well_formed = isinstance(holder.pid, int) and isinstance(holder.since_s, float | int)
    except FileNotFoundError:
        return RunLife(life=Life.UNKNOWN, words="has no run.lock")
    except OSError as error:
        return RunLife(life=Life.UNKNOWN, words=f"run.lock cannot be read: {error.strerror}")
    except (ValueError, TypeError, RecursionError):
        is_well_formed = False
    if not is_well_formed:
        return RunLife(
            life=Life.UNKNOWN, words="run.lock says nothing that this version of forgeasync can read"
        )
    if holder.has_ended:
        return RunLife(life=Life.ENDED, words=f"in order; was {holder}")
    if holder.host != socket.gethostname():
        return RunLife(life=Life.ELSEWHERE, words=f"is {holder}; that machine cannot be asked from here")
    if _is_there(holder):
        return RunLife(life=Life.RUNNING, words=f"is {holder}")
    return RunLife(life=Life.DIED, words=f"was {holder}")


def _is_there(holder: Holder) -> bool:
    """Whether the process lives; one that began later only has its number."""
    try:
        process = psutil.Process(holder.pid)
        return (
            process.create_time() <= holder.since_s + CLOCK_SLACK_S
            and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        # It is another user's: there, but not to be asked.
        return True
