"""What a server of sessions needs to let clients open sessions themselves."""

from dataclasses import dataclass
from typing import Protocol

from forgeasync.environments.sessions.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSession:
    """A session that a client has opened."""

    session: Session
    trains: bool
    """Whether it becomes a trajectory if somebody says how good it was."""


class FrontDesk(Protocol):
    """Opens sessions for clients that have the server's token."""

    def open(self) -> OpenedSession:
        """Return a new session; called on the server's loop.

        Raises:
            RequestError: no further session may be opened.
        """
        ...
