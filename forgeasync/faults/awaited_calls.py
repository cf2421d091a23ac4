"""What the tasks of this process's event loop wait for, read from their coroutines.

A task that waits is a chain of coroutines, each awaiting the next. Its frames in the run's own code say which
loop it is, the call that the loop waits for, and how far that call has come.
"""

import asyncio
import linecache
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

MAX_CALLS = 8
"""So many calls are named."""

MAX_SOURCE = 80
"""Characters of a line of code."""

REPOSITORY = Path(__file__).resolve().parents[2]

WATCHES = ("watch", "until_lost", "_fail_with", "_look_after")
"""Coroutines that look after processes, and wait for no call."""

ROOMS = ("forgeasync", "apps")
"""Folders of the run's own code."""


def awaited_calls(tasks: "Iterable[asyncio.Task[Any]]", about: Sequence[str] = ()) -> str:
    """Return what tasks wait for, in one line; what several wait for is named once, with their number.

    With ``about`` only those whose code has one of these words, if there are any. Left out are tasks that
    sleep until they look again, those that look after processes, and those outside of the run's code; apps
    come first.
    """
    found: Counter[tuple[bool, str]] = Counter()
    relevant: Counter[tuple[bool, str]] = Counter()
    for task in tasks:
        own = [] if task.done() else _own_frames(task)
        if not own:
            continue
        call = _call(own)
        found[call] += 1
        text = " ".join([call[1], *(f"{_place(frame)} {frame.f_code.co_qualname}" for frame in own)]).lower()
        if any(word in text for word in about):
            relevant[call] += 1
    ordered = sorted((relevant or found).items())
    named = [words if count == 1 else f"{words} ({count} of these)" for (_, words), count in ordered]
    if len(named) > MAX_CALLS:
        named = [*named[:MAX_CALLS], f"{len(named) - MAX_CALLS} more"]
    return "; ".join(named)


def _own_frames(task: "asyncio.Task[Any]") -> list[FrameType]:
    """Return a task's frames in the run's code, the outermost first; none if it only looks at something."""
    own: list[FrameType] = []
    for frame in _chain(task.get_coro()):
        if frame.f_code.co_name == "sleep" and frame.f_code.co_filename.endswith("asyncio/tasks.py"):
            return []
        if _place(frame):
            own.append(frame)
    return [] if any(frame.f_code.co_name in WATCHES for frame in own) else own


def _call(own: Sequence[FrameType]) -> tuple[bool, str]:
    """Whether a task is none of an app, and in words what it waits for."""
    of_app = [frame for frame in own if _place(frame).startswith("apps")]
    # A loop of an app may be called by the app's main function.
    loop, innermost = of_app[-1] if of_app else own[0], own[-1].f_code.co_qualname
    source = " ".join(linecache.getline(loop.f_code.co_filename, loop.f_lineno).split())
    if len(source) > MAX_SOURCE:
        source = source[: MAX_SOURCE - 1] + "…"
    name = loop.f_code.co_qualname
    inside = "" if innermost == name else f", in {innermost}"
    return not of_app, f"{name} ({_place(loop)}:{loop.f_lineno}: {source}{inside})"


def _chain(waiting: object) -> Iterator[FrameType]:
    """Yield the frames of a coroutine that waits, the outermost first."""
    while waiting is not None:
        # Coroutines, generators that are awaited, and asynchronous generators name them differently.
        kind = next((one for one in ("cr", "gi", "ag") if hasattr(waiting, f"{one}_frame")), None)
        if kind is None:
            return
        frame: FrameType | None = getattr(waiting, f"{kind}_frame")
        if frame is not None:
            yield frame
        waiting = getattr(waiting, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")


def _place(frame: FrameType) -> str:
    """Return the file of a frame's code from the repository's folder; empty if it is not the run's own."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(REPOSITORY):
        return ""
    place = path.relative_to(REPOSITORY)
    return str(place) if place.parts[0] in ROOMS else ""
