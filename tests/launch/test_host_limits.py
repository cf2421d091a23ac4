"""Whether a host has what its role needs there, by facts alone."""

import dataclasses
import os
import resource
import shutil
from pathlib import Path

import pytest

from forgeasync.config import load_config
from forgeasync.controller import check_hosts
from forgeasync.launch import HostLimits, HostRole, check_host_limits, gather_host_limits, lock_warning
from forgeasync.models import read_model_facts
from forgeasync.planning import HostNeeds, role_needs
from forgeasync.schema import ConfigError
from tests.support.config_samples import CONFIGS

GIB = 2**30

NEEDS = HostNeeds(
    num_cpus=8, shared_bytes=100 * GIB, memory_bytes=300 * GIB, buffer_bytes=200 * GIB, locked_bytes=50 * GIB
)
ENOUGH = HostLimits(
    machine="gpu7",
    shared_bytes=120 * GIB,
    shared_free_bytes=100 * GIB,
    available_bytes=200 * GIB,
    lockable_bytes=None,
    num_rdma_devices=4,
)


def with_(**changed: object) -> HostLimits:
    return dataclasses.replace(ENOUGH, **changed)


def test_what_just_fits_is_taken() -> None:
    assert list(check_host_limits("trainer-0", ENOUGH, NEEDS)) == []
    assert list(check_host_limits("trainer-0", with_(lockable_bytes=50 * GIB), NEEDS)) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"shared_free_bytes": 100 * GIB - 1},
            ["host trainer-0 (gpu7): /dev/shm", "'100 GiB free of 120'", "100 GiB free", "--shm-size"],
        ),
        (
            {"available_bytes": 64 * GIB},
            ["host trainer-0 (gpu7): memory", "'64 GiB available'", "200 GiB and more", "launcher.mem"],
        ),
        (
            {"lockable_bytes": 64 * 1024},
            ["host trainer-0 (gpu7): locked memory", "'6.1e-05 GiB for each process'", "50 GiB", "ulimit -l"],
        ),
    ],
)
def test_what_is_too_small_is_named_with_figure_and_remedy(changed: dict[str, int], words: list[str]) -> None:
    (problem,) = check_host_limits("trainer-0", with_(**changed), NEEDS)
    assert all(word in str(problem) for word in words), str(problem)
    assert lock_warning("trainer-0", with_(**changed), NEEDS) is None


def test_all_that_is_too_small_is_named_at_once() -> None:
    bad = with_(shared_free_bytes=0, available_bytes=0, lockable_bytes=0)
    assert len(list(check_host_limits("trainer-0", bad, NEEDS))) == 3


def test_a_low_lock_limit_without_rdma_devices_is_only_told() -> None:
    low = with_(lockable_bytes=8 * 2**20, num_rdma_devices=0)
    assert list(check_host_limits("trainer-0", low, NEEDS)) == []
    words = lock_warning("trainer-0", low, NEEDS)
    assert words is not None and "0.00781 GiB" in words and "50 GiB" in words and "ulimit -l" in words
    assert lock_warning("trainer-0", with_(num_rdma_devices=0), NEEDS) is None


def test_a_host_says_what_it_has() -> None:
    limits = gather_host_limits()
    assert limits.machine == os.uname().nodename
    disk = shutil.disk_usage("/dev/shm")
    assert limits.shared_bytes == disk.total
    assert limits.shared_free_bytes == pytest.approx(disk.free, abs=64 * 2**20)
    assert 0 < limits.available_bytes


def test_the_lock_limit_is_that_of_the_process() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    user = os.geteuid()
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 * 1024, hard))
    try:
        if user == 0:
            # Root may have the capability to lock all memory.
            os.seteuid(65534)
        assert gather_host_limits().lockable_bytes == 64 * 1024
    finally:
        os.seteuid(user)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


class _Hosts:
    """Only what ``check_hosts`` asks of hosts."""

    def __init__(self, trainer: HostLimits, generators: HostLimits) -> None:
        self._limits = {HostRole.TRAINER: trainer, HostRole.GENERATORS: generators}

    def limits(self, role: HostRole) -> dict[str, HostLimits]:
        return {f"{role}-0": self._limits[role]}


def test_each_role_is_held_to_its_own_needs() -> None:
    config = load_config([CONFIGS / "qwen3_30b_a3b.yaml", CONFIGS / "launchers" / "slurm.yaml"])
    facts = read_model_facts(config.model.path)
    needs = role_needs(config, facts, config.launcher)
    large = with_(shared_free_bytes=2**50, available_bytes=2**50)
    assert check_hosts(config, facts, _Hosts(large, large)) == []
    # Two staged versions of 56.9 GiB and two snapshots over two hosts are more than a generator's host has.
    assert needs.trainer.shared_bytes > needs.generators.shared_bytes
    tight = dataclasses.replace(large, shared_free_bytes=needs.generators.shared_bytes)
    assert check_hosts(config, facts, _Hosts(large, tight)) == []
    with pytest.raises(ConfigError) as refused:
        check_hosts(config, facts, _Hosts(tight, tight))
    (problem,) = refused.value.problems
    assert problem.field == "host trainer-0 (gpu7): /dev/shm"


def test_locked_memory_is_told_of_hosts_with_gpus(tmp_path: Path) -> None:
    config = load_config([CONFIGS / "qwen3_30b_a3b.yaml", CONFIGS / "launchers" / "slurm.yaml"])
    facts = read_model_facts(config.model.path)
    low = with_(shared_free_bytes=2**50, available_bytes=2**50, lockable_bytes=2**16, num_rdma_devices=0)
    warnings = check_hosts(config, facts, _Hosts(low, low))
    assert [words.split(":")[0] for words in warnings] == [
        "host trainer-0 (gpu7)",
        "host generators-0 (gpu7)",
    ]
