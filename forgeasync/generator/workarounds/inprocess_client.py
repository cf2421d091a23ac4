"""Runs vLLM's engine core in this process, in a thread. For vLLM 0.32.

vLLM's own asynchronous clients run the engine core in another process, which costs 10 to 25 s of startup and
a socket; its in-process client is synchronous. Here ``AsyncLLM`` uses a core in the same process. It starts
in seconds, and a function can run between two engine steps with nothing else in flight, so a weight update
and its version label are atomic. Can go when ``EngineCoreClient.make_client(multiprocess_mode=False,
asyncio_mode=True)`` is implemented.

Concurrency: a thread of ``start_llm`` waits until the engine thread has built the core. Then the event loop
puts commands into a queue without waiting. The engine thread runs all queued commands before each step,
sleeps on the queue when it has no requests or is paused, and sends outputs to the loop. A pause holds back
steps only: commands run as usual, so nothing can deadlock on it. Commands after the thread's end fail with
``EngineDeadError``.

With vLLM's asynchronous scheduling, which engines on GPUs use, the core schedules a step while the one before
it computes. Commands wait until the steps in flight have ended, unless they say that they need not.
vLLM labels a step's tokens with the version that is set when the step ends, so a swap in mid-step would give
them a wrong label.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor
from vllm.v1.outputs import SamplingMaskLists
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

R = TypeVar("R")


def scheduler_of(core: EngineCore) -> "Scheduler":
    """Return an engine's scheduler, which vLLM declares as an interface without requests."""
    return cast("Scheduler", core.scheduler)


@dataclass(slots=True)
class _Resources:
    """Replacement for the multiprocess client's resources, with the one attribute that AsyncLLM reads."""

    engine_dead: bool = False


@dataclass(frozen=True, slots=True)
class _Command(Generic[R]):
    """Function to run between two steps, with the future that its caller awaits."""

    function: Callable[[EngineCore], R]
    future: Future[R]
    needs_drain: bool
    """Whether no step may be in flight while it runs."""

    def run(self, core: EngineCore) -> None:
        # A cancelled caller gets no result, but the function still runs.
        is_awaited = self.future.set_running_or_notify_cancel()
        try:
            result = self.function(core)
        except Exception as error:
            # The error goes to the caller: a failed update does not end the engine thread.
            if is_awaited:
                self.future.set_exception(error)
            return
        if is_awaited:
            self.future.set_result(result)

    def refuse(self) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(EngineDeadError())


class StepObserver(Protocol):
    """Observer of the engine, called on its thread before results leave it."""

    def request_added(self, request: EngineCoreRequest) -> None:
        """Called when a request is added to the engine."""
        ...

    def request_ended(self, request_id: str) -> None:
        """Called when a request was aborted."""
        ...

    def stepped(self, outputs: EngineCoreOutputs) -> None:
        """Called when a step has sampled."""
        ...


class InProcessAsyncClient(EngineCoreClient):
    """``EngineCoreClient`` for ``AsyncLLM``; its constructor loads the model."""

    engine_ranks_managed = (0,)

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool,
        *,
        loop: asyncio.AbstractEventLoop,
        salt_with_version: bool,
        observer: StepObserver,
    ) -> None:
        """Build the core and serve ``loop``.

        With ``salt_with_version`` a cached prefix is used only by requests that start with its version.
        """
        self._salt_with_version = salt_with_version
        self._observer = observer
        self._loop = loop
        self._commands: queue.SimpleQueue[_Command[Any]] = queue.SimpleQueue()
        self._outputs: asyncio.Queue[EngineCoreOutputs | BaseException] = asyncio.Queue()
        self._stopping = False
        self._stands_still = False
        self._is_asleep = False
        self._awake = asyncio.Event()
        self._awake.set()
        self.resources = _Resources()
        # Built in the thread that steps it: vLLM's GPU runner keeps the CUDA stream of the thread that warms
        # it up.
        built: Future[EngineCore] = Future()
        self._thread = threading.Thread(
            target=self._run,
            args=(lambda: EngineCore(vllm_config, executor_class, log_stats), built),
            name="engine-core",
            daemon=True,
        )
        self._thread.start()
        self._core = built.result()

    def _run(self, build: Callable[[], EngineCore], built: Future[EngineCore]) -> None:
        try:
            core = build()
        except BaseException as error:
            # Raised in the thread that waits for the core.
            built.set_exception(error)
            return
        self._core = core
        built.set_result(core)
        try:
            while not self._stopping:
                if self._is_held or not (core.scheduler.has_requests() or core.batch_queue):
                    self._run_command()
                while not self._commands.empty():
                    self._run_command()
                if not self._stopping and not self._is_held:
                    self._step()
            self._drain()
        except Exception as error:
            self.resources.engine_dead = True
            self._hand_over(error)
        while not self._stopping:
            self._commands.get().refuse()
        while not self._commands.empty():
            self._commands.get().refuse()

    def _run_command(self) -> None:
        command = self._commands.get()
        if command.needs_drain:
            try:
                self._drain()
            except BaseException:
                command.refuse()
                raise
        command.run(self._core)

    def _drain(self) -> None:
        """End the steps in flight without beginning another one."""
        if self._core.batch_queue:
            self._core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            while self._core.batch_queue:
                self._step()
            self._core.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _step(self) -> None:
        outputs, model_executed = self._core.step_fn()
        self._core.post_step(model_executed=model_executed)
        if outputs and 0 in outputs:
            _copy_records(outputs[0])
            self._observer.stepped(outputs[0])
            self._hand_over(outputs[0])

    def _hand_over(self, item: EngineCoreOutputs | BaseException) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, item)

    async def between_steps(self, function: Callable[[EngineCore], R], *, needs_drain: bool = True) -> R:
        """Run a function of the engine core between two steps; return its result or raise its error.

        Without ``needs_drain`` a step may be in flight.
        """
        if self.resources.engine_dead or self._stopping:
            raise EngineDeadError()
        future: Future[R] = Future()
        self._commands.put(_Command(function, future, needs_drain))
        return await asyncio.wrap_future(future)

    async def get_output_async(self) -> EngineCoreOutputs:
        """Wait for the outputs of the next step; raise the error of a failed one."""
        item = await self._outputs.get()
        if isinstance(item, BaseException):
            raise item
        return item

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Pause decoding during the block; commands still run."""

        def stand_still(value: bool) -> None:
            self._stands_still = value

        try:
            await self.between_steps(lambda _: stand_still(True))
            yield
        finally:
            await self.between_steps(lambda _: stand_still(False))

    @property
    def _is_held(self) -> bool:
        return self._stands_still or self._is_asleep

    async def fall_asleep(self) -> None:
        """Take the weights and the KV cache off the GPU. No step is made before ``wake``; commands still run.

        Running requests keep their tokens, and compute their KV cache again.
        """

        def leave(core: EngineCore) -> None:
            core.reset_prefix_cache(reset_running_requests=True)
            core.model_executor.sleep(level=1)
            self._is_asleep = True

        await self.between_steps(leave)
        self._awake.clear()

    async def wake(self) -> None:
        """Put the weights and an empty KV cache back on the GPU, and go on."""

        def wake_up(core: EngineCore) -> None:
            core.model_executor.wake_up()
            self._is_asleep = False

        await self.between_steps(wake_up)
        self._awake.set()

    async def while_awake(self, function: Callable[[EngineCore], R]) -> R:
        """Run a function between two steps while the weights are on the GPU; waits for ``wake``."""

        def run(core: EngineCore) -> tuple[R] | None:
            return None if self._is_asleep else (function(core),)

        while (result := await self.between_steps(run)) is None:
            await self._awake.wait()
        return result[0]

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Add a request between two steps."""

        def add(core: EngineCore) -> None:
            # Salted in the engine thread, so that no swap can intervene: a prefix computed with old weights
            # is never used by a request that starts with new ones.
            if self._salt_with_version:
                request.cache_salt = core.get_weight_version()
            self._observer.request_added(request)
            core.add_request(*core.preprocess_add_request(request))

        await self.between_steps(add, needs_drain=False)

    def refresh_cache_salts(self, core: EngineCore, *, recomputed: bool) -> None:
        """Give requests that have not started the new version's cache salt (engine thread, after a swap).

        With ``recomputed`` these are all waiting requests, otherwise those of them that have no token.
        """
        if not self._salt_with_version:
            return
        for request in scheduler_of(core).requests.values():
            is_waiting = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            if is_waiting and (recomputed or not request.num_output_tokens):
                assert request.num_computed_tokens == 0
                request.cache_salt = core.get_weight_version()
                request.block_hashes.clear()
                request.update_block_hashes()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """End requests between two steps. Unknown ids are ignored."""
        if request_ids and not self.resources.engine_dead:
            await self.between_steps(lambda core: self.end_requests(core, request_ids), needs_drain=False)

    def end_requests(self, core: EngineCore, request_ids: Iterable[str]) -> None:
        """Abort requests (engine thread); they finish with what they have and vLLM's reason "abort"."""
        ended = list(request_ids)
        core.abort_requests(ended)
        for one in ended:
            self._observer.request_ended(one)
        # A core in its own process would send these itself; without them the caller would wait forever.
        outputs = [EngineCoreOutput(one, [], finish_reason=FinishReason.ABORT) for one in ended]
        self._hand_over(EngineCoreOutputs(finished_requests=set(ended), outputs=outputs))

    async def get_supported_tasks_async(self) -> tuple[Any, ...]:
        """Return the tasks that the model supports."""
        return self._core.get_supported_tasks()

    async def reset_prefix_cache_async(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empty the prefix cache between two steps; return whether it was emptied."""
        return await self.between_steps(
            lambda core: core.reset_prefix_cache(reset_running_requests, reset_connector)
        )

    async def reset_mm_cache_async(self) -> None:
        """Empty the cache of multimodal inputs between two steps."""
        await self.between_steps(lambda core: core.reset_mm_cache())

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the thread after the step in flight and free the executor; idempotent."""
        if not self._stopping:
            self._stopping = True
            self._commands.put(_Command(lambda _: None, Future(), needs_drain=False))
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout)
            self._core.shutdown()


def _copy_records(outputs: EngineCoreOutputs) -> None:
    """Copy each request's records, which are views of arrays with those of the whole step.

    Views would keep the arrays of every step alive until the longest request ends. vLLM's clients of other
    processes get copies, because they are sent.
    """
    for output in outputs.outputs:
        if output.routed_experts is not None:
            output.routed_experts = output.routed_experts.copy()
        if (mask := output.new_sampling_mask) is not None:
            output.new_sampling_mask = mask._replace(token_ids=mask.token_ids.copy())


def _rows_of_mask(mask: SamplingMaskLists) -> list[np.ndarray]:
    """Return the kept ids of each token, as arrays: vLLM's own method makes a Python int of each."""
    return [mask.token_ids] if mask.offsets is None else np.split(mask.token_ids, mask.offsets[1:-1])


_building = threading.Lock()
"""Held while ``AsyncLLM`` builds a client through a static method that is replaced temporarily."""


async def start_llm(vllm_config: VllmConfig, *, salt_with_version: bool, observer: StepObserver) -> AsyncLLM:
    """Build an ``AsyncLLM`` over a core in this process, without blocking the event loop.

    Raises:
        Exception: Any error of vLLM.
    """
    loop = asyncio.get_running_loop()

    def make(
        vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool, **_: object
    ) -> InProcessAsyncClient:
        # The other arguments address engine cores in other processes.
        return InProcessAsyncClient(
            vllm_config,
            executor_class,
            log_stats,
            loop=loop,
            salt_with_version=salt_with_version,
            observer=observer,
        )

    def build() -> AsyncLLM:
        SamplingMaskLists.to_nested_list = _rows_of_mask  # type: ignore[method-assign,assignment]  # vLLM declares lists
        with _building:
            original = EngineCoreClient.make_async_mp_client
            # Replaces vLLM's method during one call.
            EngineCoreClient.make_async_mp_client = staticmethod(make)  # type: ignore[method-assign]
            try:
                return AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)
            finally:
                EngineCoreClient.make_async_mp_client = original  # type: ignore[method-assign]  # as above

    return await asyncio.to_thread(build)
