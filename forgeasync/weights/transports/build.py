"""Builds the transport that ``weights.transport`` names, built-in or the user's own."""

from collections.abc import Iterable, Iterator, Sequence

from forgeasync.config import BUILT_IN_TRANSPORTS, LocalLauncher, RunConfig, TransportChoice, WeightsSection
from forgeasync.schema import Problem, PythonCode, load_code
from forgeasync.weights.layout import WeightLayout
from forgeasync.weights.manifest import BLOCK_BYTES
from forgeasync.weights.transports.transport import RankSource, StagingSource, Transport


def build_transport(choice: TransportChoice) -> Transport:
    """Build one process's side of a transport; imports its class.

    Raises:
        ValueError: the class does not exist, or does not make a transport from these options.
    """
    code = choice if isinstance(choice, PythonCode) else PythonCode(factory=BUILT_IN_TRANSPORTS[choice])
    make = load_code(code)
    try:
        made = make(**code.options)
    except Exception as error:
        # Whatever the user's class raises is for the user to see.
        raise ValueError(
            f"{code.factory} cannot be built with options {code.options} ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(made, Transport):
        raise ValueError(
            f"{code.factory} makes a {type(made).__name__}; must make a subclass of "
            f"{Transport.__module__}.{Transport.__name__}"
        )
    return made


def check_transport(config: RunConfig) -> Iterator[Problem]:
    """Check that the transport of a run can be made, and reaches the run's hosts."""
    choice = config.weights.transport
    value = choice.factory if isinstance(choice, PythonCode) else choice
    try:
        transport = build_transport(choice)
    except ValueError as error:
        yield Problem(field="weights.transport", value=value, remedy=str(error))
        return
    if not transport.crosses_hosts and not isinstance(config.launcher, LocalLauncher):
        yield Problem(
            field="weights.transport",
            value=value,
            remedy="must be one that crosses hosts (auto, rdma or torchstore) with launcher.kind = "
            f"{config.launcher.kind!r}: trainer and generators are on different hosts",
        )


def require_reach(transport: Transport, choice: TransportChoice, host_ids: Iterable[str]) -> None:
    """Refuse a transport that does not reach all of a run's hosts.

    Raises:
        ValueError: it stays on one host, and there are several.
    """
    hosts = sorted(set(host_ids))
    if len(hosts) > 1 and not transport.crosses_hosts:
        name = choice.factory if isinstance(choice, PythonCode) else choice
        raise ValueError(
            f"weights.transport = {name!r}, but trainer and generators are on the hosts {', '.join(hosts)}; "
            "must be one that crosses hosts: auto, rdma or torchstore"
        )


def connect_transports(
    section: WeightsSection,
    layout: WeightLayout,
    sources: Sequence[StagingSource],
    *,
    generator_host: str,
) -> dict[int, Transport]:
    """Connect a generator's side, by trainer rank; ranks that publish nothing need none.

    Raises:
        ValueError: a rank's buffers cannot be reached, or read in units of whole blocks.
    """
    transports: dict[int, Transport] = {}
    for rank, source in zip(layout.ranks, sources, strict=True):
        if not rank.num_bytes:
            continue
        transport = transports[rank.rank] = build_transport(section.transport)
        transport.connect(
            RankSource(
                rank=rank.rank,
                num_bytes=rank.num_bytes,
                staging=source,
                generator_host=generator_host,
                lease_timeout_s=section.lease_timeout_s,
            )
        )
        if transport.granularity < BLOCK_BYTES or transport.granularity % BLOCK_BYTES:
            raise ValueError(
                f"{type(transport).__name__}.granularity = {transport.granularity}; must be a multiple of "
                f"{BLOCK_BYTES}, the bytes of a block"
            )
    return transports
