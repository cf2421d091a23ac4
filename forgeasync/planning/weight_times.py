"""Estimates the time of a weight update on GPUs, from trainer to generators, as bytes over bandwidths.

The bandwidths are those of a host with eight H100 (SXM) and one 400 Gb/s network card, as their vendors state
them, and typical copy rates of one CPU core. ``benchmarks/gpu_probe.py`` measures the former. All bytes of a
term are assumed to move at full speed, so the times are lower bounds.
"""

from dataclasses import dataclass

from forgeasync.config import LocalLauncher, ModelFacts, RunConfig, ShadowMemory, num_hosts
from forgeasync.models import BYTES_PER_ELEMENT, expected_shapes, version_bytes
from forgeasync.planning.parameters import count_parameters, generator_parameters_per_rank

PCIE_BYTES_PER_S = 50e9
"""One direction between page-locked memory and a GPU: 50 of the 64 GB/s of PCIe 5.0 x16."""

DEVICE_BYTES_PER_S = 3.35e12
"""Memory bandwidth of an H100 (SXM); a copy on the device uses it twice, to read and to write."""

HOST_BYTES_PER_S = 300e9
"""Bandwidth from a host's memory to all of its GPUs together."""

NETWORK_BYTES_PER_S = 50e9
"""Bandwidth of a host's 400 Gb/s network card."""

CORE_COPY_BYTES_PER_S = 5e9
"""Rate at which one core copies strided boxes."""

CORE_CHECKSUM_BYTES_PER_S = 15e9
"""Rate at which one core computes xxh3 of bytes in its cache."""

RELOAD_S_PER_TENSOR = 0.0005
"""Time for Python and a kernel launch per tensor; ``reload_weights`` of vLLM loads each tensor twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTerm:
    """Time of one part of a weight update; ``how`` explains it."""

    name: str
    seconds: float
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fleet:
    """Sizes and counts from which the terms are computed."""

    version: float
    """Bytes of a version."""
    per_gpu: float
    """Bytes of the weights on one GPU of an engine."""
    num_trainer_ranks: int
    num_trainer_hosts: int
    num_generator_hosts: int
    replicas_per_host: int
    gpus_per_host: int
    """Number of GPUs of one generator host."""
    is_one_host: bool


def weight_times(config: RunConfig, facts: ModelFacts) -> list[TimeTerm]:
    """Return the terms of one weight update on GPUs, in order: publish, fetch, stage, pause.

    Adapters have no terms for stage and pause: they are not staged, and their swap is not modeled.
    """
    fleet = _fleet(config, facts)
    terms = [*_publish(fleet), *_fetch(fleet)]
    if config.lora is None:
        terms += [_stage(fleet, config.weights.shadow), *_pauses(config, facts, fleet)]
    return terms


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSeconds:
    """Sums of the terms of one weight update."""

    publish_s: float
    fetch_s: float
    """Time to fetch and to stage, both concurrent with decoding."""
    pause_s: float
    """Time during which decoding pauses, with the config's ``weights.shadow``."""


def weight_seconds(config: RunConfig, facts: ModelFacts) -> WeightSeconds:
    """Return the times of one weight update; the swap of adapters is assumed to take no time."""
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
    """Return the pause for each way to swap; a run's way is known only after its engines have loaded."""
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
