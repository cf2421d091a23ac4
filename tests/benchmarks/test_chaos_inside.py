"""benchmarks/chaos_inside/sitecustomize.py: what happens inside of a process that was ordered to break."""

import asyncio
import importlib.util
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from monarch._src.actor import actor_mesh

from forgeasync.testing import VirtualTime
from tests.support.processes import wait_until

FILE = Path(__file__).parents[2] / "benchmarks" / "chaos_inside" / "sitecustomize.py"
METHOD, PORT = SimpleNamespace(name="beat"), 4


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("chaos_inside", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in module.COLLECTIVES:
        monkeypatch.setattr(dist, name, lambda: "done")
    return module


@pytest.fixture
def handled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What reaches an actor's own code, in order; the answer is sent through the port as Monarch does."""
    found: list[tuple[Any, ...]] = []

    async def handle(self: object, ctx: object, method: Any, *args: Any) -> None:
        found.append((method.name, *args))
        sent = args[PORT]._resolve_and_send("answer") if args[PORT] is not None else None
        if sent is not None:
            await sent

    monkeypatch.setattr(actor_mesh._Actor, "handle", handle)
    return found


def carry_out(inside: ModuleType, tmp_path: Path, **words: Any) -> Path:
    """Have an order carried out; returns the file that says so."""
    file = tmp_path / "7-1.json"
    inside.Order(file, words).carry_out()
    taken: Path = file.with_suffix(".taken")
    return taken


def send(number: int, *, port: object = None, method: Any = METHOD) -> Any:
    return actor_mesh._Actor.handle(ACTOR, None, method, number, None, None, None, port)  # type: ignore[arg-type]


ACTOR = actor_mesh._Actor()


def test_messages_are_held_in_order_and_counted(
    inside: ModuleType, handled: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = actor_mesh._Actor.handle
    clock, is_over = VirtualTime(), threading.Event()
    own_time = SimpleNamespace(time=time.time, monotonic=clock.now_s, sleep=lambda seconds: is_over.wait())
    monkeypatch.setattr(inside, "time", own_time)

    async def go() -> None:
        taken = carry_out(inside, tmp_path, kind="delayed_messages", seconds=3.0)
        await asyncio.gather(*(send(number) for number in range(5)))
        assert clock.now_s() == pytest.approx(3.0)
        assert [one[1] for one in handled] == [0, 1, 2, 3, 4]
        await send(5)
        is_over.set()
        wait_until(taken.exists)
        assert json.loads(taken.read_text())["num_messages"] == 5

    clock.run(go())
    assert actor_mesh._Actor.handle is own, "nothing stays behind"


def test_messages_are_dropped(inside: ModuleType, handled: list[tuple[Any, ...]], tmp_path: Path) -> None:
    taken = carry_out(inside, tmp_path, kind="dropped_messages")
    assert taken.exists()
    asyncio.run(send(0))
    assert not handled


@pytest.mark.parametrize("is_after", [True, False])
def test_one_call_of_a_name_is_held(
    inside: ModuleType, handled: list[tuple[Any, ...]], tmp_path: Path, is_after: bool
) -> None:
    more = {"method": "begin_staging", "seconds": 60.0, "is_after": is_after}
    taken = carry_out(inside, tmp_path, kind="hold_call", **more)
    sent: list[object] = []
    port = SimpleNamespace(_resolve_and_send=sent.append)

    async def go() -> None:
        await send(0)
        assert not taken.exists()
        call = asyncio.create_task(send(1, port=port, method=SimpleNamespace(name="begin_staging")))
        while not taken.exists():
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(handled) == (2 if is_after else 1) and not sent
        await call
        assert len(handled) == 2 and sent == ["answer"]

    VirtualTime().run(go())


def in_trainer_thread(work: Callable[[], object], *, wait_s: float | None = None) -> list[object]:
    """What a thread of the trainer's name returns or raises."""
    found: list[object] = []

    def go() -> None:
        try:
            found.append(work())
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=go, name="trainer", daemon=True)
    thread.start()
    thread.join(wait_s)
    return found


def test_a_collective_of_the_trainers_thread_breaks_once(inside: ModuleType, tmp_path: Path) -> None:
    taken = carry_out(inside, tmp_path, kind="aborted_collective", num_before=1)
    assert in_trainer_thread(lambda: dist.all_reduce()) == ["done"]
    assert dist.all_reduce() == "done", "a checkpoint's collectives are in another thread"
    assert not taken.exists()
    (error,) = in_trainer_thread(lambda: dist.broadcast())
    assert isinstance(error, RuntimeError) and "[gloo] broadcast" in str(error)
    assert json.loads(taken.read_text())["collective"] == "broadcast"
    assert in_trainer_thread(lambda: dist.broadcast()) == ["done"]


def test_a_collective_hangs(inside: ModuleType, tmp_path: Path) -> None:
    taken = carry_out(inside, tmp_path, kind="hung_collective", num_before=0)
    assert in_trainer_thread(lambda: dist.barrier(), wait_s=0.5) == []
    wait_until(taken.exists)
