"""The model of a version's time, against sums by hand."""

import pytest

from forgeasync.config import load_config
from forgeasync.models import read_model_facts
from forgeasync.planning import TimeTerm, weight_times

VERSION = 30_532_122_624 * 2
"""Bytes of Qwen3-30B-A3B in bfloat16, by the size that its model card gives: 30.5 billion parameters."""


def terms(*overrides: str) -> dict[str, TimeTerm]:
    config = load_config(["configs/qwen3_30b_a3b.yaml"], list(overrides))
    return {term.name: term for term in weight_times(config, read_model_facts(config.model.path))}


HOSTS = (
    "trainer.parallel.num_procs=16",
    "generator.num_replicas=8",
    "generator.tensor_parallel=2",
    "launcher.kind=process",
    "launcher.hosts.trainer=2",
    "launcher.hosts.generators=2",
)


def test_a_version_crosses_the_network_once_for_each_generator_host() -> None:
    found = terms(*HOSTS)
    assert found["publish: copy"].seconds == pytest.approx(VERSION / 16 / 50e9, rel=0.01)
    # Two hosts receive all of it; two send half of it to each of them.
    assert found["fetch: network"].seconds == pytest.approx(VERSION / 50e9, rel=0.01)
    (lonely,) = [terms(*HOSTS, "launcher.hosts.trainer=1")["fetch: network"]]
    assert lonely.seconds == pytest.approx(2 * VERSION / 50e9, rel=0.01)
    assert "out of a trainer host" in lonely.how
    # Four replicas a host share the checking.
    assert found["fetch: checksums"].seconds == pytest.approx(VERSION / 4 / 15e9, rel=0.01)


def test_pauses_by_route() -> None:
    found = terms(*HOSTS)
    per_gpu = VERSION / 2
    # Eight GPUs of a host together take more than the host's memory gives.
    assert found["pause, shadow: host"].seconds == pytest.approx(8 * per_gpu / 300e9, rel=0.01)
    assert "(weights.shadow)" in found["pause, shadow: host"].how
    assert found["pause, shadow: device"].seconds == pytest.approx(2 * per_gpu / 3.35e12, rel=0.01)
    # 48 layers of 128 experts of 3 matrices, 4 of attention, a router and 4 norms, embedding, head, norm.
    assert found["pause, reloading"].seconds == pytest.approx(2 * (48 * (128 * 3 + 9) + 3) * 0.0005)
    device = terms(*HOSTS, "weights.shadow=device")
    assert "(weights.shadow)" in device["pause, shadow: device"].how
    assert device["stage"].seconds > 4 * found["stage"].seconds, "each replica stages all of it"


def test_adapters_that_are_served_have_no_swap_in_the_model() -> None:
    found = terms(*HOSTS, "lora.rank=16", "lora.alpha=32", "lora.targets=[q_proj]")
    assert set(found) == {"publish: copy", "publish: checksums", "fetch: network", "fetch: checksums"}
    assert found["fetch: network"].seconds < 0.1
