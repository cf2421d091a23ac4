"""vLLM's engine core in this very process, stepped by a thread. For vLLM 0.32.

vLLM's own asynchronous clients put the engine core into another process, 10 to 25 s of start-up and a
socket away; its in-process client is synchronous. Here ``AsyncLLM`` talks to a core in the same process:
it starts in seconds, and a function can be run between two engine steps with nothing else in flight, which
is what makes a weight update and its version label one indivisible act. Can go when
``EngineCoreClient.make_client(multiprocess_mode=False, asyncio_mode=True)`` is implemented.

Who waits for whom: the event loop puts commands into a queue and goes on; the engine thread takes all
commands before each step, sleeps on the queue when it has no requests, and hands outputs back to the loop.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

R = TypeVar("R")


@dataclass(slots=True)
class _Resources:
    """The one attribute of the multiprocess client's resources that AsyncLLM reads."""

    engine_dead: bool = False


class InProcessAsyncClient(EngineCoreClient):
    """An ``EngineCoreClient`` for ``AsyncLLM``; has to be built inside the event loop that uses it."""

    engine_ranks_managed = (0,)

    def __init__(self, vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool) -> None:
        self._core = EngineCore(vllm_config, executor_class, log_stats)
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outputs: asyncio.Queue[EngineCoreOutputs | BaseException] = asyncio.Queue()
        self._stopping = False
        self.resources = _Resources()
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self._core.scheduler.has_requests():
                    self._commands.get()()
                while not self._commands.empty():
                    self._commands.get()()
                if not self._stopping:
                    self._step()
        except Exception as error:
            self.resources.engine_dead = True
            self._hand_over(error)

    def _step(self) -> None:
        outputs, model_executed = self._core.step_fn()
        self._core.post_step(model_executed=model_executed)
        if outputs and 0 in outputs:
            self._hand_over(outputs[0])

    def _hand_over(self, item: EngineCoreOutputs | BaseException) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, item)

    async def between_steps(self, function: Callable[[EngineCore], R]) -> R:
        """Run a function of the engine core between two steps; its result or its exception comes back."""
        if self.resources.engine_dead:
            raise EngineDeadError()
        future: Future[R] = Future()

        def command() -> None:
            try:
                future.set_result(function(self._core))
            except Exception as error:
                # The caller gets it: an update that fails is not the end of the engine thread.
                future.set_exception(error)

        self._commands.put(command)
        return await asyncio.wrap_future(future)

    async def get_output_async(self) -> EngineCoreOutputs:
        item = await self._outputs.get()
        if isinstance(item, BaseException):
            raise item
        return item

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        def add(core: EngineCore) -> None:
            # Stamped here, where no swap can come between: a prefix computed under old weights is never
            # served to a request that starts under new ones.
            request.cache_salt = core.get_weight_version()
            core.add_request(*core.preprocess_add_request(request))

        await self.between_steps(add)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        def abort(core: EngineCore) -> None:
            core.abort_requests(request_ids)
            # In its own process the core would send these itself; without them the caller waits for ever.
            outputs = [
                EngineCoreOutput(request_id, [], finish_reason=FinishReason.ABORT)
                for request_id in request_ids
            ]
            self._hand_over(EngineCoreOutputs(finished_requests=set(request_ids), outputs=outputs))

        if request_ids and not self.resources.engine_dead:
            await self.between_steps(abort)

    async def get_supported_tasks_async(self) -> tuple[Any, ...]:
        return self._core.get_supported_tasks()

    async def reset_prefix_cache_async(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return await self.between_steps(
            lambda core: core.reset_prefix_cache(reset_running_requests, reset_connector)
        )

    async def reset_mm_cache_async(self) -> None:
        await self.between_steps(lambda core: core.reset_mm_cache())

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the thread after the step in flight and free the executor; idempotent."""
        if not self._stopping:
            self._stopping = True
            self._commands.put(lambda: None)
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout)
            self._core.shutdown()
