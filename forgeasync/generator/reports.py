"""Reports of engines and the clocks behind them. Importing this module does not import vLLM."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from forgeasync.processes import MemoryPeak
from forgeasync.rollouts import GroupProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters of one engine since it started."""

    num_generated_tokens: int
    busy_s: float
    """Seconds with at least one request in flight."""
    num_log_failures: int = 0
    """Number of failures of the log of tokens in flight.

    After a failure, groups that were open restart from the prompt if the engine dies.
    """
    memory: MemoryPeak | None = None
    """Peak memory of the generator's largest process; None if not measured."""


class GroupCancelled(Exception):
    """The group was cancelled; its sequences are lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapReport:
    """Report of one weight update of one engine."""

    pause_s: float
    """Seconds for which the swap itself paused decoding."""
    waited_s: float
    """Seconds before the swap in which running sequences drained, or decoding was paused for the fetch."""
    num_crossing: int
    """Number of running sequences that continue in place."""
    num_resumed: int
    """Number of sequences that were ended and restart with their tokens so far as prefix."""
    num_recomputed: int
    """Number of sequences whose KV cache is recomputed with the new weights."""
    progress: tuple[GroupProgress, ...]
    """Progress of the groups in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDifference:
    """A token that has other bits when its request is executed again."""

    draw_id: int
    """Draw of the token's group."""
    episode: int
    agent: int
    branch: int
    position: int
    """Index of the token in the response of its branch."""
    version: int
    """Policy version that sampled the token."""
    what: str
    """Value that differs."""
    recorded: str
    found: str

    def __str__(self) -> str:
        agent = f" of agent {self.agent}" if self.agent else ""
        branch = f", branch {self.branch}" if self.branch else ""
        return (
            f"{self.what} of token {self.position} in rollout {self.episode}{agent}{branch}, sampled under "
            f"version {self.version}: recorded {self.recorded}, found {self.found}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReexecutedVersion:
    """Outcome of the requests that an engine has sampled again under one version."""

    num_tokens: int
    """Number of tokens of the requests that ended."""
    num_waiting: int
    """Number of requests that continue under the next version."""
    differences: tuple[TokenDifference, ...]
    """First difference of each request that has one, in the order of versions."""


class BusyClock:
    """Clock of the time during which at least one request is running."""

    def __init__(self) -> None:
        self._num_running = 0
        self._since_s = 0.0
        self._before_s = 0.0

    @property
    def total_s(self) -> float:
        """Seconds during which at least one request was running."""
        return self._before_s + (time.perf_counter() - self._since_s if self._num_running else 0.0)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count one more running request during the block."""
        if self._num_running == 0:
            self._since_s = time.perf_counter()
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            if self._num_running == 0:
                self._before_s += time.perf_counter() - self._since_s
