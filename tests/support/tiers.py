"""Which tests start processes: by their marks ``make test-fast`` and ``make test`` leave tests out.

A helper that starts something says so with ``@starts``. Tests that reach it through their own code, their
fixtures or other helpers get the mark without being told, and a test that comes to it unmarked fails.
"""

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, ParamSpec, TypeVar

import pytest

P = ParamSpec("P")
R = TypeVar("R")


class Starts(StrEnum):
    """Marks of tests that start processes."""

    ENGINE = "engine"
    """A vLLM engine."""
    PROCESSES = "processes"
    """Gloo ranks, Monarch processes, or a whole run."""


class MarkMissing(RuntimeError):
    """A test that is not marked so starts a process."""


_running: pytest.Item | None = None


@contextmanager
def running(item: pytest.Item) -> Iterator[None]:
    """While a test with its fixtures runs, ``check`` looks at its marks."""
    global _running
    before, _running = _running, item
    try:
        yield
    finally:
        _running = before


def check(mark: Starts) -> None:
    """To be called before something is started.

    Raises:
        MarkMissing: the running test has no such mark.
    """
    if _running is not None and _running.get_closest_marker(mark) is None:
        raise MarkMissing(f"{_running.nodeid} starts processes: mark it with pytest.mark.{mark}")


def starts(mark: Starts) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a helper that starts processes."""

    def decorate(helper: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(helper)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            check(mark)
            return helper(*args, **kwargs)

        checked.starts = mark
        return checked

    return decorate


def started_by(item: pytest.Function) -> set[Starts]:
    """What a test starts, as far as the helpers that its code and its fixtures name tell."""
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    roots = [item.function, *(of_name[-1].func for of_name in fixtures)]
    found: set[Starts] = set()
    seen: set[int] = set()
    while roots:
        function = roots.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        if isinstance(function, types.FunctionType) and hasattr(function, "starts"):
            found.add(function.starts)
        elif isinstance(function, types.FunctionType) and function.__module__.startswith("tests."):
            names = _names(function.__code__)
            roots += [function.__globals__[name] for name in names if name in function.__globals__]
    return found


def _names(code: types.CodeType) -> set[str]:
    """Global names in a function's code and in the functions that it defines."""
    inner: list[Any] = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))
