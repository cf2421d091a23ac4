"""Every proc sees its own GPUs, of those that its host may use; no GPU, only their names."""

import asyncio
import os
from pathlib import Path

import pytest
import torch
from monarch.actor import Actor, concurrent_endpoint, this_host

from forgeasync.config import ProcessRewardModel, check_gpus, num_gpus_needed, places_of
from forgeasync.controller import places_of_rewards
from forgeasync.launch import GpuAllocator, HostRole, build_hosts, spawn_role, visible_devices
from forgeasync.schema import ConfigError, Problem
from forgeasync.testing import tiny_config


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


def test_a_reserved_gpu_is_handed_out_to_nobody() -> None:
    allocator = GpuAllocator(4, reserved={1, 7})
    assert [allocator.take(2, role="a"), allocator.take(1, role="b")] == [[0, 2], [3]]
    with pytest.raises(ValueError, match="c needs 1 GPUs, but 0 of this host's 4 are left"):
        allocator.take(1, role="c")
    assert GpuAllocator(0, reserved={1}).take(2, role="a") == [], "CPU processes"


@pytest.mark.parametrize(
    ("gpus", "visible", "expected"),
    [([7, 2], None, {2, 7}), ([7, 2], "4, 7,6,2,", {1, 3}), ([7], "4,5", set()), ([], "GPU-5d12", set())],
)
def test_gpus_of_rewards_are_found_among_those_of_the_run(
    gpus: list[int], visible: str | None, expected: set[int]
) -> None:
    assert places_of(gpus, visible) == expected


def test_gpus_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="must name GPUs by number"):
        places_of([7], "GPU-5d12,7")


def test_a_local_run_keeps_the_gpus_of_its_process_reward_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine of four, of which the first is the reward's."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    config = tiny_config(Path("x"))
    reward = ProcessRewardModel(kind="process_reward_model", model_path="prm", gpu=4)
    config = config.model_copy(update={"data": config.data.model_copy(update={"reward": reward})})
    assert places_of_rewards(config, 4) == {0}
    hosts = build_hosts(config, Path("x"))
    hosts.allot(HostRole.GENERATORS, 3, gpus_per_proc=1)
    with pytest.raises(ValueError, match="0 of this host's 4 are left"):
        hosts.allot(HostRole.TRAINER, 1, gpus_per_proc=1)
    needed = num_gpus_needed(config)

    def few(num_gpus: int) -> list[Problem]:
        found = check_gpus(config, num_gpus, num_of_rewards=1)
        return [one for one in found if one.field == "generator.num_replicas"]

    assert few(needed + 1) == []
    (problem,) = few(needed)
    assert "less 1 of process reward models" in str(problem)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    with pytest.raises(ConfigError, match="must be below 4, the GPUs of this machine"):
        places_of_rewards(config, 4)


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
