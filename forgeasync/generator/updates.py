"""Weight updates of a running engine, and what happens to running sequences at an update.

An update fetches the weights on the event loop, then swaps them in on the engine's thread, between two decode
steps. The interruption mode decides what waits for the fetch: nothing, decoding (blocking), or new requests
(drain). An engine that sleeps swaps when it is awake again. With abort_and_resume, requests end in the same
call as the swap: vLLM returns each of them with everything recorded so far, and the engine resumes them.
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
"""Sampling argument with the key of a request's group; the engine's thread reads it."""

NO_GROUP = -1
"""``GROUP_ARGUMENT`` of requests whose group is not reported at updates; negative."""

SAMPLE_ARGUMENT = "forgeasync_sample"
"""Sampling argument with the index of a request's response or episode within its group."""

EPISODE_ARGUMENT = "forgeasync_episode"
"""Sampling argument with the number of the response or attempt at an episode to which a request belongs."""


def request_arguments(*, group: int = NO_GROUP, sample: int = 0, episode: int) -> dict[str, int]:
    """Return the ``extra_args`` that every request of an engine has."""
    return {GROUP_ARGUMENT: group, SAMPLE_ARGUMENT: sample, EPISODE_ARGUMENT: episode}


@dataclass(slots=True, kw_only=True)
class RunningGroup:
    """State of a group in the engine. The event loop writes it and the engine's thread reads it."""

    key: int
    """Key of the group in its requests and for ``cancel``: its id, or a negative number without one."""
    num_tokens: int = 0
    """Number of tokens in the group's ended requests."""
    is_cancelled: bool = False


class Groups:
    """Groups in the engine, by the key that their requests have."""

    def __init__(self) -> None:
        self._groups: dict[int, RunningGroup] = {}
        self._num_unnamed = 0
        self._cancelled_episodes: set[int] = set()

    def open(self, group_id: int | None) -> RunningGroup:
        """Open a group; with None, a group that updates do not report and ``cancel`` cannot name.

        Raises:
            ValueError: A group with this id is in flight.
        """
        if group_id is None:
            self._num_unnamed += 1
            group_id = -self._num_unnamed
        if group_id in self._groups:
            raise ValueError(
                f"group_id = {group_id}: is being sampled already; groups in flight must have different ids"
            )
        group = RunningGroup(key=group_id)
        self._groups[group_id] = group
        return group

    def close(self, group: RunningGroup) -> None:
        """Close a group, which makes no further request."""
        del self._groups[group.key]

    def cancel(self, group_ids: Iterable[int]) -> None:
        """Mark groups as cancelled, ignoring those that have ended (event loop)."""
        for group_id in group_ids:
            if group_id in self._groups:
                self._groups[group_id].is_cancelled = True

    def cancel_episode(self, number: int) -> None:
        """Mark an episode as cancelled; it may have ended (event loop)."""
        self._cancelled_episodes.add(number)

    def cancelled_requests(self, core: EngineCore) -> tuple[str, ...]:
        """Return the ids of requests of cancelled groups and episodes (engine thread)."""
        return tuple(
            request_id
            for request_id, request in scheduler_of(core).requests.items()
            if _arguments(request)[EPISODE_ARGUMENT] in self._cancelled_episodes
            or ((group := self._groups.get(_group_id(request))) is not None and group.is_cancelled)
        )

    def progress(self, core: EngineCore, version: int) -> tuple[GroupProgress, ...]:
        """Return the progress of each group with an id that has requests in the engine (engine thread)."""
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
    """Gate that every request passes on its way into the engine.

    It can be closed to new requests, and one can wait until no request is inside.
    """

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._num_inside = 0

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """Wait until the gate is open, then count as inside during the block."""
        # The gate may be closed again before a waiting task runs.
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
    """Runs updates one after another, with a given interruption mode and policy for the KV cache."""

    def __init__(
        self,
        client: InProcessAsyncClient,
        groups: Groups,
        gate: AdmissionGate,
        *,
        interruption: Interruption,
        kv_cache: KvAfterSwap,
        keeps_prompts_whole: bool = False,
    ) -> None:
        """With ``keeps_prompts_whole``, a request with a half-computed prompt ends at a swap, and resumes."""
        self._client = client
        self._groups = groups
        self._gate = gate
        self._interruption = interruption
        self._kv_cache = kv_cache
        self._keeps_prompts_whole = keeps_prompts_whole
        self._one_at_a_time = asyncio.Lock()

    async def run(
        self, version: int, *, prefetch: Prefetch, install: Callable[[EngineCore], None]
    ) -> SwapReport:
        """Run one update. If either function raises, the version is unchanged and the error is passed on."""
        async with self._one_at_a_time, self._fetched(prefetch) as waited_s:

            def swap(core: EngineCore) -> SwapReport:
                with doing(State.SWAPPING), span("swap", {"version": version}):
                    return self._swap(core, version, install, waited_s=waited_s)

            return await self._client.while_awake(swap)

    @asynccontextmanager
    async def _fetched(self, fetch: Prefetch) -> AsyncIterator[float]:
        """Fetch the weights before the block, which swaps them in; yield how long sequences waited."""
        match self._interruption:
            case Interruption.BLOCKING:
                with doing(State.SWAPPING):
                    async with self._client.paused():
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
                # With cancel_stale, the replay buffer decides which groups are stale and cancels them.
                await fetch()
                yield 0.0

    def _swap(
        self, core: EngineCore, version: int, install: Callable[[EngineCore], None], *, waited_s: float
    ) -> SwapReport:
        start_s = time.perf_counter()
        install(core)
        # Together with the weights, so that no step lies between the weights and their label.
        core.set_weight_version(str(version))
        requests = scheduler_of(core).requests
        progress = self._groups.progress(core, version)
        resumed = tuple(filter(lambda one: self._ends_at_swap(requests[one]), requests))
        num_resumed = sum(requests[one].num_output_tokens > 0 for one in resumed)
        self._client.end_requests(core, resumed)
        # Their KV cache from before the swap is kept.
        num_crossing = sum(
            request.num_output_tokens > 0 or request.status == RequestStatus.RUNNING
            for request in requests.values()
        )
        is_recomputed, num_recomputed = self._kv_cache is KvAfterSwap.RECOMPUTE, 0
        if is_recomputed:
            num_recomputed = sum(request.num_computed_tokens > 0 for request in requests.values())
            # Running requests lose their KV blocks and are queued; vLLM recomputes them. Sampled tokens are
            # kept.
            core.reset_prefix_cache(reset_running_requests=True)
        self._client.refresh_cache_salts(core, recomputed=is_recomputed)
        return SwapReport(
            pause_s=time.perf_counter() - start_s,
            waited_s=waited_s,
            num_crossing=num_crossing,
            num_resumed=num_resumed,
            num_recomputed=num_recomputed,
            progress=progress,
        )

    def _ends_at_swap(self, request: Request) -> bool:
        """Return whether a request ends at a swap, to be resumed."""
        if self._interruption is Interruption.ABORT_AND_RESUME:
            return True
        return self._keeps_prompts_whole and 0 < request.num_computed_tokens < request.num_prompt_tokens
