"""Transport between hosts over plain TCP, for networks without RDMA hardware.

Each trainer rank serves its staging buffers with ``sendfile`` to clients that send its secret token. The
bytes are not copied in the trainer's process. A generator reads a rank over a few connections at once, one
thread each, straight into its receive buffer.
"""

import asyncio
import hmac
import ipaddress
import logging
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from forgeasync.weights.layout import SEGMENT_BYTES
from forgeasync.weights.ledger import BLOCK_BYTES
from forgeasync.weights.transports.transport import Arrived, ByteRange, RankSource, RankStaging, Transport

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 4
"""Maximum number of connections between a generator and a trainer rank."""

_RECEIVERS = ThreadPoolExecutor(8, thread_name_prefix="weights-tcp")
"""Threads of a generator that receive, one connection each; asyncio's own stay free for short calls."""

MAX_REQUESTS_IN_FLIGHT = 2
"""Requests that a connection sends ahead, so that the trainer's side never waits for the next one."""

CONNECT_TIMEOUT_S = 10.0
"""Seconds that a generator tries each address of a trainer's host, and that its token may take."""

IDLE_TIMEOUT_S = 600.0
"""Seconds after which a trainer rank closes a connection whose generator neither requests nor reads."""

_REQUEST = struct.Struct("!BQQ")
"""Slot, first byte, and the byte after the last one."""

_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpAddress:
    """Where a trainer rank serves its buffers. Without the token, which is secret, nothing is served."""

    addresses: tuple[str, ...]
    """Addresses of the host, in the order in which they are tried."""
    port: int
    token: bytes = field(repr=False)


class TcpTransport(Transport):
    """Transport that reads over several TCP connections. They are not encrypted."""

    granularity = BLOCK_BYTES

    async def open(self, staging: RankStaging) -> TcpAddress:
        """Serve the buffers until the process ends.

        Raises:
            ValueError: The name of this host has no address.
        """
        is_dual = socket.has_dualstack_ipv6()
        server = socket.create_server(
            ("", 0), family=socket.AF_INET6 if is_dual else socket.AF_INET, dualstack_ipv6=is_dual
        )
        token = secrets.token_bytes(_TOKEN_BYTES)
        threading.Thread(
            target=_accept, args=(server, token, staging.paths), name="weights-tcp", daemon=True
        ).start()
        return TcpAddress(addresses=_own_addresses(is_dual), port=server.getsockname()[1], token=token)

    def connect(self, source: RankSource) -> None:
        """Keep the address. Connections are made for each version."""
        assert isinstance(source.staging.address, TcpAddress)
        self._address = source.staging.address
        self._timeout_s = source.lease_timeout_s

    async def read(
        self, slot: int, ranges: Sequence[ByteRange], received: torch.Tensor, arrived: Arrived
    ) -> None:
        """See ``Transport``; runs in threads, so that the engine keeps decoding."""
        segments = [
            (first, min(first + SEGMENT_BYTES, stop))
            for start, stop in ranges
            for first in range(start, stop, SEGMENT_BYTES)
        ]
        # Threads take the next segment from one list iterator, which is safe in CPython.
        todo, memory = iter(segments), received.numpy().data
        loop = asyncio.get_running_loop()
        # If one connection fails, the others go on: no thread may still write when this returns.
        ended = await asyncio.gather(
            *(
                loop.run_in_executor(_RECEIVERS, self._receive, slot, todo, memory, arrived)
                for _ in range(min(MAX_CONNECTIONS, len(segments)))
            ),
            return_exceptions=True,
        )
        for error in ended:
            if error is not None:
                raise error

    def _receive(self, slot: int, todo: Iterator[ByteRange], memory: memoryview, arrived: Arrived) -> None:
        in_flight: deque[ByteRange] = deque()
        with _connect(self._address, self._timeout_s) as connection:
            # Requests are small, and leave at once.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(self._address.token)
            while True:
                while len(in_flight) < MAX_REQUESTS_IN_FLIGHT and (segment := next(todo, None)):
                    connection.sendall(_REQUEST.pack(slot, *segment))
                    in_flight.append(segment)
                if not in_flight:
                    return
                start, stop = in_flight.popleft()
                for first in range(start, stop, BLOCK_BYTES):
                    last = min(first + BLOCK_BYTES, stop)
                    _receive_into(connection, memory[first:last])
                    arrived((first, last))


def _own_addresses(is_dual: bool) -> tuple[str, ...]:
    """Return the addresses of this host's name that others reach; if there are none, all of them."""
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(
            name, None, socket.AF_UNSPEC if is_dual else socket.AF_INET, socket.SOCK_STREAM
        )
    except socket.gaierror as error:
        raise ValueError(
            f"the name of this trainer host, {name!r}, has no address ({error.strerror}), so generators "
            "cannot fetch weights; give it the address of the host's network in /etc/hosts"
        ) from error
    addresses = dict.fromkeys(str(one[4][0]).partition("%")[0] for one in found)
    outer = [one for one in addresses if not _is_inner(ipaddress.ip_address(one))]
    return tuple(outer or addresses)


def _is_inner(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return address.is_loopback or address.is_link_local


def _connect(address: TcpAddress, timeout_s: float) -> socket.socket:
    errors = []
    for host in address.addresses:
        try:
            connection = socket.create_connection((host, address.port), timeout=CONNECT_TIMEOUT_S)
        except OSError as error:
            errors.append(f"{host} port {address.port}: {error}")
        else:
            connection.settimeout(timeout_s)
            return connection
    raise ConnectionError(f"cannot connect to a trainer rank ({'; '.join(errors)})")


def _receive_into(connection: socket.socket, part: memoryview) -> None:
    while part:
        num_bytes = connection.recv_into(part)
        if not num_bytes:
            raise ConnectionError("a trainer rank closed the connection in the middle of a version")
        part = part[num_bytes:]


def _accept(server: socket.socket, token: bytes, paths: Sequence[Path]) -> None:
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_serve, args=(connection, token, paths), daemon=True).start()


def _serve(connection: socket.socket, token: bytes, paths: Sequence[Path]) -> None:
    """Answer the requests of one connection until the other side closes it."""
    with ExitStack() as stack:
        stack.enter_context(connection)
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            if not hmac.compare_digest(_read(connection, _TOKEN_BYTES), token):
                logger.warning("a connection to weights was refused: it has another token")
                return
            connection.settimeout(IDLE_TIMEOUT_S)
            slots = [stack.enter_context(path.open("rb")) for path in paths]
            while request := _read(connection, _REQUEST.size):
                slot, first, last = _REQUEST.unpack(request)
                connection.sendfile(slots[slot], first, last - first)
        except OSError as error:
            # The generator sees the closed connection and fetches what is missing again.
            logger.warning("a connection to weights failed: %s", error)


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    """Read exactly that many bytes; nothing if the other side has closed the connection before."""
    data = b""
    while len(data) < num_bytes and (more := connection.recv(num_bytes - len(data))):
        data += more
    return data if len(data) == num_bytes else b""
