"""What a run is sure to allocate, against the memory of the machine that it is started on."""

import dataclasses
import json
from pathlib import Path

import pytest

from forgeasync.config import RunConfig
from forgeasync.models import read_model_facts
from forgeasync.planning import (
    Machine,
    check_host_memory,
    check_memory,
    check_shared_memory,
    count_parameters,
    teacher_memory,
)
from forgeasync.schema import ConfigError
from forgeasync.testing import write_tiny_model
from tests.support.config_samples import FACTS, minimal_config, only

GIB = 2**30
LARGE = dataclasses.replace(FACTS, vocab_size=2**24)
"""2 * 64 * 2**24 parameters in embedding and head: 8 GiB in float32."""


def test_a_kv_cache_larger_than_the_machine_is_refused() -> None:
    large = minimal_config("generator.kv_cache_gib=1000")
    message = only(list(check_memory(large, FACTS, host_bytes=32 * GIB)))
    assert message.startswith("generator.kv_cache_gib = 1000.0: must be at most 32")
    assert "1 engine processes" in message and "32 GiB of memory available" in message
    assert list(check_memory(large, FACTS, host_bytes=1001 * GIB)) == []


def test_weights_and_optimizer_count() -> None:
    """8 GiB in the engine, and four times that in the trainer."""
    run = minimal_config("generator.kv_cache_gib=4")
    message = only(list(check_memory(run, LARGE, host_bytes=42 * GIB)))
    assert "must be at most 1.99:" in message and "8 GiB for the weights" in message
    assert "32 GiB for parameters and optimizer of 1 trainer processes" in message
    assert list(check_memory(run, LARGE, host_bytes=45 * GIB)) == []
    message = only(list(check_memory(run, LARGE, host_bytes=39 * GIB)))
    assert message.startswith("model.path = ") and "has 39 GiB of memory available" in message
    # A frozen model has no moments.
    adapted = minimal_config("generator.kv_cache_gib=4", "lora={rank: 2, alpha: 4, targets: [q_proj]}")
    assert list(check_memory(adapted, LARGE, host_bytes=21 * GIB)) == []


def test_generators_alone_need_no_memory_of_a_trainer() -> None:
    run = minimal_config("generator.kv_cache_gib=4")
    assert list(check_memory(run, LARGE, host_bytes=13 * GIB, trains=False)) == []
    message = only(list(check_memory(run, LARGE, host_bytes=11 * GIB, trains=False)))
    assert "must be at most 3:" in message and "8 GiB for the weights" in message
    assert "trainer" not in message


def test_a_reference_model_counts() -> None:
    run = minimal_config("generator.kv_cache_gib=4", "algorithm.kl={estimator: k3, coefficient: 0.1}")
    assert "40 GiB for parameters" in only(list(check_memory(run, LARGE, host_bytes=51 * GIB)))


@pytest.mark.parametrize(
    ("overrides", "machine", "needed_gib"),
    [
        # Two staged versions of 8 GiB, and one that the host receives, however many replicas it has.
        ((), Machine.CPU, 25),
        (("generator.num_replicas=2",), Machine.CPU, 25),
        # On GPUs the host also has the next version as its kernels keep it.
        ((), Machine.GPU, 33),
        (
            ("generator.num_replicas=2", "launcher={kind: process, hosts: {generators: 2}}"),
            Machine.CPU,
            33,
        ),
        (("lora={rank: 2, alpha: 4, targets: [q_proj]}",), Machine.CPU, 1),
        # Parameters and two moments, twice.
        (("trainer.recovery.snapshot_every_steps=1",), Machine.CPU, 25 + 48),
    ],
)
def test_shared_memory_holds_weights_snapshots_and_payloads(
    overrides: tuple[str, ...], machine: Machine, needed_gib: int
) -> None:
    payloads = "payload.capacity_gib=1"
    snapshots = "trainer.recovery.snapshot_every_steps=null"
    run = minimal_config(payloads, snapshots, *overrides)
    assert list(check_shared_memory(run, LARGE, machine, free_bytes=round((needed_gib + 0.1) * GIB))) == []
    message = only(list(check_shared_memory(run, LARGE, machine, free_bytes=round((needed_gib - 0.1) * GIB))))
    assert message.startswith("payload.capacity_gib = 1.0: ") and "free in /dev/shm" in message


@pytest.mark.parametrize(
    ("overrides", "needed_gib", "named"),
    [
        # Shared memory as above.
        ((), 33, "33 GiB for weights on their way and payloads"),
        (("checkpoint.every_steps=1",), 33 + 24, "24 GiB for copies for checkpoints"),
        # Parameters, two moments and gradients.
        (("trainer.cpu_offload=true",), 33 + 32, "32 GiB for parameters and optimizer"),
        (("trainer.recovery.snapshot_every_steps=1",), 33 + 48, "48 GiB for snapshots of the trainer"),
    ],
)
def test_the_host_of_gpus_needs_memory_too(overrides: tuple[str, ...], needed_gib: int, named: str) -> None:
    run = minimal_config(
        "payload.capacity_gib=1",
        "trainer.recovery.snapshot_every_steps=null",
        "checkpoint.every_steps=null",
        *overrides,
    )
    assert list(check_host_memory(run, LARGE, host_bytes=round((needed_gib + 0.1) * GIB))) == []
    message = only(list(check_host_memory(run, LARGE, host_bytes=round((needed_gib - 0.1) * GIB))))
    assert message.startswith("host memory = ") and named in message


def with_teacher(**teacher: object) -> RunConfig:
    section = {"engine": {"kv_cache_gib": 3, "num_replicas": 2}} | teacher
    return minimal_config(
        "generator.kv_cache_gib=4",
        "algorithm.terms=[{kind: sampled_reverse_kl}]",
        f"teachers={json.dumps({'wise': section})}",
    )


def test_engines_of_teachers_count(tmp_path: Path) -> None:
    folder = str(write_tiny_model(tmp_path / "hf"))
    run = with_teacher(model_path=folder)
    message = only(list(check_memory(run, FACTS, host_bytes=9 * GIB)))
    assert "must be at most 2.99:" in message and "6 GiB for weights and KV caches of teachers" in message
    assert list(check_memory(run, FACTS, host_bytes=11 * GIB)) == []
    with pytest.raises(ConfigError, match=r"^teachers\.wise\.model_path = '.*gone'"):
        list(check_memory(with_teacher(model_path=str(tmp_path / "gone")), FACTS, host_bytes=GIB))


def test_only_a_teacher_that_moves_has_a_place_for_the_next_version(tmp_path: Path) -> None:
    folder = str(write_tiny_model(tmp_path / "hf"))

    def planned(**teacher: object) -> dict[str, int]:
        run = with_teacher(model_path=folder, **teacher)
        ((name, items),) = teacher_memory(run, Machine.CPU)
        assert name == "wise"
        return {item.name: item.num_bytes for item in items}

    frozen, live = planned(), planned(source="live")
    assert set(live) - set(frozen) == {"shadow weights"} and frozen == {name: live[name] for name in frozen}
    assert frozen["KV cache"] == 3 * GIB
    facts = read_model_facts(folder)
    padding = 2 * (64 - facts.vocab_size) * facts.hidden_size
    assert frozen["weights"] == 4 * (count_parameters(facts).total + padding)


def test_a_server_takes_no_memory_here() -> None:
    server = {"endpoint": {"base_url": "http://localhost:1/v1", "model": "m"}}
    run = with_teacher(**server)
    assert list(teacher_memory(run, Machine.CPU)) == []


def test_other_machines_are_not_this_one() -> None:
    launcher = "launcher={kind: slurm, gpus_per_host: 8, partition: gpu}"
    run = minimal_config("generator.kv_cache_gib=1000", launcher)
    assert list(check_memory(run, FACTS, host_bytes=GIB)) == []
