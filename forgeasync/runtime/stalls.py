"""Detects stalls of a run, and describes what its tasks and threads wait for.

``StallPolicy`` is pure; times are passed in. It compares a run that reports no fault with its own history:

    the whole run      has stalled if nothing has progressed for ``ALL_FACTOR`` times the longest quiet time
    optimizer steps    have stalled if none was made for ``STEP_FACTOR`` times the longest time of a step,
                       even if everything else progresses

Each rule also has a floor. During the first ``NUM_STEPS`` steps, which compile models and fill caches, only
the first rule applies, with its own floor; their quiet times are not part of the history.

``awaited_calls`` finds what the tasks of this process wait for: a waiting task is a chain of coroutines, each
awaiting the next. ``read_stacks`` reads the Python stacks of another process with py-spy. That process may be
stopped, because its memory is read from outside. The kernel must allow this: it requires the same user and,
with Yama's ptrace_scope at 1, further rights.
"""

import asyncio
import contextlib
import linecache
import subprocess
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import msgspec
import psutil

ALL_FACTOR = 5.0
STEP_FACTOR = 10.0

ALL_FLOOR_S = 60.0
STEP_FLOOR_S = 180.0
FIRST_FLOOR_S = 300.0

NUM_STEPS = 3

MAX_CALLS = 8
"""Maximum number of calls in a description."""

MAX_SOURCE = 80
"""Maximum number of characters of a line of code."""

REPOSITORY = Path(__file__).resolve().parents[2]

WATCHES = ("watch", "until_lost", "_fail_with", "_look_after")
"""Names of coroutines that supervise processes and wait for no call."""

ROOMS = ("forgeasync", "apps")
"""Folders with a run's own code."""

LIMIT_S = 10.0
"""Time limit of reading a process, in seconds; a large one takes seconds if every core is busy."""

MAX_THREADS = 4
"""Maximum number of threads in a description, the most informative first."""

MAX_FRAMES = 7
"""Maximum number of frames of a thread in a description, starting with the innermost."""

MAX_CHARACTERS = 1500

NUM_ATTEMPTS = 3
"""Attempts to read a process; an attempt can fail if the process changes its stack meanwhile."""

PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")

OWN = ("forgeasync/", "apps/", "examples/")
"""Parts of paths that identify a run's own code."""

IDLE = ("threading.py", "queue.py", "selectors.py", "concurrent/futures/thread.py")
"""Files that contain the innermost frame of a waiting thread."""

STATES = {
    psutil.STATUS_STOPPED: "it was stopped by a signal; ",
    psutil.STATUS_TRACING_STOP: "a debugger has stopped it; ",
    psutil.STATUS_DISK_SLEEP: "it waits in the kernel, as for a disk; ",
}
"""Messages for states in which a process runs no code."""


class Progress(StrEnum):
    """Kinds of progress in a run."""

    STEP = "optimizer step"
    TOKENS = "sampled token"
    SCORES = "score"
    WEIGHTS = "change of weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Report of a stalled run."""

    is_whole: bool
    """Whether nothing progresses at all; otherwise only optimizer steps have stalled."""
    quiet_s: float
    longest_s: float
    """Longest quiet time before the stall."""
    since_s: Mapping[Progress, float]
    """Seconds since each kind of progress, or since the start of the monitoring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Report that a stalled run progresses again."""

    quiet_s: float


class StallPolicy:
    """Detects stalls in the progress of one run."""

    def __init__(self) -> None:
        self._marks: dict[Progress, Hashable] = {}
        self._since_s = dict.fromkeys(Progress, 0.0)
        self._num_steps = 0
        self._longest_s = 0.0
        self._longest_step_s = 0.0
        self._stall: Stall | None = None
        self.num_found = 0

    def look(self, passed_s: float, marks: Mapping[Progress, Hashable]) -> Stall | Resumed | None:
        """Process the marks of each kind of progress, and return a change of state, if any.

        A changed mark means progress. ``passed_s`` is the time since the previous call. A stall is returned
        once.
        """
        quiet_s, step_s = min(self._since_s.values()) + passed_s, self._since_s[Progress.STEP] + passed_s
        moved = {kind for kind in marks if kind in self._marks and marks[kind] != self._marks[kind]}
        self._marks |= marks
        for kind in Progress:
            self._since_s[kind] = 0.0 if kind in moved else self._since_s[kind] + passed_s
        resumed = None
        if self._stall is not None and (moved if self._stall.is_whole else Progress.STEP in moved):
            resumed = Resumed(quiet_s=quiet_s if self._stall.is_whole else step_s)
            self._stall = None
        if moved:
            self._longest_s = max(self._longest_s, quiet_s)
        if Progress.STEP in moved:
            self._num_steps += 1
            self._longest_step_s = max(self._longest_step_s, step_s)
            if self._num_steps == NUM_STEPS:
                self._longest_s = 0.0
        return resumed or self._find()

    def rest(self) -> None:
        """Reset all times, because the reason for the delay is known and handled."""
        self._since_s = dict.fromkeys(Progress, 0.0)
        self._stall = None

    def _find(self) -> Stall | None:
        if self._stall is not None:
            return None
        quiet_s, step_s = min(self._since_s.values()), self._since_s[Progress.STEP]
        is_first = self._num_steps < NUM_STEPS
        floor_s = FIRST_FLOOR_S if is_first else ALL_FLOOR_S
        if quiet_s > max(floor_s, ALL_FACTOR * self._longest_s):
            is_whole, longest_s = True, self._longest_s
        elif not is_first and step_s > max(STEP_FLOOR_S, STEP_FACTOR * self._longest_step_s):
            is_whole, quiet_s, longest_s = False, step_s, self._longest_step_s
        else:
            return None
        self.num_found += 1
        since_s = dict(self._since_s)
        self._stall = Stall(is_whole=is_whole, quiet_s=quiet_s, longest_s=longest_s, since_s=since_s)
        return self._stall


def awaited_calls(tasks: "Iterable[asyncio.Task[Any]]") -> str:
    """Return in one line what tasks wait for: the loop, its line, and the innermost function of the call.

    A call that several tasks wait for is named once, with their number. Tasks that sleep between polls, that
    supervise processes, or that run no code of the run are left out. Tasks of apps come first.
    """
    all_own = (_own_frames(task) for task in tasks if not task.done())
    ordered = sorted(Counter(_call(own) for own in all_own if own).items())
    named = [words if count == 1 else f"{words} ({count} of these)" for (_, words), count in ordered]
    if len(named) > MAX_CALLS:
        named = [*named[:MAX_CALLS], f"{len(named) - MAX_CALLS} more"]
    return "; ".join(named)


def _own_frames(task: "asyncio.Task[Any]") -> list[FrameType]:
    """Return a task's frames in the run's code, outermost first; none if the task polls or supervises."""
    own: list[FrameType] = []
    for frame in _chain(task.get_coro()):
        if frame.f_code.co_name == "sleep" and frame.f_code.co_filename.endswith("asyncio/tasks.py"):
            return []
        if _place(frame):
            own.append(frame)
    return [] if any(frame.f_code.co_name in WATCHES for frame in own) else own


def _call(own: Sequence[FrameType]) -> tuple[bool, str]:
    """Return whether a task is not an app's, and a description of what it waits for."""
    of_app = [frame for frame in own if _place(frame).startswith("apps")]
    # The innermost function of an app is the loop; main may have called it.
    loop, innermost = of_app[-1] if of_app else own[0], own[-1].f_code.co_qualname
    source = " ".join(linecache.getline(loop.f_code.co_filename, loop.f_lineno).split())
    if len(source) > MAX_SOURCE:
        source = source[: MAX_SOURCE - 1] + "…"
    name = loop.f_code.co_qualname
    inside = "" if innermost == name else f", in {innermost}"
    return not of_app, f"{name} ({_place(loop)}:{loop.f_lineno}: {source}{inside})"


def _chain(waiting: object) -> Iterator[FrameType]:
    """Yield the frames of a waiting coroutine, outermost first."""
    while waiting is not None:
        # Coroutines, awaited generators and asynchronous generators have different attributes.
        kind = next((one for one in ("cr", "gi", "ag") if hasattr(waiting, f"{one}_frame")), None)
        if kind is None:
            return
        frame: FrameType | None = getattr(waiting, f"{kind}_frame")
        if frame is not None:
            yield frame
        waiting = getattr(waiting, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")


def _place(frame: FrameType) -> str:
    """Return the path of a frame's code relative to the repository; empty for code of others."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(REPOSITORY):
        return ""
    place = path.relative_to(REPOSITORY)
    return str(place) if place.parts[0] in ROOMS else ""


class Frame(msgspec.Struct, frozen=True):
    """A call in the output of py-spy; other fields are ignored."""

    name: str
    filename: str
    short_filename: str | None
    line: int


class Thread(msgspec.Struct, frozen=True):
    """A thread with its calls, innermost first."""

    frames: tuple[Frame, ...]
    os_thread_id: int | None = None
    thread_name: str | None = None
    owns_gil: bool = False


_Threads = Annotated[list[Thread], msgspec.Meta(max_length=100_000)]


def read_stacks(pid: int) -> str:
    """Return in one line what the threads of a process are doing, or why that cannot be read."""
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
    """Return a message if a process is stopped or blocked in the kernel; empty otherwise."""
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
    """Describe threads in one line; those that compute or are in the run's own code come first."""
    if not threads:
        return "it has no Python thread"
    counts = Counter(_describe_thread(one) for one in sorted(threads, key=_rank))
    shown = [words if num == 1 else f"{words} ({num} of these)" for words, num in counts.items()]
    words = "; ".join(shown[:MAX_THREADS])
    if num_left := sum([*counts.values()][MAX_THREADS:]):
        words += f"; and {num_left} more threads"
    return words if len(words) <= MAX_CHARACTERS else words[: MAX_CHARACTERS - 1] + "…"


def _waits(thread: Thread) -> bool:
    return not thread.frames or (thread.frames[0].short_filename or "").endswith(IDLE)


def _is_own(thread: Thread) -> bool:
    """Return whether the run's own code is on the thread's stack."""
    return any(part in frame.filename for frame in thread.frames for part in OWN)


def _rank(thread: Thread) -> tuple[bool, bool, bool, int]:
    return not thread.owns_gil, _waits(thread), not _is_own(thread), thread.os_thread_id or 0


def _describe_thread(thread: Thread) -> str:
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
