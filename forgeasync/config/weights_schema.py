"""How a run's config describes the way of new weights to the generators."""

from enum import StrEnum

from pydantic import Field

from forgeasync.config.section import MAX_SECONDS, Section


class TransportChoice(StrEnum):
    """How published weights reach a generator."""

    AUTO = "auto"
    """Shared memory on one host, RDMABuffer between hosts."""
    SHARED_MEMORY = "shared_memory"
    RDMA = "rdma"
    """Monarch's RDMABuffer: ibverbs where there is the hardware, TCP elsewhere."""
    TORCHSTORE = "torchstore"


class Interruption(StrEnum):
    """What happens to running sequences when new weights arrive."""

    IN_FLIGHT = "in_flight"
    """They go on: the swap happens between two decode steps."""
    DRAIN = "drain"
    """No new sequence starts; the swap waits until all running ones have ended."""
    ABORT_AND_RESUME = "abort_and_resume"
    """They end; what they have is the prefix of new requests under the new weights."""
    CANCEL_STALE = "cancel_stale"
    """As in_flight, but groups that would be too old to train on are cancelled and their prompts reissued."""
    BLOCKING = "blocking"
    """Decoding stands still from the start of the fetch to the end of the swap."""


class KvAfterSwap(StrEnum):
    """What happens to the KV cache of running sequences at a swap."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    """Computed again under the new weights."""


class WeightsSection(Section):
    """How new weights travel from the trainer to the generators."""

    transport: TransportChoice = TransportChoice.AUTO
    interruption: Interruption = Interruption.IN_FLIGHT
    kv_cache: KvAfterSwap = KvAfterSwap.KEEP
    prefix_cache_across_versions: bool = False
    """Serve prefixes that were computed under old weights to new requests."""
    delta: bool = False
    """Move only the blocks that changed since the version a generator holds."""
    lease_timeout_s: float = Field(default=60.0, ge=1.0, le=MAX_SECONDS)
    """A generator that takes longer over a fetch loses its claim on the buffer that it reads. RDMA counts
    whole seconds."""
