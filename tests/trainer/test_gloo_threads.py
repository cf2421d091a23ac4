"""A gloo group runs its collectives in one thread, whoever makes it and with whatever arguments."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo
from torch.distributed.device_mesh import init_device_mesh

from tests.support.processes import ProcessFailed, run_apart, run_ranks


def run_loops() -> int:
    """Threads of this process that run collectives of gloo."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("pt_gloo_runloop")


def all_gather(group: dist.ProcessGroup) -> list[float]:
    """What the group's members hold. Once it is known, the thread that gathered it has its name."""
    rank = torch.tensor([float(dist.get_rank(group))])
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(rank, group.size(), group.group_name)
    return torch.ops._c10d_functional.wait_tensor(gathered).tolist()


def threads_of_groups() -> tuple[int, int]:
    """Groups of this rank, made in each way that a trainer makes them, and the threads that they have."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "cp"))
    groups = [dist.group.WORLD, dist.new_group(backend="gloo"), mesh.get_group("tp"), mesh.get_group("cp")]
    for group in groups:
        assert all_gather(group) == [float(rank) for rank in range(group.size())]
    return len(set(groups)), run_loops()


def test_groups_of_ranks_have_one_thread_each() -> None:
    for num_groups, num_threads in run_ranks(2, threads_of_groups):
        assert num_groups >= 3 and num_threads == num_groups


def threads_of_arguments() -> tuple[int, int]:
    """Groups made with each form of arguments that torch takes, and the threads that they have."""
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_default_device()]
    store, timeout = dist.HashStore(), timedelta(seconds=50)
    groups = [
        ProcessGroupGloo(dist.PrefixStore("a", store), 0, 1),
        ProcessGroupGloo(dist.PrefixStore("b", store), 0, 1, timeout),
        ProcessGroupGloo(dist.PrefixStore("c", store), 0, 1, timeout=timeout),
        ProcessGroupGloo(dist.PrefixStore("d", store), 0, 1, options),
    ]
    for group in groups:
        group.allreduce([torch.ones(1)]).wait()
    assert [group.options._timeout for group in groups[1:3]] == [timeout] * 2
    return len(groups), run_loops()


def test_groups_of_any_arguments_have_one_thread_each() -> None:
    num_groups, num_threads = run_apart(threads_of_arguments)
    assert num_threads == num_groups


def make_group() -> None:
    ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=50))


def test_a_group_takes_the_interfaces_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    run_apart(make_group)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,none_such")
    with pytest.raises(ProcessFailed, match="none_such"):
        run_apart(make_group)
