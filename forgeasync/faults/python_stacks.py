"""The Python stacks of another process of this host, read from outside by py-spy, in one bounded line.

The process takes no part in it and may be stopped: its memory is read as it lies there. For that the kernel
must let this user read it (ptrace's rules: the same user and, with Yama's ptrace_scope at 1, more rights than
that). What keeps the stacks from being read stands in their place.
"""

import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import psutil

LIMIT_S = 10.0
"""Time for reading a process; a large one takes seconds where every core is busy."""

MAX_THREADS = 4
"""So many threads are shown, those first that show what the process does."""

MAX_FRAMES = 7
"""So many frames of each are shown, from the innermost."""

MAX_CHARACTERS = 1500

NUM_ATTEMPTS = 3
"""A process that runs on changes its stack while it is read, which can leave nothing to be read."""

PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")

OWN = ("forgeasync/", "apps/", "examples/")
"""Paths with one of these are the run's code, and not a library's."""

IDLE = ("threading.py", "queue.py", "selectors.py", "concurrent/futures/thread.py")
"""A thread whose innermost frame is in one of these waits."""

STATES = {
    psutil.STATUS_STOPPED: "it was stopped by a signal; ",
    psutil.STATUS_TRACING_STOP: "a debugger has stopped it; ",
    psutil.STATUS_DISK_SLEEP: "it waits in the kernel, as for a disk; ",
}
"""What a process does that runs no code, in words."""


class Frame(msgspec.Struct, frozen=True):
    """A call, as py-spy writes it; other fields are passed over."""

    name: str
    filename: str
    short_filename: str | None
    line: int


class Thread(msgspec.Struct, frozen=True):
    """A thread with its calls, the innermost first."""

    frames: tuple[Frame, ...]
    os_thread_id: int | None = None
    thread_name: str | None = None
    owns_gil: bool = False


_Threads = Annotated[list[Thread], msgspec.Meta(max_length=100_000)]


def read_stacks(pid: int) -> str:
    """Return what the threads of a process are doing, in one line; or in words why that cannot be read."""
    program = Path(sys.executable).with_name("py-spy")
    command = [str(program), "dump", "--nonblocking", "--json", "--pid", str(pid)]
    problem = ""
    for _ in range(NUM_ATTEMPTS):
        try:
            answer = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=False
            )
        except FileNotFoundError:
            return f"its stack is not known: {program} is not there (py-spy)"
        except subprocess.TimeoutExpired:
            return f"its stack is not known: py-spy has not read it within {LIMIT_S:g} s"
        if answer.returncode == 0:
            return _state(pid) + describe(msgspec.json.decode(answer.stdout, type=_Threads))
        problem = answer.stderr.decode(errors="replace").strip()
    first, *_ = problem.splitlines() or ["nothing"]
    if any(word in problem.lower() for word in ("permission denied", "not permitted")):
        return f"its stack is not known: this user may not read its memory{_scope()}"
    return f"its stack is not known: py-spy says {first[:200]!r}"


def _state(pid: int) -> str:
    """Say that a process is stopped, or that the kernel does not let it go on; empty otherwise."""
    status = ""
    with contextlib.suppress(psutil.Error):
        status = psutil.Process(pid).status()
    return STATES.get(status, "")


def _scope() -> str:
    try:
        scope = PTRACE_SCOPE.read_text(encoding="ascii").strip()
    except OSError:
        return ""
    return "" if scope == "0" else f" ({PTRACE_SCOPE} is {scope}; at 0 a user may read its own processes)"


def describe(threads: Sequence[Thread]) -> str:
    """Return threads in one line: those that compute or are in the run's code first."""
    if not threads:
        return "it has no Python thread"
    counts = Counter(_thread_words(one) for one in sorted(threads, key=_rank))
    shown = [words if num == 1 else f"{words} ({num} of these)" for words, num in counts.items()]
    words = "; ".join(shown[:MAX_THREADS])
    if num_left := sum([*counts.values()][MAX_THREADS:]):
        words += f"; and {num_left} more threads"
    return words if len(words) <= MAX_CHARACTERS else words[: MAX_CHARACTERS - 1] + "…"


def _waits(thread: Thread) -> bool:
    return not thread.frames or (thread.frames[0].short_filename or "").endswith(IDLE)


def _is_own(thread: Thread) -> bool:
    """Whether the run's own code has called what the thread does."""
    return any(part in frame.filename for frame in thread.frames for part in OWN)


def _rank(thread: Thread) -> tuple[bool, bool, bool, int]:
    return not thread.owns_gil, _waits(thread), not _is_own(thread), thread.os_thread_id or 0


def _thread_words(thread: Thread) -> str:
    name = thread.thread_name or f"thread {thread.os_thread_id}"
    if _waits(thread) and not _is_own(thread) and not thread.owns_gil:
        return f"{name} waits for something to do"
    frames = [
        f"{frame.name} ({frame.short_filename or frame.filename}:{frame.line})"
        for frame in thread.frames[:MAX_FRAMES]
    ]
    if len(thread.frames) > MAX_FRAMES:
        frames.append("...")
    return f"{name} in {' < '.join(frames)}" if frames else f"{name} in no Python code"
