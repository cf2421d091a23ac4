"""Weight updates of one engine, one after another: fetch, then one act between two decode steps."""

import asyncio
import time
from collections.abc import Callable

from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from forgeasync.config import KvAfterSwap
from forgeasync.generator.interruption import Groups, InFlight, Prefetch
from forgeasync.generator.reports import SwapReport
from forgeasync.generator.workarounds.inprocess_client import InProcessAsyncClient, scheduler_of
from forgeasync.tracing import State, doing, span


class WeightUpdates:
    """Runs updates under an interruption policy and a policy for the KV cache."""

    def __init__(
        self, client: InProcessAsyncClient, groups: Groups, policy: InFlight, kv_cache: KvAfterSwap
    ) -> None:
        self._client = client
        self._groups = groups
        self._policy = policy
        self._kv_cache = kv_cache
        self._one_at_a_time = asyncio.Lock()

    async def run(
        self, version: int, *, prefetch: Prefetch, install: Callable[[EngineCore], None]
    ) -> SwapReport:
        """One update; what either function raises reaches the caller and leaves the version as it was."""
        async with self._one_at_a_time, self._policy.prefetch(prefetch) as waited_s:

            def swap(core: EngineCore) -> SwapReport:
                with doing(State.SWAPPING), span("swap", {"version": version}):
                    return self._swap(core, version, install, waited_s=waited_s)

            return await self._client.between_steps(swap)

    def _swap(
        self, core: EngineCore, version: int, install: Callable[[EngineCore], None], *, waited_s: float
    ) -> SwapReport:
        start_s = time.perf_counter()
        install(core)
        # In the same act: no step lies between the weights and their label.
        core.set_weight_version(str(version))
        requests = scheduler_of(core).requests
        progress = self._groups.progress(core, version)
        resumed = self._policy.end_requests(core)
        num_resumed = sum(requests[one].num_output_tokens > 0 for one in resumed)
        self._client.end_requests(core, resumed)
        num_crossing = sum(_crosses(request) for request in requests.values())
        num_recomputed = self._recompute(core) if self._kv_cache is KvAfterSwap.RECOMPUTE else 0
        self._client.stamp_anew(core, recomputed=self._kv_cache is KvAfterSwap.RECOMPUTE)
        return SwapReport(
            pause_s=time.perf_counter() - start_s,
            waited_s=waited_s,
            num_crossing=num_crossing,
            num_resumed=num_resumed,
            num_recomputed=num_recomputed,
            progress=progress,
        )

    def _recompute(self, core: EngineCore) -> int:
        """Running requests lose their KV blocks and wait; vLLM computes them again. What is sampled stays."""
        num_running = sum(request.num_computed_tokens > 0 for request in scheduler_of(core).requests.values())
        core.reset_prefix_cache(reset_running_requests=True)
        return num_running


def _crosses(request: Request) -> bool:
    """Whether something of the request was computed before the swap and stays."""
    return request.num_output_tokens > 0 or request.status == RequestStatus.RUNNING
