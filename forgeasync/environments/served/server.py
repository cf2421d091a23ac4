"""The server of sessions that people open."""

from forgeasync.environments.served.address import ServingSetup
from forgeasync.environments.served.desk import ServingDesk
from forgeasync.environments.sessions.server import SessionServer
from forgeasync.environments.sessions.session import SessionLimits


def serving_server(setup: ServingSetup, desk: ServingDesk) -> SessionServer:
    """Return the server of a worker, which opens sessions at ``desk``; it does not listen yet."""
    section = setup.section
    server = SessionServer(
        host=section.host,
        port=setup.port,
        token=setup.token,
        public_host=section.public_host,
        limits=SessionLimits(max_turns_at_once=section.max_turns_at_once),
        desk=desk,
    )
    desk.serve(server)
    return server
