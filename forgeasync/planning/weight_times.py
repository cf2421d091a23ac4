"""Estimates the time of a weight update on GPUs, from trainer to generators, as bytes over bandwidths.

The bandwidths are those of a host with eight H100 (SXM) and one 400 Gb/s network card, as their vendors state
them, and typical copy rates of one CPU core. ``benchmarks/gpu_probe.py`` measures the former. All bytes of a
term are assumed to move at full speed, so the times are lower bounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from forgeasync.config import Delta, LocalLauncher, ModelFacts, RunConfig, ShadowMemory, num_hosts
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

CORE_COMPARE_BYTES_PER_S = 2.5e9
"""Rate at which one core finds and encodes the elements that changed since the last version."""

CHANGED_SHARE = 0.02
"""Bytes of changed elements to all bytes, in bfloat16 at a learning rate of 1e-6."""

RELOAD_S_PER_TENSOR = 0.0005
"""Time for Python and a kernel launch per tensor; ``reload_weights`` of vLLM loads each tensor twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTerm:
    """Time of one part of a weight update; ``how`` explains it."""

    name: str
    seconds: float
    how: str


def weight_times(config: RunConfig, facts: ModelFacts) -> list[TimeTerm]:
    """Return the terms of one weight update on GPUs, in order: publish, fetch, stage, pause.

    The names begin with these words. Of the pauses the run has one: a run's way to swap is known only after
    its engines have loaded. Adapters have no terms for stage and pause: they are not staged, and their swap
    is not modeled.
    """
    version, launcher = version_bytes(config, facts), config.launcher
    per_rank, what = version / config.trainer.parallel.num_procs, " a trainer rank"
    terms = [
        _moved("publish: copy", per_rank, what, PCIE_BYTES_PER_S, "PCIe", ", beside the next forward pass"),
        _moved("publish: checksums", per_rank, what, CORE_CHECKSUM_BYTES_PER_S, "a core"),
    ]
    moved, of_what = 1.0, ""
    if config.weights.delta is Delta.EXACT:
        terms.append(_moved("publish: patches", per_rank, what, CORE_COMPARE_BYTES_PER_S, "a core"))
        moved, of_what = CHANGED_SHARE, f", {CHANGED_SHARE:.0%} of a version's"
    counts = None if isinstance(launcher, LocalLauncher) else num_hosts(launcher)
    num_replicas = config.generator.num_replicas // (1 if counts is None else counts.generators)
    share = version / num_replicas
    what = f", the share of one of {num_replicas} replicas"
    if counts is None:
        terms.append(
            _moved("fetch: copy", moved * share, f"{of_what}{what},", CORE_COPY_BYTES_PER_S, "a core")
        )
    else:
        sent = version * counts.generators / counts.trainer
        slowest, where = max((version, " into a generator host"), (sent, " out of a trainer host"))
        slowest, where = moved * slowest, f"{of_what}{where}"
        terms.append(_moved("fetch: network", slowest, where, NETWORK_BYTES_PER_S, "one card of 400 Gb/s"))
    terms.append(_moved("fetch: checksums", share, f"{what} a host,", CORE_CHECKSUM_BYTES_PER_S, "a core"))
    if config.lora is None:
        per_gpu = generator_parameters_per_rank(config, facts, count_parameters(facts))
        per_gpu *= BYTES_PER_ELEMENT[config.generator.dtype]
        terms += _swap(config, facts, per_gpu=per_gpu, num_replicas=num_replicas)
    return terms


def seconds_of(part: str, terms: Sequence[TimeTerm]) -> float:
    """Return the sum of the terms whose names begin with a text; 0 if there are none."""
    return sum(term.seconds for term in terms if term.name.startswith(part))


def _swap(config: RunConfig, facts: ModelFacts, *, per_gpu: int, num_replicas: int) -> list[TimeTerm]:
    """Return the terms of staging and of each way to swap; ``num_replicas`` share a host."""
    shadow = config.weights.shadow
    if shadow is ShadowMemory.HOST:
        part = per_gpu / num_replicas
        stage = _moved("stage", part, " a worker", CORE_COPY_BYTES_PER_S, "a core", ", beside decoding")
    else:
        stage = TimeTerm(
            name="stage",
            seconds=per_gpu / CORE_COPY_BYTES_PER_S + per_gpu / PCIE_BYTES_PER_S,
            how=f"{_gb(per_gpu)} a worker at {_gb(CORE_COPY_BYTES_PER_S)}/s (a core), then at "
            f"{_gb(PCIE_BYTES_PER_S)}/s (PCIe), beside decoding",
        )
    together = num_replicas * config.generator.tensor_parallel * per_gpu
    num_tensors = len(expected_shapes(facts))
    chosen = {one: " (weights.shadow)" if one is shadow else "" for one in ShadowMemory}
    return [
        stage,
        TimeTerm(
            name="pause, shadow: host",
            seconds=max(per_gpu / PCIE_BYTES_PER_S, together / HOST_BYTES_PER_S),
            how=f"{_gb(per_gpu)} a GPU at {_gb(PCIE_BYTES_PER_S)}/s (PCIe); {_gb(together)} a host at "
            f"{_gb(HOST_BYTES_PER_S)}/s{chosen[ShadowMemory.HOST]}",
        ),
        TimeTerm(
            name="pause, shadow: device",
            seconds=2 * per_gpu / DEVICE_BYTES_PER_S,
            how=f"2 x {_gb(per_gpu)} at {_gb(DEVICE_BYTES_PER_S)}/s (HBM); takes {_gb(per_gpu)} of every GPU"
            f"{chosen[ShadowMemory.DEVICE]}",
        ),
        TimeTerm(
            name="pause, reloading",
            seconds=2 * num_tensors * RELOAD_S_PER_TENSOR,
            how=f"2 x {num_tensors:,} tensors at {RELOAD_S_PER_TENSOR * 1e3:g} ms; only if kernels keep "
            "them in another order",
        ),
    ]


def _moved(
    name: str, num_bytes: float, what: str, bytes_per_s: float, medium: str, more: str = ""
) -> TimeTerm:
    how = f"{_gb(num_bytes)}{what} at {_gb(bytes_per_s)}/s ({medium}){more}"
    return TimeTerm(name=name, seconds=num_bytes / bytes_per_s, how=how)


def _gb(num_bytes: float) -> str:
    if num_bytes >= 100e9:
        return f"{num_bytes / 1e9:,.0f} GB"
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"
