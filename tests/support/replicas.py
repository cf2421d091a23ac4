"""Generators beside processes of their own, without Monarch or an engine: for the pool and its router."""

import asyncio
import contextlib
import dataclasses
import functools
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from forgeasync.config import GeneratorSection, SamplingSection, TimeoutSection
from forgeasync.generator import EngineStats, SwapReport
from forgeasync.observability import FaultLog, ProcessListFile
from forgeasync.rollouts import StoredRollout
from forgeasync.runtime import (
    CANCELLED,
    GeneratorPool,
    GeneratorRouter,
    LocalHost,
    RefusedGroup,
    ReplicaState,
    Spawned,
    supervised,
)
from forgeasync.weights import FetchReport, HostShare, Manifest
from tests.support.loops import SWAP, Endpoint, endpoint, make_fetch, make_manifest
from tests.support.standing_still import standing_still

manifest_of = make_manifest


class ScriptedGenerator:
    """An actor beside a process: it answers only while that runs, and writes down what it is asked."""

    def __init__(
        self, process: subprocess.Popen[bytes], number: int, log: list[tuple[str, int, str]]
    ) -> None:
        self.process = process
        self.number = number
        self._log = log
        self.is_released = asyncio.Event()
        """Groups end when this is set, or when they are cancelled."""
        self.running: dict[int, asyncio.Event] = {}
        """Set for groups that are cancelled."""
        self.holds: set[str] = set()
        """Names of calls that never end."""
        self.is_complete = True
        self.failure: str | None = None
        self.shares: list[HostShare | None] = []
        self.freed: list[str] = []
        self.continued: dict[int, bytes | None] = {}
        """What groups were continued from."""
        self.joined: list[tuple[HostShare, bool]] = []
        self.stats = self.beat
        for name in ("stage_update", "abandon_update", "finish_update", "sleep", "wake"):
            setattr(self, name, Endpoint(functools.partial(self._act, name)))

    async def _answering(self, name: str) -> None:
        """A process that has stopped or died never answers, as with a real actor."""
        status = psutil.STATUS_RUNNING
        with contextlib.suppress(psutil.Error):
            status = psutil.Process(self.process.pid).status()
        if status in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE) or name in self.holds:
            await asyncio.Event().wait()

    @endpoint
    async def beat(self) -> EngineStats:
        await self._answering("beat")
        return EngineStats(num_generated_tokens=10, busy_s=1.0)

    @endpoint
    async def sample_group(
        self,
        group_id: int,
        prompt_ids_P: np.ndarray,
        num_samples: int,
        sampling: SamplingSection,
        seed: int | None,
        continued: bytes | None,
        finished: object,
    ) -> tuple[StoredRollout, ...] | RefusedGroup:
        self._log.append((f"sample {group_id} {prompt_ids_P.tolist()} {seed}", self.number, "begins"))
        self.continued[group_id] = continued
        cancelled = self.running[group_id] = asyncio.Event()
        released = asyncio.ensure_future(self.is_released.wait())
        ended = asyncio.ensure_future(cancelled.wait())
        try:
            await asyncio.wait([released, ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            released.cancel()
            ended.cancel()
        del self.running[group_id]
        await self._answering("sample_group")
        return CANCELLED if cancelled.is_set() else ()

    @endpoint
    async def cancel_groups(self, group_ids: Sequence[int]) -> None:
        await self._answering("cancel_groups")
        for group_id in group_ids:
            if group_id in self.running:
                self.running[group_id].set()

    @endpoint
    async def free_payloads(self, files: Sequence[str]) -> None:
        await self._answering("free_payloads")
        self.freed += files

    @endpoint
    async def connect_weights(
        self, layout: object, sources: object, folder: Path, share: HostShare, is_joining: bool
    ) -> str:
        self._log.append(("connect_weights", self.number, "begins"))
        await asyncio.sleep(0)
        self._log.append(("connect_weights", self.number, "ends"))
        self.joined.append((share, is_joining))
        return "as copies"

    @endpoint
    async def begin_update(self, manifest: Manifest, new_share: HostShare | None) -> FetchReport:
        self.shares.append(new_share)
        await self._act("begin_update")
        moved, took_s = 10 + self.number, float(self.number)
        return make_fetch(
            manifest.version,
            is_complete=self.is_complete,
            moved=moved,
            needed=100,
            fetch_s=took_s,
            failure=self.failure,
        )

    async def _act(self, name: str) -> SwapReport:
        self._log.append((name, self.number, "begins"))
        await self._answering(name)
        # Later ones take longer.
        await asyncio.sleep(0.002 * (1 + self.number))
        self._log.append((name, self.number, "ends"))
        return dataclasses.replace(SWAP, num_crossing=self.number)


@contextlib.contextmanager
def looking_often() -> Iterator[None]:
    """Within the body generators that are gone are noticed at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervised, "LOOK_S", 0.01)
        patch.setattr(supervised, "BEAT_S", 0.02)
        patch.setattr(supervised, "RETRY_S", 0.01)
        yield


@dataclass
class ReplicaWorld:
    pool: GeneratorPool
    router: GeneratorRouter
    faults: FaultLog
    listing: ProcessListFile
    generators: dict[int, ScriptedGenerator] = field(default_factory=dict)
    """By number."""
    hosts: list[str] = field(default_factory=list)
    """By rank."""
    log: list[tuple[str, int, str]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    """Lines about faults."""
    num_stopped: int = 0
    fails_to_start: Callable[[int], bool] = lambda number: False
    watching: "asyncio.Task[None] | None" = None

    async def until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            assert self.watching is None or not self.watching.done(), self.watching
            await asyncio.sleep(0.01)

    def kill(self, number: int, sent: signal.Signals = signal.SIGKILL) -> None:
        self.generators[number].process.send_signal(sent)

    def state(self, number: int) -> ReplicaState:
        return self.pool.table.state.of(number).state

    async def update(self, host: int, version: int) -> bool:
        """Have a host take a version, as the serving loop does; whether it arrived."""
        fetched = await self.router.begin_update(host, manifest_of(version))
        if fetched is None or not fetched.is_complete:
            return False
        swapped = await self.router.finish_update(host, version)
        for number, swap in swapped.items():
            self.router.record_swap(number, swap)
        return bool(swapped)


@contextlib.asynccontextmanager
async def generators_of(
    hosts: Sequence[str],
    *,
    timeouts: TimeoutSection | None = None,
    folders: Sequence[Path] = (),
    **section: float,
) -> AsyncIterator[ReplicaWorld]:
    """Generators on hosts, by rank; ``section`` is of the config's generator section."""
    world: ReplicaWorld

    by_id = {name: LocalHost(name, list(folders)) for name in hosts}

    async def spawn(rank: int, number: int) -> Spawned:
        if world.fails_to_start(number):
            raise ValueError("no such model")
        process = standing_still()
        generator = world.generators[number] = ScriptedGenerator(process, number, world.log)

        async def stop() -> None:
            world.num_stopped += 1

        return Spawned(actor=generator, pid=process.pid, host=by_id[world.hosts[rank]], stop=stop)  # type: ignore[arg-type]

    config = GeneratorSection(**({"num_replicas": len(hosts)} | section))  # type: ignore[arg-type]
    told: list[str] = []
    faults, listing = FaultLog(tell=told.append), ProcessListFile()
    reports = SimpleNamespace(faults=faults, listing=listing)
    pool = GeneratorPool(spawn, reports, config, [by_id[name] for name in hosts])
    router = GeneratorRouter(pool, timeouts or TimeoutSection(), max_lost_per_group=config.max_lost_per_group)
    world = ReplicaWorld(
        pool=pool, router=router, faults=faults, listing=listing, hosts=list(hosts), told=told
    )
    try:
        with looking_often():
            await pool.start(len(hosts))
            world.watching = asyncio.create_task(pool.watch())
            yield world
    finally:
        world.watching.cancel() if world.watching is not None else None
        await pool.close()
        for generator in world.generators.values():
            generator.process.kill()
            generator.process.wait()
