"""Decides what happens to running sequences when new weights arrive: one small class for each mode.

Who waits for whom: an update runs ``prefetch`` on the event loop and, within it, the swap on the engine's
thread, between two decode steps. ``prefetch`` may hold back new requests (drain) or decoding (blocking);
``end_requests`` runs in the same act as the swap and says which requests end there. vLLM then sends each of
them off with everything recorded so far, and the engine resumes them.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from forgeasync.config import Interruption
from forgeasync.generator.workarounds.inprocess_client import InProcessAsyncClient, scheduler_of
from forgeasync.rollouts import GroupProgress
from forgeasync.tracing import State, doing

Prefetch = Callable[[], Awaitable[None]]

GROUP_ARGUMENT = "forgeasync_group"
"""Names a request's group in its sampling parameters, where the engine's thread finds it."""

NO_GROUP = -1
"""What stands there for requests of no group that updates tell of: below 0."""

SAMPLE_ARGUMENT = "forgeasync_sample"
"""Names the place of a request's response or episode in its group."""

EPISODE_ARGUMENT = "forgeasync_episode"
"""Names what a request belongs to and is ended with: one response, or one attempt at an episode."""


@dataclass(slots=True)
class RunningGroup:
    """A group in the engine. The event loop writes, the engine's thread reads."""

    num_tokens: int = 0
    """In parts of responses that have ended."""
    is_cancelled: bool = False


class Groups:
    """The groups in the engine, by the number that their requests carry."""

    def __init__(self) -> None:
        self._groups: dict[int, RunningGroup] = {}
        self._num_unnamed = 0
        self._cancelled_episodes: set[int] = set()

    def open(self, group_id: int | None) -> tuple[int, RunningGroup]:
        """A group whose first request is about to come; None: one that nobody asks about.

        Raises:
            ValueError: another group of this id is being sampled.
        """
        if group_id is None:
            self._num_unnamed += 1
            group_id = -self._num_unnamed
        if group_id in self._groups:
            raise ValueError(
                f"group_id = {group_id}: is being sampled already; groups in flight need ids of their own"
            )
        group = RunningGroup()
        self._groups[group_id] = group
        return group_id, group

    def close(self, key: int) -> None:
        """Close a group; no further request of it comes."""
        del self._groups[key]

    def cancel(self, group_ids: Iterable[int]) -> None:
        """Mark groups; those that have ended meanwhile are no news (event loop)."""
        for group_id in group_ids:
            if group_id in self._groups:
                self._groups[group_id].is_cancelled = True

    def cancel_episode(self, number: int) -> None:
        """Mark an episode; those that have ended meanwhile are no news (event loop)."""
        self._cancelled_episodes.add(number)

    def cancelled_requests(self, core: EngineCore) -> tuple[str, ...]:
        """Requests of cancelled groups and episodes (engine thread)."""
        return tuple(
            request_id
            for request_id, request in scheduler_of(core).requests.items()
            if _arguments(request)[EPISODE_ARGUMENT] in self._cancelled_episodes
            or ((group := self._groups.get(_group_id(request))) is not None and group.is_cancelled)
        )

    def progress(self, core: EngineCore, version: int) -> tuple[GroupProgress, ...]:
        """Return the progress of each named group that has requests in the engine (engine thread)."""
        running: dict[int, list[Request]] = {}
        for request in scheduler_of(core).requests.values():
            running.setdefault(_group_id(request), []).append(request)
        return tuple(
            GroupProgress(
                group_id=group_id,
                version=version,
                # An episode can have several requests under way.
                num_running=len({_arguments(request)[SAMPLE_ARGUMENT] for request in requests}),
                num_tokens=sum(request.num_output_tokens for request in requests)
                + self._groups[group_id].num_tokens,
            )
            for group_id, requests in running.items()
            if group_id >= 0 and group_id in self._groups
        )


def _arguments(request: Request) -> dict[str, int]:
    params = request.sampling_params
    assert params is not None and params.extra_args is not None, "every request of the engine has them"
    return params.extra_args


def _group_id(request: Request) -> int:
    return _arguments(request)[GROUP_ARGUMENT]


class AdmissionGate:
    """Every request passes it on its way into the engine; it can be closed, and knows when none is inside."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._num_inside = 0

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """Wait until the gate is open, then count as inside."""
        # Who is woken may find it closed again.
        while not self._open.is_set():
            await self._open.wait()
        self._num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._empty.set()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Close the gate during the block."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    async def until_empty(self) -> None:
        await self._empty.wait()


class InFlight:
    """Weights are fetched while decoding goes on; running sequences continue under the new ones."""

    @asynccontextmanager
    async def prefetch(self, fetch: Prefetch) -> AsyncIterator[float]:
        """Fetch the weights; the block swaps them in. Yields for how many seconds sequences waited."""
        await fetch()
        yield 0.0

    def end_requests(self, core: EngineCore) -> tuple[str, ...]:
        """Which requests end at the swap, to be resumed (engine thread)."""
        return ()


@dataclass(frozen=True, slots=True)
class Blocking(InFlight):
    """Decoding stops from before the fetch until after the swap."""

    client: InProcessAsyncClient

    @asynccontextmanager
    async def prefetch(self, fetch: Prefetch) -> AsyncIterator[float]:
        with doing(State.SWAPPING):
            async with self.client.standing_still():
                start_s = time.perf_counter()
                await fetch()
                yield time.perf_counter() - start_s


@dataclass(frozen=True, slots=True)
class Drain(InFlight):
    """New requests wait outside from the arrival on; the swap waits until nothing runs."""

    gate: AdmissionGate

    @asynccontextmanager
    async def prefetch(self, fetch: Prefetch) -> AsyncIterator[float]:
        start_s = time.perf_counter()
        with self.gate.closed():
            await fetch()
            await self.gate.until_empty()
            yield time.perf_counter() - start_s


class AbortAndResume(InFlight):
    """Every request ends; what it has becomes the prefix of a new one."""

    def end_requests(self, core: EngineCore) -> tuple[str, ...]:
        return tuple(scheduler_of(core).requests)


def interruption_policy(mode: Interruption, *, client: InProcessAsyncClient, gate: AdmissionGate) -> InFlight:
    """The policy of a mode. Cancelling is the replay buffer's decision: here it is as in flight."""
    match mode:
        case Interruption.IN_FLIGHT | Interruption.CANCEL_STALE:
            return InFlight()
        case Interruption.BLOCKING:
            return Blocking(client)
        case Interruption.DRAIN:
            return Drain(gate)
        case Interruption.ABORT_AND_RESUME:
            return AbortAndResume()
