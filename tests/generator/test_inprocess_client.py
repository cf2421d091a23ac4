"""The engine core's thread and the event loop: who waits for whom. vLLM's core is a stand-in here."""

import asyncio
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.outputs import SamplingMaskLists

from forgeasync.generator import InProcessAsyncClient, start_llm
from forgeasync.generator.workarounds import inprocess_client

DEADLINE_S = 60.0


class Core:
    """An engine core without requests."""

    def __init__(self, *_: object) -> None:
        self.thread = threading.current_thread()
        self.scheduler = SimpleNamespace(has_requests=lambda: False, running=[])
        self.batch_queue = None

    def step_fn(self) -> tuple[None, bool]:
        return None, False

    def post_step(self, *, model_executed: bool) -> None:
        pass

    def shutdown(self) -> None:
        pass


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's ``AsyncLLM`` as far as it concerns its client."""

    def build(config: object, **_: object) -> EngineCoreClient:
        return EngineCoreClient.make_async_mp_client(config, None, False, client_index=0)

    monkeypatch.setattr(inprocess_client.AsyncLLM, "from_vllm_config", build)
    monkeypatch.setattr(inprocess_client, "EngineCore", Core)


async def start() -> InProcessAsyncClient:
    client = await start_llm(None, salt_with_version=False, observer=Mock())
    assert isinstance(client, InProcessAsyncClient)
    return client


async def test_the_event_loop_goes_on_while_a_core_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    is_building, may_end = threading.Event(), threading.Event()

    class Slow(Core):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            is_building.set()
            assert may_end.wait(DEADLINE_S), "the event loop stands still"

    monkeypatch.setattr(inprocess_client, "EngineCore", Slow)
    before = EngineCoreClient.make_async_mp_client
    starting = asyncio.create_task(start())
    assert await asyncio.to_thread(is_building.wait, DEADLINE_S)
    assert not starting.done()
    may_end.set()
    client = await starting
    # The thread that steps it has built it.
    threads = await client.between_steps(lambda core: (core.thread, threading.current_thread()))
    assert threads[0] is threads[1] is not threading.main_thread()
    client.shutdown()
    assert EngineCoreClient.make_async_mp_client is before


def test_who_waits_for_a_core_gets_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room for the weights")

    monkeypatch.setattr(inprocess_client, "EngineCore", fail)
    with pytest.raises(MemoryError, match="no room for the weights"):
        asyncio.run(start())


async def test_who_waits_for_the_steps_in_flight_gets_their_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Core):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            self.scheduler.set_pause_state = lambda _: None

        def step_fn(self) -> tuple[None, bool]:
            raise RuntimeError("no GPU any more")

    monkeypatch.setattr(inprocess_client, "EngineCore", Failing)
    client = await start()
    done: set[asyncio.Task[None]] = set()
    with pytest.raises(EngineDeadError):
        # Paused, only a command ends the steps in flight.
        async with client.paused():
            await client.between_steps(lambda core: setattr(core, "batch_queue", [1]), needs_drain=False)
            waiting = asyncio.create_task(client.between_steps(lambda _: None))
            done, _ = await asyncio.wait([waiting], timeout=DEADLINE_S)
    (ended,) = done
    assert isinstance(ended.exception(), EngineDeadError)
    with pytest.raises(RuntimeError, match="no GPU any more"):
        await client.get_output_async()
    client.shutdown()


async def test_records_of_a_request_keep_no_others_of_their_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And vLLM makes arrays of kept sets, not a Python int of each id."""
    experts_NLK, ids_N = np.arange(24, dtype=np.uint8).reshape(4, 3, 2), np.arange(6, dtype=np.int32)
    output = EngineCoreOutput(
        "a", [1], routed_experts=experts_NLK[1:2], new_sampling_mask=SamplingMaskLists(ids_N[2:5])
    )

    class Sampled(Core):
        def step_fn(self) -> tuple[dict[int, EngineCoreOutputs], bool]:
            self.scheduler.has_requests = lambda: False
            return {0: EngineCoreOutputs(outputs=[output])}, True

    monkeypatch.setattr(inprocess_client, "EngineCore", Sampled)
    client = await start()
    await client.between_steps(lambda core: setattr(core.scheduler, "has_requests", lambda: True))
    (found,) = (await client.get_output_async()).outputs
    assert found.routed_experts is not None and found.new_sampling_mask is not None
    for ours, theirs in (
        (found.routed_experts, experts_NLK[1:2]),
        (found.new_sampling_mask[0], ids_N[2:5]),
    ):
        assert ours.base is None
        np.testing.assert_array_equal(ours, theirs)
    client.shutdown()
    many = SamplingMaskLists(ids_N, np.array([0, 2, 2, 6])).to_nested_list()
    assert [row.tolist() for row in many] == [[0, 1], [], [2, 3, 4, 5]]
    assert [row.tolist() for row in SamplingMaskLists(ids_N).to_nested_list()] == [ids_N.tolist()]


@pytest.mark.parametrize("is_running", [False, True])
async def test_a_caller_who_is_cancelled_is_no_end_of_the_engine(is_running: bool) -> None:
    runs, may_end = threading.Event(), threading.Event()

    def occupy(_: object) -> None:
        runs.set()
        assert may_end.wait(DEADLINE_S)

    client = await start()
    done: list[str] = []
    first = asyncio.create_task(client.between_steps(occupy))
    assert await asyncio.to_thread(runs.wait, DEADLINE_S)
    second = asyncio.create_task(client.between_steps(lambda _: done.append("second")))
    # Until its command is in the queue.
    await asyncio.sleep(0)
    cancelled = first if is_running else second
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    may_end.set()
    assert await client.between_steps(lambda _: "alive") == "alive"
    assert done == ["second"], "what was asked for is done all the same"
    assert not client.resources.engine_dead
    client.shutdown()
