"""Models how long a new version takes from the trainer to the generators on GPUs: bytes over bandwidths.

The bandwidths are those of a host of eight H100 (SXM) with one network card of 400 Gb/s, as their makers
state them, and of one core of it as such cores usually copy; ``benchmarks/gpu_probe.py`` measures the first
ones. All of a term's bytes are taken to move at full speed, so that times are lower bounds.
"""

from dataclasses import dataclass

from forgeasync.config import LocalLauncher, ModelFacts, RunConfig, ShadowMemory, num_hosts
from forgeasync.models import BYTES_PER_ELEMENT, expected_shapes
from forgeasync.planning.parameters import count_parameters, generator_parameters_per_rank, version_bytes

PCIE_BYTES_PER_S = 50e9
"""One way between page-locked memory and a GPU: PCIe 5.0 x16 has 64 GB/s, of which 50 usually arrive."""

DEVICE_BYTES_PER_S = 3.35e12
"""Memory of an H100 (SXM); a copy within it reads and writes."""

HOST_BYTES_PER_S = 300e9
"""All GPUs of a host together, from its memory."""

NETWORK_BYTES_PER_S = 50e9
"""One network card of 400 Gb/s for each host."""

CORE_COPY_BYTES_PER_S = 5e9
"""A copy of strided boxes by one core."""

CORE_CHECKSUM_BYTES_PER_S = 15e9
"""xxh3 by one core, of bytes that are in its cache."""

RELOAD_S_PER_TENSOR = 0.0005
"""Python and a launch for each tensor that vLLM's loaders take; ``reload_weights`` takes each one twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTerm:
    """One part of the way."""

    name: str
    seconds: float
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fleet:
    """What the terms are made of."""

    version: float
    """Bytes of a version."""
    per_gpu: float
    """Bytes of the weights on one GPU of an engine."""
    num_trainer_ranks: int
    num_trainer_hosts: int
    num_generator_hosts: int
    replicas_per_host: int
    gpus_per_host: int
    """GPUs of one host that generate."""
    is_one_host: bool


def weight_times(config: RunConfig, facts: ModelFacts) -> list[TimeTerm]:
    """Return the terms of one version of a run on GPUs, in their order: publish, fetch, stage, pause.

    Adapters that vLLM serves are not staged, and their swap is not modelled.
    """
    fleet = _fleet(config, facts)
    terms = [*_publish(fleet), *_fetch(fleet)]
    if config.lora is None:
        terms += [_stage(fleet, config.weights.shadow), *_pauses(config, facts, fleet)]
    return terms


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSeconds:
    """The terms of one version added up."""

    publish_s: float
    fetch_s: float
    """With staging, which goes on beside decoding too."""
    pause_s: float
    """For which decoding stands still, under the config's ``weights.shadow``."""


def weight_seconds(config: RunConfig, facts: ModelFacts) -> WeightSeconds:
    """Return how long one version takes. Adapters are fetched, and their swap is taken to cost nothing."""
    fleet = _fleet(config, facts)
    publish_s = sum(term.seconds for term in _publish(fleet))
    fetch_s = sum(term.seconds for term in _fetch(fleet))
    if config.lora is not None:
        return WeightSeconds(publish_s=publish_s, fetch_s=fetch_s, pause_s=0.0)
    by_host, by_device, _ = _pauses(config, facts, fleet)
    pause = by_host if config.weights.shadow is ShadowMemory.HOST else by_device
    staging_s = _stage(fleet, config.weights.shadow).seconds
    return WeightSeconds(publish_s=publish_s, fetch_s=fetch_s + staging_s, pause_s=pause.seconds)


def _fleet(config: RunConfig, facts: ModelFacts) -> _Fleet:
    generator, launcher = config.generator, config.launcher
    element = BYTES_PER_ELEMENT[generator.dtype]
    per_gpu = generator_parameters_per_rank(config, facts, count_parameters(facts)) * element
    is_one_host = isinstance(launcher, LocalLauncher)
    counts = None if isinstance(launcher, LocalLauncher) else num_hosts(launcher)
    num_generator_hosts = 1 if counts is None else counts.generators
    replicas = generator.num_replicas // num_generator_hosts
    return _Fleet(
        version=version_bytes(config, facts),
        per_gpu=per_gpu,
        num_trainer_ranks=config.trainer.parallel.num_procs,
        num_trainer_hosts=1 if counts is None else counts.trainer,
        num_generator_hosts=num_generator_hosts,
        replicas_per_host=replicas,
        gpus_per_host=replicas * generator.tensor_parallel,
        is_one_host=is_one_host,
    )


def _moved(
    name: str, num_bytes: float, what: str, bytes_per_s: float, medium: str, more: str = ""
) -> TimeTerm:
    how = f"{_gb(num_bytes)}{what} at {_gb(bytes_per_s)}/s ({medium}){more}"
    return TimeTerm(name=name, seconds=num_bytes / bytes_per_s, how=how)


def _publish(fleet: _Fleet) -> list[TimeTerm]:
    per_rank, what = fleet.version / fleet.num_trainer_ranks, " a trainer rank"
    return [
        _moved("publish: copy", per_rank, what, PCIE_BYTES_PER_S, "PCIe", ", beside the next forward pass"),
        _moved("publish: checksums", per_rank, what, CORE_CHECKSUM_BYTES_PER_S, "a core"),
    ]


def _fetch(fleet: _Fleet) -> list[TimeTerm]:
    share = fleet.version / fleet.replicas_per_host
    what = f", the share of one of {fleet.replicas_per_host} replicas"
    checked = _moved("fetch: checksums", share, f"{what} a host,", CORE_CHECKSUM_BYTES_PER_S, "a core")
    if fleet.is_one_host:
        return [_moved("fetch: copy", share, f"{what},", CORE_COPY_BYTES_PER_S, "a core"), checked]
    sent = fleet.version * fleet.num_generator_hosts / fleet.num_trainer_hosts
    slowest, what = max((fleet.version, " into a generator host"), (sent, " out of a trainer host"))
    return [_moved("fetch: network", slowest, what, NETWORK_BYTES_PER_S, "one card of 400 Gb/s"), checked]


def _stage(fleet: _Fleet, shadow: ShadowMemory) -> TimeTerm:
    if shadow is ShadowMemory.HOST:
        part = fleet.per_gpu / fleet.replicas_per_host
        return _moved("stage", part, " a worker", CORE_COPY_BYTES_PER_S, "a core", ", beside decoding")
    return TimeTerm(
        name="stage",
        seconds=fleet.per_gpu / CORE_COPY_BYTES_PER_S + fleet.per_gpu / PCIE_BYTES_PER_S,
        how=f"{_gb(fleet.per_gpu)} a worker at {_gb(CORE_COPY_BYTES_PER_S)}/s (a core), then at "
        f"{_gb(PCIE_BYTES_PER_S)}/s (PCIe), beside decoding",
    )


def _pauses(config: RunConfig, facts: ModelFacts, fleet: _Fleet) -> list[TimeTerm]:
    """The pause under every route; which one a run takes shows when its engines have loaded."""
    together = fleet.gpus_per_host * fleet.per_gpu
    host_s = max(fleet.per_gpu / PCIE_BYTES_PER_S, together / HOST_BYTES_PER_S)
    num_tensors = len(expected_shapes(facts))
    chosen = config.weights.shadow
    return [
        TimeTerm(
            name="pause, shadow: host",
            seconds=host_s,
            how=f"{_gb(fleet.per_gpu)} a GPU at {_gb(PCIE_BYTES_PER_S)}/s (PCIe); {_gb(together)} a host at "
            f"{_gb(HOST_BYTES_PER_S)}/s{_chosen(chosen is ShadowMemory.HOST)}",
        ),
        TimeTerm(
            name="pause, shadow: device",
            seconds=2 * fleet.per_gpu / DEVICE_BYTES_PER_S,
            how=f"2 x {_gb(fleet.per_gpu)} at {_gb(DEVICE_BYTES_PER_S)}/s (HBM); takes "
            f"{_gb(fleet.per_gpu)} of every GPU{_chosen(chosen is ShadowMemory.DEVICE)}",
        ),
        TimeTerm(
            name="pause, reloading",
            seconds=2 * num_tensors * RELOAD_S_PER_TENSOR,
            how=f"2 x {num_tensors:,} tensors at {RELOAD_S_PER_TENSOR * 1e3:g} ms; only if kernels keep "
            "an order of their own",
        ),
    ]


def _chosen(is_chosen: bool) -> str:
    return " (weights.shadow)" if is_chosen else ""


def _gb(num_bytes: float) -> str:
    if num_bytes >= 100e9:
        return f"{num_bytes / 1e9:,.0f} GB"
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"
