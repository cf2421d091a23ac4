"""What happens to running sequences when new weights arrive: one small class for each mode.

Who waits for whom: an update runs ``bring_near`` on the event loop and, within it, the swap on the engine's
thread, between two decode steps. ``bring_near`` may hold back new requests (drain) or decoding (blocking);
``end_requests`` runs in the same act as the swap and says which requests end there. vLLM then sends each of
them off with everything recorded so far, and the engine resumes or gives up.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from forgeasync.config.schema import Interruption
from forgeasync.sampler.inprocess_client import InProcessAsyncClient

Prefetch = Callable[[], Awaitable[None]]
GROUP_ARGUMENT = "forgeasync_group"
"""Names a request's group in its sampling parameters, where the engine's thread finds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Request ids that end at a swap."""

    resumed: tuple[str, ...] = ()
    cancelled: tuple[str, ...] = ()


@dataclass(slots=True)
class RunningGroup:
    """A group in the engine. Each of the two versions has one writer, so that neither thread locks."""

    may_cancel: bool
    running_version: int | None = None
    """First version of the samples that the engine's thread found running at a swap."""
    ended_version: int | None = None
    """First version of the samples that the event loop saw end."""
    is_cancelled: bool = False

    @property
    def first_version(self) -> int | None:
        """Version of the oldest token known; None while there is none."""
        versions = [version for version in (self.running_version, self.ended_version) if version is not None]
        return min(versions, default=None)

    def note_end(self, first_version: int) -> None:
        """A sample has ended (event loop)."""
        known = self.ended_version
        self.ended_version = first_version if known is None else min(known, first_version)


class Groups:
    """The groups in the engine, by the number that their requests carry."""

    def __init__(self) -> None:
        self._groups: dict[int, RunningGroup] = {}
        self._num_started = 0

    @contextmanager
    def running(self, *, may_cancel: bool) -> Iterator[tuple[int, RunningGroup]]:
        """A group from its first request to its last."""
        self._num_started += 1
        group_id, group = self._num_started, RunningGroup(may_cancel)
        self._groups[group_id] = group
        try:
            yield group_id, group
        finally:
            del self._groups[group_id]

    def of(self, request: Request) -> RunningGroup | None:
        """The group of one of our requests; None once nobody waits for it."""
        arguments = request.sampling_params.extra_args
        return self._groups.get(arguments[GROUP_ARGUMENT]) if arguments else None


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
        """Nobody enters during the block."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    async def until_empty(self) -> None:
        await self._empty.wait()


class InFlight:
    """Weights come near while decoding goes on; running sequences go on under them."""

    @asynccontextmanager
    async def bring_near(self, prefetch: Prefetch) -> AsyncIterator[float]:
        """Fetch the weights; the block is the time to swap. Yields the seconds that sequences waited."""
        await prefetch()
        yield 0.0

    def end_requests(self, core: EngineCore, *, old_version: int, new_version: int) -> Ended:
        """Which requests end at the swap (engine thread)."""
        return Ended()


@dataclass(frozen=True, slots=True)
class Blocking(InFlight):
    """Nothing is decoded from before the fetch until after the swap."""

    client: InProcessAsyncClient

    @asynccontextmanager
    async def bring_near(self, prefetch: Prefetch) -> AsyncIterator[float]:
        async with self.client.standing_still():
            start_s = time.perf_counter()
            await prefetch()
            yield time.perf_counter() - start_s


@dataclass(frozen=True, slots=True)
class Drain(InFlight):
    """New requests wait outside from the arrival on; the swap waits until nothing runs."""

    gate: AdmissionGate

    @asynccontextmanager
    async def bring_near(self, prefetch: Prefetch) -> AsyncIterator[float]:
        start_s = time.perf_counter()
        with self.gate.closed():
            await prefetch()
            await self.gate.until_empty()
            yield time.perf_counter() - start_s


class AbortAndResume(InFlight):
    """Every request ends; what it has becomes the prefix of a new one."""

    def end_requests(self, core: EngineCore, *, old_version: int, new_version: int) -> Ended:
        return Ended(resumed=tuple(core.scheduler.requests))


@dataclass(frozen=True, slots=True)
class CancelStale(InFlight):
    """As in flight, but groups whose oldest token would be too old to train on end for good."""

    groups: Groups
    max_off_policy_steps: int

    def end_requests(self, core: EngineCore, *, old_version: int, new_version: int) -> Ended:
        cancelled: list[str] = []
        requests = list(core.scheduler.requests.values())
        for request in requests:
            group = self.groups.of(request)
            # Requests without a token start under the new weights.
            if group is not None and group.running_version is None and request.num_output_tokens:
                group.running_version = old_version
        for request in requests:
            group = self.groups.of(request)
            if group is None or not group.may_cancel or group.first_version is None:
                continue
            if group.first_version < new_version - self.max_off_policy_steps:
                group.is_cancelled = True
                cancelled.append(request.request_id)
        return Ended(cancelled=tuple(cancelled))


def interruption_policy(
    mode: Interruption,
    *,
    client: InProcessAsyncClient,
    gate: AdmissionGate,
    groups: Groups,
    max_off_policy_steps: int,
) -> InFlight:
    """The policy of a mode."""
    match mode:
        case Interruption.IN_FLIGHT:
            return InFlight()
        case Interruption.BLOCKING:
            return Blocking(client)
        case Interruption.DRAIN:
            return Drain(gate)
        case Interruption.ABORT_AND_RESUME:
            return AbortAndResume()
        case Interruption.CANCEL_STALE:
            return CancelStale(groups, max_off_policy_steps)
