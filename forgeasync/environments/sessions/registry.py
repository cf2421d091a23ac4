"""The sessions of a server, and who may ask which of them."""

import hmac
import threading
from collections import OrderedDict
from collections.abc import Sequence

from forgeasync.environments.sessions.problems import RequestError, closed
from forgeasync.environments.sessions.session import Session
from forgeasync.environments.sessions.session_end import SessionEnd

MAX_CLOSED = 4096
"""The ids of so many closed sessions are kept: their clients get 410, and those of older ones 404."""


class Registry:
    """Open sessions by their ids, and the ids of those that were closed. May be used from any thread."""

    def __init__(self, secret: bytes) -> None:
        """Keys are derived from ``secret``."""
        self._secret = secret
        self._lock = threading.Lock()
        self._open: dict[str, Session] = {}
        self._closed: OrderedDict[str, SessionEnd] = OrderedDict()

    def key_of(self, session_id: str) -> str:
        """Return the key that belongs to a session's id."""
        return hmac.digest(self._secret, session_id.encode(), "sha256").hex()

    def add(self, session: Session) -> None:
        """Add an open session."""
        with self._lock:
            self._open[session.id] = session

    def remove(self, session: Session) -> None:
        """Keep nothing of a session but its id and how it ended."""
        assert session.end is not None, "it is closed"
        with self._lock:
            del self._open[session.id]
            self._closed[session.id] = session.end
            while len(self._closed) > MAX_CLOSED:
                self._closed.popitem(last=False)

    def all(self) -> list[Session]:
        """Return the open sessions."""
        with self._lock:
            return list(self._open.values())

    def find(self, session_id: str, keys: Sequence[str]) -> Session:
        """Return the open session of this id, which may be asked with one of these keys.

        Raises:
            RequestError: there is no such session, the key is another one's, or the session is closed.
        """
        with self._lock:
            session = self._open.get(session_id)
            end = self._closed.get(session_id)
        if session is None and end is None:
            raise RequestError(
                "there is no such session; paths begin with /sessions/<id>",
                status=404,
                code="session_not_found",
            )
        if not is_among(keys, self.key_of(session_id)):
            raise RequestError(
                "the key does not belong to this session; give its api_key as a bearer token or in x-api-key",
                status=401,
                code="invalid_api_key",
            )
        if session is not None and session.end is None:
            return session
        end = end if session is None else session.end
        assert end is not None
        raise closed(end)


def is_among(keys: Sequence[str], secret: str) -> bool:
    """Compare keys from headers with a secret, in a time that tells nothing of it."""
    # Bytes, because compare_digest refuses strings beyond ASCII; headers may hold any bytes.
    wanted = secret.encode()
    matches = [hmac.compare_digest(key.encode(errors="surrogateescape"), wanted) for key in keys]
    return any(matches)
