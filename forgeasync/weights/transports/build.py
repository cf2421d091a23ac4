"""The transport between one trainer rank and one generator."""

from forgeasync.config.weights_schema import TransportChoice, WeightsSection
from forgeasync.weights.layout import RankLayout
from forgeasync.weights.transports.rdma import RdmaTransport
from forgeasync.weights.transports.shared_memory import SharedMemoryTransport
from forgeasync.weights.transports.store import TorchstoreTransport
from forgeasync.weights.transports.transport import StagingSource, Transport, choose_transport


def build_transport(
    weights: WeightsSection, rank: RankLayout, source: StagingSource, *, generator_host: str
) -> Transport:
    """Connect to a rank's staging buffers.

    Raises:
        ValueError: the transport asked for cannot work between these hosts.
    """
    match choose_transport(weights.transport, trainer_host=source.host_id, generator_host=generator_host):
        case TransportChoice.SHARED_MEMORY:
            return SharedMemoryTransport(source, rank.num_bytes)
        case TransportChoice.RDMA:
            return RdmaTransport(source, int(weights.lease_timeout_s))
        case TransportChoice.TORCHSTORE:
            return TorchstoreTransport(rank.rank)
        case TransportChoice.AUTO:
            raise AssertionError("choose_transport decides")
