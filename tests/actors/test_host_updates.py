"""Generators of one host take a version together: all fetch, then all stage, then all swap."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from forgeasync.actors.router import GeneratorRouter, named_generators
from forgeasync.config.run import TimeoutSection
from forgeasync.weights.fetcher import FetchReport, HostShare
from forgeasync.weights.manifest import Manifest

HOSTS = ("a", "b", "a", "a")
"""Of every replica."""

MANIFEST = Manifest(version=7, slot=0, layout_digest="", checksums=(), waited_s=0.0, staging_s=0.0)


class Mesh:
    """Generators that write down when each of their calls begins and ends; later ones take longer."""

    def __init__(self, *, broken: Sequence[int] = ()) -> None:
        self.log: list[tuple[str, int, str]] = []
        self.connected: list[tuple[int, Path, HostShare]] = []
        self._broken = broken

    def slice(self, *, procs: int) -> SimpleNamespace:
        def endpoint(name: str) -> SimpleNamespace:
            async def call(*arguments: object) -> object:
                self.log.append((name, procs, "begins"))
                await asyncio.sleep(0.002 * (1 + procs))
                self.log.append((name, procs, "ends"))
                return self._answer(name, procs, arguments)

            return SimpleNamespace(call_one=call)

        names = ("begin_update", "stage_update", "finish_update", "abandon_update", "connect_weights")
        return SimpleNamespace(**{name: endpoint(name) for name in names})

    def _answer(self, name: str, rank: int, arguments: tuple[object, ...]) -> object:
        if name == "connect_weights":
            _, _, folder, share = arguments
            self.connected.append((rank, folder, share))
            return "as copies" if rank else "as a reload"
        if name != "begin_update":
            return f"{name} of {rank}"
        return FetchReport(
            version=7,
            is_complete=rank not in self._broken,
            num_bytes_moved=10 + rank,
            num_bytes_needed=100,
            num_bad_blocks=int(rank in self._broken),
            fetch_s=float(rank),
        )

    def ranks(self, name: str) -> set[int]:
        return {rank for called, rank, _ in self.log if called == name}


def router_of(mesh: Mesh) -> GeneratorRouter:
    return GeneratorRouter(mesh, HOSTS, TimeoutSection())  # type: ignore[arg-type]


def test_each_act_starts_when_all_have_ended_the_one_before() -> None:
    mesh = Mesh()
    router = router_of(mesh)
    assert router.hosts == ((0, 2, 3), (1,))

    async def update() -> None:
        report = await router.begin_update(0, MANIFEST)
        assert report.is_complete and report.num_bytes_needed == 100
        assert (report.num_bytes_moved, report.fetch_s) == (10 + 12 + 13, 3.0)
        swaps = await router.finish_update(0, 7)
        assert swaps == [f"finish_update of {rank}" for rank in (0, 2, 3)]

    asyncio.run(update())
    acts = ("begin_update", "stage_update", "finish_update")
    assert [name for name, _, _ in mesh.log] == [name for name in acts for _ in range(6)]
    assert all(mesh.ranks(name) == {0, 2, 3} for name in acts)


def test_a_share_that_has_not_arrived_keeps_the_whole_host_from_the_version() -> None:
    mesh = Mesh(broken=[2])
    report = asyncio.run(router_of(mesh).begin_update(0, MANIFEST))
    assert not report.is_complete and report.num_bad_blocks == 1
    assert mesh.ranks("abandon_update") == {0, 2, 3} and not mesh.ranks("stage_update")


def test_the_first_generator_of_a_host_makes_what_the_others_open() -> None:
    mesh = Mesh()
    folders = [Path(f"/shm/{host}") for host in HOSTS]
    routes = asyncio.run(router_of(mesh).connect_weights(None, (), folders))  # type: ignore[arg-type]
    assert sorted(routes) == ["as a reload", "as copies"], "each route once"
    of_a = [(rank, share) for rank, folder, share in mesh.connected if folder == Path("/shm/a")]
    assert of_a == [(rank, HostShare(index=index, count=3)) for index, rank in enumerate((0, 2, 3))]
    assert [share for rank, _, share in mesh.connected if rank == 1] == [HostShare(index=0, count=1)]
    log = [(rank, when) for _, rank, when in mesh.log if rank != 1]
    assert log == [(rank, when) for rank in (0, 2, 3) for when in ("begins", "ends")], "one after the other"


@pytest.mark.parametrize(("ranks", "words"), [((4,), "generator 4"), ((0, 2), "generators 0, 2")])
def test_messages_name_the_generators(ranks: Sequence[int], words: str) -> None:
    assert named_generators(ranks) == words
