"""What an episode is doing at the moment: which of its deadlines comes next depends on it."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class EpisodeActivity:
    """What an episode is doing, for its deadlines; times are those of ``now_s``."""

    now_s: Callable[[], float] = time.perf_counter
    num_sampling: int = 0
    num_begun: int = 0
    last_s: float = 0.0
    """When the episode began, or the last turn under way or wait for a person ended."""
    sampling_s: float = 0.0
    judging_since_s: dict[int, float] = field(default_factory=dict)
    num_waiting: int = 0
    """Waits for people and for generators that are under way; they may overlap."""
    waited_s: float = 0.0
    """Time for which somebody was waited for, waits that go on left out."""
    waited_before_turns_s: float = 0.0
    """That of waits which ended before the first turn began: nothing has grown old meanwhile."""
    _waiting_since_s: float = 0.0

    def begin(self, now_s: float) -> None:
        if not self.num_sampling:
            self.last_s = now_s
        self.num_sampling += 1
        self.num_begun += 1

    def end(self, now_s: float) -> None:
        self.num_sampling -= 1
        if not self.num_sampling:
            self.sampling_s += now_s - self.last_s
            self.last_s = now_s

    def begin_wait(self, now_s: float) -> None:
        """From now on deadlines stand still."""
        if not self.num_waiting:
            self._waiting_since_s = now_s
        self.num_waiting += 1

    def end_wait(self, now_s: float) -> None:
        """Deadlines go on if nobody else is waited for."""
        self.num_waiting -= 1
        if self.num_waiting:
            return
        waited_s = now_s - self._waiting_since_s
        self.waited_s += waited_s
        if not self.num_begun:
            self.waited_before_turns_s += waited_s
        for turn, since_s in self.judging_since_s.items():
            self.judging_since_s[turn] = since_s + waited_s
        if not self.num_sampling:
            self.last_s = now_s

    def waiting_on(self, loop: asyncio.AbstractEventLoop) -> Callable[[], AbstractContextManager[None]]:
        """Return what an agent of the episode enters, on any thread, while it waits for a person or for a
        generator; this object belongs to ``loop``."""

        @contextmanager
        def waiting() -> Iterator[None]:
            loop.call_soon_threadsafe(self.begin_wait, self.now_s())
            try:
                yield
            finally:
                loop.call_soon_threadsafe(self.end_wait, self.now_s())

        return waiting
