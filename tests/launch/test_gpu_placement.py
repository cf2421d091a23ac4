"""Every proc sees its own GPUs, of those that its host may use; no GPU, only their names."""

import asyncio
import os

import pytest
from monarch.actor import Actor, concurrent_endpoint, this_host

from forgeasync.launch.bootstrap_main import visible_devices
from forgeasync.launch.placement import GpuAllocator, spawn_role


@pytest.mark.parametrize(
    ("places", "inherited", "seen"),
    [
        ("", None, ""),
        ("", "4,5", ""),
        ("0,1", None, "0,1"),
        ("1", "4,5", "5"),
        ("0,2", " 7 ,GPU-5d12, MIG-9 ,3", "7,MIG-9"),
        ("1", "2,0,-1,1", "0"),
    ],
)
def test_places_count_among_the_gpus_of_the_job(places: str, inherited: str | None, seen: str) -> None:
    assert visible_devices(places, inherited) == seen


@pytest.mark.parametrize(
    ("inherited", "num"), [("4", 1), ("", 0), ("3,-1,5", 1), ("-1", 0)], ids=["few", "none", "cut", "off"]
)
def test_a_gpu_that_the_job_does_not_have_is_refused(inherited: str, num: int) -> None:
    with pytest.raises(ValueError, match=rf"CUDA_VISIBLE_DEVICES={inherited} .* see {num} GPUs.*number 1"):
        visible_devices("0,1", inherited)


def test_gpus_are_handed_out_once() -> None:
    allocator = GpuAllocator(3)
    assert [allocator.take(1, role="a"), allocator.take(2, role="b")] == [[0], [1, 2]]
    with pytest.raises(ValueError, match="c needs 1 GPUs, but 0 of this host's 3 are left"):
        allocator.take(1, role="c")


class Seen(Actor):
    @concurrent_endpoint
    async def devices(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.procs
def test_procs_of_a_job_with_some_of_a_hosts_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5d12,6")

    async def look() -> list[str]:
        mesh = spawn_role(this_host(), "seen", num_procs=2, gpus_per_proc=[[2], [0, 1]])
        answers = await mesh.spawn("seen", Seen).devices.call()
        await mesh.stop()
        return [seen for _, seen in answers.items()]

    assert asyncio.run(look()) == ["6", "4,GPU-5d12"]
