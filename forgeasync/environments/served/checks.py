"""Finds what would keep people from being served, before anything starts."""

import errno
import socket
from collections.abc import Iterator

from forgeasync.config import ServingSection
from forgeasync.environments.served.address import read_token
from forgeasync.schema import Problem


def check_address(section: ServingSection) -> Iterator[Problem]:
    """Check the token, and that the address can be listened on."""
    if section.token_env is not None:
        try:
            read_token(section.token_env)
        except ValueError as error:
            yield Problem(field="serving.token_env", value=section.token_env, remedy=str(error))
    yield from _check_listening(section)


def _check_listening(section: ServingSection) -> Iterator[Problem]:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            section.host or None, section.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        what = "a free port, or 0 for any" if is_port else "an address of this machine"
        yield Problem(
            field="serving.port" if is_port else "serving.host",
            value=section.port if is_port else section.host,
            remedy=f"cannot be listened on ({error.strerror}); must be {what}",
        )
