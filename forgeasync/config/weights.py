"""Section ``weights``: how new weights get from the trainer to the generators."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from forgeasync.schema import MAX_SECONDS, PluginGroup, PythonCode, Refusal, Section, installed_kinds

BUILT_IN_TRANSPORTS = {
    "auto": "forgeasync.weights.transports.rdma.AutoTransport",
    "shared_memory": "forgeasync.weights.transports.shared_memory.SharedMemoryTransport",
    "rdma": "forgeasync.weights.transports.rdma.RdmaTransport",
    "tcp": "forgeasync.weights.transports.tcp.TcpTransport",
    "torchstore": "forgeasync.weights.transports.store.TorchstoreTransport",
}
"""Class of each built-in ``weights.transport``; it is imported only if a run uses it."""


def _built_in(name: str) -> str:
    if name not in BUILT_IN_TRANSPORTS:
        names = (*BUILT_IN_TRANSPORTS, *installed_kinds(PluginGroup.TRANSPORTS))
        expected = f"one of {', '.join(names)}, or a section of kind: python"
        raise PydanticCustomError("literal_error", "expected {expected}", {"expected": expected})
    return name


TransportChoice = Annotated[
    Annotated[str, AfterValidator(_built_in), Tag("name")] | Annotated[PythonCode, Tag("python")],
    Discriminator(lambda value: "python" if isinstance(value, dict | PythonCode) else "name"),
]
"""How published weights reach a generator: by a built-in transport or by the user's own class."""


class Interruption(StrEnum):
    """Policy for running sequences when new weights arrive."""

    IN_FLIGHT = "in_flight"
    """Running sequences continue: the swap happens between two decode steps."""
    DRAIN = "drain"
    """No new sequence starts, and the swap waits until all running sequences have ended."""
    ABORT_AND_RESUME = "abort_and_resume"
    """Running requests end; their tokens become the prefix of new requests under the new weights."""
    CANCEL_STALE = "cancel_stale"
    """Like in_flight, but groups that would become too old are cancelled and their prompts reissued."""
    BLOCKING = "blocking"
    """Decoding pauses from the start of the fetch to the end of the swap."""


class KvAfterSwap(StrEnum):
    """Policy for the KV cache of running sequences at a swap, and for recurrent states of linear attention.

    The prefill that recomputes a state recomputes keys and values too, so one key decides for both.
    """

    KEEP = "keep"
    RECOMPUTE = "recompute"
    """Running sequences are queued and computed again with the new weights, at most
    ``generator.max_num_batched_tokens`` in a step; the others wait."""


class ShadowMemory(StrEnum):
    """Where a generator on GPUs keeps the next version until the swap."""

    HOST = "host"
    """Page-locked memory, shared by the generators of a host; the swap copies over PCIe."""
    DEVICE = "device"
    """Memory of each GPU, of the size of its weights; the swap takes tens of milliseconds."""


class Delta(StrEnum):
    """What generators fetch of a new version."""

    OFF = "off"
    """All of it."""
    EXACT = "exact"
    """The elements whose bits changed."""


PATCH_SHARE = 0.25
"""With ``weights.delta: exact``, room for changed elements in a buffer, as a share of the weights' bytes."""


class WeightsSection(Section):
    """Settings for the transfer of new weights from the trainer to the generators."""

    transport: TransportChoice = "auto"
    """auto, shared_memory, rdma, tcp, torchstore, or the name of a package's transport (docs/plugins.md).
    auto: shared memory on one host; between hosts RDMA, or TCP without its hardware. For your own class write
    {kind: python, factory: package.module.MyTransport}; see forgeasync/weights/transports/transport.py."""
    interruption: Interruption = Interruption.IN_FLIGHT
    kv_cache: KvAfterSwap = KvAfterSwap.KEEP
    prefix_cache_across_versions: bool = False
    """Let new requests use cached prefixes that were computed with older weights."""
    delta: Delta = Delta.OFF
    """off, or exact: generators fetch only elements whose bits changed since the version that they have. For
    networks slower than one version per step. Staging and receive buffers take 25 % more memory."""
    archive: bool = False
    """Write every published version to files in the run's folder, as a patch, for
    python -m apps.control RUN export --version N. Needs weights.delta: exact."""
    shadow: ShadowMemory = ShadowMemory.HOST
    """Where the next version waits for the swap: host or device. No effect without GPUs, on adapters, or if
    vLLM must load every version again (the run reports this at its start)."""
    lease_timeout_s: float = Field(default=60.0, ge=1.0, le=MAX_SECONDS)
    """Time limit of a generator's fetch, in seconds (with RDMA, whole seconds). After that the trainer may
    overwrite the staging buffer."""

    def find_problems(self) -> Iterator[Refusal]:
        """Yield a prefix cache that could never be used, and an archive without patches."""
        if self.archive and self.delta is Delta.OFF:
            yield "archive", "must be false with weights.delta = 'off': it is made of the patches of 'exact'"
        if self.prefix_cache_across_versions and self.kv_cache is KvAfterSwap.RECOMPUTE:
            yield (
                "prefix_cache_across_versions",
                "must be false with weights.kv_cache = 'recompute', which leaves no prefix of an older "
                "version",
            )
