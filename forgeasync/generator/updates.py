"""Weight updates of a running engine, and what happens to running sequences when new weights arrive.

Who waits for whom: an update fetches the weights on the event loop, then swaps them in on the engine's
thread, between two decode steps. The interruption mode decides what waits for the fetch: nothing, decoding
(blocking), or new requests (drain). Requests that end at a swap (abort_and_resume) end in the same act as the
swap: vLLM sends each of them off with everything recorded so far, and the engine resumes them.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from forgeasync.config import Interruption, KvAfterSwap
from forgeasync.generator.reports import SwapReport
from forgeasync.generator.workarounds.inprocess_client import InProcessAsyncClient, scheduler_of
from forgeasync.observability import State, doing, span
from forgeasync.rollouts import GroupProgress

Prefetch = Callable[[], Awaitable[None]]

GROUP_ARGUMENT = "forgeasync_group"
"""Names a request's group in its sampling parameters, where the engine's thread finds it."""

NO_GROUP = -1
"""``GROUP_ARGUMENT`` of requests of no group that updates report: below 0."""

SAMPLE_ARGUMENT = "forgeasync_sample"
"""Names the place of a request's response or episode in its group."""

EPISODE_ARGUMENT = "forgeasync_episode"
"""Names what a request belongs to and is ended with: one response, or one attempt at an episode."""


def request_arguments(*, group: int = NO_GROUP, sample: int = 0, episode: int) -> dict[str, int]:
    """The ``extra_args`` that every request of an engine has."""
    return {GROUP_ARGUMENT: group, SAMPLE_ARGUMENT: sample, EPISODE_ARGUMENT: episode}


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
        """A new group; with None a group that updates and ``cancel`` do not name.

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
        """Mark groups, except those that have ended meanwhile (event loop)."""
        for group_id in group_ids:
            if group_id in self._groups:
                self._groups[group_id].is_cancelled = True

    def cancel_episode(self, number: int) -> None:
        """Mark an episode, which may have ended meanwhile (event loop)."""
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
                # An episode can have several requests in flight.
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
        # The gate may be closed again before a waiter runs.
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


class WeightUpdates:
    """Runs updates, one after another, under an interruption mode and a policy for the KV cache."""

    def __init__(
        self,
        client: InProcessAsyncClient,
        groups: Groups,
        gate: AdmissionGate,
        *,
        interruption: Interruption,
        kv_cache: KvAfterSwap,
    ) -> None:
        self._client = client
        self._groups = groups
        self._gate = gate
        self._interruption = interruption
        self._kv_cache = kv_cache
        self._one_at_a_time = asyncio.Lock()

    async def run(
        self, version: int, *, prefetch: Prefetch, install: Callable[[EngineCore], None]
    ) -> SwapReport:
        """One update; what either function raises reaches the caller and leaves the version as it was."""
        async with self._one_at_a_time, self._fetched(prefetch) as waited_s:

            def swap(core: EngineCore) -> SwapReport:
                with doing(State.SWAPPING), span("swap", {"version": version}):
                    return self._swap(core, version, install, waited_s=waited_s)

            return await self._client.between_steps(swap)

    @asynccontextmanager
    async def _fetched(self, fetch: Prefetch) -> AsyncIterator[float]:
        """Fetch the weights; the block swaps them in. Yields for how many seconds sequences waited."""
        match self._interruption:
            case Interruption.BLOCKING:
                with doing(State.SWAPPING):
                    async with self._client.standing_still():
                        start_s = time.perf_counter()
                        await fetch()
                        yield time.perf_counter() - start_s
            case Interruption.DRAIN:
                start_s = time.perf_counter()
                with self._gate.closed():
                    await fetch()
                    await self._gate.until_empty()
                    yield time.perf_counter() - start_s
            case Interruption.IN_FLIGHT | Interruption.ABORT_AND_RESUME | Interruption.CANCEL_STALE:
                # The replay buffer decides which groups are stale and has them cancelled.
                await fetch()
                yield 0.0

    def _swap(
        self, core: EngineCore, version: int, install: Callable[[EngineCore], None], *, waited_s: float
    ) -> SwapReport:
        start_s = time.perf_counter()
        install(core)
        # In the same act: no step lies between the weights and their label.
        core.set_weight_version(str(version))
        requests = scheduler_of(core).requests
        progress = self._groups.progress(core, version)
        resumed = tuple(requests) if self._interruption is Interruption.ABORT_AND_RESUME else ()
        num_resumed = sum(requests[one].num_output_tokens > 0 for one in resumed)
        self._client.end_requests(core, resumed)
        # What was computed of these before the swap stays.
        num_crossing = sum(
            request.num_output_tokens > 0 or request.status == RequestStatus.RUNNING
            for request in requests.values()
        )
        is_recomputed, num_recomputed = self._kv_cache is KvAfterSwap.RECOMPUTE, 0
        if is_recomputed:
            num_recomputed = sum(request.num_computed_tokens > 0 for request in requests.values())
            # Running requests lose their KV blocks and wait; vLLM computes them again. What is sampled stays.
            core.reset_prefix_cache(reset_running_requests=True)
        self._client.stamp_anew(core, recomputed=is_recomputed)
        return SwapReport(
            pause_s=time.perf_counter() - start_s,
            waited_s=waited_s,
            num_crossing=num_crossing,
            num_resumed=num_resumed,
            num_recomputed=num_recomputed,
            progress=progress,
        )
